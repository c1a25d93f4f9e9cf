"""Convolutions and pooling."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from tests.programs.registry import program

NHWC = ("NHWC", "HWIO", "NHWC")


@program(
    lambda d: (d.normal(2, 8, 8, 2), d.normal(3, 3, 2, 4, scale=0.3), d.normal(4), d.weight(64, 3)),
    low_dots=2,
)
def conv_net(x: Array, kernel: Array, bias: Array, w: Array) -> Array:
    """Convolution, bias, relu, max pooling, dense."""
    y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=NHWC)
    y = jax.nn.relu(y + bias)
    y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return y.reshape(2, -1) @ w


@program(lambda d: (d.normal(2, 6, 6, 4), d.normal(3, 3, 1, 8, scale=0.3)), low_dots=1)
def conv_depthwise_dilated(x: Array, kernel: Array) -> Array:
    """Grouped and dilated."""
    return lax.conv_general_dilated(
        x,
        kernel,
        (1, 1),
        "SAME",
        rhs_dilation=(2, 2),
        dimension_numbers=NHWC,
        feature_group_count=4,
    )


@program(lambda d: (d.normal(2, 4, 4, 3), d.normal(3, 3, 3, 2, scale=0.3)), low_dots=1)
def conv_transposed(x: Array, kernel: Array) -> Array:
    """The decoder's upsampling."""
    return lax.conv_transpose(x, kernel, (2, 2), "SAME", dimension_numbers=NHWC)


@program(lambda d: (d.normal(2, 12, 3), d.normal(3, 3, 4), d.weight(4, 4)), low_dots=2)
def conv_1d_mean_pool(x: Array, kernel: Array, w: Array) -> Array:
    """A text convolution, average pooling by reduce_window, dense."""
    y = lax.conv_general_dilated(x, kernel, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"))
    y = lax.reduce_window(y, 0.0, lax.add, (1, 5, 1), (1, 5, 1), "VALID") / 5
    return y @ w
