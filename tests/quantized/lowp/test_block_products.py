"""Products of blocks: cuDNN's call where a GPU has it, elsewhere widened operands, as before."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxamp import CastConfig, amp
from jaxamp.kernels.jax_compat.cudnn_calls import cudnn_checks
from jaxamp.kernels.target_gpu import TargetGpu, lowering_for
from jaxamp.quantized.fp8_products import claims
from jaxamp.quantized.lowp import dequantize, quantize
from jaxamp.quantized.lowp.unit_blocks import fit_units, in_units
from jaxamp.quantized.primitives.block_product import by_cudnn
from tests.quantized.lowp.models import mlp, mlp_inputs, mlp_loss, policy

BLACKWELL = TargetGpu((10, 0), 91200)
RECIPES = {"mxfp8": 3, "fp8_block": 3, "nvfp4": 1}  # products in blocks, of three
CALL = "__op$block_scaled_dot"
SHAPES = (256, 512), (512, 384)  # no two of a product's and its gradients' are alike


def loss(x, w):
    return jnp.sum(jnp.tanh(x @ w))


def gradient(name):
    return jax.grad(amp(loss, policy(name)), (0, 1))


def lowered(fn, *args, platform="cuda"):
    """The module for a platform, of arrays or their shapes."""
    avals = [jax.ShapeDtypeStruct(a, jnp.float32) if isinstance(a, tuple) else a for a in args]
    return jax.jit(fn).trace(*avals).lower(lowering_platforms=(platform,)).as_text()


def calls(text):
    """The calls in a module that are not JAX's own words for the partitioner."""
    return [name for name in re.findall(r"custom_call @([\w$]+)", text) if name == CALL]


@pytest.mark.parametrize("name", RECIPES)
def test_blackwell_multiplies_blocks(name):
    """A product and both of its gradients become the call, in both orders of differentiation."""
    inside, outside = gradient(name), amp(jax.grad(loss, (0, 1)), policy(name))
    for fn in (inside, outside):
        with lowering_for(BLACKWELL):
            assert len(calls(lowered(fn, *SHAPES))) == RECIPES[name]
            assert not calls(lowered(fn, *SHAPES, platform="cpu"))
            assert not calls(lowered(fn, *SHAPES, platform="tpu"))


@pytest.mark.parametrize(
    "gpu", [None, TargetGpu((9, 0), 91200), TargetGpu((10, 0), 90600), TargetGpu((10, 0), None)]
)
def test_other_gpus_widen_them(gpu):
    """Hopper, a Blackwell whose cuDNN is too old for XLA, and where nothing is known of a GPU."""
    with lowering_for(gpu):
        assert not calls(lowered(gradient("mxfp8"), *SHAPES))


def test_what_does_not_fit_is_widened():
    """The summed axis must be whole blocks; others may have any length, as XLA fills them up."""
    with lowering_for(BLACKWELL):
        product = amp(jnp.dot, policy("mxfp8", multiple=1))
        assert len(calls(lowered(product, (7, 96), (96, 5)))) == 1
        assert not calls(lowered(product, (32, 80), (80, 32)))


@pytest.mark.parametrize(
    ("lhs", "rhs", "fit"),
    [
        (CastConfig("f8_e4m3", (1, 32), True), CastConfig("f8_e5m2", (1, 32), True), True),
        (CastConfig("f8_e5m2", (1, 32), True), CastConfig("f8_e5m2", (1, 32), True), False),
        (CastConfig("f8_e4m3", (1, 64), True), CastConfig("f8_e4m3", (128, 128), True), True),
        (CastConfig("f8_e4m3", (1, 16), True), CastConfig("f8_e4m3", (1, 16), True), False),
        (CastConfig("f8_e4m3", (1, 32)), CastConfig("f8_e4m3", (1, 32)), False),
        (CastConfig("f4_e2m1", (1, 32), True), CastConfig("f4_e2m1", (1, 32), True), False),
        (CastConfig("f4_e2m1", (1, 32)), CastConfig("f4_e2m1", (16, 16)), True),
        (CastConfig("f4_e2m1", (1, 16)), CastConfig("f8_e4m3", (1, 32), True), False),
        (CastConfig("f8_e4m3", None, True), CastConfig("f8_e4m3", (1, 32), True), False),
    ],
    ids=str,
)
def test_which_casts_matrix_units_take(lhs, rhs, fit):
    """Powers of two for 32 or more numbers of 8 bits, any scales for 16 or more of 4 bits."""
    assert fit_units((lhs, rhs), 4096) is fit
    assert fit_units((rhs, lhs), 4096) is fit


@pytest.mark.parametrize(
    "cast",
    [
        CastConfig("f8_e4m3", (1, 32), True),
        CastConfig("f8_e5m2", (1, 96), True),
        CastConfig("f8_e4m3", (128, 128), True),
        CastConfig("f4_e2m1", (16, 16)),
        CastConfig("f4_e2m1", (1, 32)),
    ],
    ids=str,
)
def test_operands_in_units_stand_for_the_same_numbers(cast):
    """Each scale for 32 or 16 numbers of a row, also where blocks at the edge are smaller."""
    x = jax.random.normal(jax.random.key(0), (2, 40, 160)) * jnp.exp2(jnp.arange(160) % 7)
    q = quantize(x, cast)
    values, scale, tensor = in_units(q)
    length = 32 if cast.round_sf else 16
    assert scale.shape == (2, 40, 160 // length)
    assert scale.dtype == (jnp.float8_e8m0fnu if cast.round_sf else jnp.float8_e4m3fn)
    whole = np.repeat(np.asarray(scale, np.float64), length, axis=-1)
    got = np.asarray(values, np.float64) * whole * (1 if tensor is None else np.float64(tensor))
    np.testing.assert_allclose(got, np.asarray(dequantize(q)), rtol=0 if cast.round_sf else 2**-23)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("mxfp8", jnp.float32), ("fp8_block", jnp.bfloat16), ("nvfp4", jnp.bfloat16)],
)
def test_the_call_is_given_the_product(name, dtype, monkeypatch):
    """Under a stand-in that multiplies such blocks on any device, JAX's own for AMD's GPUs."""

    def stand_in(a, b, a_scale, b_scale, preferred_element_type):
        return lax.scaled_dot(
            a,
            b,
            lhs_scale=a_scale,
            rhs_scale=b_scale,
            dimension_numbers=(((2,), (2,)), ((0,), (0,))),
            preferred_element_type=preferred_element_type,
        )

    monkeypatch.setattr(jax.nn, "scaled_matmul", stand_in)
    chosen = policy(name)
    casts = chosen.scaling.casts(chosen.cast_for("compute"))
    keys = jax.random.split(jax.random.key(0))
    x, w = (jax.random.normal(k, (2, 3, n, 256)) for k, n in zip(keys, (48, 32), strict=True))
    lhs, rhs = quantize(x, casts.activation), quantize(w, casts.weight)
    got = by_cudnn(lhs, rhs, dtype)
    assert (got.shape, got.dtype) == ((2, 3, 48, 32), dtype)
    left, right = (np.asarray(dequantize(q), np.float64) for q in (lhs, rhs))
    want = left @ np.swapaxes(right, -1, -2)
    error = 2 * float(jnp.finfo(dtype).eps) * np.abs(want).max()
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=error)


def per_example(chosen):
    """Gradients of each example, with shared weights and with each its own."""
    fn = jax.grad(amp(mlp_loss, chosen), (0, 1))

    def both(params, x, target):
        rows = x.reshape(4, 16, -1), target.reshape(4, 16, -1)
        own = jax.tree.map(lambda w: w * jnp.exp2(jnp.arange(4.0))[:, None, None], params)
        return jax.vmap(fn, (None, 0, 0))(params, *rows), jax.vmap(fn)(own, *rows)

    return both


FORMS = {
    "grad(amp)": lambda chosen: jax.grad(amp(mlp_loss, chosen), (0, 1)),
    "amp(grad)": lambda chosen: amp(jax.grad(mlp_loss, (0, 1)), chosen),
    "vmap": per_example,
}
SHORT = [("mxfp8", "grad(amp)"), ("nvfp4", "amp(grad)"), ("fp8_block", "vmap")]


@pytest.mark.parametrize(
    ("name", "form"),
    [
        case if case in SHORT else pytest.param(*case, marks=pytest.mark.long)
        for case in itertools.product(RECIPES, FORMS)
    ],
)
def test_elsewhere_the_numbers_are_the_same(name, form, monkeypatch):
    """To the letter: what is lowered for a CPU is the product of widened operands."""
    args, again = mlp_inputs(), policy(name, multiple=8)  # another policy is traced again
    fn, widened = (jax.jit(FORMS[form](chosen)) for chosen in (policy(name), again))
    with lowering_for(BLACKWELL):
        assert calls(lowered(fn, *args))
    got = fn(*args)
    monkeypatch.setattr("jaxamp.quantized.primitives.quantized_product.takes", lambda *_: False)
    with lowering_for(BLACKWELL):
        assert not calls(lowered(widened, *args))
    jax.tree.map(np.testing.assert_array_equal, got, widened(*args))


def test_an_exported_program_holds_a_form_for_each_platform():
    """JAX exports the call if it is told to; where nothing is known of a GPU it is not made."""
    x, w = (jax.random.normal(jax.random.key(0), shape) for shape in SHAPES)
    fn = jax.jit(gradient("mxfp8"))
    export = functools.partial(jax.export.export, fn, platforms=["cpu", "cuda", "tpu"])
    assert not calls(export()(x, w).mlir_module())
    with lowering_for(BLACKWELL):
        with pytest.raises(ValueError, match="no compatibility guarantees"):
            export()(x, w)
        whole = export(disabled_checks=cudnn_checks())(x, w)
    assert len(calls(whole.mlir_module())) == 3
    again = jax.export.deserialize(whole.serialize())
    jax.tree.map(np.testing.assert_array_equal, again.call(x, w), fn(x, w))


def test_on_several_devices():
    """In a `shard_map` each multiplies blocks; where a compiler divides, they are widened."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Auto,))
    product = amp(jnp.dot, policy("mxfp8"))
    divided = jax.shard_map(product, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    placed = jax.jit(product, in_shardings=(NamedSharding(mesh, P("data")), None))
    with lowering_for(BLACKWELL):
        assert len(calls(lowered(divided, *SHAPES))) == 1
        assert "custom_call" not in lowered(placed, *SHAPES)


@pytest.mark.parametrize(
    ("saved", "count"),
    [("dots_saveable", 9), ("dots_with_no_batch_dims_saveable", 9), ("nothing_saveable", 11)],
)
def test_a_checkpoint_saves_its_dots(saved, count):
    """A policy sees the dot that the product stands for: what it saves is not multiplied again."""
    kept = getattr(jax.checkpoint_policies, saved)

    def step(params, x, target):
        return jnp.mean((jax.checkpoint(mlp, policy=kept)(params, x) - target) ** 2)

    traced = jax.make_jaxpr(jax.grad(amp(step, policy("mxfp8")), (0, 1)))(*mlp_inputs())
    assert claims(traced) == count
