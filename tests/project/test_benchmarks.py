"""The benchmarks measure what they say: programs of the right size, traced afresh each time."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxamp
from benchmarks import fp8_step, recipes, techniques, trace_cost, waiting
from benchmarks.deviceless import pages
from benchmarks.peers import table
from benchmarks.peers.peers import PEERS
from benchmarks.recipe_models import RECIPES
from jaxamp.compiled import traffic
from jaxamp.compiled.hlo import parse
from jaxamp.compiled.targets import TARGETS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("size", [100, 1000])
def test_chain_has_the_equations_it_names(size):
    """The chain's length is within a tenth of what its row says."""
    jaxpr = jax.make_jaxpr(trace_cost.chain(size))(jnp.ones((2, 2)))
    assert trace_cost.count_equations(jaxpr) == pytest.approx(size, rel=0.1)


def test_a_fresh_function_is_traced_again():
    """No cache answers in place of the tracing that is timed."""
    calls = []

    def fn(x):
        calls.append(None)
        return x

    for _ in range(3):
        trace_cost.seconds_to_trace(lambda: trace_cost.fresh(fn), (1.0,))
    assert len(calls) == 3


@pytest.mark.product("name", every=3)
@pytest.mark.parametrize("name", trace_cost.MODELS)
def test_models_are_differentiable(name):
    """Each loss that is traced is one number, with a gradient for every parameter."""
    loss, args = trace_cost.MODELS[name]()
    value, grads = jax.eval_shape(jax.value_and_grad(loss), *args)
    assert value.shape == ()
    assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, args[0])


def test_the_scanned_transformer_has_its_layers():
    """One scan, over as many layers as its row says."""
    loss, args = trace_cost.MODELS[f"{trace_cost.SCANNED} layers, scanned"]()
    eqns = jax.make_jaxpr(loss)(*args).jaxpr.eqns
    assert [e.params["length"] for e in eqns if e.primitive.name == "scan"] == [trace_cost.SCANNED]


@pytest.mark.long
def test_memory_of_a_plan_is_measured_beside_its_jaxpr():
    """A plan takes some memory, and no multiple of what the jaxpr takes."""
    trace_cost.memory_ratio(trace_cost.chain(10), (jnp.ones((2, 2)),))  # loads the planner
    assert 0.1 < trace_cost.memory_ratio(trace_cost.chain(1000), (jnp.ones((2, 2)),)) < 2


def test_a_wait_begins_with_nothing_traced():
    """No round finds what an earlier one has traced or compiled, and each has all stages."""
    calls = []

    def fn(x):
        calls.append(None)
        return x * 2

    shapes = (jax.ShapeDtypeStruct((3,), jnp.float32),)
    found = [waiting.seconds_of_stages(fn, shapes) for _ in range(3)]
    assert len(calls) == 3
    assert all(seconds[stage] > 0 for seconds in found for stage in waiting.STAGES)


def test_a_wait_is_the_least_of_whole_rounds():
    """Not the sum of the least of its stages."""
    times = [(1.0, 0.0, 5.0), (2.0, 0.0, 3.0), (9.0, 0.0, 1.0)]
    found = waiting.least([dict(zip(waiting.STAGES, t, strict=True)) for t in times])
    assert found == {"whole": 5.0, "trace": 2.0, "lower": 0.0, "compile": 3.0}


def test_the_peers_shown_are_the_figures_kept():
    """The table is made from the JSON, of every peer, and not edited since."""
    figures = json.loads((ROOT / "docs/peers.json").read_text())
    assert [peer.name for peer in PEERS] == list(figures)
    page = (ROOT / "docs/peers.md").read_text()
    shown = page.partition(table.BEGIN)[2].partition(table.END)[0]
    assert shown.strip() == table.markdown(figures)


def test_the_strongest_hand_is_shown_as_its_figures_are_kept():
    """The tables of the README and of the page are made from the JSON, and not edited since."""
    rows = json.loads(pages.FIGURES.read_text())
    for page, made in pages.TABLES.items():
        assert page.read_text() == pages.with_table(page.read_text(), made(rows))
        assert made(rows) in page.read_text()


def test_programs_of_techniques_are_compiled_once(tmp_path, monkeypatch):
    """A technique that a program has no use for changes nothing; a second run compiles nothing."""
    compiled = []

    def figures(target, fn, args):
        compiled.append(target.name)
        return dict.fromkeys(techniques.FIGURES, len(compiled))

    monkeypatch.setattr(techniques, "figures", figures)
    path, variants = tmp_path / "figures.json", ["all", techniques.NONE, "reversed-weights"]
    for _ in range(2):
        techniques.measure(TARGETS["h200"], ["lstm"], variants, path, small=True)
        assert compiled == ["h200"] * 4  # two orders, with all techniques and with none
    found = techniques.ratios(json.loads(path.read_text()))
    assert {*found["reversed-weights"].values()} == {None}
    assert [ratio["bytes"] for ratio in found[techniques.NONE].values()] == [3 / 1, 4 / 2]


def test_the_table_of_techniques_is_written_between_its_markers(tmp_path):
    """What was there is replaced; what was not measured is a dash, what is the same a dot."""
    figures = {"a": (100, 10, 4), "b": (150, 5, 5), "c": (200, 20, 8)}
    rows = [
        ["lstm", "f", "all", "a"],
        ["lstm", "f", "fused-groups", "b"],
        ["lstm", "f", "row-broadcasts", "a"],
        ["vit", "f", "all", "c"],
        ["vit", "f", "fused-groups", "c"],
    ]
    found = {
        "programs": {p: dict(zip(techniques.FIGURES, f, strict=True)) for p, f in figures.items()},
        "rows": rows,
        "jax": "0.10.2",
        "date": "2026-11-05",
    }
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- techniques h200 -->\nold\n<!-- end of techniques h200 -->\nafter\n"
    )
    for _ in range(2):
        techniques.write(page, "h200", techniques.described(TARGETS["h200"], found))
    text = page.read_text()
    assert text.startswith("before\n<!-- techniques h200 -->\n")
    assert text.endswith("<!-- end of techniques h200 -->\nafter\n")
    assert "old" not in text
    assert "Not measured: transformer, scanned, resnet50." in text
    assert text.count("5 November 2026") == text.count("| without") == 1
    cells = [
        [cell.strip() for cell in line.split("|")[2:-1]]
        for line in text.splitlines()
        if line.startswith(("| fused-groups", "| row-broadcasts"))
    ]
    assert cells == [
        ["1.50 / 0.50", "·"],
        ["·", "–"],
    ]


@pytest.mark.parametrize(("name", "policy"), [("mlp", "auto_mixed"), ("regression", "fp8_current")])
def test_recipes_learn(name, policy):
    """A few steps under a policy make the loss of a batch smaller, from weights of the seed."""
    recipe = RECIPES[name]()
    rng = np.random.default_rng(0)
    start, batch = recipe.init(rng), recipe.batch(rng)
    params = recipes.trained(recipe, policy, seed=0, steps=40)
    assert recipe.loss(params, batch) < 0.9 * recipe.loss(start, batch)


def test_recipes_scale_small_dots():
    """Their `fp8_current` quantizes dots that the preset leaves alone."""
    recipe = RECIPES["vit"]()
    rng = np.random.default_rng(0)
    args = recipe.init(rng), recipe.batch(rng)

    def text(policy):
        return str(jax.make_jaxpr(jaxamp.amp(recipe.loss, policy=policy))(*args))

    assert "f8_e4m3" in text(recipes.policy("fp8_current"))
    assert "f8_e4m3" not in text("fp8_current")


def test_recipes_are_judged_by_the_spread():
    """A mean within the spread of float32's seeds is not marked, one beyond is."""
    scores = {key: [0.9, 0.92, 0.91] for key in recipes.POLICIES}
    scores["fp8_current"] = [0.8, 0.8, 0.8]
    (line,) = recipes.rows({"mlp": scores})
    marked = [name for name, cell in zip(recipes.HEADER, line, strict=True) if "✗" in cell]
    assert marked == ["fp8_current"]
    assert len(RECIPES) >= 15


PASSES = """
ENTRY %main (x: bf16[8,4], w: bf16[4,4]) -> bf16[4,8] {
  %x = bf16[8,4] parameter(0)
  %w = bf16[4,4] parameter(1)
  %fused = (f32[8], f8e5m2[8,4]) custom-call(%x), metadata={op_name="jvp()/mul"}
  %rows = f32[8] get-tuple-element(%fused), index=0
  %narrow = f8e5m2[8,4] get-tuple-element(%fused), index=1
  %moved = (f8e5m2[8,4], f32[8]) tuple(%narrow, %rows)
  %held = f8e5m2[8,4] get-tuple-element(%moved), index=0
  %dot = bf16[8,4] dot(%x, %w), lhs_contracting_dims={1}, metadata={op_name="jvp()/dot"}
  ROOT %back = bf16[4,8] custom-call(%held, %w), metadata={op_name="transpose(jvp())/mul"}
}
"""


STEP = """
ENTRY %main (p: f32[4096,512], x: f8e4m3fn[4096,4096]) -> f32[4096,512] {
  %p = f32[4096,512] parameter(0)
  %x = f8e4m3fn[4096,4096] parameter(1)
  %narrow = bf16[4096,512] convert(%p)
  %turned = f8e4m3fn[4096,4096] transpose(%x), dimensions={1,0}
  %dot = bf16[4096,512] dot(%turned, %narrow), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %new = f32[4096,512] add(%p, %dot)
  ROOT %out = f32[4096,1024] custom-call(%dot)
}
"""


def test_what_waits_for_the_backward_pass_is_what_it_reads():
    """The arrays that one pass writes and the other reads, through tuples."""
    module = parse(PASSES)
    found = list(traffic.kernels(module))
    assert fp8_step.kept(found) == {"f8e5m2": 32}


def test_what_kernels_of_a_wide_step_are_for():
    """Products, layouts that are made of 8 bits alone, arrays of a parameter's shape, the rest."""
    module = parse(STEP)
    causes = [fp8_step.cause(kernel, module, {(4096, 512)}) for kernel in traffic.kernels(module)]
    assert causes == ["weights", "layouts", "products", "AdamW", "between"]
