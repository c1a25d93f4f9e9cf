"""Random numbers, transforms, linear algebra, complex, integer and sensitive functions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from tests.programs.registry import program


@program(lambda d: (3,), tolerance="exact", low_dots=0)
def random_draws(seed: int) -> dict[str, Array]:
    """Samples are the float32 samples."""
    keys = jax.random.split(jax.random.key(seed), 5)
    return {
        "normal": jax.random.normal(keys[0], (4,)),
        "uniform": jax.random.uniform(keys[1], (4,)),
        "index": jax.random.categorical(keys[2], jnp.zeros((4, 3))),
        "order": jax.random.permutation(keys[3], 6),
        "bits": jax.random.bits(keys[4], (2,)),
    }


@program(lambda d: (d.normal(4, 8), d.weight(8, 8), d.weight(8, 2), 5), low_dots=2)
def dropout_and_noise(x: Array, w: Array, v: Array, seed: int) -> Array:
    """A dropout mask and reparametrised noise between products."""
    key, noise = jax.random.split(jax.random.key(seed))
    h = x @ w
    h = jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h / 0.9, 0.0)
    return (h + 0.1 * jax.random.normal(noise, h.shape)) @ v


@program(lambda d: (d.normal(3, 8), d.weight(8, 8)), low_dots=1, tolerance="dot")
def fft_filter(x: Array, w: Array) -> Array:
    """A product, a filter in frequency, the real part back."""
    spectrum = jnp.fft.rfft(x @ w, axis=-1)
    return jnp.fft.irfft(spectrum * jnp.exp(-0.1 * jnp.arange(5)), n=8, axis=-1)


@program(lambda d: (d.positive_definite(5), d.normal(5)), tolerance="f32", low_dots=0)
def cholesky_solve(a: Array, b: Array) -> tuple[Array, Array]:
    """A Gaussian's log density by cholesky."""
    factor = jnp.linalg.cholesky(a)
    x = jax.scipy.linalg.solve_triangular(factor, b, lower=True)
    return 0.5 * jnp.sum(x * x), jnp.log(jnp.diagonal(factor)).sum()


@program(lambda d: (d.positive_definite(4), d.normal(4)), tolerance="deep")
def decompositions(a: Array, b: Array) -> dict[str, Array]:
    """qr, svd, eigh, lu."""
    return {
        "qr": jnp.abs(jnp.linalg.qr(a)[1]),
        "svd": jnp.linalg.svd(a, compute_uv=False),
        "eigh": jnp.linalg.eigvalsh(a),
        "solve": jnp.linalg.solve(a, b),
        "logdet": jnp.linalg.slogdet(a)[1],
    }


@program(lambda d: (d.normal(4, 4, scale=0.3),), tolerance="deep")
def matrix_exponential(a: Array) -> Array:
    """`jax.scipy.linalg.expm`."""
    return jax.scipy.linalg.expm(a)


@program(lambda d: (d.normal(4, 4), d.normal(4, 4)), tolerance="dot")
def complex_product(a: Array, b: Array) -> tuple[Array, Array]:
    """A complex product: complex dtypes are never touched."""
    z = lax.complex(a, b)
    y = z @ z.conj().T
    return jnp.abs(y), jnp.angle(z) + jnp.real(jnp.exp(1j * a))


@program(lambda d: (d.integers(1000, 6), d.integers(7, 6)), tolerance="exact", low_dots=0)
def integer_code(a: Array, b: Array) -> tuple[Array, ...]:
    """Bit operations, division, comparisons, population count."""
    mixed = (a << 3) ^ (a >> 2) | b
    return mixed, a // (b + 1), a % (b + 1), lax.population_count(mixed), (a > b) & (b != 3)


@program(lambda d: (d.normal(6),), tolerance="exact", low_dots=0)
def bits_of_floats(x: Array) -> tuple[Array, Array, Array, Array]:
    """Bitcasts, nextafter and reduce_precision look at the float32 bits."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    back = lax.bitcast_convert_type(bits & ~0xFF, jnp.float32)
    return bits, back, jnp.nextafter(x, jnp.inf), lax.reduce_precision(x, 8, 10)


@program(lambda d: (d.normal(4, 8), d.weight(8, 4)), low_dots=1)
def integer_floats(x: Array, w: Array) -> tuple[Array, Array, Array]:
    """Positions and counts past 256 that are floats stay exact."""
    position = jnp.arange(4, dtype=jnp.float32) + 2049.0
    h = x @ w
    return h + position, position % 7.0, jnp.floor(position / 3.0)


@program(lambda d: (d.uniform(6, low=0.1, high=0.9), d.weight(6, 6)), low_dots=1, tolerance="deep")
def sensitive_functions(x: Array, w: Array) -> Array:
    """Large derivatives after a product."""
    p = jax.nn.sigmoid(x @ w)
    return (
        jnp.log1p(p) + lax.erf_inv(p * 0.9) + p**2.5 + jnp.tan(p) + jax.scipy.special.digamma(p + 1)
    )


@program(lambda d: (d.uniform(6, low=1e-3, high=2e-3),), tolerance="f32", low_dots=0)
def cancellations(x: Array) -> tuple[Array, ...]:
    """Small differences with no product near: nothing is gained by lowering."""
    return jnp.log(1 + x), 1 - jnp.cos(x), jnp.expm1(x), jnp.cumsum(x + 100.0), jnp.cumprod(1 + x)


@program(lambda d: (d.normal(5, 4), d.weight(4, 4)), low_dots=1)
def prefix_sums(x: Array, w: Array) -> tuple[Array, Array, Array]:
    """cumsum, cummax and cumlogsumexp of a product."""
    h = x @ w
    return jnp.cumsum(h, 0), lax.cummax(h), lax.cumlogsumexp(h)


@program(lambda d: (d.normal(4, 8), d.weight(8, 4)), tags="explicit", tolerance="dot")
def large_and_small(x: Array, w: Array) -> tuple[Array, Array]:
    """Scales beyond the f16 range around a product, whose cotangent f16 cannot hold."""
    h = x @ w
    return h * 1e6, h * 1e-9 + 1e-9


@program(lambda d: (d.normal(4, 3),), tolerance="tight", low_dots=0)
def elementwise_only(x: Array) -> tuple[Array, Array]:
    """No product at all."""
    return jnp.sin(x) * jnp.exp(-x * x), jnp.clip(jnp.abs(x), 0.1, 1.0) ** 0.5
