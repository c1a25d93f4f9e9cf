"""What the core does by itself; in the whole package, and in what is left without its features."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxamp
from jaxamp import Precision, PrecisionPolicy, Rule, amp, keep_precision, plan_of
from jaxamp.core.features import fields, lacking
from jaxamp.errors import PolicyError
from tests import tolerances
from tests.project.removable import FEATURES

POLICIES = "bf16", "f16", "mixed_f16_conservative", "c=bf16,o=f32"
W = np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)


def _loss(w: jax.Array) -> jax.Array:
    def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        x = jax.checkpoint(lambda x: jax.nn.softmax(jnp.tanh(x @ w) @ w.T))(x)
        with keep_precision("f32"):
            return x + jnp.cumsum(x, -1), None

    x, _ = jax.lax.scan(layer, jnp.ones((8, 64)), None, length=2)
    return jnp.mean(x**2)


@pytest.mark.parametrize("word", POLICIES)
def test_both_orders_agree(word: str) -> None:
    """Loops, checkpoints, regions that are kept, and both orders of `amp` and `grad`."""
    low = PrecisionPolicy.parse(word).base.value
    wanted, nudged = (
        np.asarray(jax.jit(jax.grad(_loss))(w)) for w in (W, tolerances.moved(W, low))
    )
    bound = tolerances.bound("deep", 1, low, wanted, nudged)
    for fn in (jax.grad(amp(_loss, word)), amp(jax.grad(_loss), word)):
        got = fn(W)
        assert got.dtype == np.float32
        assert np.abs(got - wanted).max() <= bound


def test_rules_decide() -> None:
    """A rule keeps products wide, and they are narrow without it."""
    rule = Rule(precision="f32", kind="compute")
    for policy in (PrecisionPolicy.MIXED_BF16, PrecisionPolicy.MIXED_BF16.with_rules(rule)):
        dots = [d for d in plan_of(_loss, policy)(W).decisions() if d.primitive == "dot_general"]
        assert {d.operand for d in dots} == {Precision.F32 if policy.rules else Precision.BF16}


@pytest.mark.parametrize(
    ("name", "value"), [("scaling", {}), ("xla", ()), ("fused_attention", True)]
)
def test_a_field_of_a_feature(name: str, value: object) -> None:
    """A policy has the fields of the features that are here, and says which the others need."""
    if name in fields():
        assert name in PrecisionPolicy.MIXED_BF16.to_json()
        assert not lacking(name)
        return
    with pytest.raises(PolicyError, match="taken out of this installation"):
        PrecisionPolicy.MIXED_BF16.replace(**{name: value})
    with pytest.raises(AttributeError, match="taken out of this installation"):
        getattr(PrecisionPolicy.MIXED_BF16, name)


def test_a_name_of_an_absent_feature() -> None:
    """The error says which folder is missing, which need not be the one that has the name."""
    package = Path(jaxamp.__file__).parent
    missing = [room for room in ("inspect", "compiled") if not (package / room).is_dir()]
    if not missing:
        assert callable(jaxamp.report)
        return
    needed = "|".join(missing)
    with pytest.raises(AttributeError, match=f"report needs jaxamp's feature '({needed})', which"):
        _ = jaxamp.report


def test_a_word_that_asks_the_device() -> None:
    """The policy that suits the device is found, or a folder is named that is missing."""
    package = Path(jaxamp.__file__).parent
    rooms = [room for room in FEATURES if not (package / room).is_dir()]
    if not {"training", "numerics", "inspect"} & {*rooms}:
        assert PrecisionPolicy.parse("auto").name in ("always_f32", "mixed_bf16", "mixed_f16")
        return
    with pytest.raises(PolicyError, match=f"auto needs jaxamp's feature '({'|'.join(rooms)})', w"):
        PrecisionPolicy.parse("auto")


def test_what_is_no_policy_needs_no_feature() -> None:
    """A name of jaxamp that is taken for a policy's word is unknown, whatever is installed."""
    with pytest.raises(PolicyError, match="Unknown policy 'report'") as found:
        PrecisionPolicy.parse("report")
    assert "taken out" not in str(found.value)


def test_a_recipe() -> None:
    """A word that quantizes is known, or its feature is named."""
    if "scaling" in fields():
        assert PrecisionPolicy.parse("fp8_current").is_scaled
        return
    with pytest.raises(PolicyError, match="needs jaxamp's feature 'quantized'"):
        PrecisionPolicy.parse("fp8_current")
    policy = PrecisionPolicy.custom({"compute": "f8_e4m3"})
    with pytest.raises(PolicyError, match="needs jaxamp's feature 'quantized'"):
        amp(_loss, policy)
