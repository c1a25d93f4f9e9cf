"""Long sums, means and products, in one operation or step by step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from tests.numerics.hostile.registry import hostile


@hostile(lambda d: (d.normal(4096, 4), d.weight(4, 4), d.weight(4, 2)))
def sum_in_a_scan(x: Array, w: Array, v: Array) -> Array:
    """A running sum stops growing when a term is below half an ulp of it."""

    def add(total: Array, row: Array) -> tuple[Array, None]:
        return total + jax.nn.relu(row @ w), None

    total, _ = lax.scan(add, jnp.zeros(4), x[:, None, :].sum(1))
    return total @ v


@hostile(lambda d: (d.normal(1024, 2, 4), d.weight(4, 4), d.weight(4, 2)))
def counter_beside_a_product(x: Array, w: Array, v: Array) -> Array:
    """A float counter in the carry divides what was summed."""

    def add(carry: tuple[Array, Array], rows: Array) -> tuple[tuple[Array, Array], None]:
        total, n = carry
        return (total + jnp.abs(rows @ w), n + 1.0), None

    (total, n), _ = lax.scan(add, (jnp.zeros((2, 4)), jnp.float32(0)), x)
    return (total / n) @ v


@hostile(lambda d: (d.normal(2048, 4), d.weight(4, 4), d.weight(4, 2)))
def cumulative_sum(x: Array, w: Array, v: Array) -> Array:
    """Differences of a cumulative sum 16 apart, as in a moving average."""
    total = jnp.cumsum(jax.nn.relu(x @ w), 0)
    return ((total[16:] - total[:-16]) / 16.0) @ v


@hostile(lambda d: (d.normal(1000, 4), d.weight(4, 4), d.weight(4, 2)))
def cumulative_product(x: Array, w: Array, v: Array) -> Array:
    """A product of 1000 factors near 1.001: each is 1 in bf16."""
    return jnp.cumprod(1.0 + 1e-3 * jax.nn.sigmoid(x @ w), 0) @ v


@hostile(lambda d: (d.normal(512, 4), d.weight(4, 4), d.weight(4, 2)))
def cumulative_logsumexp(x: Array, w: Array, v: Array) -> Array:
    """What each term adds to a running log of a sum of exponentials."""
    total = lax.cumlogsumexp(x @ w, 0)
    return (50.0 * (total[1:] - total[:-1])) @ v


@hostile(lambda d: (d.normal(1, 64, 64, 3), d.weight(3, 3), d.weight(3, 2)))
def local_contrast(x: Array, w: Array, v: Array) -> Array:
    """Window sums of 1024 terms give E[h²] - E[h]² of each window."""
    h = 3.0 + 0.1 * jnp.tanh(x @ w)

    def mean(a: Array) -> Array:
        return lax.reduce_window(a, 0.0, lax.add, (1, 32, 32, 1), (1, 16, 16, 1), "VALID") / 1024.0

    return (100.0 * (mean(h * h) - mean(h) ** 2)) @ v


@hostile(lambda d: (d.normal(128, 4), d.weight(4, 4), d.weight(4, 2)))
def linear_recurrence(x: Array, w: Array, v: Array) -> Array:
    """y <- 0.999 y + x as an associative scan: decays of 0.999 ** n."""

    def join(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        return a[0] * b[0], a[1] * b[0] + b[1]

    h = jnp.abs(x @ w)
    return lax.associative_scan(join, (jnp.full(h.shape, 0.999), h))[1] @ v


@hostile(lambda d: (d.normal(128, 4), d.weight(4, 4), d.normal(128, 4), d.weight(4, 2)))
def state_space_model(x: Array, w: Array, u: Array, v: Array) -> Array:
    """The same with decays exp(-0.002 softplus(h)) that are made by a product."""
    decay = jnp.exp(-2e-3 * jax.nn.softplus(x @ w))

    def join(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        return a[0] * b[0], a[1] * b[0] + b[1]

    return lax.associative_scan(join, (decay, (1 - decay) * jnp.abs(u)))[1] @ v


@hostile(lambda d: (d.normal(512, 4), d.weight(4, 4), d.weight(4, 2)))
def discounted_returns(x: Array, w: Array, v: Array) -> Array:
    """r + 0.99 G backward over 512 rewards of a network."""

    def back(later: Array, reward: Array) -> tuple[Array, Array]:
        total = reward + 0.99 * later
        return total, total

    rewards = jax.nn.sigmoid(x @ w)
    return lax.scan(back, jnp.zeros(4), rewards, reverse=True)[1] @ v


@hostile(lambda d: (d.normal(256, 16), d.weight(16, 4), d.weight(4, 2)))
def welford(x: Array, w: Array, v: Array) -> Array:
    """A running mean and sum of squares over rows of a product with mean 10."""
    h = x @ w + 10.0

    def step(carry: tuple[Array, Array, Array], row: Array) -> tuple[tuple, None]:
        n, mean, squares = carry
        n = n + 1.0
        delta = row - mean
        mean = mean + delta / n
        return (n, mean, squares + delta * (row - mean)), None

    (n, mean, squares), _ = lax.scan(step, (jnp.float32(0), jnp.zeros(4), jnp.zeros(4)), h)
    return ((h - mean) * lax.rsqrt(squares / n + 1e-6)) @ v


@hostile(lambda d: (d.normal(40, 40, 3), d.weight(3, 3), d.weight(3, 2)))
def integral_image(x: Array, w: Array, v: Array) -> Array:
    """Box sums are differences of four large sums."""
    s = jnp.cumsum(jnp.cumsum(jnp.abs(x @ w), 0), 1)
    box = s[4:, 4:] - s[:-4, 4:] - s[4:, :-4] + s[:-4, :-4]
    return box[-8:, -8:] @ v


@hostile(
    lambda d: (d.normal(4, 4), d.integers(4, 4096), d.weight(4, 4), d.normal(4096, 4)),
    after=jax.grad,
)
def gradient_of_a_frequent_row(table: Array, ids: Array, w: Array, g: Array) -> Array:
    """Each of four embeddings collects a thousand cotangents."""
    return ((table[ids] @ w) * (1.0 + 0.1 * g)).mean(0).sum()


@hostile(lambda d: (d.weight(8, 8), d.normal(4, 8)), after=jax.grad)
def gradient_of_a_shared_weight(w: Array, x: Array) -> Array:
    """A weight used 256 times in a scan collects 256 cotangents."""

    def layer(h: Array, _: None) -> tuple[Array, None]:
        return h + 0.02 * jnp.tanh(h @ w), None

    return jnp.mean(lax.scan(layer, x, None, length=256)[0] ** 2)
