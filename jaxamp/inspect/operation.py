"""An operation of a program as reports show it, and rows of equal operations."""

from __future__ import annotations

import dataclasses
import linecache
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxamp.core import jax_compat
from jaxamp.inspect.count import Tally
from jaxamp.inspect.displayable import Data

_LIBRARIES = ("site-packages", "dist-packages")
_T = TypeVar("_T")
_K = TypeVar("_K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Place:
    """A line of source.

    Attributes:
      file: its path; empty where it is not known.
      line: its number.
      function: the function around it.
    """

    file: str = ""
    line: int = 0
    function: str = ""

    @property
    def text(self) -> str:
        """The line itself, without indentation."""
        return linecache.getline(self.file, self.line).strip() if self.file else ""

    @property
    def short(self) -> str:
        """Its number after the name of the file, without folders; empty where it is not known."""
        return f"{cell(self.file) or os.path.basename(self.file)}:{self.line}" if self.file else ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else "unknown"


def cell(file: str) -> str:
    """Return ``In[3]`` for the file that IPython has made of a notebook's cell, or nothing."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    named = shell.compile.format_code_name(file) if shell else None
    return named[1] if named else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation(Data):
    """An equation with its precisions and costs.

    Attributes:
      primitive: name of the primitive.
      kind: its kind, as ``OpKind`` spells it.
      arithmetic: precision that it computes in, or the dtype of what is not a float.
      stored: precision that its first result is stored in.
      accumulation: precision inside; empty where there is none.
      operands: types of its operands as it reads them, such as ``"bf16[8,128]"``.
      results: types of its results as they are stored.
      each: what one run costs.
      runs: how often it runs; 0 in a branch that is not counted, and for dead code.
      reason: why, in one phrase.
      guard: the guard that fired; empty if none did.
      scope: scope path, as the user wrote it.
      backward: whether it is in a backward pass.
      place: the innermost line that is the user's own, or else that of an installed library.
      contraction: whether it is a dot or a convolution.
      emulated: that its quantized operands are multiplied in a wider format; empty if not.
    """

    primitive: str
    kind: str
    arithmetic: str
    stored: str
    accumulation: str = ""
    operands: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    each: Tally
    runs: int
    reason: str
    guard: str = ""
    scope: str
    backward: bool
    place: Place = Place()
    contraction: bool = False
    emulated: str = ""

    @property
    def tally(self) -> Tally:
        """The cost of all its runs."""
        return self.runs * self.each


@dataclass(frozen=True, slots=True)
class Row:
    """Operations that differ in the numbers of their scopes only, such as the layers of a network.

    It has one of them, how many there are, their scope with stars, and what all of them cost.
    """

    operation: Operation
    count: int
    scope: str
    tally: Tally


def rows_of(operations: Iterable[Operation]) -> list[Row]:
    """Group operations that are alike, each group where its first is."""

    def alike(o: Operation) -> Any:
        return dataclasses.replace(o, scope=numberless(o.scope), each=Tally()), o.each.flops

    return [
        Row(group[0], len(group), common_scope([o.scope for o in group]), total(group))
        for group in grouped(operations, alike).values()
    ]


def grouped(items: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    """Group items by a key, each group where its first is.

    >>> grouped(["a", "bc", "d"], len)
    {1: ['a', 'd'], 2: ['bc']}
    """
    groups: dict[_K, list[_T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return dict(groups)


def numberless(scope: str) -> str:
    """Return a scope with a star for each number: equal layers have one.

    >>> numberless("LM/Block_11/Dense_0")
    'LM/Block_*/Dense_*'
    """
    return re.sub(r"\d+", "*", scope)


def common_scope(scopes: Sequence[str]) -> str:
    """Return scopes that differ in numbers only as one, with a star for these.

    >>> common_scope(["LM/Block_0/Dense_1", "LM/Block_11/Dense_1"])
    'LM/Block_*/Dense_1'
    """
    parts = zip(*(re.split(r"(\d+|\*)", scope) for scope in dict.fromkeys(scopes)), strict=True)
    return "".join(part[0] if len(set(part)) == 1 else "*" for part in parts)


def is_float(word: str) -> bool:
    """Return whether a dtype's short word is that of a float.

    >>> is_float("bf16"), is_float("bool"), is_float("key<fry>")
    (True, False, False)
    """
    return bool(re.fullmatch(r"b?f\d+(_e\dm\d)?", word))


def few(counts: Mapping[str, int]) -> str:
    """Write names with their numbers, the first three of them.

    >>> few({"add": 2, "mul": 1, "exp": 1, "sin": 1})
    'add ×2, mul, exp, 1 more'
    """
    named = [f"{name} ×{n}" if n > 1 else name for name, n in counts.items()]
    return ", ".join(named[:3] + ([f"{len(named) - 3} more"] if len(named) > 3 else []))


def total(operations: Iterable[Operation]) -> Tally:
    """Add up what some operations cost."""
    return sum((o.tally for o in operations), Tally())


SourceFrame = tuple[str, int, str]


def frames_of(source_info: Any) -> tuple[SourceFrame, ...]:
    """Return the user's own frames, innermost first: none of installed libraries."""
    frames = jax_compat.user_frames(source_info)
    return tuple(f for f in frames if not any(library in f[0] for library in _LIBRARIES))


def innermost(source_info: Any, frames: Sequence[SourceFrame]) -> Place:
    """Return the innermost of the user's own lines, or else that of a library."""
    found = [*frames[:1], *jax_compat.user_frames(source_info)[:1]]
    return Place(*found[0]) if found else Place()
