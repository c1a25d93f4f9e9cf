"""The original program with a switch for the roundings of each group.

Each rounding that a plan makes is replaced by ``x + s * (round(x) - x)`` with the difference held
constant and ``s`` zero: the program computes what it always did, and the derivative by ``s`` is
what the roundings of a group do to the result, to first order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision, is_narrow
from jaxamp.inspect.blocks import Block
from jaxamp.numerics.nested_interpreter import Interpreter, Value, literal, run_live
from jaxamp.tools.tune.groups import Group


class Perturbing(Interpreter):
    """Runs blocks in the original precision, with the switch f32[] of each group, zero."""

    def __init__(self, numbers: Mapping[Group, int], switches: jax.Array) -> None:
        self.numbers, self.switches = numbers, switches

    def run(self, block: Block, values: Sequence[Value], state: Any) -> tuple[list[Value], Any]:
        """Run a block on its inputs."""
        run = _Run(self, block)
        entries = block.plan.inputs if block.plan else [None] * len(values)
        run.write(block.jaxpr.constvars, block.consts, [None] * len(block.consts), None)
        run.write(block.jaxpr.invars, [v.low for v in values], entries, None)
        run_live(block, run.equation)
        return run.results(), state

    def rounded(self, array: Any, precision: Precision, group: int | None) -> Any:
        """Return an array whose rounding the switch of a group turns on."""
        if group is None or getattr(array, "dtype", None) != jnp.float32:
            return array
        fixed = lax.stop_gradient(array)
        limited = jnp.clip(fixed, -precision.max, precision.max)
        narrow = lax.optimization_barrier(limited.astype(precision.dtype))
        error = jnp.where(jnp.isfinite(fixed), narrow.astype(jnp.float32) - fixed, 0)
        return array + self.switches[group] * error


class _Run:
    """One block, while it runs."""

    def __init__(self, owner: Perturbing, block: Block) -> None:
        self.owner, self.block = owner, block
        self.values: dict[Any, Any] = {}
        self.stored: dict[Any, Precision | None] = {}
        self.group: dict[Any, int | None] = {}
        self.read_before: dict[tuple[Any, Precision, int | None], Any] = {}

    def write(
        self,
        variables: Sequence[Any],
        values: Sequence[Any],
        precisions: Sequence[Precision | None],
        group: int | None,
    ) -> None:
        """Take values that are stored in precisions already."""
        for var, value, precision in zip(variables, values, precisions, strict=True):
            self.values[var], self.stored[var], self.group[var] = value, precision, group

    def equation(self, position: int) -> None:
        """Run one equation."""
        eqn, decision = self.block.jaxpr.eqns[position], self.block.decision(position)
        group = self._group(position)
        if decision is None:
            operands = [self.read(atom, None, None, None) for atom in eqn.invars]
            outputs: Sequence[Precision | None] = [None] * len(eqn.outvars)
        else:
            reads = zip(eqn.invars, decision.reads, strict=True)
            operands = [self.read(atom, r.precision, r.copy, group) for atom, r in reads]
            outputs = decision.outputs
        if self.block.inner[position]:
            values = [Value(operand) for operand in operands]
            outs, _ = self.owner.enter(self.block, position, values, ())
            self.write(eqn.outvars, [value.low for value in outs], outputs, group)
            return
        results = [
            self.owner.rounded(result, p, group) if is_narrow(p) and p else result
            for result, p in zip(jax_compat.bind(eqn, operands), outputs, strict=True)
        ]
        self.write(eqn.outvars, results, outputs, group)

    def read(
        self, atom: Any, precision: Precision | None, copy: Precision | None, group: int | None
    ) -> Any:
        """Return a value as one group of operations reads it."""
        if (number := literal(atom)) is not None:
            return number
        value = self.values[atom]
        for wanted in (copy, precision):
            if wanted is None or not is_narrow(wanted) or self.stored[atom] is wanted:
                continue
            key = atom, wanted, group
            if key not in self.read_before:
                self.read_before[key] = self.owner.rounded(value, wanted, group)
            value = self.read_before[key]
        return value

    def results(self) -> list[Value]:
        """Return the results of the block."""
        atoms, wanted = self.block.jaxpr.outvars, self.block.outputs
        return [
            Value(self.read(atom, p, None, self.group.get(atom) if literal(atom) is None else None))
            for atom, p in zip(atoms, wanted, strict=True)
        ]

    def _group(self, position: int) -> int | None:
        """Return the group of an operation, or of the first inside of what holds others."""
        site = self.block.sites[position]
        if site is None:
            inside = (s for block in self.block.inner[position] for s in block.walk())
            known = (self.owner.numbers.get(Group.of(s)) for s in inside)
            return next((number for number in known if number is not None), None)
        return self.owner.numbers.get(Group.of(site))
