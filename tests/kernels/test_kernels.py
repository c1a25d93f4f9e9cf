"""The kernel against its definition: by XLA, interpreted, batched, sharded and under amp."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

import jaxamp
from jaxamp import CastConfig
from jaxamp.errors import KernelError
from jaxamp.kernels import KernelConfig
from jaxamp.quantized import lowp
from jaxamp.quantized.kernels import block_quantize

quantize = jax.jit(lowp.quantize, static_argnums=1)
dequantize = jax.jit(lowp.dequantize)
GPU_INTERPRETER = getattr(plgpu, "InterpretGPUParams", None)


def _interpreters() -> list[Any]:
    """Pallas' own; those of TPU and GPU see races, and memory is NaN until it is written."""
    tpu = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
    gpu = GPU_INTERPRETER and GPU_INTERPRETER(uninitialized_memory="nan", detect_races=True)
    missing = pytest.mark.skipif(
        gpu is None, reason="Mosaic GPU's interpreter runs such kernels from JAX 0.11 on"
    )
    return [
        pytest.param(KernelConfig(), id="reference"),
        pytest.param(KernelConfig(backend="interpret"), id="pallas"),
        pytest.param(KernelConfig(backend="interpret", interpret=tpu), id="tpu"),
        pytest.param(
            KernelConfig(backend="interpret", interpret=gpu) if gpu else None,
            id="gpu",
            marks=missing,
        ),
    ]


EVERYWHERE = pytest.mark.parametrize("config", _interpreters())


def _hostile(shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    """Rows over sixteen decades, with zeros, subnormals, an infinity and a NaN."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal(shape) * 10.0 ** draw.integers(-8, 8, (*shape[:-1], 1))
    x[..., 1, :] = 0
    x[..., 2, :] = 1e-40
    x[..., 3, 5], x[..., 4, 7] = np.inf, np.nan
    return jnp.asarray(x, jnp.bfloat16)


def _same_bits(got: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


CASTS = [
    CastConfig("f8_e4m3", (1, 128)),
    CastConfig("f8_e5m2", (128, 128), round_sf=True),
    CastConfig("f8_e4m3", (1, 32), round_sf=True),
]


@pytest.mark.product("cast")
@EVERYWHERE
@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_block_quantize_gives_the_bits_of_quantize(cast, config):
    """Ragged edges, zeros, subnormals, infinities and NaN included; so does the transposed copy."""
    x = _hostile((2, 40, 200))
    transposed = cast.sf_block[1] == 128
    run = functools.partial(block_quantize, cast=cast, transposed=transposed, config=config)
    got = jax.jit(run)(x)
    _same_bits(got, (quantize(x, cast), quantize(x.mT, cast)) if transposed else quantize(x, cast))


def test_no_block_spans_two_matrices():
    """Matrices of fewer rows than a block has are quantized one by one."""
    x = _hostile((2, 40, 200)).at[1].multiply(4)
    _same_bits(block_quantize(x, CASTS[1]), quantize(x, CASTS[1]))


def _batched(x: jax.Array) -> Any:
    return block_quantize(x, CASTS[0], transposed=True)


@pytest.mark.parametrize("axis", [0, 1])
def test_vmap_of_block_quantize_is_a_batch(axis):
    """One equation, whichever axis is mapped."""
    x = _hostile((3, 3, 16, 128))
    got = jax.jit(jax.vmap(_batched, in_axes=axis))(x)
    _same_bits(got, jax.tree.map(lambda *q: jnp.stack(q), *map(_batched, jnp.moveaxis(x, axis, 0))))


@pytest.mark.parametrize("check_vma", [False, True])
def test_the_kernel_runs_in_shard_map(check_vma):
    """Each device quantizes its rows."""
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = PartitionSpec("rows")
    x = _hostile((32, 128))

    def values(x: jax.Array) -> jax.Array:
        return block_quantize(x, CASTS[0]).values

    run = jax.shard_map(values, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=check_vma)
    _same_bits(jax.jit(run)(x), values(x))


def test_a_derivative_is_refused_with_advice():
    """Rounding has none worth having."""
    with pytest.raises(KernelError, match="custom_vjp"):
        jax.grad(lambda x: block_quantize(x, CASTS[0]).scale.sum())(jnp.ones((2, 128)))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: block_quantize(jnp.ones(128), CASTS[0]), "two or more axes"),
        (lambda: block_quantize(jnp.ones((2, 128), int), CASTS[0]), "takes floats"),
        (
            lambda: block_quantize(jnp.ones((2, 128)), CastConfig("f8_e4m3")),
            "jaxamp.quantized.lowp.scaled_array",
        ),
        (lambda: block_quantize(jnp.ones((2, 128)), "f8_e4m3"), "CastConfig("),  # type: ignore
    ],
)
def test_operands_that_do_not_fit_are_refused(call, says):
    """With what was seen and what is taken."""
    with pytest.raises(KernelError) as caught:
        call()
    assert says in str(caught.value)


def test_amp_leaves_a_users_kernel_and_its_parameters_alone():
    """Operands come in the dtypes that the kernel was written for, parameters as they were."""
    params = pltpu.CompilerParams(
        dimension_semantics=("arbitrary",), vmem_limit_bytes=2**22, flags={"xla_name": 1}
    )

    def body(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] * 2

    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
        doubled = pl.pallas_call(
            body,
            grid=(2,),
            in_specs=[spec],
            out_specs=spec,
            out_shape=jax.ShapeDtypeStruct((16, 128), jnp.float32),
            compiler_params=params,
            interpret=True,
        )(x @ w)
        return doubled @ w

    x, w = jnp.ones((16, 128)), jnp.ones((128, 128))
    (eqn,) = _equations(jax.make_jaxpr(jaxamp.amp(program))(x, w).jaxpr, "pallas_call")
    assert eqn.params["compiler_params"] == params
    assert eqn.invars[0].aval.dtype == jnp.float32
    np.testing.assert_array_equal(jaxamp.amp(program)(x, w), program(x, w))


def _equations(jaxpr: Any, name: str) -> list[Any]:
    found = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == name]
    for eqn in jaxpr.eqns:
        for sub in jax.extend.core.jaxprs_in_params(eqn.params):
            found += [] if eqn.primitive.name == name else _equations(sub, name)
    return found


def test_amp_keeps_the_kernel_whole():
    """One opaque equation, whose operands are not rounded on the way in."""

    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        return dequantize(block_quantize(jnp.tanh(x @ w), CASTS[0]))

    x, w = jnp.ones((8, 128)), jnp.ones((128, 128)) / 100
    (eqn,) = _equations(jax.make_jaxpr(jaxamp.amp(program))(x, w).jaxpr, "jaxamp_block_quantize")
    assert eqn.invars[0].aval.dtype == jnp.float32
    assert jaxamp.amp(program)(x, w).dtype == jnp.float32
