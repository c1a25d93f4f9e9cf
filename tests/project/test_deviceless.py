"""The counter of the deviceless benchmark, on small programs whose traffic is known."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.collectives.count import collectives
from benchmarks.deviceless.models import PACKAGES
from benchmarks.deviceless.models.fused import FUSED
from benchmarks.deviceless.models.model import HAND
from jaxamp.compiled import hlo, traffic

LOOP = """HloModule loop

%body.1 (state.1: (s32[], f32[4,8], f32[8])) -> (s32[], f32[4,8], f32[8]) {
  %state.1 = (s32[], f32[4,8]{1,0}, f32[8]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %rows.1 = f32[4,8]{1,0} get-tuple-element(%state.1), index=1
  %sum.1 = f32[8]{0} get-tuple-element(%state.1), index=2
  %add.1 = f32[8]{0} fusion(%sum.1, %rows.1, %i.1), kind=kLoop, calls=%add_row.1
  ROOT %next.1 = (s32[], f32[4,8]{1,0}, /*index=2*/f32[8]{0}) tuple(%i.1, %rows.1, %add.1)
}

%condition.1 (state.2: (s32[], f32[4,8], f32[8])) -> pred[] {
  %state.2 = (s32[], f32[4,8]{1,0}, f32[8]{0}) parameter(0)
  %i.2 = s32[] get-tuple-element(%state.2), index=0
  %bound.1 = s32[] constant(4)
  ROOT %less.1 = pred[] compare(%i.2, %bound.1), direction=LT
}

%add_row.1 (sum.2: f32[8], rows.2: f32[4,8], i.3: s32[]) -> f32[8] {
  %sum.2 = f32[8]{0} parameter(0)
  %rows.2 = f32[4,8]{1,0} parameter(1)
  %i.3 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  %row.1 = f32[1,8]{1,0} dynamic-slice(%rows.2, %i.3, %zero.1), dynamic_slice_sizes={1,8}
  %row.2 = f32[8]{0} bitcast(%row.1)
  ROOT %add.2 = f32[8]{0} add(%sum.2, %row.2)
}

ENTRY %main.1 (start.1: (s32[], f32[4,8], f32[8])) -> (s32[], f32[4,8], f32[8]) {
  %start.1 = (s32[], f32[4,8]{1,0}, f32[8]{0}) parameter(0)
  ROOT %loop.1 = (s32[], f32[4,8]{1,0}, f32[8]{0}) while(%start.1), condition=%condition.1, body=%body.1
}
"""  # noqa: E501

ROW = 8 * 4
INDEX = 4


def test_a_loop_counts_as_often_as_it_runs_and_reads_one_row_each_time():
    """Four runs, each reading the sum, one row of the matrix and the index, writing the sum."""
    counted = traffic.measure(hlo.parse(LOOP))
    assert counted.kernels == 4
    assert counted.bytes == 4 * (ROW + ROW + INDEX + ROW)
    assert counted.unknown_loops == 0


def test_products_in_a_loop_count_as_often_as_it_runs():
    """A vector and a matrix of eight by eight: 128 FLOPs in each of four runs."""
    product = "dot(%sum.2, %square.1), lhs_contracting_dims={0}, rhs_contracting_dims={0}"
    text = LOOP.replace("add(%sum.2, %row.2)", product)
    text = text.replace(
        "  ROOT %add.2",
        "  %square.1 = f32[8,8]{1,0} broadcast(%row.2), dimensions={1}\n  ROOT %add.2",
    )
    assert traffic.measure(hlo.parse(text)).flops == 4 * 2 * 8 * 8


def test_a_loop_without_a_bound_counts_once_and_is_reported():
    """A condition that compares two values that change says nothing about the trip count."""
    unknown = LOOP.replace("compare(%i.2, %bound.1)", "compare(%bound.1, %i.2)")
    counted = traffic.measure(hlo.parse(unknown))
    assert counted.kernels == 1
    assert counted.unknown_loops == 1


def test_the_trip_count_that_the_compiler_states_is_used():
    """XLA's annotation is believed before the condition is read."""
    stated = LOOP.replace(
        "body=%body.1", 'body=%body.1, backend_config={"known_trip_count":{"n":"9"}}'
    )
    assert traffic.measure(hlo.parse(stated)).kernels == 9


def test_a_kernel_with_a_configuration_of_several_lines_ends_no_loop():
    """A TPU's kernel is followed by JSON, of which a line begins with a brace."""
    kernel = """  %kernel.1 = f32[8]{0} custom-call(%add.1), backend_config={"custom_call_config":{
"xprof_metadata":"{\\"block_q\\": 256}"
}}, metadata={op_name="splash"}
  ROOT %next.1"""
    text = LOOP.replace("  ROOT %next.1", kernel)
    assert traffic.measure(hlo.parse(text)).kernels == 4 * 2


def test_bytes_between_devices_are_not_guessed_where_a_loop_is_unknown():
    """Counted once they would be too few."""
    reduced = LOOP.replace("add(%sum.2, %row.2)", "all-reduce(%row.2), channel_id=1")
    reduced = reduced.replace("f32[8]", "f32[512]")
    assert collectives(hlo.parse(reduced)) == {("all-reduce", "f32"): 4 * 512 * 4}
    unknown = reduced.replace("compare(%i.2, %bound.1)", "compare(%bound.1, %i.2)")
    with pytest.raises(ValueError, match=r"how often loop\.1 runs"):
        collectives(hlo.parse(unknown))


def test_of_a_conditional_the_branch_that_moves_most_counts():
    """Nobody knows which one runs."""
    text = """HloModule choice

%copied.1 (x.1: f32[8]) -> f32[8] {
  %x.1 = f32[8]{0} parameter(0)
  ROOT %copy.1 = f32[8]{0} copy(%x.1)
}

%kept.1 (x.2: f32[8]) -> f32[8] {
  ROOT %x.2 = f32[8]{0} parameter(0)
}

ENTRY %main.1 (i.1: s32[], y.1: f32[8]) -> f32[8] {
  %i.1 = s32[] parameter(0)
  %y.1 = f32[8]{0} parameter(1)
  ROOT %choice.1 = f32[8]{0} conditional(%i.1, %y.1, %y.1), branch_computations={%kept.1, %copied.1}
}
"""
    assert traffic.measure(hlo.parse(text)).bytes == ROW + ROW


def test_an_update_in_place_writes_only_the_update():
    """A fusion whose root updates its operand neither reads nor writes the rest of it."""
    text = """HloModule update

%put.1 (rows.1: f32[4,8], row.1: f32[1,8], i.1: s32[]) -> f32[4,8] {
  %rows.1 = f32[4,8]{1,0} parameter(0)
  %row.1 = f32[1,8]{1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  ROOT %put.2 = f32[4,8]{1,0} dynamic-update-slice(%rows.1, %row.1, %i.1, %i.1)
}

ENTRY %main.1 (rows.2: f32[4,8], row.2: f32[1,8], i.2: s32[]) -> f32[4,8] {
  %rows.2 = f32[4,8]{1,0} parameter(0)
  %row.2 = f32[1,8]{1,0} parameter(1)
  %i.2 = s32[] parameter(2)
  ROOT %put.3 = f32[4,8]{1,0} fusion(%rows.2, %row.2, %i.2), kind=kLoop, calls=%put.1
}
"""
    assert traffic.measure(hlo.parse(text)).bytes == ROW + INDEX + ROW
    viewed = "%view.1 = f32[1,8]{1,0} bitcast(%row.2)\n  ROOT %put.3 = f32[1,8]{1,0} "
    head, _, _ = text.partition("ROOT %put.3")
    twice = f"{head}{viewed}add(%row.2, %view.1)\n}}\n"  # one array in memory is read
    assert traffic.measure(hlo.parse(twice)).bytes == ROW + ROW


@pytest.mark.parametrize(
    "first",
    ["slice(%rows.1), slice={[0:2], [0:8]}", "concatenate(%one.1, %other.1), dimensions={0}"],
)
def test_a_slice_in_a_kernel_reads_what_the_last_one_returns(first: str):
    """Cotangents of what is joined again and again are slices of slices, in one kernel."""
    text = """HloModule slices

%kernel.1 (rows.1: f32[4,8]) -> f32[1,8] {
  %rows.1 = f32[4,8]{1,0} parameter(0)
  %one.1 = f32[1,8]{1,0} slice(%rows.1), slice={[0:1], [0:8]}
  %other.1 = f32[1,8]{1,0} slice(%rows.1), slice={[3:4], [0:8]}
  %both.1 = f32[2,8]{1,0} FIRST
  %twice.1 = f32[2,8]{1,0} add(%both.1, %both.1)
  ROOT %row.1 = f32[1,8]{1,0} slice(%twice.1), slice={[1:2], [0:8]}
}

ENTRY %main.1 (rows.2: f32[4,8]) -> f32[1,8] {
  %rows.2 = f32[4,8]{1,0} parameter(0)
  ROOT %row.2 = f32[1,8]{1,0} fusion(%rows.2), kind=kLoop, calls=%kernel.1
}
"""
    assert traffic.measure(hlo.parse(text.replace("FIRST", first))).bytes == ROW + ROW


def test_scratch_space_and_on_chip_buffers_are_not_counted():
    """A library call's workspace is no traffic, nor is a buffer in memory space 1."""
    text = """HloModule call

ENTRY %main.1 (a.1: bf16[8,8], b.1: bf16[8,8]) -> (bf16[8,8], s8[4096]) {
  %a.1 = bf16[8,8]{1,0} parameter(0)
  %b.1 = bf16[8,8]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  ROOT %call.1 = (bf16[8,8]{1,0}, s8[4096]{0}) custom-call(%a.1, %b.1), custom_call_target="__cublas$gemm"
}
"""  # noqa: E501
    counted = traffic.measure(hlo.parse(text))
    assert counted.bytes == 2 * 8 * 8 * 2
    assert counted.dots == {"bf16": 1}


def test_a_prefetch_of_a_slice_reads_the_slice():
    """Beside what it copies to the chip, a started copy names its operand among its results."""
    text = """HloModule prefetch

ENTRY %main.1 (a.1: f32[8,8], b.1: f32[8,8]) -> f32[8,8] {
  %a.1 = f32[8,8]{1,0} parameter(0)
  %b.1 = f32[8,8]{1,0:T(8,128)S(1)} parameter(1)
  %slice-start.1 = ((f32[8,8]{1,0}), f32[2,8]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%a.1), slice={[0:2], [0:8]}
  %slice-done.1 = f32[2,8]{1,0:T(8,128)S(1)} slice-done(%slice-start.1)
  %copy-start.1 = (f32[8,8]{1,0}, f32[8,8]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) copy-start(%b.1)
  ROOT %copy-done.1 = f32[8,8]{1,0} copy-done(%copy-start.1)
}
"""  # noqa: E501
    read, written = 2 * 8 * 4, 8 * 8 * 4
    assert traffic.measure(hlo.parse(text)).bytes == read + written


@pytest.mark.parametrize("steps", [3, 7])
def test_a_compiled_scan_counts_every_step(steps: int):
    """The dots of a real program's loop count by its trips."""

    def run(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    shapes = (jnp.ones((16, 16)), jnp.ones((steps, 16, 16)))
    text = jax.jit(run).lower(*shapes).compile().as_text()
    assert text is not None
    counted = traffic.measure(hlo.parse(text))
    assert sum(counted.dots.values()) == steps


@pytest.mark.long
@pytest.mark.parametrize("name", PACKAGES)
def test_models_of_packages_by_hand_are_those_models(name: str):
    """Each version has the loss and the gradient of the plain one, up to bfloat16."""
    model = PACKAGES[name].small
    params, batch = model.init(jax.random.key(0)), model.sample(jax.random.key(1))
    loss, grads = jax.jit(jax.value_and_grad(model.plain, has_aux=True))(params, batch)
    size = sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))
    assert {HAND, FUSED} <= model.hands.keys()
    for hand in model.hands.values():
        value, found = jax.jit(jax.value_and_grad(hand, has_aux=True))(params, batch)
        difference = jax.tree.map(lambda x, y: jnp.sum((x - y) ** 2), found, grads)
        assert value[0] == pytest.approx(loss[0], rel=2**-7)
        assert sum(jax.tree.leaves(difference)) < 0.05**2 * size


@pytest.mark.product
@pytest.mark.parametrize("name", PACKAGES)
def test_hands_of_models_have_their_gradients(name: str):
    """One number, and float32 cotangents of all parameters."""
    model = PACKAGES[name].small
    params = jax.eval_shape(model.init, jax.random.key(0))
    batch = jax.eval_shape(model.sample, jax.random.key(0))
    for fn in (model.plain, *model.hands.values()):
        (value, _), grads = jax.eval_shape(jax.value_and_grad(fn, has_aux=True), params, batch)
        assert value.shape == ()
        assert jax.tree.map(lambda x: (x.shape, x.dtype), grads) == jax.tree.map(
            lambda x: (x.shape, x.dtype), params
        )
