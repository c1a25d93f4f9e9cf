"""Errors of a program's results and gradients, fused and written out, against float64."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jaxamp
from tests.attention import imitation, near_misses, of_packages, spellings  # noqa: F401
from tests.attention.corpus import EXTRA_TERMS, NEAR_MISSES, SPELLINGS, Fn, Program, gradient
from tests.attention.finding import ORDERS
from tests.programs.registry import Args

POLICIES = {"bfloat16": "auto_mixed_bf16", "float16": "auto_mixed"}
LIMIT = 1.5
"""How much larger the error of a fused form may be than that of the form written out."""

NOISE = 3.0
"""The same for numbers that are noise in both, and for few."""

FEW = 16
"""Of so many numbers errors have a norm that is no chance."""

PEAK = 3.0
"""The same for the largest error of all elements, a single number of each form."""

FLOOR = {"bfloat16": 2**-9, "float16": 2**-12}
"""Relative errors that rounding the results alone makes."""


Case = tuple[Program, str, str]

CASES: list[Case] = [
    case
    for case in itertools.product(
        [*SPELLINGS.values(), *NEAR_MISSES.values(), *EXTRA_TERMS.values()], POLICIES, ORDERS
    )
    if not case[0].missing
]
"""Every program of the corpus in both formats and both orders, those of a program together."""

ONCE = [CASES[4 * i + i % 4] for i in range(len(CASES) // 4)]
"""Every program in one format and order, these in turn."""


def check(program: Program, dtype: str, order: str, spread: float = 1.0) -> None:
    """Hold a program to `LIMIT`, with kernels as they round.

    Args:
        program: of the corpus.
        dtype: a key of `POLICIES`.
        order: as `tests.attention.finding` has them; results are those of the program too.
        spread: deviation of the logits, where the program begins with its queries.

    Raises:
        AssertionError: a result or gradient is less accurate, or not finite where it should be.
    """
    fn, args = program.built
    if program.operands:
        args = (np.float32(spread) * args[0], *args[1:])
    policy = jaxamp.PrecisionPolicy.parse(POLICIES[dtype]).replace(fused_attention=True)
    composed = policy.replace(fused_attention=False)
    exact = _in_float64(fn, args)
    others = _run(fn, args, composed, order)
    with imitation.kernels():
        mine = _run(fn, args, policy, order)
    for got, other, want in zip(mine, others, exact, strict=True):
        assert (np.isfinite(got) == np.isfinite(want)).all()
        here = np.isfinite(want)
        if here.any():
            got, other, want = (np.where(here, x, 0.0) for x in (got, other, want))
            compare(got, other, want, dtype)


def compare(got: np.ndarray, other: np.ndarray, want: np.ndarray, dtype: str) -> None:
    """Compare the root mean square and the maximum of errors with those of the form written out.

    Where the form written out has no digit right, as in the gradient of a bias of all keys, which
    is zero, both are noise: of a few numbers, whose ratio is no measure. Nor is it of fewer than
    `FEW`.
    """
    size, error = np.linalg.norm(want), np.linalg.norm(other - want)
    limit = LIMIT if error < size and want.size >= FEW else NOISE
    allowed = limit * max(error, FLOOR[dtype] * size) + 1e-6
    mine = np.linalg.norm(got - want)
    assert mine <= allowed, f"{got.shape}: error {mine:.3g}, not {error:.3g}, of {size:.3g}"
    largest = max(np.abs(other - want).max(), 2 * FLOOR[dtype] * np.abs(want).max())
    peak = np.abs(got - want).max()
    assert peak <= PEAK * largest + 1e-6, (
        f"{got.shape}: largest error {peak:.3g}, not {largest:.3g}"
    )


def _run(fn: Fn, args: Args, policy: Any, order: str) -> list[np.ndarray]:
    amped = jaxamp.amp(fn, policy)
    if order == "forward":
        whole, floats = gradient(amped, args)
    else:
        whole, floats = gradient(fn, args)
        whole = jaxamp.amp(whole, policy)
    return _leaves(jax.jit(lambda args, floats: (amped(*args), whole(*floats)))(args, floats))


def _in_float64(fn: Fn, args: Args) -> list[np.ndarray]:
    """Return what a program means: what it casts to bfloat16 itself is not rounded."""
    with jax.enable_x64(True), mock.patch.object(jnp, "bfloat16", jnp.float64):
        wide = jax.tree.map(_widened, args)
        whole, floats = gradient(fn, wide)
        return _leaves(jax.jit(lambda args, floats: (fn(*args), whole(*floats)))(wide, floats))


def _widened(x: Any) -> Any:
    x = np.asarray(x)
    return x.astype(np.float64) if x.dtype == np.float32 else x


def _leaves(tree: Any) -> list[np.ndarray]:
    """All real results but the loss, which is a sum of few large numbers."""
    out, (_, grads) = tree
    leaves = jax.tree.leaves((out, grads))
    return [np.asarray(x, np.float64) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
