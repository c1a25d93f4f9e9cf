"""Every compiler parameter shows in what is lowered, for chips that are not here."""

import dataclasses
import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp import CastConfig
from jaxamp.errors import KernelError
from jaxamp.kernels import KernelConfig, gpu_params, tpu_params
from jaxamp.kernels.params import mosaic_gpu
from jaxamp.kernels.target_gpu import TargetGpu, lowering_for
from jaxamp.quantized.kernels import KernelFallbackWarning, block_quantize
from tests.kernels.lowered import GpuKernel, TpuKernel, lower, plain

BLOCK = CastConfig("f8_e4m3", sf_block=(1, 128))
LANE = {"lowering_semantics": "lane"}


def _array(shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


X = _array((512, 1024))


def _quantize(x, config=None):
    return block_quantize(x, BLOCK, config=config)


def _with(**config):
    return functools.partial(_quantize, config=KernelConfig(backend="pallas", **config))


@functools.cache
def _plain_gpu():
    return _gpu()


def _gpu(delay_release=0, **fields):
    return GpuKernel(_with(gpu=LANE | fields, delay_release=delay_release), X)


def _tpu(**fields):
    return TpuKernel(_with(tpu=fields), X)


def _has(build, *names):
    """Skips a test of fields that only a newer JAX has."""
    missing = set(names) - {field.name for field in dataclasses.fields(build())}
    return pytest.mark.skipif(bool(missing), reason=f"JAX {jax.__version__} has no {missing}")


IN_ORDER = ("parallel", "parallel", "sequential")  # makes a loop; its depth is buffers and barriers


def test_gpu_dimension_semantics_trades_programs_for_a_loop():
    """A sequential axis leaves the grid."""
    plain, serial = _plain_gpu(), _gpu(dimension_semantics=IN_ORDER)
    assert np.prod(serial.grid) < np.prod(plain.grid)
    assert serial.count("scf.for") == plain.count("scf.for") + 1


def test_gpu_max_concurrent_steps_and_delay_release():
    """Depth is paid in shared memory and barriers; a delay moves the copies within the loop."""
    one, four = (_gpu(dimension_semantics=IN_ORDER, max_concurrent_steps=n) for n in (1, 4))
    assert four.shared_memory > 2 * one.shared_memory
    assert four.count("mbarrier.init") >= one.count("mbarrier.init") + 3
    late = _gpu(2, dimension_semantics=IN_ORDER, max_concurrent_steps=4)
    assert late.shared_memory == four.shared_memory
    assert late.body != four.body


def test_gpu_scales_make_the_largest_magnitude_that_of_the_format():
    """Scales are magnitudes over the largest number of e4m3, 448."""
    constants = re.findall(r"value = ([\d.e+-]+) : f32", _plain_gpu().body)
    assert np.float32(1 / 448) in set(map(np.float32, constants))


def test_gpu_unsafe_no_auto_barriers_leaves_barriers_out():
    """The module shrinks."""
    assert len(_gpu(unsafe_no_auto_barriers=True).body) < len(_plain_gpu().body)


def test_gpu_reduction_scratch_bytes_are_shared_memory():
    """What is asked for more is taken more."""
    more = _gpu(reduction_scratch_bytes=8192)
    assert more.shared_memory == _plain_gpu().shared_memory + 8192 - 2048


def test_gpu_lowering_semantics_is_the_one_given():
    """Both compile; they give different modules for the same grid."""
    other = _gpu(lowering_semantics="warpgroup")
    assert other.grid == _plain_gpu().grid
    assert other.body != _plain_gpu().body


def test_gpu_profiles_need_a_gpu():
    """A profile is written by the process that runs the kernel; without a GPU that is refused."""
    with pytest.raises(KernelError, match="where there is a GPU"):
        _gpu(profile_space=8, profile_dir="/tmp/profile")


@_has(gpu_params, "skip_device_barrier")
def test_gpu_skip_device_barrier_is_in_the_custom_call():
    """Where what launches the kernel reads it."""
    plain, skipping = _plain_gpu(), _gpu(skip_device_barrier=True)
    assert [str(k.config["skip_device_barrier"]) for k in (plain, skipping)] == ["false", "true"]


class ReachedError(Exception):
    """Mosaic GPU is asked for a kernel, with these compiler parameters."""


OWN = {"dimension_semantics", "max_concurrent_steps"}  # grid and pipeline are jaxamp's
PROFILE = {"profile_space": 8, "profile_dir": "/tmp/profile"}
OTHER = {
    "unsafe_no_auto_barriers": True,
    "reduction_scratch_bytes": 4096,
    "lowering_semantics": "warpgroup",
    "profile_trace_scope": "warp",
    "profile_bounds_check": True,
    "skip_device_barrier": True,
    "is_multi_process": True,
} | PROFILE
GPU_NAMES = {field.name for field in dataclasses.fields(gpu_params())}


@pytest.mark.parametrize("field", sorted(GPU_NAMES - OWN - {"approx_math"}))
def test_gpu_every_other_field_is_given_to_mosaic(field, monkeypatch):
    """Profiles too, where there is a GPU; a field that a newer JAX has is not forgotten."""

    def kernel(*_, compiler_params, **__):
        raise ReachedError(compiler_params)

    monkeypatch.setattr(mosaic_gpu(), "kernel", kernel)
    monkeypatch.setattr("jaxamp.quantized.kernels.hopper.gpu_at_hand", object)
    given = {field: OTHER[field]} | (PROFILE if field in PROFILE else {})
    with pytest.raises(ReachedError) as caught:
        _gpu(**given)
    assert plain(getattr(caught.value.args[0], field)) == OTHER[field]


@pytest.mark.parametrize("words", [{}, {"dimension_semantics": ["arbitrary"] * 3}])
def test_tpu_dimension_semantics_are_in_the_body(words):
    """The kernel's own, or those of a configuration."""
    (word,) = {*words.get("dimension_semantics", ["parallel"])}
    text = f"#tpu.dimension_semantics<{word}>"
    assert f"[{', '.join([text] * 3)}]" in _tpu(**words).body


TPU_SETTINGS = [
    ({"allow_input_fusion": (True,)}, "allow_input_fusion", [True]),
    (
        {"vmem_limit_bytes": 2**26},
        "scoped_memory_configs",
        [{"memory_space": 1, "offset": 0, "size": 2**26}],
    ),
    (
        {"collective_id": 3, "allow_collective_id_without_custom_barrier": True},
        "collective_id",
        3,
    ),
    (
        {"flags": {"xla_name": 1}},
        "flag_configs",
        [{"flag_type": "xla_name", "value": {"integer_value": 1}}],
    ),
    ({"internal_scratch_in_bytes": 4096}, "internal_scratch_in_bytes", 4096),
    ({"serialization_format": 0}, "serialization_format", 0),
    ({"disable_bounds_checks": True}, "disable_bounds_checks", True),
    ({"disable_semaphore_checks": True}, "disable_semaphore_checks", True),
    ({"skip_device_barrier": True}, "skip_device_barrier", True),
    ({"shape_invariant_numerics": False}, "shape_invariant_numerics", False),
]


@pytest.mark.parametrize(("fields", "key", "value"), TPU_SETTINGS)
def test_tpu_fields_reach_the_custom_call(fields, key, value):
    """Each is in the configuration that libtpu reads, and is not there by default."""
    assert _tpu(**fields).settings[key] == value
    assert _tpu().settings.get(key) != value


def test_tpu_side_effects_are_an_attribute():
    """A kernel with side effects is not merged with its like."""
    effect = [
        str(_tpu(**f).op.attributes["has_side_effect"]) for f in ({}, {"has_side_effects": True})
    ]
    assert effect == ["false", "true"]


GPU, TPU = {"gpu": {}}, {"tpu": {}}
REFUSED = [
    ({"gpu": {"dimension_semantics": ("parallel",)}}, "has 3 axes: batch, rows, columns"),
    ({"tpu": {"dimension_semantics": ("parallel",)}}, "has 3 axes: batch, rows, columns"),
    ({"gpu": {"approx_math": True}}, "exponentials, roots"),
    ({"tpu": {"allow_input_fusion": (True, True)}}, "reads one array"),
    ({"tpu": {"use_tc_tiling_on_sc": True}}, "SparseCore"),
    ({"tpu": {"needs_layout_passes": False}}, "SparseCore"),
    ({"tpu": {"fuse_transposed_lhs_in_matmul": True}}, "for products"),
    pytest.param({"tpu": {"opt_level": 1}}, "SparseCore", marks=_has(tpu_params, "opt_level")),
    (TPU | {"tile": (100, 128)}, "(rows, columns), each a multiple of 128"),
    (GPU | {"tile": (128,)}, "(rows, columns), each a multiple of 128"),
    ({"tile": (512, 1024), "tpu": {"vmem_limit_bytes": 2**20}}, "bytes of VMEM"),
    (GPU | {"tile": (512, 1024)}, "bytes of shared memory"),
]


@pytest.mark.parametrize(("config", "says"), REFUSED)
def test_what_cannot_work_is_refused_before_lowering(config, says):
    """On any machine, when the kernel is called; nothing is traced to the end."""
    with pytest.raises(KernelError) as caught:
        jax.eval_shape(_with(**config), X)
    assert says in str(caught.value)


def test_tpu_no_field_is_forgotten():
    """Each of the installed class is seen above in what is lowered, or refused."""
    seen = {"dimension_semantics", "has_side_effects"}
    seen |= {name for fields, _, _ in TPU_SETTINGS for name in fields}
    refused = {"use_tc_tiling_on_sc", "needs_layout_passes", "fuse_transposed_lhs_in_matmul"}
    assert {field.name for field in dataclasses.fields(tpu_params())} <= (
        seen | refused | {"opt_level"}
    )


def test_a_smaller_tile_makes_a_larger_grid():
    """Half as many rows in each, twice as many programs."""
    grids = []
    for rows in (128, 256):
        body = TpuKernel(_with(tile=(rows, 128)), X).body
        bounds = re.search(r"iteration_bounds = array<i64: ([\d, ]+)>", body)
        grids.append(np.prod([int(n) for n in bounds[1].split(",")]))
    assert grids[0] == 2 * grids[1]


def test_shared_memory_is_estimated_within_a_tenth():
    """The estimate that refuses is what the lowered kernel asks for, scratch apart."""
    steps = {"dimension_semantics": IN_ORDER, "max_concurrent_steps": 3}
    asked = _gpu(**steps).shared_memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxamp.quantized.kernels.fit.SHARED_MEMORY", 0)
        with pytest.raises(KernelError) as caught:
            jax.eval_shape(_with(gpu=LANE | steps), X)
    estimate = int(re.search(r"about ([\d,]+) bytes", str(caught.value))[1].replace(",", ""))
    assert asked - 4096 <= estimate <= 1.1 * asked


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_one_exported_program_holds_every_platform(platform):
    """On a CPU it runs as XLA's reference, from the same jaxpr."""
    call = {"tpu": "tpu_custom_call", "cuda": "mosaic_gpu_v2"}[platform]
    assert call in str(lower(lambda x: _quantize(x), X, platform=platform))
    assert call not in str(lower(_quantize, X, platform="cpu"))


def test_f16_on_tpu_falls_back_and_says_so():
    """Mosaic TPU refuses float16; the reference runs, and backend='pallas' refuses."""
    x = _array((128, 256), jnp.float16)
    with pytest.warns(KernelFallbackWarning, match="Mosaic TPU takes no float16"):
        module = lower(lambda x: _quantize(x), x, platform="tpu")
    assert "tpu_custom_call" not in str(module)
    with pytest.raises(KernelError, match="Mosaic TPU takes no float16"):
        lower(_with(), x, platform="tpu")


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_other_gpus_than_hopper_fall_back_and_say_so(capability):
    """Neither Ampere nor Blackwell has Hopper's instructions; an absent GPU counts if described."""
    major, minor = capability
    with (
        lowering_for(TargetGpu(capability, 91200)),
        pytest.warns(KernelFallbackWarning, match=f"this GPU has {major}.{minor}"),
    ):
        module = lower(lambda x: _quantize(x), X, platform="cuda")  # is traced anew
    assert "mosaic_gpu_v2" not in str(module)


def test_without_absl_py_the_reference_runs_and_says_so(monkeypatch):
    """JAX does not declare it; neither is jaxamp to be installed by a name that is another's."""
    monkeypatch.setattr("jaxamp.core.jax_compat.has_module", lambda name: False)
    with pytest.warns(KernelFallbackWarning, match="`pip install absl-py`"):
        module = lower(lambda x: _quantize(x), X, platform="cuda")  # is traced anew
    assert "mosaic_gpu_v2" not in str(module)
    monkeypatch.delattr("jax.experimental.pallas.mosaic_gpu")
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.mosaic_gpu", None)
    with pytest.raises(KernelError, match="`pip install absl-py`"):
        gpu_params()


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_a_tile_that_does_not_fit_is_an_error(platform):
    """Where its platform is lowered for, and not before."""
    with pytest.raises(KernelError, match=r"bytes of (VMEM|shared memory)"):
        lower(_with(tile=(4096, 1024)), _array((4096, 1024)), platform=platform)


def test_pallas_is_refused_where_there_is_none():
    """On a CPU there is nothing to lower to, and backend='pallas' does not pretend."""
    with pytest.raises(KernelError, match="TPU and CUDA only"):
        _quantize(jnp.ones((8, 128)), KernelConfig(backend="pallas"))


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_the_reference_can_be_asked_for(platform):
    """On every platform."""
    run = functools.partial(_quantize, config=KernelConfig(backend="reference"))
    assert "custom_call" not in str(lower(run, X, platform=platform))
