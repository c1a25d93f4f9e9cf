"""Roundings that a GPU reads in the kernel that makes them, and derivatives of biases."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp import amp
from jaxamp.xla.primitives.rounding_barrier import widened
from tests.numerics.oracle import products_rounded

ROWS, WIDTH = 8, 16
KEYS = jax.random.split(jax.random.key(2), 4)
X = jax.random.normal(KEYS[0], (ROWS, WIDTH))
W, OUT = (jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in KEYS[1:3])
BIAS = jax.random.normal(KEYS[3], (WIDTH,))

Loss = Callable[[jax.Array, jax.Array], jax.Array]

BIASED: dict[str, Loss] = {
    "added": lambda b, x: jnp.sum(jnp.tanh(x @ W + b) @ OUT),
    "added_before": lambda b, x: jnp.sum(jnp.tanh(b + x @ W) @ OUT),
    "subtracted": lambda b, x: jnp.sum(jnp.tanh(x @ W - b) @ OUT),
    "subtracted_from": lambda b, x: jnp.sum(jnp.tanh(b - x @ W) @ OUT),
    "added_row": lambda b, x: jnp.sum(jnp.tanh(x @ W + b[None]) @ OUT),
    "added_number": lambda b, x: jnp.sum(jnp.tanh(x @ W + b[0]) @ OUT),
    "also_read": lambda b, x: jnp.sum(((x @ W) * jnp.tanh(x @ W + b)) @ OUT),
}

DERIVATIVES: dict[str, Callable[[Loss], Callable[..., jax.Array]]] = {
    "grad": jax.grad,
    "vmapped": lambda f: lambda b, x: jax.vmap(jax.grad(f), (None, 0))(b, jnp.stack([x, -x])),
    "per_bias": lambda f: lambda b, x: jax.vmap(jax.grad(f), (0, None))(jnp.stack([b, -b]), x),
    "both": lambda f: lambda b, x: jax.vmap(jax.grad(f))(jnp.stack([b, -b]), jnp.stack([x, -x])),
    "forward": lambda f: jax.jacfwd(f),
    "curvature": lambda f: lambda b, x: jax.jvp(jax.grad(lambda b: f(b, x)), (b,), (b,))[1],
}


@pytest.mark.product("name")
@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("name", BIASED)
def test_biases_have_the_gradients_of_rounded_products(name: str, derivative: str) -> None:
    fn, derive = BIASED[name], DERIVATIVES[derivative]
    exact = jax.jit(derive(fn))(BIAS, X)
    rounded = jax.jit(derive(products_rounded(fn, jnp.bfloat16)))(BIAS, X)
    found = jax.jit(derive(amp(fn, "auto_mixed_bf16")))(BIAS, X)
    allowed = 4 * np.linalg.norm(rounded - exact) + 2**-8 * np.linalg.norm(exact)
    assert np.linalg.norm(found - exact) <= allowed


def stream(x: jax.Array) -> jax.Array:
    """A residual connection: rounded from float32, as it has a bias."""
    return x @ W + (jnp.tanh(x @ OUT) @ W + BIAS)


def normed(x: jax.Array) -> jax.Array:
    h = stream(x)
    mean, square = jnp.mean(h, -1, keepdims=True), jnp.mean(jnp.square(h), -1, keepdims=True)
    return ((h - mean) * jax.lax.rsqrt(square - mean**2 + 1e-5)) @ OUT + h


def echoed(x: jax.Array) -> jax.Array:
    h = stream(x)
    return h @ OUT + jnp.tanh(h)


def read_before_barriers(fn: Callable[..., Any], rows: int, platform: str) -> int:
    """How often a program reads a rounding before it is held."""
    shape = jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)
    text = jax.jit(fn).trace(shape).lower(lowering_platforms=(platform,)).as_text()
    return len(re.findall(r"stablehlo.compare +EQ, .*xbf16>", text))


def test_only_many_rows_on_a_gpu_are_read_before_the_barrier() -> None:
    """By sums and other arithmetic; few rows are summed by a kernel of their own in any case."""
    mixed = amp(normed)
    assert read_before_barriers(mixed, 8192, "cuda") > 0
    assert read_before_barriers(amp(echoed), 8192, "cuda") > 0
    assert read_before_barriers(mixed, 4096, "cuda") == 0
    assert read_before_barriers(mixed, 8192, "cpu") == 0
    assert read_before_barriers(mixed, 8192, "tpu") == 0


def test_what_is_read_before_the_barrier_is_the_rounding() -> None:
    """Every bfloat16 number, NaN and infinities among them."""
    rounded = jnp.arange(2**16, dtype=jnp.uint16).view(jnp.bfloat16)
    found = jax.jit(partial(widened, dtype=jnp.float32))(rounded)
    np.testing.assert_array_equal(found, rounded.astype(jnp.float32))


def of_normed_heads(h: jax.Array) -> jax.Array:
    h = h * jax.lax.rsqrt(jnp.sum(h**2, -1, keepdims=True) + 1e-6)
    return h.reshape(-1, WIDTH) @ OUT


def of_heads(h: jax.Array) -> jax.Array:
    return jnp.einsum("thd,hde->te", h, OUT.reshape(4, 4, WIDTH))


@pytest.mark.parametrize(("read", "reads"), [(of_normed_heads, 1), (of_heads, 0)])
def test_what_arithmetic_reads_moved_is_read_before_the_barrier(
    read: Callable[[jax.Array], jax.Array], reads: int
) -> None:
    """As heads of a `silu` that are normed: XLA took the rounding away, and stored float32."""

    def headed(x: jax.Array) -> jax.Array:
        h = jax.nn.silu(x @ W) * jnp.tanh(x @ OUT)
        return read(h.reshape(-1, 4, 4)) + h @ OUT

    assert read_before_barriers(amp(headed), 8192, "cuda") == reads


@pytest.mark.parametrize(("columns", "reads"), [(1, 2), (2, 1)])
def test_a_product_with_a_vector_reads_before_the_barrier(columns: int, reads: int) -> None:
    """XLA adds it up in the kernel that makes the activation; one with a matrix reads memory."""

    def pooled(x: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ W + BIAS)
        return (jax.nn.softmax(h @ OUT[:, :columns], 0)[:, :1] * h) @ OUT

    assert read_before_barriers(amp(pooled), 8192, "cuda") == reads
    assert read_before_barriers(amp(pooled), 4096, "cuda") == 0


@pytest.mark.parametrize(("columns", "reads"), [(1, 1), (2, 0)])
def test_what_vectors_of_a_batch_multiply_is_held(columns: int, reads: int) -> None:
    """XLA transposes it for the sums, and stored it in float32; one vector needs no barrier."""
    vectors = OUT.reshape(4, 4, 16)[:, :, :columns]

    def scored(of: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
        return lambda x: (jax.nn.softmax(of(jnp.tanh(x @ W)), 0) * x[:, :columns]) @ OUT[:columns]

    def of_heads(h: jax.Array) -> jax.Array:
        return jnp.einsum("thd,hde->the", jnp.tanh(h.reshape(-1, 4, 4)), vectors)[:, 0]

    assert read_before_barriers(amp(scored(of_heads)), 8192, "cuda") == reads
    assert read_before_barriers(amp(scored(lambda h: h @ OUT[:, :columns])), 8192, "cuda") == 0


def test_products_with_others_are_summed_before_the_barrier() -> None:
    """As in a batch norm's backward pass: the kernel that makes the value makes both sums."""

    def centred(x: jax.Array) -> jax.Array:
        h = stream(x)
        return (h - jnp.mean(h, 0)) @ OUT + h

    def regressed(x: jax.Array) -> jax.Array:
        h = stream(x)
        return (h - jnp.mean(h, 0) - jnp.mean(h * x, 0)) @ OUT + h

    assert read_before_barriers(amp(centred), 8192, "cuda") > 0
    assert read_before_barriers(amp(regressed), 8192, "cuda") > 0


def test_what_a_called_function_rounds_is_read_before_its_barrier() -> None:
    """As the cotangent of a norm that is, which the rule of `silu` returns: two sums read it."""

    def gated(scale: jax.Array, x: jax.Array) -> jax.Array:
        h = x @ W
        y = h * jax.lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6) * scale
        return jnp.sum(jax.nn.silu(y) @ OUT)

    differentiated = amp(jax.grad(gated, argnums=(0, 1)))
    assert read_before_barriers(lambda x: differentiated(BIAS, x), 8192, "cuda") > 0


def test_unknown_sizes_are_read_after_the_barrier() -> None:
    """Symbolic sizes cannot be compared; exported for a GPU, the program still runs on others."""
    rows = jax.export.symbolic_shape("n")[0]
    shape = jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)
    mixed = jax.jit(amp(normed))
    exported = jax.export.export(mixed, platforms=("cuda", "cpu"))(shape)
    np.testing.assert_array_equal(exported.call(X), mixed(X))
