"""Why biases with slopes are left alone, and others are not."""

import numpy as np
import pytest

from jaxamp.found.attention.kernels import composed
from jaxamp.found.attention.kernels.spec import AttentionSpec
from tests.found.attention import imitation, oracle
from tests.found.attention.accuracy import LIMIT

B, T, N, H, DRAWS = 2, 64, 2, 16, 8
DISTANCE = np.arange(T)[:, None] - np.arange(T)[None]


def _slopes(draw):
    slopes = draw.normal(size=N)
    return slopes[:, None, None] * np.abs(DISTANCE), lambda ds: np.sum(
        ds * np.abs(DISTANCE), (1, 2)
    )


def _table(draw):
    table = draw.normal(size=(N, 2 * T - 1))
    place = DISTANCE + T - 1

    def gradient(ds):
        return np.array([np.bincount(place.ravel(), d.ravel(), 2 * T - 1) for d in ds])

    return table[:, place], gradient


def _gate(draw):
    table, gate = draw.normal(size=(N, T, T)), draw.normal(size=(N, T, 1))
    return gate * table, lambda ds: np.sum(ds * table, -1)


@pytest.mark.parametrize(("made", "is_kept"), [(_slopes, False), (_gate, False), (_table, True)])
def test_what_kernels_keep_of_a_gradient(made, is_kept):
    """The root mean square of its error over draws, against cotangents of float32."""
    errors = np.array([_errors(made, np.random.default_rng(seed)) for seed in range(DRAWS)])
    kernel, float32 = np.sqrt(np.mean(errors**2, axis=0))
    assert (kernel <= LIMIT * float32) == is_kept, f"{kernel / float32:.2f} times"


def _errors(made, draw):
    """Return the errors of a gradient with a kernel, and with cotangents of scores in float32."""
    wide = draw.normal(size=(4, B, T, N, H))
    q, k, v, dout = wide.astype("bfloat16")
    bias, gradient = made(draw)
    spec = AttentionSpec(scale=H**-0.5)
    *_, exact = oracle.attention(*wide, spec=spec, bias=bias)
    operands = (q, k, v, np.float32(bias - bias.max(-1, keepdims=True))[None])
    words = {"spec": spec, "bias_grad": True}
    found = []
    for form, more in ((imitation, {}), (composed, {"widen": True})):
        results = form.forward(*operands, spec=spec, **more)
        found.append(np.float64(form.backward(*operands, *results, dout, **words, **more)[-1])[0])
    return [np.linalg.norm(gradient(ds) - gradient(exact.sum(0))) for ds in found]
