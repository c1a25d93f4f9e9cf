"""Attentions of a program, found and refused, as plain data."""

from __future__ import annotations

from typing import NamedTuple


class Attention(NamedTuple):
    """An attention that a program computes, as one equation of it.

    Attributes:
      scope: where it is, as the user wrote it.
      source: ``file:line (function)`` of the user's code.
      forward: whether its output is computed here.
      backward: whether its cotangents are computed here.
      mask: ``"none"``, ``"causal"``, ``"window"``, ``"segments"``, ``"intervals"`` or ``"bias"``.
    """

    scope: str
    source: str
    forward: bool
    backward: bool
    mask: str


class RefusedAttention(NamedTuple):
    """A softmax between two products that stays as it is.

    Attributes:
      scope: where it is, as the user wrote it.
      source: ``file:line (function)`` of the user's code.
      reason: why, in words.
    """

    scope: str
    source: str
    reason: str
