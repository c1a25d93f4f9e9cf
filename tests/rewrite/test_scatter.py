"""Scatters whose operands are rounded."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxamp import amp
from tests.audit import equations


def test_the_update_is_typed_as_its_operands() -> None:
    """A jaxpr of a float32 maximum says nothing of float16's."""

    def largest(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.ops.segment_max(x @ w, jnp.arange(8) // 2, 4) @ w

    closed = jax.make_jaxpr(amp(largest, "always_f16"))(jnp.ones((8, 8)), jnp.ones((8, 8)))
    (scatter,) = [e for e in equations(closed.jaxpr) if e.primitive.name == "scatter-max"]
    dtypes = {v.aval.dtype for v in (scatter.invars[0], *scatter.params["update_jaxpr"].invars)}
    assert dtypes == {jnp.dtype("float16")}
