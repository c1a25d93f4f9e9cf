"""The interface between the core and its features: what a feature contributes, and which are here.

A feature is a folder beside the core that can be taken away. Its file `feature.py` has a `FEATURE`,
which `jaxamp/installed.py` registers when jaxamp is imported: names and fields of policies, which
cost nothing. What plans and emits is its `Work`, imported before the first program is traced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from jax.extend.core import ClosedJaxpr

from jaxamp.core.formats import Precision


@dataclass(frozen=True, slots=True)
class Outcome:
    """A region that a feature replaces, or does not and why; each kind may say more of its own.

    Attributes:
      kind: what it is, such as ``"attention"``.
      scope: where it is, as the user wrote it.
      source: ``file:line (function)`` of the user's code.
      obstacle: why it stays as it is written; empty if it does not.
      forward: whether its forward pass is computed here.
      backward: whether its cotangents are computed here.
      saved: bytes that are not stored; 0 where that is not known.
      slower: the predicted time of the program, against that without.
    """

    kind: str
    scope: str
    source: str
    obstacle: str = ""
    forward: bool = True
    backward: bool = True
    saved: int = 0
    slower: float = 1.0


class Replaced(NamedTuple):
    """A program with regions replaced, the same object where there are none, and which."""

    jaxpr: ClosedJaxpr
    found: tuple[Outcome, ...] = ()
    refused: tuple[Outcome, ...] = ()


class Form(Protocol):
    """A form of its own that a feature gives an equation: hashable, and in words as ``str``."""

    @property
    def formats(self) -> tuple[Precision, ...]:
        """Formats in which the first operands are multiplied, for reports."""
        ...

    def emulated(self, eqn: Any) -> str:
        """Return that they are multiplied in wider ones, in words; empty if they are not."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyField:
    """A field that a feature adds to policies: ``policy.NAME``, ``policy.replace(NAME=...)``.

    Attributes:
      name: its name.
      default: its value in policies that do not say.
      read: of what a user gives and the present value, the value to keep, which is hashable;
        raises ``PolicyError``.
      from_data: reads what JSON holds, of which ``read`` makes the value.
    """

    name: str
    default: Any
    read: Callable[[Any, Any], Any]
    from_data: Callable[[Any], Any] = lambda data: data


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Contributions to planning and rewriting, each of which may be left out.

    Attributes:
      name: of a traced program, the same with more scopes, which rules and reports read.
      replace: functions of a traced program and a policy, which replace regions of one kind each.
      kinds: of regions that it replaces, each with why a program has none.
      elsewhere: of a plan, its program as another policy or device would have it replaced.
      keep: of a ``plan.graph.graph.Graph`` and its known values, the products that are not to be
        rounded, each with its ``Constraint``.
      choose: of a ``plan.findings.Draft``, new choices for some nodes, after the core's.
      steer: of the ``plan.findings.Findings``, hints for a compiler; one feature has them.
      emitter: of a policy, the ``rewrite.emitter.Emitter`` of such hints, by that feature.
      rules: rewrite rules by name of primitive.
      forms: rewrite rules by type of ``Choice.form``, in place of the primitive's.
      idle: of a plan and its program's name, words about parts of the policy without effect.
      advise: of a compiler's error and a function that plans the call again, a note for the error.
      verify: of a function, a policy and a chip's name or ``None``, a function of the arguments to
        what a compiler has made of the forms: a dataclass with ``lines``.
    """

    name: Callable[[ClosedJaxpr], ClosedJaxpr] | None = None
    replace: tuple[Callable[[ClosedJaxpr, Any], Replaced], ...] = ()
    kinds: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Callable[[Any], Replaced] | None = None
    keep: Callable[[Any, Any], Mapping[Any, Any]] | None = None
    choose: Callable[[Any], Mapping[Any, Any]] | None = None
    steer: Callable[[Any], Any] | None = None
    emitter: Callable[[Any], Any] | None = None
    rules: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    forms: Mapping[type, Callable[..., Any]] = field(default_factory=dict)
    idle: Callable[[Any, str], Iterable[str]] | None = None
    advise: Callable[[Exception, Callable[[], Any]], str] | None = None
    verify: Callable[[Any, Any, str | None], Callable[..., Any]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """Contributions of a folder beside the core.

    Attributes:
      name: of its folder.
      fields: fields that it adds to policies.
      formats: formats of Compute that it computes, beside the core's.
      presets: makes policies that have names, once the fields are known.
      check: refuses a policy that cannot be computed.
      wrap: of a function and its settings, what `amp` returns instead of its own; ``None`` if not.
      screens: imports the screens of values.
      work: imports what it does to programs.
    """

    name: str
    fields: tuple[PolicyField, ...] = ()
    formats: frozenset[Precision] = frozenset()
    presets: Callable[[], Iterable[Any]] = tuple
    check: Callable[[Any], None] = lambda policy: None
    wrap: Callable[[Any, Any], Any] = lambda fn, settings: None
    screens: Callable[[], Any] | None = None
    work: Callable[[], Work] = Work


_FEATURES: dict[str, Feature] = {}
_WORDS: dict[str, str] = {}


def register(feature: Feature) -> None:
    """Enter a feature, before any program is traced."""
    _FEATURES[feature.name] = feature


def register_words(name: str, words: Iterable[str]) -> None:
    """Enter the words that need a feature: `lacking` names it where it is absent."""
    _WORDS.update(dict.fromkeys(words, name))


def features() -> Iterator[Feature]:
    """Yield the features that are here."""
    return iter(_FEATURES.values())


def fields() -> dict[str, PolicyField]:
    """Return the fields that they add to policies."""
    return {found.name: found for feature in features() for found in feature.fields}


@functools.cache
def works() -> tuple[Work, ...]:
    """Import what they do to programs."""
    return tuple(feature.work() for feature in features())


def lacking(word: object) -> str:
    """Return a sentence that names the absent feature that a word needs; empty if none does."""
    name = _WORDS.get(str(word))
    return "" if name is None or name in _FEATURES else absent(word, name)


def absent(word: object, name: str) -> str:
    """Return a sentence that names the absent feature that a word needs."""
    return f"{word} needs jaxamp's feature {name!r}, which was taken out of this installation. "
