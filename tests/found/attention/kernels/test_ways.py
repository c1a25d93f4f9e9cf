"""A known mask as a kernel's own, segment by segment, and as a bias: the same attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp.found.attention.kernels import composed
from jaxamp.found.attention.kernels.fused import Fused
from jaxamp.found.attention.kernels.known_masks import Intervals, known_mask
from jaxamp.found.attention.kernels.platforms import ways
from jaxamp.found.attention.kernels.spec import AttentionSpec, Operands

B, T, N, H = 2, 24, 2, 8
WORDS = np.arange(T)


def _run(operands, spec, bias_grad):
    if operands.dout is None:
        return composed.forward(*operands[:4], spec=spec)
    return composed.backward(*operands, spec=spec, bias_grad=bias_grad)


KERNEL = Fused(name="written out", obstacle=lambda *_: None, run=_run)


def _segments(queries, keys=None):
    return known_mask(queries[:, None] == (queries if keys is None else keys))


@pytest.mark.parametrize(
    ("spec", "bias", "count"),
    [
        (AttentionSpec(0.3, mask=_segments(WORDS // 6)), None, 3),
        (AttentionSpec(0.3, True, 5, _segments(WORDS // 12)), None, 3),
        (AttentionSpec(0.3, True, 5, _segments(WORDS // 3)), None, 3),
        (AttentionSpec(0.3, True, mask=_segments(WORDS // 10)), None, 2),
        (AttentionSpec(0.3, mask=_segments(WORDS // 6, WORDS[::2] // 6)), None, 3),
        (AttentionSpec(0.3, mask=_segments(WORDS // 6)), (1, N, T, T), 2),
        (AttentionSpec(0.3, True, mask=_segments(WORDS % 3)), None, 2),
        (AttentionSpec(0.3, mask=_segments(WORDS * 0, np.minimum(WORDS, 3) // 3 - 1)), None, 2),
        (AttentionSpec(0.3, mask=Intervals(WORDS // 2, WORDS + 1, T)), None, 2),
        (AttentionSpec(0.3, True), None, 1),
    ],
)
def test_every_way_is_the_same_attention(spec, bias, count):
    """Output, sums of rows and cotangents, in float32; so many ways take the operands."""
    draw = np.random.default_rng(0)
    keys = T if spec.mask is None else spec.mask.shape[1]
    shapes = [(B, T, N, H), (B, keys, 1, H), (B, keys, 1, H), *([bias] if bias else [])]
    operands = Operands(*(jnp.asarray(draw.standard_normal(s), jnp.float32) for s in shapes))

    def passes(kernel):
        out, lse = kernel.run(operands, spec, False)
        given = operands._replace(out=out, lse=lse, dout=jnp.cos(out))
        return out, lse, *kernel.run(given, spec, bias is not None)

    types = Operands(
        *(x if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
    )
    taken = [way for way in ways(KERNEL, spec) if way.obstacle(types, spec, True) is None]
    assert len(taken) == count
    want = jax.jit(lambda: passes(KERNEL))()
    for way in taken:
        for got, exact in zip(jax.jit(lambda way=way: passes(way))(), want, strict=False):
            if exact is not None and got is not None:
                np.testing.assert_allclose(got, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("numbers", "size"), [(WORDS // 6, (6, 6)), (WORDS // 10, None), (WORDS % 3, None)]
)
def test_segments_one_after_the_other(numbers, size):
    """They have a size where all have the same, and they are not mixed."""
    mask = _segments(numbers)
    assert (mask.segments if isinstance(mask, Intervals) else None) == size
    np.testing.assert_array_equal(mask.seen(), numbers[:, None] == numbers)
