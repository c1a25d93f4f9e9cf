"""Programs that cross from one context of a mesh to another are right in all three formats."""

import json
import re
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from jaxamp import amp, plan_of
from tests.meshes import checks, partial_sums
from tests.meshes.partial_sums import COLLECTIVES
from tests.meshes.registry import KINDS, MESH_PROGRAMS


@pytest.mark.product("case.program", every=4)
@pytest.mark.parametrize("case", checks.every_case(), ids=str)
def test_types_and_numbers(case):
    """In both orders: results lie where those of float32 do, and are as near as rounding allows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fp8 that scales no product of a typed sharding
        checks.check(case)


def test_there_are_enough_programs():
    """Of each type of axes."""
    assert len(MESH_PROGRAMS) >= 60
    assert {program.kind for program in MESH_PROGRAMS.values()} == set(KINDS)


@pytest.mark.parametrize(
    "names", [["psum", "all_gather"], pytest.param([*COLLECTIVES], marks=pytest.mark.long)]
)
def test_sums_of_a_part_over_some_axes_compile_for_a_cpu(names):
    """Those in bfloat16 end the process of XLA's compiler, if nothing is done about them."""
    command = [sys.executable, "-m", "tests.meshes.partial_sums", *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 8 * len(names)
    assert {name: far for name, far in found.items() if not far <= 0.02} == {}


@pytest.mark.parametrize(("platform", "dtype"), [("cpu", "f32"), ("cuda", "bf16"), ("tpu", "bf16")])
@pytest.mark.parametrize("name", ["psum", "psum_scatter"])
def test_sums_are_in_float32_on_a_cpu_alone(platform, dtype, name):
    """What accelerators are sent is as it was."""
    mesh = jax.make_mesh((2, 4), ("d", "m"), axis_types=(AxisType.Auto,) * 2)

    def layer(*args):
        return partial_sums.program(COLLECTIVES[name], True, *args)

    with jax.set_mesh(mesh):
        traced = jax.jit(amp(layer, "bf16")).trace(*[jnp.ones((16, 16))] * 3)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    sums = r'"stablehlo\.(?:all_reduce|reduce_scatter)".*?-> tensor<[0-9]+x[0-9]+x(\w+)>'
    assert re.findall(sums, text, re.DOTALL) == [dtype]


@pytest.mark.parametrize("name", [n for n in MESH_PROGRAMS if n.startswith("attention_parted")])
def test_no_attention_is_found_across_meshes(name):
    """Where scores and their softmax have different meshes; on one mesh it is found."""
    policy = checks.policy_of("mixed_bf16").replace(fused_attention=True)
    for program, count in ((name, 0), ("attention_on_auto_axes", 1)):
        chosen = MESH_PROGRAMS[program]
        with jax.set_mesh(chosen.mesh):
            assert len(plan_of(chosen.fn, policy)(*chosen.args()).found) == count
