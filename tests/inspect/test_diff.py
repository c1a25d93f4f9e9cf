"""Differences between policies."""

import json

import jax
import jax.numpy as jnp
import pytest

from jaxamp import PrecisionPolicy, Rule, diff
from jaxamp.errors import PolicyError
from jaxamp.policy.context import current_policy
from tests.inspect.programs import MLP, PROGRAMS, attention, mlp_loss, spec


def test_a_policy_does_not_differ_from_itself():
    """No change, and the value is false."""
    found = diff("mixed_f16", "mixed_f16")(mlp_loss)(*MLP)
    assert not found
    assert "no operation runs otherwise" in str(found)


def test_a_rule_changes_what_it_names():
    """Only operations inside of the rule's scope, or fed from there, run otherwise."""
    base = PrecisionPolicy.MIXED_BF16
    ruled = base.with_rules(Rule(precision="f32", scope="attention", kind="compute"))
    found = diff(base, ruled)(attention)(*PROGRAMS["attention"][1])
    dots = [c for c in found.changes if c.either.contraction]
    assert len(dots) == 3
    assert all(c.before.arithmetic == "bf16" and c.after.arithmetic == "f32" for c in dots)
    assert found.before.dots() == {"bf16": 3}
    assert found.after.dots() == {"f32": 3}


def test_text_has_lines_and_both_reasons():
    """The dearest line first, with why it was and why it is."""
    text = str(diff("always_f32", "mixed_bf16")(jax.grad(mlp_loss))(*MLP))
    assert "always_f32 → mixed_bf16" in text
    assert "dots in bf16" in text
    assert "convolutions" in text


def test_programs_that_depend_on_the_policy_are_compared():
    """An operation that only one side has is shown as such."""

    def program(x):
        doubled = jnp.sin(x) if current_policy().name == "mixed_f16" else x
        return doubled @ doubled

    found = diff("mixed_bf16", "mixed_f16")(program)(spec(4, 4))
    only = [c for c in found.changes if c.before is None]
    assert [c.either.primitive for c in only] == ["sin"]
    assert "not there → f32" in {c.words.partition(",")[0] for c in only}


def test_json_has_both_sides():
    """Totals of each side, and each changed operation twice."""
    data = json.loads(diff("mixed_bf16", "mixed_f16")(mlp_loss)(*MLP).to_json())
    assert data["before"]["dots"] == {"bf16": 2}
    assert data["after"]["dots"] == {"f16": 2}
    assert all(c["before"] and c["after"] for c in data["changes"])


def test_the_policies_come_first():
    """A function in the place of a policy is refused there, before anything is called."""
    with pytest.raises(PolicyError, match="is not a policy"):
        diff(mlp_loss, "mixed_f16")
