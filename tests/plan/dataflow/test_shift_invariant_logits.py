"""Logits of a large vocabulary are stored narrow where a loss reads them, and nothing else is."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxamp import OpKind, Precision, PrecisionPolicy, amp, plan_of

ROWS, WIDTH, WORDS = 32, 16, 200
LABELS = np.arange(ROWS)
BF16, F16 = PrecisionPolicy.AUTO_MIXED_BF16, PrecisionPolicy.AUTO_MIXED

Head = Callable[[jax.Array, jax.Array], jax.Array]


def of_logits(read: Callable[[jax.Array], jax.Array]) -> Head:
    return lambda x, w: read(x @ w)


def picked(rows: jax.Array) -> jax.Array:
    return jnp.mean(jnp.take_along_axis(rows, LABELS[:, None], axis=-1))


def by_logsumexp(logits: jax.Array) -> jax.Array:
    at_label = jnp.take_along_axis(logits, LABELS[:, None], axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1, keepdims=True) - at_label)


def capped(logits: jax.Array) -> jax.Array:
    logits = 30 * jnp.tanh((logits + jnp.ones(WORDS)) / 30)
    logits = jnp.where(jnp.arange(WORDS) < 150, logits, -jnp.inf)
    return optax.softmax_cross_entropy_with_integer_labels(logits, LABELS).mean()


def distance(products: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.min(900 - 2 * products, axis=-1))


NARROW = {
    "log_softmax": of_logits(lambda logits: picked(jax.nn.log_softmax(logits))),
    "softmax": of_logits(lambda logits: jnp.mean(jax.nn.softmax(logits) ** 2)),
    "logsumexp": of_logits(by_logsumexp),
    "capped": of_logits(capped),
}
WIDE = {
    "squared": of_logits(lambda prediction: jnp.mean((prediction - 1.0) ** 2)),
    "distance": of_logits(distance),
    "exponential": of_logits(lambda logits: jnp.mean(jnp.exp(logits))),
    "argmax": of_logits(lambda logits: jnp.argmax(logits, axis=-1)),
    "returned": of_logits(lambda logits: (logits, by_logsumexp(logits))),
    "centred": of_logits(lambda y: jnp.mean((y - jnp.mean(y, axis=0)) ** 2)),
    "small": lambda x, w: jnp.mean(jax.nn.log_softmax(x @ w[:, :8])),
}


@pytest.fixture
def args() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(ROWS, WIDTH)), rng.normal(size=(WIDTH, WORDS))
    return jnp.float32(x), jnp.float32(w)


@pytest.mark.parametrize(
    ("head", "policy", "stored"),
    [
        *(pytest.param(head, BF16, Precision.BF16, id=name) for name, head in NARROW.items()),
        *(pytest.param(head, BF16, Precision.F32, id=name) for name, head in WIDE.items()),
        # Float16 logits might overflow.
        *(
            pytest.param(head, F16, Precision.F32, id=f"{name}-f16")
            for name, head in NARROW.items()
        ),
    ],
)
def test_a_loss_alone_reads_rounded_logits(
    head: Head, policy: PrecisionPolicy, stored: Precision, args: tuple[jax.Array, jax.Array]
) -> None:
    decisions = plan_of(head, policy)(*args).decisions()
    assert {d.output for d in decisions if d.kind is OpKind.COMPUTE} == {stored}


def by_hand(x: jax.Array, w: jax.Array) -> jax.Array:
    """A loss in chunks as people write it."""
    chunks = x.reshape(-1, 4, WIDTH), LABELS.reshape(-1, 4)
    losses = jax.lax.map(
        lambda chunk: optax.softmax_cross_entropy_with_integer_labels(chunk[0] @ w, chunk[1]),
        chunks,
    )
    return losses.mean()


@pytest.mark.parametrize("name", [*NARROW, "by hand"])
def test_in_chunks_too(name: str, args: tuple[jax.Array, jax.Array]) -> None:
    """The matrix, larger than logits of a chunk, is the same for all of them."""
    head, policy = NARROW.get(name, by_hand), BF16.replace(loss_in_chunks=name in NARROW)
    plan = plan_of(head, policy)(*args)
    assert len(plan.found) == (name in NARROW)
    (product,) = [d for d in plan.decisions() if d.kind is OpKind.COMPUTE]
    assert product.eqn.outvars[0].aval.size < args[1].size
    assert product.output is Precision.BF16


@pytest.mark.product
@pytest.mark.parametrize("name", NARROW)
def test_gradients_are_as_good_as_those_of_the_differentiated_program(
    name: str, args: tuple[jax.Array, jax.Array]
) -> None:
    """Inside of `amp` the cotangent's way leads to Compute, so there logits were always rounded."""
    head = NARROW[name]
    exact = jax.grad(head, argnums=(0, 1))(*args)
    outside = jax.grad(amp(head, BF16), argnums=(0, 1))(*args)
    inside = amp(jax.grad(head, argnums=(0, 1)), BF16)(*args)
    for true, ours, theirs in zip(exact, outside, inside, strict=True):
        norm = jnp.linalg.norm(true)
        assert jnp.linalg.norm(ours - true) <= 1.1 * jnp.linalg.norm(theirs - true)
        assert jnp.linalg.norm(ours - true) <= 0.02 * norm
