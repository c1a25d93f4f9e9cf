"""Annotated source: the right notes at the right lines."""

import json
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

from jaxamp import PrecisionPolicy, Rule, explain, report
from jaxamp.errors import InspectionError
from tests.inspect.programs import MLP, PROGRAMS, attention, mlp_loss, spec


def test_each_line_has_its_precision_and_reason():
    """The product is bf16 by the policy; what follows the last product is f32."""
    notes = explain(mlp_loss)(*MLP).notes
    by_text = {(n.place.text, n.arithmetic): n for n in notes}
    hidden = by_text['hidden = jax.nn.relu(x @ params["w1"])', "bf16"]
    assert dict(hidden.primitives)["dot_general"] == 1
    assert hidden.reason == "products and convolutions are bf16 in the policy"
    loss = by_text['return jnp.mean((hidden @ params["w2"] - y) ** 2)', "f32"]
    assert "reduce_sum" in dict(loss.primitives)


def test_the_source_is_shown_with_the_notes_below_their_lines():
    """The whole function is printed on request, each note after the line that it is about."""
    lines = str(explain(jax.grad(mlp_loss), everything=True)(*MLP)).splitlines()
    at = next(i for i, line in enumerate(lines) if "hidden = jax.nn.relu" in line)
    assert any("def mlp_loss" in line for line in lines[:at])
    assert "bf16" in lines[at + 1]
    assert "(fwd, bwd) — products and convolutions are bf16 in the policy" in lines[at + 1]


def test_long_words_of_formats_are_words():
    """A format's name does not run into the first operation's."""
    found = explain(lambda x: x[jnp.arange(3) + 1], everything=True)(spec(8))
    assert " int32 " in str(found)


def test_where_shows_one_scope():
    """Only what is inside the scope has notes, forward and backward."""
    args = PROGRAMS["attention"][1]
    found = explain(jax.grad(attention), where="attention")(*args)
    assert {n.scope for n in found.notes} == {"attention"}
    assert len(found.notes) < len(explain(jax.grad(attention))(*args).notes)


def test_a_scope_that_is_not_there_is_an_error_that_names_those_that_are():
    """A slip of the pen is answered with the nearest scope."""
    with pytest.raises(InspectionError, match="Did you mean 'attention'"):
        explain(attention, where="attentoin")(*PROGRAMS["attention"][1])


def test_a_program_without_scopes_says_so():
    """There is nothing to list."""
    with pytest.raises(InspectionError, match=r"neither jax\.named_scope nor modules"):
        explain(mlp_loss, where="layer")(*MLP)


def test_a_rule_is_the_reason():
    """What the user decided is given as the reason, in the rule's own words."""
    policy = PrecisionPolicy.MIXED_BF16.with_rules(Rule(precision="f32", scope="attention"))
    found = explain(attention, policy, where="attention")(*PROGRAMS["attention"][1])
    assert {n.arithmetic for n in found.notes} == {"f32"}
    assert any(n.reason == "rule: scope=attention -> f32" for n in found.notes)


def test_code_without_a_file_is_explained_too():
    """A function that was typed in has no source; its notes have the numbers of their lines."""
    names: dict = {"jnp": jnp}
    exec(compile("def typed(x, w):\n    return jnp.tanh(x @ w)", "<typed>", "exec"), names)
    found = explain(names["typed"])(spec(2, 3), spec(3, 4))
    assert any("dot_general" in n.what for n in found.notes)
    shown = str(found)
    assert "<typed> (source not available)" in shown
    assert "    2 │ bf16 product — operands in bf16" in shown


def test_a_line_outside_of_functions_is_shown_once(tmp_path):
    """A script's lines are neighbours of each other, and each has its notes once."""
    script = tmp_path / "script.py"
    script.write_text(
        "import jax.numpy as jnp\n"
        "first = lambda x, w: jnp.tanh(x @ w)\n"
        "second = lambda x, w: jnp.sin(first(x, w))\n"
        "third = lambda x, w: jnp.cos(second(x, w))\n"
        "def last(x, w):\n"
        "    return third(x, w) * 2.0\n"
        "net = lambda x, w: last(x, w).sum()\n"
    )
    names: dict = {}
    exec(compile(script.read_text(), script, "exec"), names)
    shown = str(explain(names["net"])(spec(2, 3), spec(3, 4)))
    numbers = re.findall(r"^ +(\d+) │", shown, re.MULTILINE)
    assert numbers == ["2", "3", "4", "6", "7"]


def _noisy(params, x, key):
    """A docstring.

    It has lines of its own.
    """
    keep = jax.random.bits(jax.random.fold_in(key, 1), x.shape) > 7
    rows = jnp.arange(x.shape[0])[::-1]
    x = jnp.where(keep, x[rows], 0.0)

    return jnp.sum(x @ params)


def test_only_lines_that_compute_floats_are_shown():
    """No docstrings, keys, indices, casts or moved data; names are those of jax.numpy."""
    args = spec(4, 4), spec(4, 4), jax.eval_shape(jax.random.key, 0)
    shown = str(explain(jax.grad(_noisy))(*args))
    numbered = [line.partition("│")[2].strip() for line in shown.splitlines() if "│" in line]
    source = [line for line in numbered if not line.startswith(("f32", "bf16"))]
    assert source == ["x = jnp.where(keep, x[rows], 0.0)", "return jnp.sum(x @ params)"]
    assert "product" in shown
    assert not re.search(r"dot_general|add_any|select_n|broadcast|key<|uint32|docstring", shown)
    assert "--all" in shown
    everything = str(explain(jax.grad(_noisy), everything=True)(*args))
    assert "It has lines of its own." in everything
    assert "key = " not in everything
    assert "uint32" in everything


def test_who_asked_for_an_explicit_precision_is_said():
    """The call that names it, in one's own code or through a library's; or the configuration."""

    def own(x, w):
        return jnp.sin(jnp.einsum("ij,jk->ik", x, w, precision="highest") @ w)

    def chosen(x, w):
        precise = jax.lax.Precision.HIGH
        return jnp.dot(x, w, precision=precise)

    linen = nn.Dense(4, precision="highest")
    variables = linen.init(jax.random.key(0), jnp.ones((4, 4)))

    def module(x, w):
        return linen.apply(variables, x) @ w

    def configured(x, w):
        with jax.default_matmul_precision("float32"):
            return x @ w

    def reason(fn):
        notes = explain(fn)(spec(4, 4), spec(4, 4)).notes
        (found,) = {n.reason for n in notes if n.reason.startswith("precision=")}
        return found

    assert re.search(r"precision='highest' is asked for in test_explain.py:\d+", reason(own))
    assert re.search(r"precision='high' is asked for in test_explain.py:\d+", reason(chosen))
    assert "precision='highest' is asked for in linear.py:" in reason(module)
    assert "by jax.default_matmul_precision" in reason(configured)


@pytest.mark.parametrize("layers", [2, 12])
def test_a_training_step_is_explained_on_two_screens(layers):
    """Transformer, dropout, AdamW, however many layers: not more than a hundred lines."""
    block = {"qkv": (32, 96), "out": (32, 32), "up": (32, 64), "down": (64, 32)}
    params = [{name: spec(*shape) for name, shape in block.items()} for _ in range(layers)]
    optimizer = optax.adamw(1e-3)

    def norm(x):
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)

    def attend(p, x):
        q, k, v = jnp.split(norm(x) @ p["qkv"], 3, axis=-1)
        weights = jax.nn.softmax(q @ k.swapaxes(-1, -2) / 32**0.5)
        return weights @ v @ p["out"]

    def loss(params, x, key):
        for p, k in zip(params, jax.random.split(key, len(params)), strict=True):
            x = x + attend(p, x)
            y = jax.nn.gelu(norm(x) @ p["up"])
            y = jnp.where(jax.random.bernoulli(k, 0.9, y.shape), y / 0.9, 0.0)
            x = x + y @ p["down"]
        return jnp.mean(x**2)

    def step(params, state, x, key):
        grads = jax.grad(loss)(params, x, key)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state, key = jax.eval_shape(optimizer.init, params), jax.eval_shape(jax.random.key, 0)
    shown = str(explain(step)(params, state, spec(2, 8, 32), key)).splitlines()
    assert 20 < len(shown) <= 100


def test_json_has_the_text_of_each_line():
    """Every note carries its line and what it says."""
    notes = json.loads(explain(mlp_loss)(*MLP).to_json())["notes"]
    assert 'hidden = jax.nn.relu(x @ params["w1"])' in {n["text"] for n in notes}


def test_an_explanation_needs_the_plan_alone(monkeypatch):
    """Only reports count casts, for which the program is emitted once more."""
    monkeypatch.setattr("jaxamp.inspect.walk.run_plan", None)
    assert explain(mlp_loss)(*MLP).notes
    with pytest.raises(TypeError):
        report(mlp_loss)(*MLP)
