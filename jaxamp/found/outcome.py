"""Regions of a program, found and refused, as plain data."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Outcome(Protocol):
    """A region that a program computes, replaced; each kind of region says more of its own.

    Attributes:
      kind: what it is, such as ``"attention"``.
      scope: where it is, as the user wrote it.
      source: ``file:line (function)`` of the user's code.
      forward: whether its forward pass is computed here.
      backward: whether its cotangents are computed here.
    """

    @property
    def kind(self) -> str: ...  # noqa: D102 - see above

    @property
    def scope(self) -> str: ...  # noqa: D102

    @property
    def source(self) -> str: ...  # noqa: D102

    @property
    def forward(self) -> bool: ...  # noqa: D102

    @property
    def backward(self) -> bool: ...  # noqa: D102


class Refused(NamedTuple):
    """Seeming region of some kind, which stays as it is.

    Attributes:
      kind: what it looks like.
      scope: where it is, as the user wrote it.
      source: ``file:line (function)`` of the user's code.
      reason: why, in words.
    """

    kind: str
    scope: str
    source: str
    reason: str
