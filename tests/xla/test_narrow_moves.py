"""Arrays that are moved while they are narrow, where a group is lowered for a TPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Var

import jaxamp
from jaxamp import PrecisionPolicy, amp
from jaxamp.core import jax_compat
from jaxamp.jaxprs.interpret import evaluate
from jaxamp.xla.hints.techniques import Technique
from jaxamp.xla.primitives.label_gather import label_gather
from jaxamp.xla.primitives.narrow_moves import narrow_moves
from jaxamp.xla.primitives.rounding_barrier import unbarriered
from tests.audit import equations

NARROW, WIDE = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
MOVES = frozenset(
    {"concatenate", "label_gather", "pad", "reshape", "slice", "split", "transpose", "unstack"}
)


def widened(x: jax.Array, *_: jax.Array) -> jax.Array:
    return x.astype(WIDE).reshape(4, 2, 3, 8).swapaxes(1, 2)


def rounded(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Round what is computed of two arrays, behind moves."""
    wide = jnp.exp(x.astype(WIDE)) * x.astype(WIDE) - bias
    return wide.reshape(4, 2, 3, 8).swapaxes(1, 2).astype(NARROW)


def biased(x: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Take parts of a sum; one of them is scaled before it is rounded."""
    first, second = jnp.split((bias - x).reshape(4, 2, 3, 8), 2, 3)
    return (first * 0.3).astype(NARROW), second.astype(NARROW)


def padded(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Add up what was scaled along the columns, and shifted along the rows."""
    wide = x.astype(WIDE)
    taps = (wide * bias, bias * 3 * wide)
    first, second = (jnp.pad(tap, ((i, 1 - i), (0, 0))) for i, tap in enumerate(taps))
    return first + second


def joined(x: jax.Array, bias: jax.Array) -> jax.Array:
    wide = x.astype(WIDE)
    return jnp.exp(jnp.concatenate([wide, wide[::-1]])) + bias


def gated(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Take heads of what is computed from an array in several ways."""
    return jnp.sqrt(jnp.exp(jax.nn.silu(x.astype(WIDE)) * bias).reshape(4, 6, 8).swapaxes(0, 1))


def parted(x: jax.Array, *_: jax.Array) -> list[jax.Array]:
    """Take apart what is the sum of narrow arrays, as the cotangent of what was joined is."""

    def joined_twice(*rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        whole = jnp.stack(rows)
        return whole.astype(NARROW), (whole * 1).astype(NARROW)

    _, transposed = jax.vjp(joined_twice, *x.astype(WIDE))
    return [*transposed((x, jnp.sin(x)))]


def labelled(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Look up a number of each row of logits that have a bias, beyond the row as well."""
    logits = jnp.tanh(x.astype(WIDE) + jnp.broadcast_to(bias, x.shape)) * 30
    places = 16 * jnp.arange(4)[:, None]
    closed = jax.make_jaxpr(lambda y: jnp.take_along_axis(y, places, 1))(logits)
    (lookup,) = (eqn for eqn in equations(closed.jaxpr) if eqn.primitive.name == "gather")
    return label_gather(logits, places[..., None], lookup.params)


X = jax.random.normal(jax.random.key(0), (4, 48), NARROW)
BIAS = jax.random.normal(jax.random.key(1), (1, 48))


def changed(fn: Callable[..., Any], *args: jax.Array) -> tuple[list[Any], list[Any]]:
    """Dtypes of the arrays that are moved and not small, and what the changed program returns."""
    closed = narrow_moves(jax.make_jaxpr(fn)(*args))
    dtypes, small = [], {closed.jaxpr.invars[1]}
    for eqn in closed.jaxpr.eqns:
        if small.issuperset(v for v in eqn.invars[:1] if isinstance(v, Var)):
            small.update(eqn.outvars)
        elif eqn.primitive.name in MOVES:
            dtypes.append(eqn.invars[0].aval.dtype)
    return dtypes, evaluate(closed, args, jax_compat.bind)


def held(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Move what a GPU would read from before a barrier."""
    return unbarriered(x.astype(WIDE)).T


def unread(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Move an array twice, once for nobody."""
    jnp.transpose(jnp.exp(x.astype(WIDE)))
    return x.astype(WIDE).T


@pytest.mark.parametrize(
    "fn", [widened, rounded, biased, padded, joined, gated, parted, labelled, held, unread]
)
def test_arrays_are_moved_while_they_are_narrow(fn: Callable[..., Any]) -> None:
    """The results are the same, bit for bit."""
    dtypes, found = changed(fn, X, BIAS)
    assert set(dtypes) == {NARROW}
    for one, other in zip(found, jax.tree.leaves(fn(X, BIAS)), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def sharpened(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Move what others read in float32, too."""
    wide = jnp.exp(x.astype(WIDE)) * jnp.tile(bias, (4, 1))
    return wide.T @ wide


def added(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Move what is computed of two narrow arrays, which would be two moves."""
    return (x.astype(WIDE) + (x * 3).astype(WIDE)).T * bias.T


def raised(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Put numbers beside an array that are not zero, or not after the sum."""
    wide = x.astype(WIDE)
    return jnp.pad(wide, 1, constant_values=0.1) + jnp.pad(wide + bias, 1)


def joined_later(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Join what is computed from an array to it."""
    wide = x.astype(WIDE)
    return jnp.concatenate([wide * bias, wide]).T


@pytest.mark.parametrize("fn", [sharpened, added, raised, joined_later])
def test_what_would_change_a_number_is_moved_wide(fn: Callable[..., Any]) -> None:
    dtypes, found = changed(fn, X, BIAS)
    assert set(dtypes) == {WIDE}
    np.testing.assert_array_equal(found[0], fn(X, BIAS))


def test_numbers_are_computed_before_they_are_repeated() -> None:
    def repeated(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(jnp.exp(x[:, :1].astype(WIDE)), x.shape).T

    eqns = narrow_moves(jax.make_jaxpr(repeated)(X)).jaxpr.eqns
    assert [eqn.invars[0].aval.shape for eqn in eqns if eqn.primitive.name == "exp"] == [(4, 1)]


def shifted(x: jax.Array, w: jax.Array) -> jax.Array:
    x = jnp.pad(x @ w, ((3, 0), (0, 0)))
    return (jax.nn.silu(sum(w[i] * x[i : i + 64] for i in range(4))) @ w).sum()


def test_groups_are_changed_for_a_tpu_alone() -> None:
    """Programs for other platforms shift products with a filter's taps in float32, as planned."""
    traced = jax.jit(jax.grad(amp(shifted))).trace(jnp.ones((64, 32)), jnp.ones((32, 32)))
    found = []
    for platform in ("tpu", "cuda", "cpu"):
        lines = traced.lower(lowering_platforms=(platform,)).as_text().splitlines()
        found.append(
            sum("stablehlo.pad" in line and "-> tensor<67x32xf32>" in line for line in lines)
        )
    assert found == [0, 4, 4]


def test_a_group_may_call_what_holds_an_array() -> None:
    """It is lowered as it is."""
    table = np.arange(64.0 * 32, dtype=np.float32).reshape(64, 32)
    held = jax.jit(lambda x: jnp.tanh(x) * table)

    def heads(x: jax.Array, w: jax.Array) -> jax.Array:
        return ((held(x @ w).reshape(64, 4, 8) * 0.3).reshape(64, 32) @ w).sum()

    traced = jax.jit(jax.grad(amp(heads))).trace(jnp.ones((64, 32)), jnp.ones((32, 32)))
    assert "stablehlo.tanh" in traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.deviceless("v5e")
def test_a_depthwise_convolution_moves_half_of_the_bytes() -> None:
    """Compiled for a v5e, where products, shifts and cotangents were stored in float32."""

    def loss(w: jax.Array, taps: jax.Array, x: jax.Array) -> jax.Array:
        y = jnp.pad(x @ w, ((0, 0), (3, 0), (0, 0)))
        filtered = sum(taps[i] * y[:, i : i + 2048] for i in range(4))
        return ((jax.nn.silu(filtered) @ w.T) ** 2).mean()

    policy = PrecisionPolicy.MIXED_BF16
    off = policy.replace(xla=policy.xla - {Technique.NARROW_MOVES})
    shapes = (768, 1536), (4, 1536), (4, 2048, 768)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    gradient = jax.grad(loss, argnums=(0, 1))
    found = jaxamp.estimate(gradient, policy, others=[off], target="v5e")(*args)
    moved = {row.policy: row.bytes for row in found.compiled}
    assert 0 < 2 * moved[str(policy)] < moved[str(off)], moved
