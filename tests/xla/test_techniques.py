"""Steering XLA has a switch: off, the precisions are the same and the casts alone are emitted."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxamp import PrecisionPolicy, amp, plan_of
from jaxamp.errors import PolicyError
from jaxamp.plan import FusionCall, Plan
from jaxamp.xla.hints.techniques import ALL_TECHNIQUES, WORKS_ON, Technique
from tests import products
from tests.audit import equations
from tests.products import Case
from tests.programs import PROGRAMS
from tests.transforms import TRANSFORMS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

POLICY = PrecisionPolicy.AUTO_MIXED_BF16
OFF = POLICY.replace(xla=())
STEERING = {
    "recomputation_barrier",
    "rounding_barrier",
    "unbarriered",
    "rounded_cotangent",
    "label_gather",
}
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


@pytest.mark.product("case", every=2)
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


@pytest.mark.product("case", every=6)
@pytest.mark.parametrize("case", SAMPLE)
def test_off_values_agree_with_float32(case: Case) -> None:
    """Values and gradients are within the tolerances of the table."""
    products.check_values(case, OFF)


def joined(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Normalize a concatenation of stored arrays twice, the second time with one part more."""
    for w in weights:
        hidden = x - x.mean(0)
        normed = hidden * jax.lax.rsqrt((hidden * hidden).mean(0) + 1e-5)
        new = jax.nn.relu(normed) @ w[: x.shape[1]]
        x = jnp.concatenate([x, new], 1) if x.shape[1] > 8 else new
    return (x**2).mean()


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.where(jnp.tril(jnp.ones((64, 64), bool)), q @ k.swapaxes(2, 3), -jnp.inf)
    return ((jax.nn.softmax(scores) @ v) ** 2).sum()


def masked_layers(x: jax.Array, weights: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        scores = jnp.where(jnp.tril(jnp.ones((64, 64), bool)), x @ w @ x.T, -jnp.inf)
        return x + jax.nn.softmax(scores) @ x, None

    return (jax.lax.scan(layer, x, weights)[0] ** 2).sum()


def large_softmax(x: jax.Array, w: jax.Array) -> jax.Array:
    """Take a softmax of more numbers than XLA:GPU keeps in its cache."""
    return (jax.nn.softmax(x @ w) @ w).sum()


def pooled(x: jax.Array, w: jax.Array) -> jax.Array:
    """Weigh channels of each image, of more numbers than XLA:GPU keeps in its cache."""
    x = jnp.tanh(x @ w)
    return ((x * x.mean(1, keepdims=True)) @ w).sum()


def shifted(x: jax.Array, w: jax.Array) -> jax.Array:
    """Filter along the rows by four taps."""
    x = jnp.pad(x @ w, ((0, 0), (3, 0), (0, 0)))
    filtered = sum(w[i] * x[:, i : i + 512] for i in range(4))
    return (jax.nn.silu(filtered) @ w).sum()


HEADS = jnp.ones((2, 4, 64, 8))
OWN = {
    "joined": (joined, (jnp.ones((32, 8)), jnp.ones((4, 64, 16)))),
    "attention": (attention, (HEADS, HEADS, HEADS)),
    "masked_layers": (masked_layers, (jnp.ones((64, 16)), jnp.ones((4, 16, 16)))),
    "large_softmax": (large_softmax, (jnp.ones((512, 512)), jnp.ones((512, 512)))),
    "shifted": (shifted, (jnp.ones((4, 512, 128)), jnp.ones((128, 128)))),
    "pooled": (pooled, (jnp.ones((4, 512, 128)), jnp.ones((128, 128)))),
}
SHOWN = {
    Technique.ROUNDING_BARRIERS: ("rounding_barrier", "sgd_step", "grad_of_amp"),
    Technique.UNBARRIERED_READS: ("unbarriered", "conv_net", "amp_of_grad"),
    Technique.COTANGENT_ROUNDINGS: ("rounded_cotangent", "sgd_step", "plain"),
    Technique.LABEL_COMPARISONS: ("label_gather", "cross_entropy", "plain"),
    Technique.REVERSED_WEIGHTS: ("rev", "conv_depthwise_dilated", "amp_of_grad"),
    Technique.CONSTANT_REMATERIALIZATION: ("iota", "masked_layers", "amp_of_grad"),
    Technique.FUSED_GROUPS: ("fused_group", "layer_norm", "plain"),
    Technique.SHARED_RECOMPUTATION: ("reduce_sum", "contrastive", "grad_of_amp"),
    Technique.CONCATENATION_PARTS: ("concatenate", "joined", "grad_of_amp"),
    Technique.SAVED_STATISTICS: ("residual", "matmul", "amp_of_grad"),
    Technique.RELU_RESIDUALS: ("residual", "sgd_step", "grad_of_amp"),
}
"""A primitive of which a technique emits more, and a program and an order in which it does."""

LOWERED = {
    Technique.RECOMPUTATION_BARRIERS: ("optimization_barrier", "large_softmax", "grad_of_amp"),
    Technique.NARROW_MOVES: ("0:512, 0:128] : (tensor<4x515x128xbf16>)", "shifted", "plain"),
    Technique.ROW_BROADCASTS: ("tensor<512x64xf32>", "attention", "grad_of_amp"),
    Technique.SPLIT_SUMS: ("tensor<4x2x256x128xf32>", "pooled", "grad_of_amp"),
}
"""The same for text that is lowered for a GPU, or for a TPU where only that has a technique."""


def amped(program: str, order: str, xla: frozenset[Technique]) -> tuple[Any, Any]:
    """Return a function and its arguments, under the techniques that are on."""
    policy = POLICY.replace(xla=xla)
    fn, args = OWN[program] if program in OWN else (PROGRAMS[program].fn, PROGRAMS[program].args)
    return TRANSFORMS[order].build(lambda f: amp(f, policy), fn, args)


@pytest.mark.parametrize("technique", Technique)
def test_each_technique_has_a_switch(technique: Technique) -> None:
    """A technique emits more with all the others on, and beside that alone on which it works."""
    name, program, order = (SHOWN | LOWERED)[technique]

    def count(xla: frozenset[Technique]) -> int:
        fn, args = amped(program, order, xla)
        if technique in SHOWN:
            return primitives(fn, *args)[name]
        platform = "tpu" if technique is Technique.NARROW_MOVES else "cuda"
        lowered = jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,))
        return lowered.as_text().count(name)

    base = frozenset({WORKS_ON[technique]} if technique in WORKS_ON else ())
    assert count(ALL_TECHNIQUES) > count(ALL_TECHNIQUES - {technique})
    assert count(base | {technique}) > count(base)


@pytest.mark.parametrize("technique", WORKS_ON)
def test_a_technique_without_the_one_it_works_on_does_nothing(technique: Technique) -> None:
    """What is emitted is what no technique at all emits."""
    _, program, order = (SHOWN | LOWERED)[technique]
    alone, none = (
        primitives(fn, *args)
        for fn, args in (amped(program, order, frozenset(xla)) for xla in ({technique}, ()))
    )
    assert alone == none


def test_each_technique_is_described() -> None:
    """The table of the documentation has a row for each, with the one that it works on."""
    text = (Path(__file__).parents[2] / "docs/explanation/fusion.md").read_text()
    rows = re.findall(r"^\| `([a-z-]+)` \| [A-Z].*?\. \|(?: `([a-z-]+)`)? \|$", text, re.M)
    works_on = {t.value: WORKS_ON[t].value if t in WORKS_ON else "" for t in Technique}
    assert dict(rows) == works_on


def test_techniques_are_part_of_a_policy() -> None:
    """They are read from words, written as JSON, and tell policies apart."""
    policy = POLICY.replace(xla=["rounding-barriers", Technique.FUSED_GROUPS])
    assert policy.xla == {Technique.ROUNDING_BARRIERS, Technique.FUSED_GROUPS}
    assert PrecisionPolicy.from_json(policy.to_json()) == policy
    assert PrecisionPolicy.custom({"compute": "bf16"}, xla=policy.xla).xla == policy.xla
    assert len({policy, POLICY, OFF}) == 3
    with pytest.raises(PolicyError, match="rounding-barriers"):
        POLICY.replace(xla="rounding-barrier")
