"""Attention that a compiler partitions: each device has its examples and heads, and that is all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxamp.found.attention.kernels import composed
from jaxamp.found.attention.kernels.known_masks import known_mask
from jaxamp.found.attention.kernels.partitioned import partitioned
from jaxamp.found.attention.kernels.spec import AttentionSpec

B, T, N, H = 8, 16, 4, 8
NUMBERS = np.arange(T) // 5
SEGMENTS = known_mask(NUMBERS[:, None] == NUMBERS)
SPEC = AttentionSpec(0.3, causal=True, mask=SEGMENTS)
EXAMPLES, BOTH = P("data"), P("data", None, "heads")


def _forward(q, k, v, bias=None):
    return composed.forward(q, k, v, bias, spec=SPEC)


def _backward(q, k, v, *rest):
    bias = rest[0] if len(rest) == 4 else None
    words = {"spec": SPEC, "bias_grad": bias is not None}
    return composed.backward(q, k, v, bias, *rest[-3:], **words)


def _both(passes, operands):
    out, lse = passes[0](*operands)
    return out, lse, *passes[1](*operands, out, lse, jnp.cos(out))


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "bias", "gathers"),
    [
        (BOTH, BOTH, 2, None, False),
        (P(None, ("data", "heads")), EXAMPLES, 2, (1, N, 1, T), True),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (BOTH, BOTH, 4, None, False),
                (BOTH, EXAMPLES, 1, None, True),
                (P(None, "data"), P(None, "data"), 4, None, True),
                (EXAMPLES, P(None, None, "heads"), 4, None, True),
                (P(None, "data", "heads"), P(None, None, "heads"), 4, (1, 1, T, T), False),
                (BOTH, BOTH, 4, (1, N, T, T), False),
                (BOTH, BOTH, 2, (B, 1, 1, T), False),
            )
        ),
    ],
)
def test_wherever_arrays_lie(queries, keys, heads, bias, gathers):
    """Grouped heads too; keys over devices are gathered, and a bias' cotangent is summed."""
    draw = np.random.default_rng(0)
    shapes = [(B, T, N, H), (B, T, heads, H), (B, T, heads, H), *([bias] if bias else [])]
    operands = [draw.standard_normal(shape).astype("float32") for shape in shapes]
    mesh = jax.make_mesh((4, 2), ("data", "heads"), axis_types=(AxisType.Auto,) * 2)
    places = [queries, keys, keys, P()][: len(operands)]
    placed = [
        jax.device_put(x, NamedSharding(mesh, place))
        for x, place in zip(operands, places, strict=True)
    ]

    def divided(*xs):
        forward = partitioned(_forward, xs, SPEC, None)

        def backward(*ys):
            return partitioned(_backward, ys, SPEC, bias is not None)(*ys)

        return _both((forward, backward), xs)

    compiled = jax.jit(divided).lower(*placed).compile()
    assert ("all-gather(" in compiled.as_text()) == gathers
    want = jax.jit(lambda *xs: _both((_forward, _backward), xs))(*operands)
    for got, exact in zip(compiled(*placed), want, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-4, atol=1e-5)
