"""The plan of arrays on a mesh is that of the same arrays without one.

There JAX makes operands of loops of some literals, and reshards cotangents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.deviceless.models import EVERY
from jaxamp import Precision, plan_of, report
from tests.programs import PROGRAMS

POLICY = "mixed_bf16"
MODELS = ("lstm", "decoder", "scanned")
SMALL = ("gru_two_ways", "rnn", "scan_layers")
SOLVERS = ("fixed_point", "power_iteration")  # by `while`: without a gradient
UNPLANNED = ("reshard", "scan", "while", "jit")  # what stands in one program alone, or holds others

Gradient = Callable[..., Any]


def model(name: str) -> tuple[Gradient, Any]:
    size, key = EVERY[name].small, jax.eval_shape(lambda: jax.random.key(0))
    shapes = jax.eval_shape(size.init, key), jax.eval_shape(size.sample, key)
    return jax.value_and_grad(size.plain, has_aux=True), shapes


def small(name: str) -> tuple[Gradient, Any]:
    program = PROGRAMS[name]

    def loss(*args: Any) -> jax.Array:
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(program.fn(*args)))

    fn = program.fn if name in SOLVERS else jax.grad(loss)
    return fn, jax.eval_shape(lambda: program.args)


def on_a_mesh(shapes: Any) -> Any:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes)


def stored(fn: Gradient, args: Any) -> Counter[str]:
    """Bytes of residuals by dtype, but for scalars, such as the cotangent of a loss."""
    found: Counter[str] = Counter()
    for value in report(fn, POLICY)(*args).residuals:
        found[value.dtype] += value.bytes if value.bytes > 4 else 0
    return found


def multiplied(fn: Gradient, args: Any) -> Counter[str]:
    """FLOPs of products by the format of their operands."""
    found: Counter[str] = Counter()
    for product in report(fn, POLICY)(*args).contractions:
        found[product.arithmetic] += product.tally.flops
    return found


def results(fn: Gradient, args: Any) -> Counter[tuple[str, Precision | None]]:
    """How many equations of a primitive have results of a precision."""
    decisions = plan_of(fn, POLICY)(*args).decisions()
    return Counter((d.primitive, d.output) for d in decisions if d.primitive not in UNPLANNED)


@pytest.mark.product("name")
@pytest.mark.parametrize("of", [multiplied, stored, results])
@pytest.mark.parametrize("name", [*MODELS, *SMALL, *SOLVERS])
def test_a_plan_does_not_depend_on_a_mesh(name: str, of: Callable[..., Counter[Any]]) -> None:
    fn, shapes = model(name) if name in MODELS else small(name)
    assert of(fn, shapes) == of(fn, on_a_mesh(shapes))
