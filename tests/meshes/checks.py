"""How one case of the product programs × orders × policies is checked."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from jaxamp import PrecisionPolicy, amp
from tests import audit, tolerances
from tests.meshes import programs  # noqa: F401 - they enter themselves
from tests.meshes.registry import MESH_PROGRAMS
from tests.transforms import weigh

ORDERS = ("amp", "amp_of_grad", "grad_of_amp")
POLICIES = {"mixed_bf16": "bfloat16", "mixed_f16": "float16", "fp8_current": "float8_e4m3fn"}
"""Each policy and its low format."""


class MeshCase(NamedTuple):
    """One point of the product."""

    program: str
    order: str
    policy: str

    def __str__(self) -> str:
        return "-".join(self)


def every_case() -> list[MeshCase]:
    """Return the whole product."""
    return [MeshCase(p, o, f) for p in MESH_PROGRAMS for o in ORDERS for f in POLICIES]


def ordered(order: str, wrap: Any, fn: Any) -> Any:
    """Return a function of a program under `wrap`, in one of `ORDERS`."""

    def gradient(fn: Any) -> Any:
        return jax.grad(lambda *args: weigh(fn(*args)), (0, 1, 2))

    if order == "amp":
        return wrap(fn)
    return wrap(gradient(fn)) if order == "amp_of_grad" else gradient(wrap(fn))


def policy_of(name: str) -> PrecisionPolicy:
    """Return the policy of that name, under which products of 16 columns are scaled too."""
    changes = {"scaling": {"small": (), "ends": True}} if "fp8" in name else {}
    return PrecisionPolicy.parse(name).replace(**changes)


def check(case: MeshCase) -> None:
    """Run a case: its types are those of float32, shardings among them, and its numbers are near.

    Raises:
        AssertionError: if one of them is not.
    """
    program, low = MESH_PROGRAMS[case.program], POLICIES[case.policy]
    policy = policy_of(case.policy)
    with jax.set_mesh(program.mesh):
        args = program.args()
        plain = jax.jit(ordered(case.order, lambda fn: fn, program.fn))
        mixed = jax.jit(ordered(case.order, lambda fn: amp(fn, policy), program.fn))
        traced, expected = mixed.trace(*args), plain.trace(*args)
        assert traced.jaxpr.out_avals == expected.jaxpr.out_avals
        core.check_jaxpr(traced.jaxpr.jaxpr)
        _check_groups(traced.jaxpr.jaxpr)
        found = audit.products(traced.jaxpr.jaxpr)
        assert case.policy == "fp8_current" or any(p.is_low for p in found), "no narrow product"
        nudged = plain(*_moved(args, low))
        got, want = traced.lower().compile()(*args), plain(*args)
    for leaves in zip(*map(jax.tree.leaves, (got, want, nudged)), strict=True):
        _check_leaf(*leaves, program.tolerance, int(case.order != "amp"), low)


def _check_groups(jaxpr: Any) -> None:
    """Check that no fused group, which is recomputed as a whole, leads to another mesh."""
    groups = [eqn for eqn in audit.equations(jaxpr) if eqn.primitive.name == "fused_group"]
    for group in groups:
        inside = [v.aval for eqn in audit.equations(group.params["jaxpr"]) for v in eqn.outvars]
        meshes = {aval.sharding.mesh for aval in inside if not aval.sharding.mesh.empty}
        assert len(meshes) <= 1, f"a group across {meshes}"


def _moved(args: Any, low: str) -> Any:
    moved = tolerances.moved(jax.tree.map(np.asarray, args), low)
    return jax.tree.map(lambda x, y: jax.device_put(y, x.sharding), args, moved)


def _check_leaf(got: Any, want: Any, near: Any, tolerance: str, order: int, low: str) -> None:
    got, want, near = (np.asarray(x, np.float64) for x in (got, want, near))
    worst, allowed = np.abs(got - want).max(), tolerances.bound(tolerance, order, low, want, near)
    assert worst <= allowed, f"off by {worst:.3g}, allowed {allowed:.3g}"
