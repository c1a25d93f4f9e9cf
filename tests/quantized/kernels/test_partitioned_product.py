"""Products of blocks that a compiler partitions: each device multiplies its part, and no more."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxamp import CastConfig
from jaxamp.quantized.kernels.partitioned_product import partitioned
from jaxamp.quantized.lowp import dequantize, quantize

M, N, K = 64, 48, 512


def multiply(a, b, a_scale, b_scale):
    """What runs on any device, of JAX's own."""
    return lax.scaled_dot(
        a,
        b,
        lhs_scale=a_scale,
        rhs_scale=b_scale,
        dimension_numbers=(((2,), (2,)), ((0,), (0,))),
        preferred_element_type=jnp.float32,
    )


@pytest.mark.parametrize(
    ("left", "right", "moves"),
    [
        (P(None, "data"), P(), ""),  # examples over devices
        (P(None, "data"), P(None, "model"), ""),  # and features
        (P(None, None, "data"), P(None, None, "data"), "all-reduce"),  # a gradient of weights
        (P(None, "data"), P(None, None, "data"), "all-gather"),  # weights that are stored in parts
        (P(None, "model", "data"), P(None, None, "data"), "all-reduce"),
        (P(None, "data"), P(None, "data"), "all-gather"),
        (P(), P(None, ("data", "model")), ""),
        (P("model", "data"), P("model"), ""),
        (P(), P(), ""),
    ],
)
def test_wherever_operands_lie(left, right, moves):
    """Rows stay, as does a summed axis that both have in the same parts; the rest is gathered."""
    cast = CastConfig("f8_e4m3", (1, 32), round_sf=True)
    keys = jax.random.split(jax.random.key(0))
    shapes = (2, M, K), (2, N, K)
    lhs, rhs = (quantize(jax.random.normal(k, s), cast) for k, s in zip(keys, shapes, strict=True))
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    operands = [
        jax.device_put(x, NamedSharding(mesh, place))
        for x, place in (
            (lhs.values, left),
            (rhs.values, right),
            (lhs.scale, left),
            (rhs.scale, right),
        )
    ]
    compiled = jax.jit(partitioned(multiply)).lower(*operands).compile()
    found = {word for word in ("all-gather", "all-reduce") if f" {word}(" in compiled.as_text()}
    assert found == ({moves} if moves else set())
    a, b = (np.asarray(dequantize(x), np.float64) for x in (lhs, rhs))
    want = a @ b.transpose(0, 2, 1)
    np.testing.assert_allclose(compiled(*operands), want, rtol=0, atol=1e-6 * np.abs(want).max())


def test_blocks_are_not_divided():
    """Of a summed axis with three blocks on two devices, each gets the whole."""
    cast = CastConfig("f8_e4m3", (1, 32), round_sf=True)
    lhs, rhs = (quantize(jnp.ones((1, n, 96)), cast) for n in (16, 8))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, P(None, None, "data"))
    values = [jax.device_put(x, place) for x in (lhs.values, rhs.values)]
    got = jax.jit(partitioned(multiply))(*values, lhs.scale, rhs.scale)
    np.testing.assert_array_equal(got, np.full((1, 16, 8), 96.0))
