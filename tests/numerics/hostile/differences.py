"""Differences of near-equal numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from tests.numerics.hostile.registry import hostile
from tests.programs.registry import Args, Draw


def _layers(d: Draw) -> Args:
    return d.normal(8, 16), d.weight(16, 8), d.weight(8, 4)


def _small(d: Draw) -> Args:
    return d.normal(8, 16, scale=1e-2), d.weight(16, 8), d.weight(8, 4)


@hostile(_layers)
def variance_by_moments(x: Array, w: Array, v: Array) -> Array:
    """E[h²] - E[h]² with a mean of 10 and a deviation of 0.1."""
    h = 10.0 + 0.1 * (x @ w)
    var = (h * h).mean(-1, keepdims=True) - h.mean(-1, keepdims=True) ** 2
    return ((h - h.mean(-1, keepdims=True)) * lax.rsqrt(var + 1e-5)) @ v


@hostile(_layers)
def layer_norm_far_from_zero(x: Array, w: Array, v: Array) -> Array:
    """Rows with a mean of 300 and a deviation of 1."""
    h = 300.0 + x @ w
    return ((h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5)) @ v


@hostile(_layers)
def batch_norm_by_moments(x: Array, w: Array, v: Array) -> tuple[Array, Array]:
    """Batch statistics by E[h²] - E[h]², used and returned."""
    h = 5.0 + 0.2 * (x @ w)
    mean = h.mean(0)
    var = jnp.maximum((h * h).mean(0) - mean * mean, 0.0)
    return ((h - mean) * lax.rsqrt(var + 1e-5)) @ v, 0.9 + 0.1 * var


@hostile(lambda d: (d.uniform(8, 16), d.uniform(16, 8, low=0.7, high=1.0), d.uniform(8, 4)))
def one_minus_sigmoid(x: Array, w: Array, v: Array) -> Array:
    """1 - sigmoid(8) is 3e-4, below an ulp of 1 in bf16."""
    return (1.0 - jax.nn.sigmoid(x @ w)) @ v


@hostile(lambda d: (d.uniform(8, 16), d.uniform(16, 8, low=0.7, high=1.0), d.uniform(8, 4)))
def log_of_sigmoid(x: Array, w: Array, v: Array) -> Array:
    """log(sigmoid(8)) is the same 3e-4."""
    return jnp.log(jax.nn.sigmoid(x @ w)) @ v


@hostile(lambda d: (d.uniform(8, 16), d.uniform(16, 8, low=-1.0, high=-0.7), d.uniform(8, 4)))
def log_of_one_plus_exp(x: Array, w: Array, v: Array) -> Array:
    """log(1 + exp(-8)): 1 + 3e-4 is 1."""
    return jnp.log(1.0 + jnp.exp(x @ w)) @ v


@hostile(lambda d: (d.uniform(8, 16), d.uniform(16, 8, low=-1.0, high=-0.7), d.uniform(8, 4)))
def product_of_complements(x: Array, w: Array, v: Array) -> Array:
    """1 - (1 - p)(1 - p') with p of 3e-4."""
    p = jax.nn.sigmoid(x @ w)
    return (1.0 - (1.0 - p) * (1.0 - p[::-1])) @ v


@hostile(_layers)
def cosine_distance(x: Array, w: Array, v: Array) -> Array:
    """1 - cos of the angle between a product and itself with a little noise."""
    h = x @ w
    g = h * (1.0 + 0.02 * jnp.arange(-4.0, 4.0))
    norms = jnp.sqrt((h * h).sum(-1) * (g * g).sum(-1))
    return (1.0 - (h * g).sum(-1) / norms)[None] @ h


@hostile(_small)
def one_minus_cosine(x: Array, w: Array, v: Array) -> Array:
    """1 - cos(h) with h of 0.01."""
    return (1.0 - jnp.cos(x @ w)) @ jnp.abs(v)


@hostile(_small)
def root_minus_one(x: Array, w: Array, v: Array) -> Array:
    """sqrt(1 + h²) - 1 with h of 0.01: a smooth absolute value."""
    return (jnp.sqrt(1.0 + (x @ w) ** 2) - 1.0) @ jnp.abs(v)


@hostile(_small)
def exponential_minus_one(x: Array, w: Array, v: Array) -> Array:
    """(exp(h) - 1) / h with h of 0.01."""
    h = x @ w + 0.05
    return ((jnp.exp(h) - 1.0) / h) @ v


@hostile(lambda d: (d.normal(8, 16), d.weight(16, 8), d.weight(8, 4)))
def pairwise_distances(x: Array, w: Array, v: Array) -> Array:
    """Differences of points with an offset of 50, squared and summed, into a kernel."""
    p = 50.0 + x @ w
    d2 = ((p[:, None] - p[None]) ** 2).sum(-1)
    return jnp.exp(-d2 / 8.0) @ p


@hostile(lambda d: (d.normal(8, 16), d.weight(16, 8), d.weight(8, 4)))
def pairwise_distances_by_products(x: Array, w: Array, v: Array) -> Array:
    """|p|² + |q|² - 2 p q: the product's own rounding is all that may show."""
    p = 1.0 + 0.2 * (x @ w)
    squares = (p * p).sum(-1)
    d2 = jnp.maximum(squares[:, None] + squares[None] - 2.0 * p @ p.T, 0.0)
    return jnp.exp(-d2 * 4.0) @ p


@hostile(lambda d: (d.normal(8, 16), d.weight(16, 8), d.weight(8, 4)))
def slope_by_differences(x: Array, w: Array, v: Array) -> Array:
    """(f(h + e) - f(h - e)) / 2e of an elementwise function with e of 0.01."""
    h = x @ w
    return ((jnp.tanh(h + 0.01) - jnp.tanh(h - 0.01)) / 0.02) @ v


@hostile(lambda d: (d.normal(8, 16), d.weight(16, 8), d.weight(8, 4)))
def normalised_difference(x: Array, w: Array, v: Array) -> Array:
    """(a - b) / (a + b) with a and b of 20 and a difference of 0.1."""
    h = x @ w
    a, b = 20.0 + 0.1 * h, 20.0 - 0.05 * h
    return ((a - b) / (a + b)) @ v


@hostile(lambda d: (d.normal(8, 16), d.weight(16, 8), d.weight(8, 8)))
def divergence_of_near_equals(x: Array, w: Array, v: Array) -> Array:
    """sum p (log p - log q) where q is p's neighbour."""
    h = x @ w
    p = jax.nn.log_softmax(h)
    q = jax.nn.log_softmax(h * 1.02)
    return (jnp.exp(p) * (p - q)).sum(-1) @ v


@hostile(lambda d: (d.normal(8, 16), d.weight(16, 8), d.integers(8, 8), d.weight(8, 4)))
def ratio_of_policies(x: Array, w: Array, action: Array, v: Array) -> Array:
    """exp(new - old) - 1 of log probabilities that are nearly equal."""
    h = x @ w
    new, old = jax.nn.log_softmax(h * 1.01), jax.nn.log_softmax(h)
    ratio = jnp.exp(new - old) - 1.0
    return jnp.take_along_axis(ratio, action[:, None], 1).T @ v


@hostile(lambda d: (d.normal(8, 16), d.weight(16, 8), d.weight(8, 4)))
def discriminant(x: Array, w: Array, v: Array) -> Array:
    """b² - 4ac near zero."""
    h = x @ w
    b = 4.0 + 0.01 * h
    return jnp.sqrt(jnp.abs(b * b - 4.0 * 2.0 * 1.999)) @ v


@hostile(lambda d: (d.normal(8, 16), *[d.weight(16, 16) for _ in range(4)]))
def undone_blocks(x: Array, *weights: Array) -> Array:
    """a + f(b) less f(b): a reversible network computes its activations anew from its end."""
    a, b = x @ weights[0], x @ weights[1]
    for w in weights:
        a, b = b, a + 4.0 * jnp.tanh(b @ w) @ w
    for w in reversed(weights):
        a, b = b - 4.0 * jnp.tanh(a @ w) @ w, a
    return a @ weights[0]


@hostile(lambda d: (500.0 + d.normal(8, 16, scale=0.1), d.weight(16, 8), d.weight(8, 4)))
def centred_inputs(x: Array, w: Array, v: Array) -> Array:
    """Coordinates of 500 minus their mean, before the first product."""
    return jax.nn.relu((x - x.mean(0)) @ w) @ v


@hostile(lambda d: (500.0 + d.normal(8, 16, scale=0.1), d.weight(16, 8), d.weight(8, 4)))
def inputs_minus_a_constant(x: Array, w: Array, v: Array) -> Array:
    """The same with the mean as a constant."""
    return jax.nn.relu((x - 500.0) * 10.0 @ w) @ v


@hostile(_layers)
def celsius(x: Array, w: Array, v: Array) -> Array:
    """exp(-E / R (1/T - 1/T0)) with T of 300 and a network's small change of it."""
    t = 300.0 + 0.5 * (x @ w)
    return jnp.exp(-6000.0 * (1.0 / t - 1.0 / 300.0)) @ v


@hostile(lambda d: (d.normal(8, 16), d.weight(16, 8), d.weight(8, 4)))
def there_and_back(x: Array, w: Array, v: Array) -> Array:
    """h + 1000 - 1000."""
    return ((x @ w + 1000.0) - 1000.0) @ v


@hostile(lambda d: (d.normal(8, 16), d.weight(16, 8), d.weight(8, 4)))
def centre_of_a_softmax(x: Array, w: Array, v: Array) -> Array:
    """An expectation over bins near 100 minus 100."""
    p = jax.nn.softmax(x @ w)
    bins = 100.0 + 0.01 * jnp.arange(8.0)
    return ((p * bins).sum(-1, keepdims=True) - 100.0) * 10.0 @ v[:1]


@hostile(_layers)
def log_before_batch_norm(x: Array, w: Array, v: Array) -> Array:
    """A logarithm of about 4.6 with a deviation of 0.02 over the batch."""
    h = jnp.log((x @ w) ** 2 + 100.0)
    return ((h - h.mean(0)) * lax.rsqrt(h.var(0) + 1e-5)) @ v


@hostile(_layers)
def sigmoid_before_batch_norm(x: Array, w: Array, v: Array) -> Array:
    """A sigmoid of about 0.88 with a deviation of 0.01."""
    h = jax.nn.sigmoid(0.1 * (x @ w) + 2.0)
    return ((h - h.mean(0)) * lax.rsqrt(h.var(0) + 1e-5)) @ v


@hostile(_layers)
def log_over_its_mean(x: Array, w: Array, v: Array) -> Array:
    """How far a logarithm is from its mean, as a part of that."""
    h = jnp.log((x @ w) ** 2 + 100.0)
    return (100.0 * (h / h.mean(0) - 1.0)) @ v


@hostile(_layers)
def softmax_over_the_batch_of_a_log(x: Array, w: Array, v: Array) -> Array:
    """Weights of items for each column."""
    h = 16.0 * jnp.log((x @ w) ** 2 + 100.0)
    return (jax.nn.softmax(h, axis=0) * x[:, :8]).sum(0) @ v


def _window_mean(h: Array) -> Array:
    return lax.reduce_window(h, 0.0, lax.add, (5, 1), (1, 1), "VALID") / 5.0


@hostile(lambda d: (d.normal(32, 16), d.weight(16, 8), d.weight(8, 4), d.normal(28, 4)))
def gradient_of_windowed_deviation(x: Array, w: Array, v: Array, y: Array) -> Array:
    """mean(h²) - mean(h)² over windows of rows; backward h mean(g) - mean(mean(h) g)."""

    def loss(w: Array) -> Array:
        h = 10.0 + x @ w
        var = _window_mean(h * h) - _window_mean(h) ** 2
        return ((jnp.sqrt(jnp.maximum(var, 0.0) + 1e-2) @ v - y) ** 2).mean()

    return jax.grad(loss)(w)


@hostile(lambda d: (d.normal(40, 16), d.weight(16, 8), d.integers(6, 40), d.weight(8, 4)))
def deviation_within_groups(x: Array, w: Array, group: Array, v: Array) -> tuple[Array, Array]:
    """The same over groups of rows, as a graph network aggregates: the mean is joined to it."""
    h = 20.0 + x @ w
    count = jnp.maximum(jax.ops.segment_sum(jnp.ones(40), group, 6), 1.0)[:, None]
    mean = jax.ops.segment_sum(h, group, 6) / count
    var = jax.ops.segment_sum(h * h, group, 6) / count - mean**2
    deviation = jnp.sqrt(jax.nn.relu(var) + 1e-2)
    return jnp.concatenate([mean, deviation], -1) @ jnp.tile(v, (2, 1)), deviation


def _points(d: Draw) -> Args:
    layers = d.normal(4, 1, 8), d.normal(4, 8, 1, scale=0.3)
    return d.normal(12, 16), d.weight(16, 3), *layers, d.weight(3, 4)


@hostile(_points)
def coordinates_refined_by_layers(x: Array, w: Array, a: Array, b: Array, v: Array) -> Array:
    """Coordinates near 60 that layers move along their differences; these are all that counts."""

    def layer(p: Array, weights: tuple[Array, Array]) -> tuple[Array, None]:
        apart = p[:, None] - p[None]
        distance = jnp.sqrt((apart**2).sum(-1, keepdims=True) + 1e-3)
        pull = jnp.tanh(jax.nn.silu(distance @ weights[0]) @ weights[1])
        return p + (apart / (1.0 + distance) * pull).mean(1), None

    p = lax.scan(layer, 60.0 + x @ w, (a, b))[0]
    return (p - p.mean(0)) @ v


@hostile(lambda d: (d.normal(32, 16), d.weight(16, 8), d.weight(8, 4)))
def temperatures_joined(x: Array, w: Array, v: Array) -> Array:
    """Temperatures of 288 with a deviation of 5, reordered, then their radiation less its mean."""
    t = 288.0 + 5.0 * jnp.tanh(x @ w)
    t = jnp.concatenate([t[16:], t[:16]])
    return (5.67e-8 * t**4 - 390.0) @ v


@hostile(lambda d: (d.normal(32, 16), d.weight(16, 8), d.integers(32, 32), d.weight(8, 4)))
def offsets_that_cancel(x: Array, w: Array, order: Array, v: Array) -> Array:
    """Two activations with one offset of 8 and deviations of 0.1, one of them looked up."""
    h = x @ w
    a, b = 8.0 + 0.1 * jnp.tanh(h), 8.0 + 0.1 * jnp.sin(h)
    return (a[order] - b) @ v


@hostile(lambda d: (d.normal(32, 16), d.weight(16, 8), d.integers(32, 32), d.weight(8, 4)))
def high_powers_of_what_is_near_one(x: Array, w: Array, order: Array, v: Array) -> Array:
    """(1 + 0.01 h) ** 200 of rows that are looked up: a compound growth."""
    growth = 1.0 + 0.01 * jnp.tanh(x @ w)
    return growth[order] ** 200 @ v


@hostile(lambda d: (d.normal(32, 16), d.weight(16, 8), d.weight(8, 4)))
def second_differences(x: Array, w: Array, v: Array) -> Array:
    """A stencil on a smooth field: left neighbour, less twice the middle, and the right one."""
    h = jnp.cumsum(jnp.cumsum(0.01 * (x @ w), 0), 0)
    return 100.0 * (jnp.roll(h, 1, 0) - 2.0 * h + jnp.roll(h, -1, 0))[1:-1] @ v
