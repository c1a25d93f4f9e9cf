"""Errors of a program's results and gradients, fused and written out, against float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jaxamp
from tests.found.attention import imitation, near_misses, of_packages, spellings  # noqa: F401
from tests.found.attention.corpus import EXTRA_TERMS, NEAR_MISSES, SPELLINGS, Fn, Program, gradient
from tests.found.attention.finding import ORDERS
from tests.programs.registry import Args

POLICIES = {"bfloat16": "auto_mixed_bf16", "float16": "auto_mixed"}
LIMIT = 1.5
"""How much larger the error of a fused form may be than that of the form written out."""

NOISE = 3.0
"""The same for numbers that are noise in both."""

FEW = 16
"""Of fewer numbers one error is a chance; that of several draws is not."""

DRAWS = 8
"""How many arguments those are looked at for."""

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
        order: as `tests.found.attention.finding` has them; results are those of the program too.
        spread: deviation of the logits, where the program begins with its queries.

    Raises:
        AssertionError: a result or gradient is less accurate, or not finite where it should be.
    """
    fn, args = program.built
    if program.operands:
        args = (np.float32(spread) * args[0], *args[1:])
    policy = jaxamp.PrecisionPolicy.parse(POLICIES[dtype]).replace(fused_attention=True)
    exact = _in_float64(fn, args)
    composed = _run(fn, args, policy.replace(fused_attention=False), order)
    with imitation.kernels():
        fused = _run(fn, args, policy, order)
    draws = [_compared(fused(args), composed(args), exact(args))]
    if any(want.size < FEW for _, _, want in draws[0]):
        draws += [
            _compared(fused(more), composed(more), exact(more))
            for more in (_shuffled(args, seed) for seed in range(1, DRAWS))
        ]
    for results in zip(*draws, strict=True):
        if results[0][2].size < FEW:
            by_form = zip(*results, strict=True)
            results = [[np.concatenate([x.ravel() for x in xs]) for xs in by_form]]
        got, other, want = results[0]
        compare(got, other, want, dtype)


def _compared(
    fused: list[np.ndarray], composed: list[np.ndarray], exact: list[np.ndarray]
) -> list[list[np.ndarray]]:
    """Check what is finite, and return each result in three forms, with zeros where it is not."""
    found = []
    for forms in zip(fused, composed, exact, strict=True):
        here = np.isfinite(forms[2])
        assert (np.isfinite(forms[0]) == here).all()
        found.append([np.where(here, x, 0.0) for x in forms])
    return found


def _shuffled(args: Args, seed: int) -> Args:
    """Return other arguments: the numbers of each array in another order."""
    draw = np.random.default_rng(seed)

    def shuffled(x: Any) -> Any:
        x = np.asarray(x)
        return draw.permutation(x.ravel()).reshape(x.shape) if x.dtype == np.float32 else x

    return jax.tree.map(shuffled, args)


def compare(got: np.ndarray, other: np.ndarray, want: np.ndarray, dtype: str) -> None:
    """Compare the root mean square and the maximum of errors with those of the form written out.

    Where the form written out has no digit right, as in the gradient of a bias of all keys, which
    is zero, both are noise, whose ratio is no measure.
    """
    size, error = np.linalg.norm(want), np.linalg.norm(other - want)
    limit = LIMIT if error < size else NOISE
    allowed = limit * max(error, FLOOR[dtype] * size) + 1e-6
    mine = np.linalg.norm(got - want)
    assert mine <= allowed, f"{got.shape}: error {mine:.3g}, not {error:.3g}, of {size:.3g}"
    largest = max(np.abs(other - want).max(), 2 * FLOOR[dtype] * np.abs(want).max())
    peak = np.abs(got - want).max()
    assert peak <= PEAK * largest + 1e-6, (
        f"{got.shape}: largest error {peak:.3g}, not {largest:.3g}"
    )


Run = Callable[[Args], list[np.ndarray]]


def _run(fn: Fn, args: Args, policy: Any, order: str) -> Run:
    """Compile the results and gradients of a program under a policy."""
    amped = jaxamp.amp(fn, policy)
    if order == "forward":
        whole, _ = gradient(amped, args)
    else:
        whole = jaxamp.amp(gradient(fn, args)[0], policy)
    compiled = jax.jit(lambda args, floats: (amped(*args), whole(*floats)))
    compiled = compiled.lower(args, gradient(fn, args)[1]).compile()
    return lambda args: _leaves(compiled(args, gradient(fn, args)[1]))


def _in_float64(fn: Fn, args: Args) -> Run:
    """Compute what a program means: what it casts to bfloat16 itself is not rounded."""
    with jax.enable_x64(True), mock.patch.object(jnp, "bfloat16", jnp.float64):
        wide = jax.tree.map(_widened, args)
        whole, floats = gradient(fn, wide)
        compiled = jax.jit(lambda args, floats: (fn(*args), whole(*floats)))
        compiled = compiled.lower(wide, floats).compile()

    def run(args: Args) -> list[np.ndarray]:
        with jax.enable_x64(True):
            wide = jax.tree.map(_widened, args)
            return _leaves(compiled(wide, gradient(fn, wide)[1]))

    return run


def _widened(x: Any) -> Any:
    x = np.asarray(x)
    return x.astype(np.float64) if x.dtype == np.float32 else x


def _leaves(tree: Any) -> list[np.ndarray]:
    """All real results but the loss, which is a sum of few large numbers."""
    out, (_, grads) = tree
    leaves = jax.tree.leaves((out, grads))
    return [np.asarray(x, np.float64) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
