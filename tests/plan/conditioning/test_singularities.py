"""Values near a pole of what is made of them: probabilities near one or zero, that are stored."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxamp import amp, plan_of
from jaxamp.core.formats import Precision
from tests.numerics.oracle import products_rounded
from tests.programs.registry import Draw

ROWS, WIDTH = 64, 8
LOW = {"auto_mixed_bf16": jnp.bfloat16, "auto_mixed": jnp.float16}
DRAW = Draw("singularities")
X = DRAW.normal(ROWS, WIDTH)
W, OUT = DRAW.weight(WIDTH, WIDTH), DRAW.weight(WIDTH, WIDTH)

Body = Callable[[jax.Array], jax.Array]


def probabilities(x: jax.Array) -> jax.Array:
    """Some of them are one in 11 bits, none is in float32."""
    return jax.nn.sigmoid(3 * x @ W)


def scanned(x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, row: (c, probabilities(row)), 0.0, x)[1]


def pooled(x: jax.Array) -> jax.Array:
    return lax.reduce_window(probabilities(x), -jnp.inf, lax.max, (2, 1), (2, 1), "VALID")


def chosen(x: jax.Array) -> jax.Array:
    return lax.cond(x[0, 0] < 9, probabilities, jnp.tanh, x)


STORED: dict[str, Body] = {
    "sorted": lambda x: jnp.sort(probabilities(x), 0),
    "concatenated": lambda x: jnp.concatenate([probabilities(x), probabilities(-x)]),
    "top_k": lambda x: lax.top_k(probabilities(x).T, 32)[0].T,
    "pooled": pooled,
    "scanned": scanned,
    "chosen": chosen,
}


def small(x: jax.Array) -> jax.Array:
    return jnp.exp(-18 * jnp.abs(x @ W))


def exponential(x: jax.Array) -> jax.Array:
    p = small(x)
    return jnp.tanh(p @ W) * jnp.log(p)


def reciprocal(x: jax.Array) -> jax.Array:
    p = small(x)
    return jnp.tanh(jnp.tanh(p @ W) / (p + 1e-10) * 1e-9)


def sticks(x: jax.Array) -> jax.Array:
    """Each takes a part of what the others have left."""
    return jnp.cumprod(1 - jax.nn.sigmoid(x @ W / 3 + 2), -1)


def balanced(x: jax.Array) -> jax.Array:
    """What is below float16 is multiplied by what is beyond it, as in a monotonic attention."""
    large = jnp.sort(1 / small(x[::-1] / 2), 0)
    return jnp.tanh(jnp.tanh(x @ OUT) * small(x / 2) * large)


def stepped(x: jax.Array) -> jax.Array:
    """What steps of Adam have made: at zero a divisor's square is beyond float16."""
    m = v = jnp.zeros_like(x)
    for t in (1, 2):
        g = jax.grad(lambda x: jnp.mean(jnp.tanh(jnp.tanh(x @ W) @ OUT)))(x)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        root = jnp.sqrt(v / (1 - 0.999**t) + 1e-8)
        x = x - 0.01 * (m / (1 - 0.9**t)) / (root + 1e-4)
    return jnp.tanh(x @ W)


# Derivatives divide by what is below float16, and multiply by it again.
SMALL: dict[str, Body] = {
    "exponential": exponential,
    "reciprocal": reciprocal,
    "sticks": lambda x: jnp.log(sticks(x)),
    "balanced": balanced,
    "stepped": stepped,
}


def logit(p: jax.Array) -> jax.Array:
    return jnp.log(p) - jnp.log1p(-p)


def loss(body: Body, x: jax.Array) -> jax.Array:
    return jnp.mean((body(x) @ OUT) ** 2)


def distances(fn: Callable[[jax.Array], jax.Array], policy: str, order: str) -> list[float]:
    """How far gradients are from float32's: mixed ones, and those of rounded products."""
    exact = jax.jit(jax.grad(fn))(X)
    rounded = jax.jit(products_rounded(jax.grad(fn), LOW[policy]))(X)
    mixed = amp(jax.grad(fn), policy) if order == "amp(grad(f))" else jax.grad(amp(fn, policy))
    return [float(np.linalg.norm(g - exact)) for g in (jax.jit(mixed)(X), rounded)]


@pytest.mark.product("name")
@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("name", STORED)
def test_probabilities_that_are_stored_are_not_one(name: str, policy: str, order: str) -> None:
    mixed, rounded = distances(partial(loss, lambda x: logit(STORED[name](x))), policy, order)
    assert mixed <= 4 * rounded + 1e-6


@pytest.mark.product("name")
@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
@pytest.mark.parametrize("name", SMALL)
def test_what_is_divided_by_something_small_fits(name: str, order: str) -> None:
    mixed, rounded = distances(partial(loss, SMALL[name]), "auto_mixed", order)
    assert mixed <= 4 * rounded + 1e-6


def attended(x: jax.Array) -> jax.Array:
    """Sums beyond float16, one of which is divided by the other."""
    weights, values = jnp.exp(x @ OUT), 300 * (x @ W) + 4000
    return jnp.tanh((weights.T @ values) / jnp.sum(weights, 0)[:, None] / 4000)


def linearly_attended(x: jax.Array) -> jax.Array:
    queries, keys, values = jnp.exp(x @ OUT), jnp.exp(x @ W), x @ OUT + 3
    sums = keys.T @ values, jnp.sum(keys, 0)
    return (40 * queries @ sums[0]) / (40 * queries @ sums[1])[:, None]


SUMS: dict[str, Body] = {"attended": attended, "linearly_attended": linearly_attended}


@pytest.mark.product("name")
@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
@pytest.mark.parametrize("name", SUMS)
def test_sums_that_are_divided_by_sums_are_finite(name: str, order: str) -> None:
    mixed, rounded = distances(partial(loss, SUMS[name]), "auto_mixed", order)
    assert mixed <= 4 * rounded + 1e-6


def test_what_is_divided_by_its_own_norm_is_narrow() -> None:
    """It is stored as it is, and has to fit anyway."""

    def normalised(x: jax.Array) -> jax.Array:
        h = x @ W
        return (h / jnp.linalg.norm(h, axis=-1, keepdims=True)) @ OUT

    (first, *_) = plan_of(normalised, "auto_mixed")(X).decisions()
    assert first.output is Precision.F16


DATUM = -np.linspace(280, 290, WIDTH, dtype=np.float32)


def temperatures(x: jax.Array) -> jax.Array:
    return 288 + jax.nn.softplus(x @ W)


@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
@pytest.mark.parametrize("policy", LOW)
def test_captured_numbers_may_be_negative(policy: str, order: str) -> None:
    """They nearly cancel with what they are added to."""

    def anomalies(x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.concatenate([temperatures(x), temperatures(-x)]) + DATUM)

    mixed, rounded = distances(partial(loss, anomalies), policy, order)
    assert mixed <= 4 * rounded + 1e-6


HARMLESS: dict[str, Body] = {
    "softsign": lambda h: h / (1 + jnp.abs(h)),
    "swish": lambda h: h / (1 + jnp.exp(-h)),
    "softplus": jax.nn.softplus,
    "gelu": jax.nn.gelu,
    "softmax": jax.nn.softmax,
    "squared": lambda h: h / (1 + h * h),
    "by_softplus": lambda h: h / (1 + jax.nn.softplus(h)),
    "layer_norm": jax.nn.standardize,
}


@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_far_from_poles_is_stored_narrow(name: str, policy: str) -> None:
    """Nothing here is divided by what may be zero, nor is the logarithm of it taken."""

    def joined(x: jax.Array) -> jax.Array:
        parts = [HARMLESS[name](x @ W), HARMLESS[name](x @ OUT)]
        return jnp.mean((jnp.concatenate(parts) @ OUT) ** 2)

    for fn in (joined, jax.grad(joined)):
        decisions = list(plan_of(fn, policy)(X).decisions())
        (pile,) = [d for d in decisions if d.primitive == "concatenate"]
        assert pile.output is decisions[0].output


@pytest.mark.parametrize(
    ("of", "precision"), [(jnp.arccos, Precision.F32), (jnp.tanh, Precision.F16)]
)
def test_what_an_angle_is_measured_by_is_not_rounded(of: Body, precision: Precision) -> None:
    """The product of two directions is no larger than one; that of their roundings may be."""

    def angle(w: jax.Array, x: jax.Array) -> jax.Array:
        ahead, aside = (x @ w)[:, :4], (x @ w)[:, 4:]
        both = jnp.concatenate([jnp.tanh(ahead), jnp.tanh(aside)], -1)
        return of((jnp.sum(both * x, -1) - 1) / 9).mean()

    decisions = plan_of(jax.grad(angle), "auto_mixed")(W, X).decisions()
    joined = [d.output for d in decisions if d.eqn.primitive.name == "concatenate"]
    assert joined[0] is precision


def test_a_difference_may_be_zero_at_any_number() -> None:
    """As a logarithm of one is told, which a report then says."""
    decisions = plan_of(lambda x: jnp.log(jax.nn.sigmoid(x @ W) - 0.5) @ OUT)(X).decisions()
    (reason,) = [d.reason for d in decisions if d.primitive == "logistic"]
    assert reason == "rounding may hit a singularity of a later operation"


def mean_of_contacts(q: jax.Array, touches: jax.Array, turns: jax.Array) -> jax.Array:
    """The mean of torques over contacts, of which some bodies have none, through inertias."""
    forces = jnp.where(touches[:, None], q @ W[:, :3], 0)
    torques = forces + jnp.cross(q @ W[:, 3:6], forces)
    bodies = jnp.arange(ROWS) % 4
    added = jax.ops.segment_sum(torques, bodies, 4)
    counts = jax.ops.segment_sum(jnp.float32(touches), bodies, 4)
    return jnp.einsum("nij,nj->ni", turns, added / (counts[:, None] + 1e-8))


def test_a_cotangent_that_a_count_of_zero_makes_large_is_not_rounded_to_float16():
    """A mask takes it away, as it does in float32."""
    touches = jnp.arange(ROWS) % 4 > 0
    turns = DRAW.weight(3, 3) + jnp.zeros((4, 3, 3), jnp.float32)

    def loss(q: jax.Array) -> jax.Array:
        return jnp.tanh(mean_of_contacts(q, touches, turns)).sum()

    exact = jax.grad(loss)(X)
    found = jax.grad(amp(loss, "f16"))(X)
    assert jnp.linalg.norm(found - exact) < 0.01 * jnp.linalg.norm(exact)


@pytest.mark.parametrize("scale", [jnp.std, lambda x, *a, **k: jnp.linalg.norm(x, *a, **k)])
def test_what_a_norm_divides_is_narrow_in_float16(scale):
    """A divisor made of what the dividend is made of is tiny where that is."""

    def normed(x: jax.Array) -> jax.Array:
        y = x @ W
        return (y - y.mean(-1, keepdims=True)) / (scale(y, axis=-1, keepdims=True) + 1e-6) @ OUT

    reasons = [d.reason for d in plan_of(normed, "f16")(X).decisions()]
    assert not [why for why in reasons if "cotangent may overflow" in why]
