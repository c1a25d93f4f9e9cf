"""Masks and scales that a narrow format does exactly are not widened, and change no number."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp import PrecisionPolicy, Rule, amp
from tests.audit import equations

BATCH, LENGTH, HEADS, WIDTH = 2, 24, 3, 16  # no other array has LENGTH²·HEADS·BATCH elements
SIZE = BATCH * HEADS * LENGTH**2

Scores = Callable[[jax.Array], jax.Array]


def attention(weigh: Scores) -> Callable[..., jax.Array]:
    def fn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        weights = weigh(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

    return fn


def causal() -> jax.Array:
    return jnp.tril(jnp.ones((LENGTH, LENGTH), bool))


def masked(fill: float, scale: float = WIDTH**-0.5) -> Scores:
    return lambda s: jax.nn.softmax(jnp.where(causal(), s * scale, fill))


def divided(scores: jax.Array) -> jax.Array:
    scores = scores / jnp.sqrt(WIDTH)
    return jax.nn.softmax(jnp.where(causal(), scores, -jnp.inf))


def moved(scores: jax.Array) -> jax.Array:
    rows = (scores / 8).reshape(BATCH * HEADS, LENGTH, LENGTH)
    return jax.nn.softmax(jnp.where(causal(), rows, -jnp.inf)).reshape(scores.shape)


def padded(scores: jax.Array) -> jax.Array:
    wide = jax.lax.pad(scores, -jnp.inf, [(0, 0, 0)] * 3 + [(0, LENGTH, 0)])
    return jax.nn.softmax(wide)[..., :LENGTH]


def read_twice(scores: jax.Array) -> jax.Array:
    seen = jnp.where(causal(), scores, -jnp.inf)
    return jnp.exp(seen - jax.nn.logsumexp(scores, axis=-1, keepdims=True))


@jax.custom_jvp
def clipped(scores: jax.Array) -> jax.Array:
    return jnp.maximum(scores, -8.0)


@clipped.defjvp
def _clipped_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return clipped(*primals), jax.nn.sigmoid(*primals) * tangents[0]


def with_a_rule(scores: jax.Array) -> jax.Array:
    return jax.nn.softmax(clipped(scores))


# What runs in a narrow format, in bfloat16 and in float16, among the operations on scores.
CASES = {
    "causal": (masked(-jnp.inf), {"mul", "select_n"}, set()),
    "fits": (masked(-(2.0**20)), {"mul", "select_n"}, set()),
    "does_not_fit": (masked(-1e9), {"mul"}, set()),
    "scale_does_not_fit": (masked(-jnp.inf, 0.3), set(), set()),
    "scale_rounds": (masked(-jnp.inf, 0.75), set(), set()),
    "mask_alone": (masked(-jnp.inf, 1.0), {"mul", "select_n"}, set()),
    "divided": (divided, {"div", "select_n"}, set()),
    "moved": (moved, {"div", "reshape", "select_n"}, set()),
    "padded": (padded, {"pad"}, {"pad"}),
    "read_twice": (read_twice, set(), set()),
    "with_a_rule": (with_a_rule, set(), set()),
}
OPERATIONS = {"mul", "div", "select_n", "reshape", "pad", "max"}


@pytest.fixture
def args() -> list[jax.Array]:
    shape = BATCH, LENGTH, HEADS, WIDTH
    return [2 * jax.random.normal(jax.random.key(n), shape) for n in range(3)]


@pytest.mark.parametrize("name", CASES)
def test_what_is_exact_runs_narrow(name: str, args: Any) -> None:
    weigh, *expected = CASES[name]
    found = [
        narrow_operations(jax.make_jaxpr(amp(attention(weigh), policy))(*args).jaxpr)
        for policy in ("auto_mixed_bf16", "auto_mixed")
    ]
    assert found == expected


@pytest.mark.product("name", every=2)
@pytest.mark.parametrize("name", [name for name, (_, bf16, _) in CASES.items() if bf16])
def test_no_number_changes(name: str, args: Any) -> None:
    """Values and gradients are those of the same operations in float32, to the last bit."""
    weigh, *_ = CASES[name]
    wide = [Rule(primitive=p, precision="f32") for p in OPERATIONS - {"reshape"}]
    policy = PrecisionPolicy.AUTO_MIXED_BF16

    def loss(fn: Callable[..., jax.Array], *args: jax.Array) -> jax.Array:
        return (fn(*args) ** 2).sum()

    def both(policy: PrecisionPolicy) -> Any:
        gradient = jax.value_and_grad(partial(loss, amp(attention(weigh), policy)), (0, 1, 2))
        around = amp(jax.grad(partial(loss, attention(weigh)), (0, 1, 2)), policy)
        return jax.jit(gradient)(*args), around(*args)

    found, expected = both(policy), both(policy.with_rules(*wide))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def residual(weights: jax.Array, x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jax.nn.relu(jnp.tanh(x @ weight) + x)
    return (x @ weights[0]).sum()


def selects(jaxpr: Any) -> set[str]:
    """Dtypes of what is chosen by masks of the size of an activation."""
    eqns = (e for e in equations(jaxpr) if e.primitive.name == "select_n")
    return {e.outvars[0].aval.dtype.name for e in eqns if e.outvars[0].aval.size > 1}


@pytest.mark.parametrize(
    ("name", "low"), [("auto_mixed_bf16", "bfloat16"), ("auto_mixed", "float16")]
)
def test_a_cotangent_is_masked_while_it_is_narrow(name: str, low: str) -> None:
    """What is then stored is the masked one; no number changes."""
    policy = PrecisionPolicy.parse(name)
    keys = jax.random.split(jax.random.key(0))
    args = jax.random.normal(keys[0], (3, 16, 16)), jax.random.normal(keys[1], (8, 16))

    def gradient(policy: PrecisionPolicy) -> Any:
        return jax.grad(amp(partial(residual), policy))

    wide = gradient(policy.with_rules(Rule(primitive="select_n", precision="f32")))
    assert low in selects(jax.make_jaxpr(gradient(policy))(*args).jaxpr)
    assert selects(jax.make_jaxpr(wide)(*args).jaxpr) == {"float32"}
    found, expected = jax.jit(gradient(policy))(*args), jax.jit(wide)(*args)
    np.testing.assert_array_equal(found, expected)


def narrow_operations(jaxpr: Any) -> set[str]:
    """Operations that take and give narrow scores."""
    return {
        e.primitive.name
        for e in equations(jaxpr)
        if e.primitive.name in OPERATIONS
        and all(_is_narrow(v.aval) for v in e.outvars)
        and any(_is_narrow(v.aval) for v in e.invars)
    }


def _is_narrow(aval: Any) -> bool:
    return aval.size >= SIZE and aval.dtype in (jnp.bfloat16, jnp.float16)
