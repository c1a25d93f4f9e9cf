"""Effect of each group's roundings on the result, from one forward and one backward pass.

Each rounding that a plan makes is replaced by ``x + s * (round(x) - x)`` with the difference held
constant and ``s`` zero: the program computes what it always did, and the derivative by ``s`` is
what the roundings of a group do to the result, to first order.

The result is seen through a few random projections, so that its size does not matter: entry (k, g)
of the matrix is the change of projection k by group g. Sums of columns predict what several groups
do together, with the signs in which their errors add up or cancel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision, is_narrow
from jaxamp.inspect.blocks import Block, Site
from jaxamp.numerics.nested_interpreter import Interpreter, Value, run_sites
from jaxamp.tools.tune.tuning import Group


class Perturbing(Interpreter):
    """The run of a block in the original precision, with the switch f32[] of each group, zero."""

    def __init__(self, numbers: Mapping[Group, int], switches: jax.Array, block: Block) -> None:
        self.numbers, self.switches, self.block = numbers, switches, block
        self.stored: dict[Any, tuple[Any, Precision | None, int | None]] = {}
        self.read_before: dict[tuple[Any, Precision, int | None], Any] = {}

    def run(self, block: Block, values: Sequence[Value], state: Any) -> tuple[list[Value], Any]:
        """Run a block inside of this one on its inputs."""
        return Perturbing(self.numbers, self.switches, block).of(values), state

    def of(self, values: Sequence[Value]) -> list[Value]:
        """Return the results for some inputs."""
        jaxpr, plan = self.block.jaxpr, self.block.plan
        self._write(jaxpr.constvars, self.block.consts, repeat(None), None)
        self._write(jaxpr.invars, [v.low for v in values], plan.inputs, None)
        run_sites(self.block, self._equation)
        atoms = jaxpr.outvars
        groups = [None if isinstance(a, Literal) else self.stored[a][2] for a in atoms]
        columns = zip(atoms, plan.outputs, repeat(None), groups)
        return [Value(self._read(*each)) for each in columns]

    def _rounded(self, array: Any, precision: Precision, group: int | None) -> Any:
        """Return an array whose rounding the switch of a group turns on."""
        if group is None or getattr(array, "dtype", None) != jnp.float32:
            return array
        fixed = lax.stop_gradient(array)
        limited = jnp.clip(fixed, -precision.max, precision.max)
        narrow = lax.optimization_barrier(limited.astype(precision.dtype))
        error = jnp.where(jnp.isfinite(fixed), narrow.astype(jnp.float32) - fixed, 0)
        return array + self.switches[group] * error

    def _write(self, variables: Any, values: Any, precisions: Any, group: int | None) -> None:
        """Take values that are stored in precisions already, by a group of operations."""
        self.stored.update(zip(variables, zip(values, precisions, repeat(group)), strict=False))

    def _equation(self, site: Site) -> None:
        eqn, decision = site.eqn, site.decision
        group, outputs = self._group(site), decision.outputs
        reads = zip(eqn.invars, decision.plan.reads, strict=True)
        operands = [self._read(atom, r.precision, r.copy, group) for atom, r in reads]
        if site.inner:
            values = [Value(operand) for operand in operands]
            outs, _ = self.enter(site, values, ())
            self._write(eqn.outvars, [value.low for value in outs], outputs, group)
            return
        results = [
            self._rounded(result, p, group) if is_narrow(p) and p else result
            for result, p in zip(jax_compat.bind(eqn, operands), outputs, strict=True)
        ]
        self._write(eqn.outvars, results, outputs, group)

    def _read(
        self, atom: Any, precision: Precision | None, copy: Precision | None, group: int | None
    ) -> Any:
        """Return a value as one group of operations reads it."""
        if isinstance(atom, Literal):
            return jax_compat.literal_value(atom)
        value, stored, _ = self.stored[atom]
        for wanted in (copy, precision):
            if wanted is None or not is_narrow(wanted) or stored is wanted:
                continue
            key = atom, wanted, group
            if key not in self.read_before:
                self.read_before[key] = self._rounded(value, wanted, group)
            value = self.read_before[key]
        return value

    def _group(self, site: Site) -> int | None:
        """Return the group of an operation, or of the first inside of what holds others."""
        inside = [s for block in site.inner for s in block.walk()] or [site]
        known = (self.numbers.get(Group.of(s)) for s in inside)
        return next((number for number in known if number is not None), None)


PROJECTIONS = 8


def sensitivities(
    block: Block, groups: Sequence[Group], args: Sequence[Any], reference: Sequence[Any]
) -> np.ndarray:
    """Return the matrix of changes, f32[projections, groups], relative to the reference."""
    scales = [1 / ((norm(r) or 1) * len(reference) ** 0.5) for r in reference]

    def projected(switches: jax.Array, *args: Any) -> jax.Array:
        floats = switched(block, groups, switches, args)
        keys = map(jax.random.key, range(len(floats)))
        parts = [_project(*part) for part in zip(floats, scales, keys, strict=True)]
        return jnp.stack(parts).sum(axis=0)

    def by_row(switches: jax.Array, *args: Any) -> jax.Array:
        """Return what `jacrev` does, which maps, and JAX cannot map all products."""
        pull = jax.vjp(lambda switches: projected(switches, *args), switches)[1]
        return lax.map(lambda row: pull(row)[0], jnp.eye(PROJECTIONS))

    zeros = jnp.zeros(len(groups), jnp.float32)
    try:
        found = jax.jit(by_row)(zeros, *args)
    except (ValueError, TypeError, NotImplementedError):  # a while loop has no backward pass
        found = jax.jit(jax.jacfwd(projected))(zeros, *args)
    return np.nan_to_num(np.asarray(found, np.float64), nan=np.inf, posinf=np.inf, neginf=-np.inf)


def switched(
    block: Block, groups: Sequence[Group], switches: Any, args: Sequence[Any]
) -> list[Any]:
    """Return the float results if the roundings of the groups with switches of one are on."""
    numbers = {group: number for number, group in enumerate(groups)}
    values = [Value(arg) for arg in args]
    outs = Perturbing(numbers, jnp.asarray(switches, jnp.float32), block).of(values)
    return [out.low for out in outs if is_float(out.low)]


def predicted(matrix: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Return the relative errors of choices of groups, bool[..., groups], by the matrix.

    >>> predicted(np.array([[3.0, -3.0]]), np.array([[True, False], [True, True]]))
    array([3., 0.])
    """
    bad = ~np.isfinite(matrix).all(axis=0)
    changes = low.astype(float) @ np.where(bad, 0, matrix).T
    errors = np.sqrt((changes**2).mean(axis=-1))
    return np.where((low & bad).any(axis=-1), np.inf, errors)


def relative_error(results: Sequence[Any], reference: Sequence[Any]) -> float:
    """Return the root of the mean, over arrays, of the squared relative error."""
    errors = [_relative(*pair) for pair in zip(results, reference, strict=True)]
    total = float(np.sqrt(np.mean(np.square(errors)))) if errors else 0.0
    return total if np.isfinite(total) else float("inf")


def norm(array: Any) -> float:
    """Return the Euclidean norm of all numbers."""
    return float(np.linalg.norm(np.asarray(array, np.float64).ravel()))


def is_float(array: Any) -> bool:
    """Return whether an array holds real floating-point numbers."""
    return jnp.issubdtype(getattr(array, "dtype", np.int32), jnp.floating)


def _relative(result: Any, exact: Any) -> float:
    change = norm(np.asarray(result, np.float64) - np.asarray(exact, np.float64))
    size = norm(exact)
    return change / size if size else float("inf") if change else 0.0


def _project(array: jax.Array, scale: float, key: jax.Array) -> jax.Array:
    if array.size == 1:
        return jnp.full(PROJECTIONS, scale) * array.reshape(())
    shape = (PROJECTIONS, array.size)
    signs = jax.random.rademacher(key, shape, jnp.int8).astype(jnp.float32)
    return scale * (signs @ array.astype(jnp.float32).reshape(-1))
