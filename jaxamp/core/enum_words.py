"""Enums whose members users write by their words."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from typing import TypeVar

from jaxamp.errors import PolicyError, accepted, article

_E = TypeVar("_E", bound=enum.Enum)


class Word(enum.Enum):
    """Enum whose members are single objects, and hashed as such."""

    __hash__ = object.__hash__  # Enum's own goes through the name, in Python


def chosen(kind: type[_E], words: _E | str | Iterable[_E | str]) -> frozenset[_E]:
    """Read members of an enum: one or several, or their words; ``"all"`` for all, none for none.

    Raises:
      PolicyError: a word names no member.

    >>> from jaxamp.core.guards import Guard
    >>> chosen(Guard, "no-gain")
    frozenset({<Guard.NO_GAIN: 'no-gain'>})
    """
    if isinstance(words, (kind, str)):
        return frozenset(kind) if words == "all" else frozenset({member(kind, words)})
    if not isinstance(words, Iterable):
        raise PolicyError(f"{kind.__name__}s are words or none at all, `()`, not {words!r}.")
    return frozenset(member(kind, word) for word in words)


def member(kind: type[_E], word: _E | str) -> _E:
    """Read a member of an enum: itself, or its word in any case, joined as one likes.

    Raises:
      PolicyError: the word names no member.
    """
    for known in kind:
        if word is known or (isinstance(word, str) and _bare(word) == _bare(known.value)):
            return known
    words = [known.name.lower().replace("_", "-") for known in kind]
    raise PolicyError(f"{word!r} is not {article(kind.__name__)}. {accepted(word, words)}")


def _bare(word: str) -> str:
    return re.sub(r"[-_ ]", "", word).lower()
