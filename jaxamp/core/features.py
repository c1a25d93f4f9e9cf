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
    """A region that a feature replaces, or does not and why; each kind may say more of its own."""

    kind: str  # what it is, such as ``"attention"``
    scope: str  # where it is, as the user wrote it
    source: str  # ``file:line (function)`` of the user's code
    obstacle: str = ""  # why it stays as it is written; empty if it does not
    forward: bool = True  # whether its forward pass is computed here
    backward: bool = True  # whether its cotangents are computed here
    saved: int = 0  # bytes that are not stored; 0 where that is not known
    slower: float = 1.0  # the predicted time of the program, against that without


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
    """A field that a feature adds to policies: ``policy.NAME``, ``policy.replace(NAME=...)``."""

    name: str
    default: Any  # its value in policies that do not say
    # Of what a user gives and the present value, the value to keep, which is hashable; raises
    # ``PolicyError``.
    read: Callable[[Any, Any], Any]
    # Reads what JSON holds, of which ``read`` makes the value.
    from_data: Callable[[Any], Any] = lambda data: data


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Contributions to planning and rewriting, each of which may be left out."""

    # Of a traced program, the same with more scopes, which rules and reports read.
    name: Callable[[ClosedJaxpr], ClosedJaxpr] | None = None
    # Functions of a traced program and a policy, which replace regions of one kind each.
    replace: tuple[Callable[[ClosedJaxpr, Any], Replaced], ...] = ()
    # Of regions that it replaces, each with why a program has none.
    kinds: Mapping[str, str] = field(default_factory=dict)
    # Of a plan, its program as another policy or device would have it replaced.
    elsewhere: Callable[[Any], Replaced] | None = None
    # Of a ``plan.graph.graph.Graph`` and its known values, the products that are not to be rounded,
    # each with its ``Constraint``.
    keep: Callable[[Any, Any], Mapping[Any, Any]] | None = None
    # Of a ``plan.findings.Draft``, new choices for some nodes, after the core's.
    choose: Callable[[Any], Mapping[Any, Any]] | None = None
    # Of the ``plan.findings.Findings``, hints for a compiler; one feature has them.
    steer: Callable[[Any], Any] | None = None
    # Of a policy, the ``rewrite.emitter.Emitter`` of such hints, by that feature.
    emitter: Callable[[Any], Any] | None = None
    # Rewrite rules by name of primitive.
    rules: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    # Rewrite rules by type of ``Choice.form``, in place of the primitive's.
    forms: Mapping[type, Callable[..., Any]] = field(default_factory=dict)
    # Of a plan and its program's name, words about parts of the policy without effect.
    idle: Callable[[Any, str], Iterable[str]] | None = None
    # Of a compiler's error and a function that plans the call again, a note for the error.
    advise: Callable[[Exception, Callable[[], Any]], str] | None = None
    # Of a function, a policy and a chip's name or ``None``, a function of the arguments to what a
    # compiler has made of the forms: a dataclass with ``lines``.
    verify: Callable[[Any, Any, str | None], Callable[..., Any]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """Contributions of a folder beside the core."""

    name: str  # of its folder
    fields: tuple[PolicyField, ...] = ()  # fields that it adds to policies
    # Formats of Compute that it computes, beside the core's.
    formats: frozenset[Precision] = frozenset()
    # Makes policies that have names, once the fields are known.
    presets: Callable[[], Iterable[Any]] = tuple
    check: Callable[[Any], None] = lambda policy: None  # refuses a policy that cannot be computed
    # Of a function and its settings, what `amp` returns instead of its own; ``None`` if not.
    wrap: Callable[[Any, Any], Any] = lambda fn, settings: None
    screens: Callable[[], Any] | None = None  # imports the screens of values
    work: Callable[[], Work] = Work  # imports what it does to programs


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
