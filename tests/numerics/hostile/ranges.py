"""Numbers that leave a narrow format on the way."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from tests.numerics.hostile.registry import hostile
from tests.programs.registry import Args, Draw


def _large(d: Draw) -> Args:
    return d.normal(8, 16, scale=100.0), d.weight(16, 8), d.weight(8, 4)


def _layers(d: Draw) -> Args:
    return d.normal(8, 16), d.weight(16, 8), d.weight(8, 4)


@hostile(lambda d: (d.normal(8, 16, scale=5.0), d.weight(16, 8), d.weight(8, 4)))
def softmax_without_a_maximum(x: Array, w: Array, v: Array) -> Array:
    """exp(12) is infinite in f16; inf / inf."""
    e = jnp.exp(x @ w + 6.0)
    return (e / e.sum(-1, keepdims=True)) @ v


@hostile(lambda d: (d.normal(8, 16, scale=5.0), d.weight(16, 8), d.weight(8, 4)))
def log_of_a_sum_of_exponentials(x: Array, w: Array, v: Array) -> Array:
    """The same as a logarithm."""
    return jnp.log(jnp.exp(x @ w + 6.0).sum(-1)) @ v


@hostile(_large)
def gradient_of_gelu_of_large(x: Array, w: Array, v: Array) -> Array:
    """Its derivative is 0 * inf there."""
    return jax.grad(lambda w: (jax.nn.gelu(x @ w) @ v).mean())(w)


@hostile(_large)
def norm_of_large(x: Array, w: Array, v: Array) -> Array:
    """Squares of 300 pass 65504 in the norm that divides."""
    h = 3.0 * (x @ w)
    return (h / jnp.sqrt((h * h).sum(-1, keepdims=True))) @ v


@hostile(_large)
def saturating_square(x: Array, w: Array, v: Array) -> Array:
    """h² / (1 + h²) is inf / inf."""
    s = (3.0 * (x @ w)) ** 2
    return (s / (1.0 + s)) @ v


@hostile(lambda d: (d.normal(8, 16, scale=10.0), d.weight(16, 8), d.weight(8, 4)))
def log_of_cosh(x: Array, w: Array, v: Array) -> Array:
    """cosh(20) is infinite in f16."""
    return jnp.log(jnp.cosh(x @ w)) @ v


@hostile(_large)
def gradient_of_mish(x: Array, w: Array, v: Array) -> Array:
    """h tanh(log(1 + exp(h))) with h of 60: its derivative is inf / inf in f16."""

    def mish(h: Array) -> Array:
        return h * jnp.tanh(jnp.log(1.0 + jnp.exp(h)))

    return jax.grad(lambda w: (mish(jnp.clip(x @ w, -60.0, 60.0)) @ v).mean())(w)


@hostile(_layers)
def up_and_down(x: Array, w: Array, v: Array) -> Array:
    """h * 1e5 * 1e-5."""
    return (jnp.tanh(x @ w) * 1e5 * 1e-5) @ v


@hostile(_layers)
def down_and_up(x: Array, w: Array, v: Array) -> Array:
    """h * 1e-10 * 1e10."""
    return (jnp.tanh(x @ w) * 1e-10 * 1e10) @ v


@hostile(_layers)
def physical_constants(x: Array, w: Array, v: Array) -> Array:
    """Planck's constant is 0 in both formats."""
    energy = 6.62607015e-34 * (1.0 + jnp.abs(x @ w)) * 1e14
    return (energy / 1.602176634e-19) @ v


@hostile(lambda d: (d.normal(8, 16, scale=1e-3), d.weight(16, 8), d.weight(8, 4)))
def narrow_kernel(x: Array, w: Array, v: Array) -> Array:
    """exp(-d² / 2 s²) with s of 1e-3: 1 / 2 s² passes f16 and d² vanishes in it."""
    h = x @ w
    d2 = ((h[:, None] - h[None]) ** 2).sum(-1)
    return jnp.exp(-d2 * (0.5 / 1e-3**2) / 16.0) @ jax.nn.relu(1e3 * h)


@hostile(lambda d: (d.normal(8, 16, scale=12.0), d.weight(16, 8), d.weight(8, 4)))
def powers(x: Array, w: Array, v: Array) -> Array:
    """h⁵ of 30 passes f16; scaled back."""
    h = x @ w
    return jnp.stack([h, h**2 / 30.0, h**5 / 30.0**4]).sum(0) @ v


@hostile(lambda d: (d.normal(8, 16), d.weight(16, 8), d.normal(8, 4), d.weight(8, 4)))
def scaled_loss(x: Array, w: Array, y: Array, v: Array) -> Array:
    """A loss times 65536 and its gradient divided by it."""

    def loss(w: Array) -> Array:
        return 65536.0 * jnp.mean((jnp.tanh(x @ w) @ v - y) ** 2)

    return jax.grad(loss)(w) / 65536.0


@hostile(lambda d: (d.normal(64, 32, scale=20.0), d.uniform(32, 32), d.weight(32, 4)))
def norm_of_a_gradient(x: Array, w: Array, v: Array) -> Array:
    """A global norm of gradients of 1e3 clips them to 1."""
    g = jax.grad(lambda w: jnp.sum((x @ w @ v) ** 2) * 0.1)(w)
    return g / jnp.maximum(1.0, jnp.sqrt(jnp.sum(g * g)))


@hostile(lambda d: (d.uniform(8, 16), d.uniform(16, 8), d.weight(8, 4)))
def log_factorial(x: Array, w: Array, v: Array) -> Array:
    """lgamma(4000 h): the logarithm of a factorial of some thousands is beyond f16."""
    return (jax.lax.lgamma(4000.0 * jnp.abs(x @ w)) / 1e4) @ v


@hostile(lambda d: (d.normal(8, 16), d.weight(16, 8), d.weight(8, 4)))
def large_offset_in_a_division(x: Array, w: Array, v: Array) -> Array:
    """h / (h + 1e6) * 1e6: a saturation constant beyond f16."""
    h = jnp.abs(x @ w)
    return (h / (h + 1e6) * 1e6) @ v


@hostile(lambda d: (d.uniform(8, 16, low=20.0, high=40.0), d.uniform(16, 8), d.weight(8, 4)))
def variance_of_large(x: Array, w: Array, v: Array) -> Array:
    """Squared deviations of activations of 300 and their mean."""
    h = 40.0 * (x @ w) / 20.0
    h = h * jnp.arange(1.0, 9.0) / 4.0
    return ((h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-6)) @ v


@hostile(lambda d: (d.normal(2, 16, 16, 3) + 1.0, d.normal(3, 3, 3, 8, scale=0.3), d.weight(8, 4)))
def batch_norm_after_a_convolution(x: Array, w: Array, v: Array) -> Array:
    """Statistics of 40 times a convolution by E[h²] - E[h]²: squares pass 65504."""
    dims = ("NHWC", "HWIO", "NHWC")
    h = 40.0 * jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims) + 200.0
    mean = h.mean((0, 1, 2))
    var = (h * h).mean((0, 1, 2)) - mean * mean
    return ((h - mean) * jax.lax.rsqrt(var + 1e-3)) @ v


@hostile(lambda d: (d.normal(2048, 4) + 2.0, d.weight(4, 4) + 1.0, d.weight(4, 2)))
def running_total(x: Array, w: Array, v: Array) -> Array:
    """A cumulative sum to 1e5 over its own index: the sum passes f16, the mean does not."""
    total = jnp.cumsum(10.0 * (x @ w), 0)
    return (total / jnp.arange(1.0, 2049.0)[:, None]) @ v


@hostile(lambda d: (d.uniform(8, 16, low=1e3, high=3e4), d.uniform(16, 8), d.weight(8, 4)))
def log_of_power(x: Array, w: Array, v: Array) -> Array:
    """Energies in bands add up to 4e5, beyond f16; their logarithms are 13."""
    return jnp.log(x @ w + 1e-5) @ v


@hostile(lambda d: (d.uniform(8, 16, low=1e3, high=3e4), d.uniform(16, 8), d.weight(8, 4)))
def root_of_power(x: Array, w: Array, v: Array) -> Array:
    """The same under a root."""
    return jnp.sqrt(jnp.maximum(x @ w, 1e-5)) @ v
