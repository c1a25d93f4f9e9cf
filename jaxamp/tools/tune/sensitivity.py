"""Effect of each group's roundings on the result, from one forward and one backward pass.

The result is seen through a few random projections, so that its size does not matter: entry (k, g)
of the matrix is the change of projection k by group g. Sums of columns predict what several groups
do together, with the signs in which their errors add up or cancel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxamp.inspect.blocks import Block
from jaxamp.numerics.nested_interpreter import Value
from jaxamp.tools.tune.groups import Group
from jaxamp.tools.tune.perturbed import Perturbing

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

    zeros = jnp.zeros(len(groups), jnp.float32)
    try:
        found = jax.jit(jax.jacrev(projected))(zeros, *args)
    except (ValueError, TypeError, NotImplementedError):  # a while loop has no backward pass
        found = jax.jit(jax.jacfwd(projected))(zeros, *args)
    return np.nan_to_num(np.asarray(found, np.float64), nan=np.inf, posinf=np.inf, neginf=-np.inf)


def switched(
    block: Block, groups: Sequence[Group], switches: Any, args: Sequence[Any]
) -> list[Any]:
    """Return the float results if the roundings of the groups with switches of one are on."""
    numbers = {group: number for number, group in enumerate(groups)}
    values = [Value(arg) for arg in args]
    outs, _ = Perturbing(numbers, jnp.asarray(switches, jnp.float32)).run(block, values, ())
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
