"""What must be left whole: kernels, exported programs, named calls."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core

from tests.programs.registry import Draw, program


def _dense(d: Draw) -> tuple:
    return d.normal(4, 8), d.weight(8, 8)


def _square_kernel(x_ref, o_ref) -> None:
    x = x_ref[...]
    o_ref[...] = x * x + 1.0


def _square(x: Array) -> Array:
    return pl.pallas_call(_square_kernel, out_shape=jax.typeof(x), interpret=True)(x)


@program(_dense, low_dots=1)
def pallas(x: Array, w: Array) -> Array:
    """A kernel on the result of a product."""
    return _square(x @ w)


@program(lambda d: (d.normal(8, 8), d.weight(8, 8)), low_dots=1)
def pallas_matmul_custom_vjp(x: Array, w: Array) -> Array:
    """A kernel with a product inside, tiled, its derivative in plain JAX."""

    def kernel(x_ref, w_ref, o_ref) -> None:
        o_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    def multiply(x: Array, w: Array) -> Array:
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((8, 8), jnp.float32),
            grid=(2,),
            in_specs=[
                pl.BlockSpec((4, 8), lambda i: (i, 0)),
                pl.BlockSpec((8, 8), lambda i: (0, 0)),
            ],
            out_specs=pl.BlockSpec((4, 8), lambda i: (i, 0)),
            interpret=True,
        )(x, w)

    f = jax.custom_vjp(multiply)
    f.defvjp(lambda x, w: (f(x, w), (x, w)), lambda s, ct: (ct @ s[1].T, s[0].T @ ct))
    return f(x, w) @ w


@program(_dense, low_dots=2)
def exported_call(x: Array, w: Array) -> Array:
    """A program that was exported, between two products."""
    exported = jax.export.export(jax.jit(lambda h: jnp.tanh(h) * 2))(
        jax.ShapeDtypeStruct((4, 8), jnp.float32)
    )
    return exported.call(x @ w) @ w


@program(_dense, low_dots=1)
def closed_call(x: Array, w: Array) -> Array:
    """A closed_call equation."""
    body = jax.make_jaxpr(lambda x, w: jnp.tanh(x @ w))(x, w)
    call = core.primitives.closed_call_p
    (y,) = call.bind(x, w, **call.get_bind_params({"call_jaxpr": body}))
    return y


@program(_dense, low_dots=2)
def composite(x: Array, w: Array) -> Array:
    """A named composite operation, and a product after it."""

    @functools.partial(lax.composite, name="test.dense")
    def dense(x: Array, w: Array) -> Array:
        return jnp.tanh(x @ w)

    return dense(x, w) @ w


@program(_dense, low_dots=1)
def xla_metadata(x: Array, w: Array) -> Array:
    """Equations with XLA metadata and a named scope."""
    with set_xla_metadata(tag="dense"), jax.named_scope("dense"):
        return jnp.tanh(x @ w)
