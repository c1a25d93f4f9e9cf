"""Matrix products in the forms that users write."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tests.programs.registry import program


@program(lambda d: (d.normal(4, 8), d.weight(8, 5)), low_dots=1)
def matmul(x: Array, w: Array) -> Array:
    """One product."""
    return x @ w


@program(
    lambda d: (d.normal(4, 8), {"w": d.weight(8, 6), "b": d.normal(6)}, d.weight(6, 3)),
    low_dots=2,
)
def mlp(x: Array, hidden: dict[str, Array], w: Array) -> Array:
    """Two layers, relu between (a custom_jvp), parameters in a dict."""
    return jax.nn.relu(x @ hidden["w"] + hidden["b"]) @ w


@program(lambda d: (d.normal(4, 8), d.weight(8, 12), d.weight(8, 12), d.weight(12, 8)), low_dots=3)
def gated_mlp(x: Array, gate: Array, up: Array, down: Array) -> Array:
    """A SwiGLU block with a residual."""
    return x + (jax.nn.silu(x @ gate) * (x @ up)) @ down


@program(
    lambda d: (d.normal(5, 8), d.normal(3, 8), d.weight(8, 6), d.weight(8, 6), d.weight(6, 4)),
    low_dots=3,
)
def joint_network(frames: Array, words: Array, f: Array, g: Array, out: Array) -> Array:
    """A product for each frame and one for each word are added, each with each."""
    return jnp.tanh((frames @ f)[:, None] + (words @ g)[None]) @ out


@program(lambda d: (d.normal(4, 8), d.weight(8, 8)), low_dots=2)
def gelu_tied(x: Array, w: Array) -> Array:
    """One weight used twice, once transposed."""
    return jax.nn.gelu(x @ w) @ w.T


@program(lambda d: (d.normal(2, 3, 4), d.normal(2, 4, 5), d.normal(5, 6)), low_dots=2)
def einsum_chain(a: Array, b: Array, c: Array) -> Array:
    """Three operands contracted by einsum."""
    return jnp.einsum("bij,bjk,kl->bil", a, b, c)


@program(lambda d: (d.normal(5), d.normal(5, 7), d.normal(7)), low_dots=1, tags="explicit")
def bilinear(x: Array, a: Array, y: Array) -> Array:
    """A scalar from two vectors and a matrix: the inner product is a reduction, not Compute."""
    return x @ a @ y


@program(lambda d: (d.normal(4, 8), d.weight(8, 4)), tolerance="f32", low_dots=0)
def matmul_highest(x: Array, w: Array) -> Array:
    """An explicit precision means: leave this product alone."""
    return jnp.matmul(x, w, precision=lax.Precision.HIGHEST)


@program(lambda d: (d.normal(4, 8), d.weight(8, 8), d.weight(8, 4)), low_dots=1, tags="kept")
def matmul_kept(x: Array, w: Array, v: Array) -> Array:
    """The first product is in a keep_precision region, the second is not."""
    from jaxamp import keep_precision

    with keep_precision("f32"):
        h = x @ w
    return h @ v


@program(lambda d: (d.normal(4, 8), d.weight(8, 4)), low_dots=1)
def matmul_accumulate_f32(x: Array, w: Array) -> Array:
    """A preferred element type that the user wrote."""
    return lax.dot(x, w, preferred_element_type=jnp.float32)


@program(lambda d: (d.normal(4, 8), d.weight(8, 4)), tags="explicit", low_dots=1)
def matmul_user_bf16(x: Array, w: Array) -> tuple[Array, Array]:
    """A product that is low already, and one that the user asks for in float32."""
    low = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
    return low, low.astype(jnp.float32) @ w.T


@program(lambda d: (d.normal(6, 4), d.normal(3, 4, 5), np.array([2, 1, 3], np.int32)), low_dots=1)
def ragged_dot(x: Array, w: Array, sizes: Array) -> Array:
    """A grouped product, as in mixture-of-experts layers."""
    return lax.ragged_dot(x, w, sizes)


@program(lambda d: (d.normal(4, 8), d.weight(8, 3), 0.5), low_dots=1)
def weak_scalars(x: Array, w: Array, scale: float) -> tuple[Array, Array, dict[str, Array]]:
    """Python scalars in, weak and strong types out."""
    y = x @ w
    return y * scale, jnp.asarray(scale) * 2, {"weak": jnp.asarray(1.5), "mean": y.mean()}


@program(lambda d: (d.integers(9, 4, 5), d.integers(9, 5, 3)), tolerance="exact", low_dots=0)
def integer_matmul(a: Array, b: Array) -> Array:
    """An integer product."""
    return a @ b


@program(lambda d: (d.normal(3, 4), d.normal(4, 5)), low_dots=0, tolerance="tight")
def outer_by_hand(a: Array, b: Array) -> Array:
    """A product written as multiply and sum."""
    return (a[:, :, None] * b[None]).sum(1)


@program(lambda d: (d.normal(4, 8), d.weight(8, 8), d.normal(4, 8)), low_dots=1)
def residual_add_many(x: Array, w: Array, y: Array) -> tuple[Array, ...]:
    """One product read by several consumers; outputs alias inputs."""
    h = x @ w
    return h, h + y, y, jnp.tanh(h), h.T.reshape(2, -1)
