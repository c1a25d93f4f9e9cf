"""Steering XLA has a switch: off, the precisions are the same and the casts alone are emitted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import pytest

from jaxamp import PrecisionPolicy, amp, plan_of
from jaxamp.errors import PolicyError
from jaxamp.plan import FusionCall, Plan
from jaxamp.policy.techniques import ALL_TECHNIQUES, Technique
from tests import products
from tests.audit import equations
from tests.products import Case
from tests.programs import PROGRAMS
from tests.transforms import TRANSFORMS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

POLICY = PrecisionPolicy.AUTO_MIXED_BF16
OFF = POLICY.replace(xla=())
STEERING = {"apart", "held", "unheld", "echo", "pick"}
"""Primitives that exist to steer XLA."""

ORDERS = ("plain", "grad_of_amp", "amp_of_grad")
CASES = [
    case
    for name in PROGRAMS
    for order in ORDERS
    if (case := Case(name, order, "auto_mixed_bf16")).refusal is None
]
NUMBER = {case: number for number, case in enumerate(CASES)}
SAMPLE = [
    pytest.param(case, id=str(case), marks=[] if number % 9 == 0 else [pytest.mark.long])
    for case, number in NUMBER.items()
]


def precisions(plan: Plan) -> list[Any]:
    """What is decided of every equation, nested ones included."""
    return [
        (d.primitive, d.operands, d.outputs, d.accumulation, d.reason) for d in plan.decisions()
    ]


def primitives(fn: Any, *args: Any) -> Counter[str]:
    """How often each primitive is emitted."""
    return Counter(e.primitive.name for e in equations(jax.make_jaxpr(fn)(*args).jaxpr))


@pytest.mark.parametrize("case", SAMPLE)
def test_no_precision_depends_on_steering(case: Case) -> None:
    """Operands, arithmetic and results of every equation have the same precision on and off."""
    if case.transform == "grad_of_amp":
        return  # its plan is that of the program itself
    program = PROGRAMS[case.program]
    fn, args = TRANSFORMS[case.transform].build(lambda f: f, program.fn, program.args)
    off = plan_of(fn, OFF)(*args)
    assert precisions(off) == precisions(plan_of(fn, POLICY)(*args))
    assert not any(isinstance(step, FusionCall) for step in off.body.steps)


@pytest.mark.parametrize("case", SAMPLE)
def test_off_the_casts_alone_are_emitted(case: Case) -> None:
    """No primitive that steers XLA is left, and no checkpoint that the program does not have."""
    program, order = PROGRAMS[case.program], TRANSFORMS[case.transform]
    fn, args = order.build(lambda f: amp(f, OFF), program.fn, program.args)
    emitted = primitives(fn, *args)
    assert STEERING.isdisjoint(emitted)
    fn, args = order.build(lambda f: f, program.fn, program.args)
    plain = primitives(fn, *args)
    for name in ("fused_group", "remat2", "optimization_barrier"):
        assert bool(emitted[name]) <= bool(plain[name])


@pytest.mark.parametrize("case", SAMPLE)
def test_off_values_agree_with_float32(case: Case) -> None:
    """Values and gradients are within the tolerances of the table."""
    products.check_values(case, OFF)


SHOWN = {
    Technique.HELD_ROUNDINGS: ("held", "custom_jvp", "grad_of_amp"),
    Technique.COTANGENT_ROUNDINGS: ("echo", "sgd_step", "plain"),
    Technique.LABEL_COMPARISONS: ("pick", "cross_entropy", "plain"),
    Technique.FUSED_GROUPS: ("fused_group", "layer_norm", "plain"),
}
"""What a technique emits, and a program in which it does."""


@pytest.mark.parametrize("technique", SHOWN)
def test_each_technique_has_a_switch(technique: Technique) -> None:
    """What a technique emits is there with all on and with it alone, and not with it alone off."""
    name, program, order = SHOWN[technique]
    fn, args = PROGRAMS[program].fn, PROGRAMS[program].args

    def count(*xla: Technique) -> int:
        policy = POLICY.replace(xla=xla)
        built, given = TRANSFORMS[order].build(lambda f: amp(f, policy), fn, args)
        return primitives(built, *given)[name]

    assert count(*ALL_TECHNIQUES)
    assert count(technique)
    assert not count(*ALL_TECHNIQUES - {technique})


def test_techniques_are_part_of_a_policy() -> None:
    """They are read from words, written as JSON, and tell policies apart."""
    policy = POLICY.replace(xla=["held-roundings", Technique.FUSED_GROUPS])
    assert policy.xla == {Technique.HELD_ROUNDINGS, Technique.FUSED_GROUPS}
    assert PrecisionPolicy.from_json(policy.to_json()) == policy
    assert len({policy, POLICY, OFF}) == 3
    with pytest.raises(PolicyError, match="held-roundings"):
        POLICY.replace(xla="held-rounding")
