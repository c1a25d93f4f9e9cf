"""The chunked linear layer with cross-entropy, against the plain one in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxamp
from jaxamp.errors import KernelError
from jaxamp.kernels import KernelConfig, kernel_config, linear_cross_entropy

POSITIONS, FEATURES, WORDS = 24, 16, 100


def _problem(dtype=jnp.float32):
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.standard_normal((4, POSITIONS // 4, FEATURES)) * 3, dtype)
    weight = jnp.asarray(draw.standard_normal((FEATURES, WORDS)), dtype)
    bias = jnp.asarray(draw.standard_normal(WORDS), jnp.float32)
    labels = jnp.asarray(draw.integers(-1, WORDS, (4, POSITIONS // 4)))
    return x, weight, bias, labels


def _plain(x, weight, bias, labels):
    logits = x @ weight + bias
    at_label = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    return jnp.where(labels < 0, 0, jax.nn.logsumexp(logits, -1) - at_label)


def _weighted(loss, x, weight, bias, labels):
    per_position = loss(x, weight, bias, labels)
    return jnp.sum(per_position * jnp.linspace(1, 2, per_position.size).reshape(per_position.shape))


def _chunked(chunk, x, weight, bias, labels):
    config = KernelConfig(tile=(chunk,))
    return linear_cross_entropy(x, weight, labels, bias, config=config)


@pytest.mark.parametrize("chunk", [32, 1000])
def test_values_and_gradients_are_those_of_the_plain_form(chunk):
    """With any chunk, one that does not divide the vocabulary included; labels below 0 masked."""
    x, weight, bias, labels = _problem()
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(v, np.float64)) for v in (x, weight, bias)]
        plain = jax.value_and_grad(functools.partial(_weighted, _plain), (0, 1, 2))
        exact = jax.jit(plain)(*wide, labels)
        exact = jax.tree.map(np.asarray, exact)
    fn = functools.partial(_weighted, functools.partial(_chunked, chunk))
    got = jax.jit(jax.value_and_grad(fn, (0, 1, 2)))(x, weight, bias, labels)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True):
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


def test_bf16_operands_accumulate_in_f32():
    """The loss is as good as the operands' rounding; gradients come in the operands' dtype."""
    x, weight, bias, labels = _problem(jnp.bfloat16)
    wide = [v.astype(jnp.float32) for v in (x, weight)]
    got = jax.jit(functools.partial(_chunked, 32))(x, weight, bias, labels)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, _plain(*wide, bias, labels), rtol=1e-5, atol=1e-5)
    dx, dweight = jax.jit(jax.grad(lambda *a: _chunked(32, *a, bias, labels).sum(), (0, 1)))(
        x, weight
    )
    assert dx.dtype == dweight.dtype == jnp.bfloat16


def test_the_logits_are_never_in_memory():
    """Forward and backward together need less than the logits; the plain form needs them."""
    tokens, words = 1024, 16384
    avals = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((tokens, 32), jnp.float32),
            ((32, words), jnp.float32),
            ((words,), jnp.float32),
            ((tokens,), jnp.int32),
        )
    ]

    def temporary(loss):
        fn = jax.value_and_grad(functools.partial(_weighted, loss), (0, 1, 2))
        return jax.jit(fn).lower(*avals).compile().memory_analysis().temp_size_in_bytes

    logits = tokens * words * 4
    assert temporary(_plain) > logits
    assert temporary(functools.partial(_chunked, 1024)) < logits / 4


def test_it_composes_with_vmap_scan_and_remat():
    """Built of scan and custom_vjp, it goes where they go."""
    x, weight, bias, labels = _problem()
    each = jax.jit(jax.vmap(lambda x, y: _chunked(32, x, weight, bias, y)))(x, labels)
    np.testing.assert_allclose(each, _plain(x, weight, bias, labels), rtol=1e-5, atol=1e-5)

    def scanned(weight):
        step = jax.checkpoint(lambda c, xy: (c + _chunked(32, xy[0], weight, bias, xy[1]).sum(), 0))
        return jax.lax.scan(step, 0.0, (x, labels))[0]

    wanted = jax.jit(jax.grad(lambda w: _plain(x, w, bias, labels).sum()))(weight)
    np.testing.assert_allclose(jax.jit(jax.grad(scanned))(weight), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
def test_amp_gives_the_dots_its_precision_and_no_more(order):
    """Every dot, forward and backward, multiplies bf16; the loss is f32 and gradients too."""
    x, weight, bias, labels = _problem()

    def loss(x, weight):
        return _chunked(50, x, weight, bias, labels).sum()

    amp = jaxamp.amp
    fn = jax.grad(amp(loss), (0, 1)) if order == "grad(amp(f))" else amp(jax.grad(loss, (0, 1)))
    text = jax.jit(fn).trace(x, weight).lower(lowering_platforms=("cuda",)).as_text()
    dots = [line.split(" : (")[1] for line in text.splitlines() if "dot_general" in line]
    assert dots
    assert all(line.count("bf16>") >= 2 for line in dots)
    for got, wanted in zip(
        jax.jit(fn)(x, weight), jax.jit(jax.grad(loss, (0, 1)))(x, weight), strict=True
    ):
        assert got.dtype == jnp.float32
        assert np.linalg.norm(got - wanted) <= 1e-2 * np.linalg.norm(wanted)


def test_the_chunk_may_come_from_the_block_around():
    """As for the other kernels."""
    x, weight, bias, labels = _problem()

    def dots(**fields):
        with kernel_config(**fields):
            jaxpr = jax.make_jaxpr(lambda x: linear_cross_entropy(x, weight, labels, bias))(x)
        return str(jaxpr).count("dot_general")

    assert dots() == 1  # the whole vocabulary fits
    assert dots(tile=(33,)) == 2  # chunks, and what is left


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"x": jnp.ones((2, 5))}, "(..., features)"),
        ({"labels": jnp.ones(2)}, "labels are integers"),
        ({"labels": jnp.ones(3, int)}, "(3,)"),
        ({"bias": jnp.ones(3)}, "bias has shape"),
        ({"weight": jnp.ones((4, 8), jnp.bfloat16)}, "of one dtype"),
        ({"config": KernelConfig(backend="pallas")}, "no Pallas kernel"),
        ({"config": KernelConfig(tile=(8, 8))}, "(chunk,)"),
    ],
)
def test_what_does_not_fit_is_refused(change, says):
    """Before anything is computed."""
    given = {"x": jnp.ones((2, 4)), "weight": jnp.ones((4, 8)), "labels": jnp.ones(2, int)}
    with pytest.raises(KernelError) as caught:
        linear_cross_entropy(**(given | change))
    assert says in str(caught.value)
