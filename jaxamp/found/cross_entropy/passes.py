"""A pass over the tokens: equations that are computed for some of them at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxamp.found.cross_entropy.rows import Flow, Rows
from jaxamp.found.levels import Atom, Unit, numbers

Key = tuple[int, Rows | None]
"""A value, and where its tokens are; all of it, or a sum over them, for ``None``."""

End = tuple[Atom, Rows | None]
"""The same, or a literal."""


class Step(NamedTuple):
    """An equation that is computed for some tokens at a time."""

    unit: Unit
    flow: Flow  # how tokens go through it
    # The values that it reads; of a product matrices that the program transposes before.
    operands: Sequence[End]
    rule: Rule | None  # of a function with a derivative of its own


@dataclass(slots=True, eq=False)
class Pass:
    """Equations that are computed in one pass over the tokens."""

    # The equations, in order, by how tokens go through them.
    steps: dict[tuple[Unit, Flow], Step] = field(default_factory=dict)
    # The values that they read, in parts or whole.
    inputs: dict[Key, None] = field(default_factory=dict)
    exits: list[End] = field(default_factory=list)  # what is read of them

    @property
    def outputs(self) -> dict[int, Rows | None]:
        """Per value that is read, where its tokens are; ``None`` for sums over them."""
        return {value: rows for value, rows in self.exits if isinstance(value, int)}

    @property
    def values(self) -> frozenset[int]:
        """All values that are made of some tokens at a time."""
        return frozenset(a for unit, _ in self.steps for a in numbers(unit.outs))

    def sums(self) -> Iterator[tuple[int, Any]]:
        """Yield the outputs that are sums over tokens, and their types."""
        sums = {value for value, rows in self.outputs.items() if rows is None}
        for unit, _ in self.steps:
            for value, var in zip(unit.outs, unit.eqn.outvars, strict=True):
                if value in sums:
                    yield value, var.aval  # type: ignore[misc]

    @property
    def backward(self) -> bool:
        """The presence of cotangents: products with more matrices than that of the logits."""
        flows = [flow for unit, flow in self.steps if contracts(unit)]
        return any(f.result is None for f in flows) or sum(None in f.operands for f in flows) > 1

    def count(self, name: str) -> int:
        """Return the number of equations of a primitive."""
        return sum(unit.eqn.primitive.name == name for unit, _ in self.steps)


class Rule(NamedTuple):
    """A function with a derivative of its own, for some tokens at a time."""

    # `forward` and `backward`: its programs, see `programs_of`; values that they read are the
    # indices of their operands.
    forward: Pass
    backward: Pass
    moving: Sequence[int]  # indices of the operands that have cotangents
    is_linear: bool  # whether all cotangents are linear in those of the results

    def moved(self, results: Sequence[Atom]) -> list[Atom]:
        """Return the results whose cotangents it reads."""
        return [results[i] for i, _ in self.backward.inputs if i < len(results)]


def contracts(unit: Unit) -> bool:
    """Return whether an equation is a product that sums over something."""
    numbers = unit.eqn.params.get("dimension_numbers")
    return unit.eqn.primitive.name == "dot_general" and bool(numbers[0][0])  # type: ignore[index]
