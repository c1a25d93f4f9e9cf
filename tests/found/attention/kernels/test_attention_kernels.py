"""Which kernel each platform runs for an attention, and what the Pallas kernels compute."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxamp.compiled.targets import TARGETS
from jaxamp.found.attention.kernels import cudnn
from jaxamp.found.attention.kernels.known_masks import Intervals, known_mask
from jaxamp.found.attention.kernels.spec import AttentionSpec, Operands
from jaxamp.found.attention.kernels.splash import SPLASH, block
from jaxamp.kernels.jax_compat.cudnn_calls import cudnn_checks
from jaxamp.kernels.target_gpu import TargetGpu, described_gpu, gpu_at_hand, lowering_for
from tests.found.attention.kernels import attention_programs
from tests.found.attention.kernels.calls import attention, attention_forward
from tests.kernels.test_deviceless import compiled

HOPPER = TargetGpu((9, 0), 91200)
CUDNN = ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
BIASED = ["__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"]
PALLAS = ["tpu_custom_call"] * 3  # forward, dq, dk and dv


WORDS = np.arange(256, dtype=np.int32)


def _calls(text):
    """What is called, but for what is told of layouts."""
    return re.findall(r"custom_call @(?!LayoutConstraint)([\w$]+)", text)


def _lowered(platform, gpu=HOPPER, **words):
    fn, avals = attention_programs.program({"length": 256, **words})
    with lowering_for(gpu):
        return _calls(jax.jit(fn).trace(*avals).lower(lowering_platforms=(platform,)).as_text())


@pytest.mark.parametrize(
    ("words", "on_cuda", "on_tpu"),
    [
        ({"causal": True}, CUDNN, PALLAS),
        ({"causal": True, "window": 64, "key_heads": 2}, CUDNN, PALLAS),
        ({"keys": 512, "scale": 0.1}, CUDNN, PALLAS),
        ({"vmap": True}, CUDNN, PALLAS),
        ({"bias": (2, 8, 256, 256)}, BIASED, []),
        ({"bias": (1, 8, 256, 256), "key_heads": 2}, BIASED, []),
        ({"bias": (2, 1, 1, 256)}, BIASED, []),
        ({"dtype": "float16"}, CUDNN, []),
        ({"dtype": "float32"}, [], []),
        ({"length": 250}, CUDNN, []),
        ({"length": 251, "bias": (1, 1, 251, 251)}, BIASED[:1], []),
        ({"head": 300}, [], []),
        ({"head": 12}, [], []),
        ({"head": 36}, [], []),
        ({"numbers": WORDS // 128, "causal": True}, CUDNN, PALLAS),
        ({"numbers": WORDS // 100}, BIASED, PALLAS),
        ({"numbers": WORDS // 16, "causal": True, "window": 9}, CUDNN, PALLAS),
        ({"numbers": WORDS % 2, "causal": True, "key_heads": 2}, BIASED, PALLAS),
        ({"numbers": WORDS // 128, "bias": (2, 8, 256, 256)}, BIASED, []),
        ({"numbers": WORDS % 2, "head": 36}, [], []),
        ({"seen": abs(WORDS[:, None] - WORDS) < 50}, BIASED, PALLAS),
    ],
)
def test_kernels_by_platform(words, on_cuda, on_tpu):
    """A kernel in both passes, in one of them, or the composed form, which calls nothing."""
    assert _lowered("cuda", **words) == on_cuda
    assert _lowered("tpu", **words) == on_tpu
    assert _lowered("cpu", **words) == []


@pytest.mark.parametrize("number", [np.arange(1024) // 300, np.arange(1024) % 2])
def test_a_program_for_a_tpu_holds_no_mask(number):
    """Known segments are numbers of each word there, in order or mixed."""

    def size(**words):
        fn, avals = attention_programs.program({"causal": True, **words})
        lowered = jax.jit(fn).trace(*avals).lower(lowering_platforms=("tpu",))
        return len(lowered.as_text())

    assert size(numbers=number) < size() + 4 * 8 * number.size


@pytest.mark.parametrize(
    ("gpu", "head", "calls"),
    [
        (TargetGpu((8, 0), 91200), 128, CUDNN),
        (TargetGpu((8, 0), 91200), 256, []),
        (TargetGpu((10, 0), 91200), 256, CUDNN),
        (TargetGpu((10, 3), 90000), 64, []),
        (TargetGpu((7, 5), 91200), 64, []),
        (TargetGpu((9, 0), None), 64, []),
    ],
)
def test_what_a_gpu_takes(gpu, head, calls):
    """By its compute capability and its cuDNN, as JAX's own checks have it."""
    assert _lowered("cuda", gpu, head=head) == calls


def test_without_a_gpu_nothing_is_assumed():
    """A program lowered for CUDA where there is none runs anywhere, and is composed."""
    assert gpu_at_hand() is None
    assert _lowered("cuda", None) == []
    assert TARGETS["v5e"].described().__enter__() is None
    with TARGETS["a100"].described():
        assert described_gpu() == TargetGpu((8, 0), 91200)


def test_an_exported_program_holds_a_form_for_each_platform():
    """JAX exports Pallas' call for TPU and, if told to, that of cuDNN; here neither is run."""
    fn, _ = attention_programs.program({"causal": True})
    draw = np.random.default_rng(0)
    q, k, v = (jnp.asarray(draw.standard_normal((1, 128, 2, 64)), jnp.bfloat16) for _ in range(3))
    platforms = ["cpu", "cuda", "tpu"]
    plain = jax.export.export(jax.jit(fn), platforms=platforms)(q, k, v)
    assert sorted(set(_calls(plain.mlir_module()))) == ["tpu_custom_call"]
    with lowering_for(HOPPER):
        checks = cudnn_checks()
        with pytest.raises(ValueError, match="no compatibility guarantees"):
            jax.export.export(jax.jit(fn), platforms=platforms)(q, k, v)
        whole = jax.export.export(jax.jit(fn), platforms=platforms, disabled_checks=checks)(q, k, v)
    assert sorted(set(_calls(whole.mlir_module()))) == [*CUDNN, "tpu_custom_call"]
    again = jax.export.deserialize(whole.serialize(vjp_order=0))
    for got, want in zip(
        jax.tree.leaves(again.call(q, k, v)), jax.tree.leaves(jax.jit(fn)(q, k, v)), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_programs_on_several_devices():
    """A compiler for GPUs asks how to partition the calls; for TPUs, or exported, it cannot."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Auto,))
    fn, avals = attention_programs.program({"length": 256, "causal": True})
    place = NamedSharding(mesh, P("data"))
    whole = jax.jit(fn, in_shardings=place)
    with lowering_for(HOPPER):
        traced = whole.trace(*avals)
        lowered = {p: traced.lower(lowering_platforms=(p,)).as_text() for p in ("cuda", "tpu")}
        exported = jax.export.export(whole, platforms=["cuda"])(*avals).mlir_module()
    assert _calls(lowered["cuda"]) == ["CustomSPMDPartitioning"] * 2
    assert _calls(lowered["tpu"]) == _calls(exported) == []


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("check", [True, False])
def test_each_device_of_a_shard_map_calls_the_kernel(platform, check):
    """Inside of manual axes an array is local, whether or not JAX follows what varies."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Auto,))
    fn, avals = attention_programs.program({"length": 256, "causal": True})
    specs = (P("data"), P("data"), P("data"))

    def summed(*operands):
        value, grads = fn(*operands)
        return jax.lax.psum(value, "data"), grads

    divided = jax.shard_map(
        summed, mesh=mesh, in_specs=specs, out_specs=(P(), specs), check_vma=check
    )
    with lowering_for(HOPPER):
        lowered = jax.jit(divided).trace(*avals).lower(lowering_platforms=(platform,))
    assert set(_calls(lowered.as_text())) >= set(CUDNN if platform == "cuda" else PALLAS)


def _operands(shape, keys, dtype=jnp.bfloat16):
    draw = np.random.default_rng(0)
    shapes = (shape, keys, keys, shape)
    return [jnp.asarray(draw.standard_normal(s), dtype) for s in shapes]


MIXED, IN_ORDER = (known_mask(n[:, None] == n) for n in (WORDS // 50 % 2, WORDS // 100))
BOTH_SIDES = Intervals(np.maximum(WORDS - 9, 0), np.minimum(WORDS + 70, 256), 256)
CASES = {
    "causal": ((1, 256, 2, 64), (1, 256, 2, 64), {"causal": True}),
    "window, grouped": ((1, 256, 4, 64), (1, 256, 2, 64), {"causal": True, "window": 100}),
    "cross": ((1, 128, 2, 32), (1, 256, 2, 32), {}),
    "segments": ((1, 256, 2, 64), (1, 256, 1, 64), {"causal": True, "mask": MIXED}),
    "segments in order": (
        (1, 256, 2, 64),
        (1, 256, 2, 64),
        {"causal": True, "window": 40, "mask": IN_ORDER},
    ),
    "intervals": ((1, 256, 2, 64), (1, 256, 2, 64), {"mask": BOTH_SIDES}),
}


@pytest.mark.product("case", every=4)
@pytest.mark.parametrize("case", CASES)
def test_splash_is_attention(case):
    """Output, lse and cotangents of the kernels, interpreted, are the composed form's."""
    shape, keys, words = CASES[case]
    q, k, v, dout = _operands(shape, keys)
    spec = AttentionSpec(scale=0.125, **words)
    operands = Operands(q, k, v)
    assert SPLASH.obstacle(operands, spec, True) is None
    _, lse = attention_forward(q, k, v, None, spec)
    out, vjp = jax.vjp(lambda q, k, v: attention(q, k, v, None, spec), q, k, v)
    with pltpu.force_tpu_interpret_mode():
        run = jax.jit(functools.partial(SPLASH.run, spec=spec, bias_grad=False))
        found, sums = run(operands)
        grads = run(operands._replace(out=found, lse=sums, dout=dout))
    np.testing.assert_allclose(sums, lse, atol=1e-4)
    for got, want in zip((found, *grads[:3]), (out, *vjp(dout)), strict=True):
        size = np.abs(np.asarray(want, np.float32)).max()
        assert np.abs((got - want).astype(jnp.float32)).max() <= 2**-6 * size


def test_blocks_divide():
    """The largest multiple of 128 up to 512 that divides a length."""
    assert [block(n) for n in (128, 384, 640, 1024, 1536, 1920)] == [128, 384, 128, 512, 512, 384]


def test_biases_for_cudnn_are_finite():
    """Minus infinity is a number that cuDNN can subtract, also in float16."""
    q = jax.ShapeDtypeStruct((1, 4, 1, 8), "float16")
    bias = jnp.array([-jnp.inf, -1e30, 2.0, jnp.inf]).reshape(1, 1, 1, 4)
    found = cudnn._narrowed(Operands(q, q, q, bias)).bias
    assert found.shape == (1, 1, 4, 4)
    assert found.dtype == jnp.float16
    np.testing.assert_array_equal(found[0, 0, 0], [-32768, -32768, 2, 32768])


@pytest.mark.deviceless
@pytest.mark.parametrize("target", ["h200", "a100", "b200", "v5e", "v6e"])
def test_vendors_compile_attention(target, tmp_path):
    """The compilers take each kernel, and less memory than the scores need."""
    found = compiled(target, tmp_path, "tests.found.attention.kernels.attention_programs")
    composed = {"head 100", "head 300", *["head 256"] * (target == "a100")}
    if TARGETS[target].gpu is None:
        composed |= {"bias of all", "bias of heads", "bias of keys", "float16", "odd length"}
    for title, facts in found.items():
        assert bool(facts["calls"]) == (title not in composed), title
    scores = attention_programs.B * attention_programs.N * attention_programs.T**2
    assert found["causal"]["temporary"] < scores
    if TARGETS[target].gpu:  # a TPU's compiler keeps most of what is composed in VMEM
        assert found["head 300"]["temporary"] > 2 * scores
