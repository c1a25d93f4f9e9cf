"""Reports against counts made without the plan, and what a report shows."""

import functools
import json
import re
from collections import Counter

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxamp import (
    CastConfig,
    PrecisionPolicy,
    Rule,
    amp,
    diff,
    explain,
    plan_of,
    probe,
    report,
)
from jaxamp.errors import InspectionError
from jaxamp.inspect.operation import rows_of, total
from jaxamp.quantized.fp8_products import Lowering, verify_lowering
from jaxamp.quantized.scaling import Scaling
from jaxamp.tools.tune import tune
from tests.inspect import independent
from tests.inspect.programs import MLP, PROGRAMS, branching, layer, mlp_loss, spec

POLICIES = ("mixed_bf16", "mixed_f16", "always_f16")
SINGLE = [name for name in PROGRAMS if name not in ("scanned", "calls")]


def _step(name: str):
    fn, args = PROGRAMS[name]
    return jax.grad(lambda *a: jnp.sum(fn(*a))), args


@pytest.mark.product("name")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_casts_are_those_of_the_rewritten_program(name: str, policy: str):
    """Casts inserted, loops included, are the conversions that `amp` adds to the jaxpr."""
    fn, args = PROGRAMS[name]
    fn = jax.value_and_grad(lambda *a, fn=fn: jnp.sum(fn(*a)))
    added = independent.casts(amp(fn, policy), args) - independent.casts(fn, args)
    assert report(fn, policy)(*args).casts == added > 0


def test_casts_that_are_shared_or_not_needed():
    """Counted by hand: of a value that is read twice, of weights, and of what is narrow already."""

    def shared(x, a, b):
        h = jnp.sin(x)  # in float32: rounded for one product, found again by the other
        return h @ a + h @ b

    def cancelled(x, a, b):
        h = x @ a  # stored in bfloat16, as both products read it; one finds `a` rounded too
        return jnp.sum(h @ a) + jnp.sum(h @ b)

    args = spec(4, 4), spec(4, 4), spec(4, 4)
    assert report(shared)(*args).casts == report(cancelled)(*args).casts == 3


@pytest.mark.product("name")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", SINGLE)
def test_dots_are_those_of_the_lowered_program(name: str, policy: str):
    """Dots and convolutions per format are those that reach a GPU's compiler."""
    fn, args = _step(name)
    assert report(fn, policy)(*args).dots() == independent.lowered_dots(amp(fn, policy), args)


@pytest.mark.parametrize("name", SINGLE)
def test_dots_of_the_gradient_of_an_amped_function(name: str):
    """The other order: what differentiation made of a rewritten function is counted as well."""
    fn, args = PROGRAMS[name]
    step = jax.grad(lambda *a: jnp.sum(amp(fn)(*a)))
    assert report(step, "always_f32")(*args).dots() == independent.lowered_dots(step, args)


def test_totals_are_of_attributes_that_there_are():
    """A word that is none is named, with the likely one."""
    with pytest.raises(InspectionError, match="Did you mean 'kind'"):
        report(layer)(*PROGRAMS["layer"][1]).by("kinds")


def test_flops_of_a_dot():
    """Two for each multiplication: 4 by 8 by 16, and one for each tanh."""
    found = report(layer)(*PROGRAMS["layer"][1])
    assert found.total.flops == 2 * 4 * 8 * 16 + 4 * 16
    assert found.by("kind")["Compute",].flops == 1024


def test_flops_of_an_attention():
    """Two products forward and five backward, in both orders."""

    def attend(q, k, v):
        return jnp.sum(jnp.sin(jax.nn.dot_product_attention(q, k, v)))

    x = jnp.ones((2, 16, 3, 8))
    fused = PrecisionPolicy.MIXED_BF16.replace(fused_attention=True)
    product = 2 * 2 * 3 * 16 * 16 * 8
    for fn, products in ((attend, 2), (jax.grad(attend, (0, 1, 2)), 7)):
        assert report(fn, fused)(x, x, x).by("kind")["Compute",].flops == products * product
    inside = report(jax.grad(amp(attend, fused), (0, 1, 2)), "always_f32")(x, x, x)
    assert total(inside.contractions).flops == 7 * product


def test_flops_of_products_by_groups_and_of_their_gradient():
    """Each row meets the matrix of its own group, forward and in both cotangents."""
    sizes = jnp.array([2, 6], jnp.int32)

    def fn(x, w):
        return jax.lax.ragged_dot(x, w, sizes).sum()

    found = report(jax.grad(fn, argnums=(0, 1)))(spec(8, 16), spec(2, 16, 4))
    assert [o.each.flops for o in found.contractions] == 3 * [2 * 8 * 16 * 4]


def test_flops_of_a_convolution_and_of_its_gradient():
    """The transpose of a strided convolution does not count the zeros between its inputs."""
    fn, args = PROGRAMS["convolution"]
    forward = report(fn)(*args).by("kind")["Compute",].flops
    assert forward == 2 * (2 * 4 * 4 * 4) * (3 * 3 * 3)
    both = report(jax.grad(fn, argnums=(0, 1)))(*args).by("kind")["Compute",].flops
    assert both == 3 * forward


def test_a_loop_counts_as_often_as_it_runs():
    """Twice the layers cost twice the FLOPs and bytes, with the same lines."""
    fn, (x, _) = PROGRAMS["scanned"]
    five, ten = (report(fn)(x, spec(n, 8, 8)) for n in (5, 10))
    assert len(five.operations) == len(ten.operations)
    compute = [r.by("kind")["Compute",] for r in (five, ten)]
    assert compute[1] == 2 * compute[0]
    assert compute[0].operations == 5


def test_what_only_another_carry_needs_counts():
    """A scan's carry that no result is made of, but the next iteration of one that is."""

    def fn(x, w):
        def step(carry, _):
            total, state = carry
            return (total + state, jnp.tanh(state @ w)), None

        (total, _), _ = jax.lax.scan(step, (x, x), None, length=5)
        return total

    assert sum(report(fn)(spec(4, 4), spec(4, 4)).dots().values()) == 5


def test_a_loop_of_unknown_length_is_named():
    """A while loop counts once, and its line is in the report."""

    def halve(x, w):
        return jax.lax.while_loop(lambda h: jnp.sum(h) > 1.0, lambda h: 0.5 * (h @ w), x)

    found = report(halve)(spec(4, 4), spec(4, 4))
    assert found.dots() == {"bf16": 1} or found.dots() == {"f32": 1}
    (place,) = found.unknown_loops
    assert "while_loop" in place.text
    assert str(place) in str(found).replace("\n", "")


def test_only_the_dearest_branch_counts():
    """Both branches are listed; the one that multiplies is what the totals have."""
    found = report(branching)(jax.ShapeDtypeStruct((), jnp.bool_), spec(4, 4), spec(4, 4))
    assert sum(found.dots().values()) == 2
    runs = {o.runs for o in found.operations}
    assert runs == {0, 1}


def test_an_amp_inside_is_seen():
    """What `amp` has rewritten already is reported as it is, forward and backward."""
    found = report(jax.grad(amp(mlp_loss)), "always_f32")(*MLP)
    assert set(found.dots()) == {"bf16"}
    assert {o.reason for o in found.contractions} == {"rewritten already, by an amp inside"}
    assert {o.backward for o in found.contractions} == {True, False}


def test_source_lines_and_scopes():
    """A dot carries its line, its scope and its direction."""
    found = report(jax.grad(lambda x, w: jnp.sum(layer(x, w))))(*PROGRAMS["layer"][1])
    forward, backward = found.contractions
    for dot in (forward, backward):
        assert dot.place.text == "return jnp.tanh(x @ w)"
        assert dot.place.function == "layer"
        assert dot.scope == "layer"
    assert (forward.backward, backward.backward) == (False, True)


def test_a_library_function_that_is_traced_once_is_seen_at_each_call():
    """`jnp` functions are jitted and traced once; each call has its own line in the report."""

    def twice(x):
        one = jnp.clip(x, 0.0, 1.0)
        two = jnp.clip(one + x, 0.0, 1.0)
        return two

    lines = {o.place.text for o in report(twice)(spec(4)).operations}
    assert {"one = jnp.clip(x, 0.0, 1.0)", "two = jnp.clip(one + x, 0.0, 1.0)"} <= lines


def test_a_library_around_the_user_s_code_hides_no_line():
    """A jit of equinox's around the program: every operation still has the user's own line."""
    fn, args = PROGRAMS["mlp"]
    places = {o.place for o in report(eqx.filter_jit(fn))(*args).operations}
    assert {place.function for place in places} == {"mlp_loss"}


def test_a_library_function_has_the_scope_of_each_call():
    """Calls of one jitted function in several scopes, forward and backward, are told apart."""

    def layers(x):
        for index in range(4):
            with jax.named_scope(f"layer{index}"):
                x = x * x.var()
        return x.sum()

    counts = Counter(o.scope for o in report(jax.grad(layers))(spec(8)).operations)
    assert len({counts[f"layer{index}"] for index in (1, 2)}) == 1
    assert abs(counts["layer0"] - counts["layer3"]) < counts["layer3"] / 4


def _checkpointed(x, w):
    for name in ("one", "two"):
        with jax.named_scope(name), jax.named_scope(name):  # twice as the user has it
            x = jax.checkpoint(layer)(x, w)
    return jnp.sum(x)


def _checkpointed_in_a_loop(x, w):
    def body(carry, _):
        with jax.named_scope("body"):
            return jax.checkpoint(layer)(carry, w), None

    with jax.named_scope("around"):
        return jnp.sum(jax.lax.scan(body, x, None, length=3)[0])


@pytest.mark.parametrize(
    ("program", "scopes"),
    [
        (_checkpointed, {"one/one/layer", "two/two/layer"}),
        (_checkpointed_in_a_loop, {"around/body/layer"}),
    ],
)
@pytest.mark.parametrize("compiled", [False, True], ids=["grad", "jit"])
def test_what_is_computed_again_is_in_the_scope_that_it_was_in(program, scopes, compiled):
    """JAX writes the names around a checkpoint twice in its backward pass; a report does not."""
    step = jax.grad(program, (0, 1))
    args = spec(8, 8), spec(8, 8)
    inside = jax.named_scope("step")(jax.jit(step)) if compiled else step
    expected = {f"step/{s}" for s in scopes} if compiled else scopes
    dots = report(inside)(*args).contractions
    assert {o.scope for o in dots if o.backward} == {o.scope for o in dots} == expected
    decided = [d for d in plan_of(inside)(*args).decisions() if d.primitive == "dot_general"]
    assert [d.scope for d in decided] == [o.scope for o in dots]


@jax.jit
def _shared(x, w):
    return jnp.tanh(x @ w)


def _in_a_loop(x, w):
    return jax.lax.scan(lambda h, _: (_shared(h, w), None), x, length=3)[0]


@pytest.mark.parametrize("call", [_shared, _in_a_loop], ids=["call", "loop"])
@pytest.mark.parametrize("direction", [lambda f: f, jax.grad], ids=["forward", "both"])
def test_calls_that_run_alike_keep_their_own_reasons(call, direction):
    """A rule that says what the policy says anyway is the reason in its scope, and only there."""

    def program(x, w):
        for name in ("one", "two", "three"):
            with jax.named_scope(name):
                x = call(x, w)
        return jnp.sum(x @ w)

    rule = Rule(precision="bf16", scope="two", kind="compute", label="as I say")
    policy = PrecisionPolicy.MIXED_BF16.with_rules(rule)
    args = spec(8, 8), spec(8, 8)
    found = report(direction(program), policy)(*args)
    ruled = {o.scope for o in found.contractions if o.reason == "rule: as I say"}
    assert ruled == {"two"}
    assert all(o.reason == "rule: as I say" for o in found.contractions if o.scope == "two")
    decided = [
        d for d in plan_of(direction(program), policy)(*args).decisions() if not d.plan.inner
    ]
    assert [(d.scope, d.reason) for d in decided] == [
        (o.scope, o.reason) for o in found.operations if o.each.operations
    ]
    (note,) = explain(program, policy, where="two")(*args).notes[:1]
    assert (note.reason, note.scope) == ("rule: as I say", "two")


def test_a_rule_that_matched_nothing_is_named():
    """The rule's words are in the value, the text and the JSON."""
    policy = PrecisionPolicy.MIXED_BF16.with_rules(Rule(precision="f32", scope="nowhere"))
    found = report(layer, policy)(*PROGRAMS["layer"][1])
    assert found.unmatched_rules == ("scope=nowhere -> f32",)
    assert "rule matched nothing: scope=nowhere -> f32" in str(found)
    assert json.loads(found.to_json())["unmatched_rules"] == ["scope=nowhere -> f32"]


def test_guards_that_fired_are_counted():
    """A softmax is an island; the mean at the end gains nothing."""
    fn, args = PROGRAMS["attention"]
    guards = report(fn)(*args).guards
    assert guards["reduction-island"] > 0
    assert guards["no-gain"] > 0


def test_a_print_of_no_arrays_is_shown():
    def speaking(x, w):
        jax.debug.print("here")
        return x @ w

    args = spec(4, 8), spec(8, 2)
    (said,) = [o for o in report(speaking)(*args).operations if o.primitive == "debug_print"]
    assert (said.arithmetic, said.operands, said.results) == ("", (), ())
    assert "debug_print" in str(explain(speaking, everything=True)(*args))
    assert str(diff("mixed_bf16", "mixed_f16")(speaking)(*args))


def test_json_has_every_operation():
    """Totals in the JSON are the sums of the operations in it."""
    found = report(mlp_loss)(*MLP)
    data = json.loads(found.to_json())
    flops = sum(o["runs"] * o["each"]["flops"] for o in data["operations"])
    assert data["total"]["flops"] == flops == found.total.flops
    dot = next(o for o in data["operations"] if o["contraction"])
    assert dot["operands"] == ["bf16[4,8]", "bf16[8,16]"]
    assert dot["accumulation"] == "f32"
    assert dot["text"] == 'hidden = jax.nn.relu(x @ params["w1"])'


def _deep(weights, x):
    for index, w in enumerate(weights):
        with jax.named_scope(f"block{index}"):
            x = jnp.tanh(x @ w)
    with jax.named_scope("head"):
        return jnp.sum(jnp.dot(x, weights[0], precision="highest"))


def test_the_first_line_is_the_share_of_narrow_products():
    """Counted by hand: of five equal products four are narrow."""
    found = report(_deep)([spec(8, 8)] * 4, spec(2, 8))
    assert found.headline == "80 % of the FLOPs of matrix products in bf16"
    assert str(found).splitlines()[0] == f"_deep under mixed_bf16: {found.headline}"
    assert report(jnp.sin)(spec(4)).headline == "no matrix products, so nothing runs narrow"


def test_equal_rows_are_one_row():
    """Four layers are one row with their number, and the sum of their FLOPs."""
    found = report(_deep)([spec(8, 8)] * 5, spec(2, 8))
    rows = rows_of(found.contractions)
    assert [(row.count, row.scope, row.tally.flops) for row in rows] == [
        (4, "block*", 4 * 2 * 2 * 8 * 8),
        (1, "block4", 2 * 2 * 8 * 8),  # returns float32, for the head
        (1, "head", 2 * 2 * 8 * 8),
    ]
    assert re.search(r"× 4 .*block\*", str(found.full()))


def test_rows_that_differ_stay_apart():
    """Other types, or names that differ in more than numbers."""

    def two(x, w, v):
        with jax.named_scope("up1"):
            h = x @ w
        with jax.named_scope("up2"):
            h = h @ v
        with jax.named_scope("down1"):
            return h @ v

    rows = rows_of(report(two)(spec(2, 8), spec(8, 4), spec(4, 4)).contractions)
    assert [(row.count, row.scope) for row in rows] == [(1, "up1"), (1, "up2"), (1, "down1")]


def test_what_waits_for_the_backward_pass_is_counted():
    """By hand: each layer's product, of which tanh is computed again, and three of its results.

    The fourth layer's result is read last, after it has been computed again.
    """

    def loss(weights, x):
        for index, w in enumerate(weights):
            with jax.named_scope(f"block{index}"):
                x = jnp.tanh(x @ w)
        with jax.named_scope("end"):
            return jnp.sum(x @ weights[0])

    step, args = jax.grad(loss), ([spec(8, 8)] * 4, spec(2, 8))
    assert report(step)(*args).residual_bytes() == {("block*", "bf16"): 7 * 2 * 8 * 2}
    wide = report(step, "always_f32")(*args).residual_bytes()
    assert {word for _, word in wide} == {"f32"}
    assert wide["block*", "f32"] >= 4 * 2 * 8 * 4
    assert report(loss)(*args).residual_bytes() == {}


def test_what_waits_in_a_loop_counts_for_each_iteration():
    """A scan stacks what its backward pass reads; its scope is that inside."""
    fn, (x, weights) = PROGRAMS["scanned"][0], PROGRAMS["scanned"][1]
    few = report(jax.grad(fn, argnums=1))(x, weights).residual_bytes()
    more = report(jax.grad(fn, argnums=1))(x, spec(2 * weights.shape[0], *weights.shape[1:]))
    assert more.residual_bytes()["layer", "bf16"] == 2 * few["layer", "bf16"] > 0


def test_text_lists_every_dot():
    """At a terminal: shape, dtypes, accumulation, line and share of the FLOPs."""
    text = str(report(jax.value_and_grad(mlp_loss))(*MLP).full())
    for words in ("bf16[4,8] × bf16[8,16]", "bf16[4,16]", "bwd", "programs.py:", "94.7 %"):
        assert words in text


def test_bytes_of_an_update_in_place():
    """An update reads and writes what changes; a slice reads what it gives."""

    def update(x, row):
        return jax.lax.dynamic_update_slice(x, row, (0, 0)), jax.lax.slice(x, (0, 0), (1, 8))

    found = report(update, "always_f32")(spec(100, 8), spec(1, 8))
    assert found.total.bytes == 2 * 32 + 2 * 4 + 2 * 32


def test_notebooks_show_what_the_terminal_shows():
    """Everything that is asked is quoted text in colours; nothing in it is run."""
    fn, args = PROGRAMS["layer"]
    numbers = jnp.linspace(0, 1, 32).reshape(4, 8), jnp.linspace(0, 1, 128).reshape(8, 16)
    answers = (
        explain(fn)(*args),
        diff("always_f32", "mixed_f16")(fn)(*args),
        probe(fn)(*numbers),
        tune(fn, numbers),
        verify_lowering(fn, "fp8_current")(*args),
    )
    for shown in answers:
        html = shown._repr_html_()
        assert html.startswith("<pre")
        assert "layer" in html


def test_fp8_of_an_amped_step_is_looked_for():
    """It is compiled without its history; where no product is large enough, the report says so."""
    step = amp(jnp.dot, "fp8_delayed")
    (lowering,) = report(step, target="here")(spec(8, 8), spec(8, 8)).lowerings
    assert "no FP8 products claimed" in str(lowering)


FLOAT_SCALES = PrecisionPolicy.custom(
    {"compute": CastConfig("f8_e4m3", (1, 128))}, scaling=Scaling(small=())
)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("fp8_current", ""),
        ("fp8_block", "multiplied in bf16"),
        ("mxfp8", "multiplied in bf16"),
        ("nvfp4", "multiplied in bf16"),
        (FLOAT_SCALES, "multiplied in bf16"),
    ],
)
def test_quantized_products_in_bf16_are_named_first(policy, words):
    """The headline, the first note and each reason say so."""
    large = spec(4096, 4096)
    found = report(jnp.dot, policy)(large, large)
    notes = explain(jnp.dot, policy)(large, large).notes
    (product,) = found.contractions
    assert product.emulated == words
    assert (f"({words})" in found.headline) is bool(words)
    first = next(iter(found.notes), "")
    assert ("multiplied in bf16" in first) is bool(words)
    assert product.reason.startswith(words or "scaled")
    assert notes[0].reason == product.reason
    assert f" {found.policy}: {found.headline}" in " ".join(str(found).splitlines()[:2])


def test_a_chip_without_fp8_is_named_first():
    """Before how many products were found there comes why."""
    for target, first in {"a100": "multiplies no 8-bit floats", "h200": "3 FP8 products"}.items():
        lowering = Lowering(program="f", target=target, claimed=3, found=0, missing=())
        assert first in lowering.lines[0]


def test_modules_and_partials_have_names():
    """A module is called what its class is called, a partial what it calls."""
    linear = eqx.nn.Linear(4, 3, key=jax.random.key(0))
    assert report(linear)(spec(4)).program == "Linear"
    assert report(amp(linear))(spec(4)).program == "Linear"
    fn, (x, w) = PROGRAMS["layer"]
    assert report(functools.partial(fn, w=w))(x).program == "layer"


def test_a_gather_is_shown_as_it_travels():
    """Rounded once, to be sent, and what its product reads of it is narrow."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))

    def loss(w, x):
        return jax.lax.pmean(jnp.sum(x @ jax.lax.all_gather(w, "d", tiled=True)), "d")

    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(P("d"), P("d")), out_specs=P())
    operations = {o.primitive: o for o in report(mapped)(spec(64, 32), spec(16, 64)).operations}
    gather, product = operations["all_gather"], operations["dot_general"]
    assert gather.results == product.operands[1:] == ("bf16[64,32]",)
    assert product.each.bytes == 2 * 64 * 4 + 64 * 32 * 2 + 2 * 32 * 4


def test_a_rule_that_an_explicit_precision_stops_is_named() -> None:
    """With the line that asks for the precision, in a report."""
    ruled = PrecisionPolicy.MIXED_BF16.with_rules(Rule(precision="bf16", kind="compute"))
    (dot,) = report(lambda x: jnp.dot(x, x, precision="highest"), ruled)(jnp.eye(4)).contractions
    assert "asked for in" in dot.reason
    assert "not followed: rule: kind=Compute -> bf16" in dot.reason
