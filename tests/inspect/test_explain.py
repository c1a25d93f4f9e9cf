"""Annotated source: the right notes at the right lines."""

import json

import jax
import jax.numpy as jnp
import pytest

from jaxamp import PrecisionPolicy, Rule, explain
from jaxamp.errors import InspectionError
from tests.inspect.programs import MLP, PROGRAMS, attention, mlp_loss, spec


def test_each_line_has_its_precision_and_reason():
    """The product is bf16 by the policy; what follows the last product is f32."""
    notes = explain(mlp_loss)(*MLP).notes
    by_text = {(n.place.text, n.arithmetic): n for n in notes}
    hidden = by_text['hidden = jax.nn.relu(x @ params["w1"])', "bf16"]
    assert dict(hidden.primitives)["dot_general"] == 1
    assert hidden.reason == "Compute is bf16 in the policy"
    loss = by_text['return jnp.mean((hidden @ params["w2"] - y) ** 2)', "f32"]
    assert "reduce_sum" in dict(loss.primitives)


def test_the_source_is_shown_with_the_notes_below_their_lines():
    """The whole function is printed, each note after the line that it is about."""
    lines = str(explain(jax.grad(mlp_loss))(*MLP)).splitlines()
    at = next(i for i, line in enumerate(lines) if "hidden = jax.nn.relu" in line)
    assert any("def mlp_loss" in line for line in lines[:at])
    assert "bf16" in lines[at + 1]
    assert "(fwd, bwd) — Compute is bf16 in the policy" in lines[at + 1]


def test_long_words_of_formats_are_words():
    """A format's name does not run into the first operation's."""
    found = explain(lambda x: x[jnp.arange(3) + 1])(spec(8))
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
    with pytest.raises(InspectionError, match=r"no jax\.named_scope at all"):
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
    exec("def typed(x, w):\n    return jnp.tanh(x @ w)", names)
    found = explain(names["typed"])(spec(2, 3), spec(3, 4))
    assert any("dot_general" in n.what for n in found.notes)
    shown = str(found)
    assert "<string> (source not available)" in shown
    assert "    2 │ bf16 dot_general — operands in bf16" in shown


def test_json_has_the_text_of_each_line():
    """Every note carries its line and what it says."""
    notes = json.loads(explain(mlp_loss)(*MLP).to_json())["notes"]
    assert 'hidden = jax.nn.relu(x @ params["w1"])' in {n["text"] for n in notes}
