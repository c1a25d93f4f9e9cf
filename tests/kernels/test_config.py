"""KernelConfig, the builders of compiler parameters, and which configuration is in force."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxamp import CastConfig
from jaxamp.errors import KernelError
from jaxamp.kernels import KernelConfig, gpu_params, kernel_config, tpu_params
from jaxamp.kernels.config import resolve
from jaxamp.quantized.kernels import block_quantize
from tests.kernels.lowered import plain

BLOCK = CastConfig("f8_e4m3", sf_block=(1, 128))

# Every name that is or was documented, with a value that is not its default.
GPU_FIELDS = {
    "approx_math": True,
    "dimension_semantics": ("parallel", "sequential"),
    "max_concurrent_steps": 3,
    "delay_release": 1,
    "unsafe_no_auto_barriers": True,
    "profile_space": 8,
    "profile_dir": "/tmp/profile",
    "lowering_semantics": "warpgroup",
}
TPU_FIELDS = {
    "dimension_semantics": ("parallel", "arbitrary"),
    "allow_input_fusion": (True, False),
    "vmem_limit_bytes": 2**20,
    "collective_id": 1,
    "has_side_effects": True,
    "flags": {"xla_name": 1},
    "internal_scratch_in_bytes": 1024,
    "serialization_format": 2,
    "kernel_type": "tc",
    "disable_bounds_checks": True,
    "disable_semaphore_checks": True,
    "skip_device_barrier": True,
    "allow_collective_id_without_custom_barrier": True,
    "shape_invariant_numerics": False,
    "use_tc_tiling_on_sc": True,
    "needs_layout_passes": False,
    "fuse_transposed_lhs_in_matmul": True,
}
# What a field needs beside it.
TOGETHER = {
    "profile_space": {"profile_dir": "/tmp/profile"},
    "profile_dir": {"profile_space": 8},
    "collective_id": {"allow_collective_id_without_custom_barrier": True},
}
MOVED = {"delay_release": "KernelConfig(delay_release=", "kernel_type": "mesh"}
BUILDERS = {"gpu": (gpu_params, GPU_FIELDS), "tpu": (tpu_params, TPU_FIELDS)}
ALL = [(platform, name) for platform, (_, fields) in BUILDERS.items() for name in fields]


@pytest.mark.parametrize(("platform", "name"), ALL)
def test_every_documented_field_is_taken_or_names_its_successor(platform, name):
    """A field of the installed class gets its value; one that left says where to."""
    build, fields = BUILDERS[platform]
    wanted = {name: fields[name]} | TOGETHER.get(name, {})
    if name in {f.name for f in dataclasses.fields(build())}:
        assert plain(getattr(build(**wanted), name)) == plain(fields[name])
    else:
        with pytest.raises(KernelError) as caught:
            build(**wanted)
        assert MOVED[name] in str(caught.value)
        assert jax.__version__ in str(caught.value)


@pytest.mark.parametrize(
    ("build", "fields", "says"),
    [
        (gpu_params, {"aprox_math": True}, "Did you mean 'approx_math'"),
        (gpu_params, {"vmem_limit_bytes": 1}, "one of pallas.tpu"),
        (gpu_params, {"kernel_type": "tc"}, "It was one of pallas.tpu"),
        (tpu_params, {"delay_release": 1}, "KernelConfig(delay_release="),
        (gpu_params, {"dimension_semantics": ("arbitrary",)}, "is 'sequential' there"),
        (gpu_params, {"max_concurrent_steps": 0}, "below 1"),
        (gpu_params, {"profile_space": 8}, "profile_dir"),
        (gpu_params, {"lowering_semantics": "thread"}, "lane, warpgroup"),
        (tpu_params, {"dimension_semantics": ("sequential",)}, "is 'arbitrary' there"),
        (tpu_params, {"vmem_limit_bytes": 0}, "not positive"),
        (tpu_params, {"collective_id": 1}, "allow_collective_id_without_custom_barrier=True"),
    ],
)
def test_builders_refuse_what_no_kernel_could_use(build, fields, says):
    """The message says what to write instead."""
    with pytest.raises(KernelError) as caught:
        build(**fields)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"backend": "triton"}, "auto, pallas, reference, interpret"),
        ({"tile": (0, 128)}, "positive integers"),
        ({"gpu": tpu_params()}, "takes pallas.mosaic_gpu.CompilerParams"),
        ({"tpu": gpu_params()}, "takes pallas.tpu.CompilerParams"),
        ({"delay_release": 1}, "below max_concurrent_steps"),
        ({"delay_release": 2, "gpu": {"max_concurrent_steps": 2}}, "max_concurrent_steps=3"),
        ({"delay_release": -1}, "not a number of steps"),
        ({"interpret": True}, "backend='interpret'"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(fields, says):
    """Before any kernel is seen."""
    with pytest.raises(KernelError) as caught:
        KernelConfig(**fields)
    assert says in str(caught.value)


def test_the_call_wins_over_the_block_and_the_inner_block_over_the_outer():
    """The innermost configuration, as a whole."""
    outer, inner, own = (KernelConfig(tile=(128 * n, 128)) for n in (1, 2, 3))
    with kernel_config(outer):
        with kernel_config(inner):
            assert (resolve(None), resolve(own)) == (inner, own)
        assert resolve(None) == outer
    assert resolve(None) == KernelConfig()


def test_a_block_reaches_functions_that_were_jitted_outside():
    """The configuration is part of jit's key, and stands in the equation."""
    quantize = jax.jit(lambda x: block_quantize(x, BLOCK).values)

    def config_in_force() -> KernelConfig:
        jaxpr = jax.make_jaxpr(quantize)(jnp.ones((8, 128)))
        (eqn,) = jaxpr.eqns[0].params["jaxpr"].eqns[1:2]
        return eqn.params["config"]

    assert config_in_force().backend == "auto"
    with kernel_config(backend="reference"):
        assert config_in_force().backend == "reference"
    assert config_in_force().backend == "auto"


def test_a_block_takes_a_configuration_or_fields():
    """Everything else is refused when the block is entered."""
    with pytest.raises(KernelError, match="not both"), kernel_config(KernelConfig(), tile=(1,)):
        pass
    with pytest.raises(KernelError, match="KernelConfig, not 'auto'"), kernel_config("auto"):  # type: ignore
        pass
