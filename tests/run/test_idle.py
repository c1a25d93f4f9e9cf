"""A policy, or a part of one, that came to nothing is not silent."""

import warnings

import jax
import jax.numpy as jnp
import pytest

from jaxamp import PrecisionPolicy, Rule, amp
from jaxamp.errors import IdlePolicyWarning

_BF16 = PrecisionPolicy.AUTO_MIXED_BF16


def _layer(x, w):
    with jax.named_scope("head"):
        return jax.nn.softmax(x @ w)


def _highest(x, w):
    return jnp.dot(x, w, precision="highest")


def _rules(*rules):
    return _BF16.with_rules(*(Rule(precision="f32", **rule) for rule in rules))


IDLE = {
    "scope": (_layer, _rules({"scope": "hed"}), "head"),
    "function": (_layer, _rules({"function": "encode"}), "function=encode"),
    "second of two": (_layer, _rules({"scope": "head"}, {"scope": "tail"}), "scope=tail"),
    "fp8, a small dot": (_layer, "mxfp8", "no multiple"),
    "fp8, no dot": (lambda x, w: jnp.sin(x) + w, "fp8_current", "no product"),
    "explicit precision": (_highest, "mixed_bf16", "stays wide"),
    "all kept": (_layer, _rules({"kind": "compute"}), "stays wide"),
}


@pytest.mark.parametrize("case", IDLE)
def test_idle_parts_are_told_once(case):
    """One warning for each trace, which names the part and what there is instead."""
    fn, policy, word = IDLE[case]
    x, w = jnp.ones((6, 7)), jnp.ones((7, 7)) if fn is not IDLE["fp8, no dot"][0] else jnp.ones(7)
    amped = amp(fn, policy)
    with pytest.warns(IdlePolicyWarning, match=word) as found:
        [amped(x, w) for _ in range(2)]
    assert len(found) == 1


@pytest.mark.parametrize(
    "fn",
    [
        _layer,
        lambda x, w: x + 1,
        lambda x, w: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16),
        jax.value_and_grad(lambda x, w: _layer(x, w)[0, 0]),
    ],
    ids=["product", "no product", "narrow already", "gradient"],
)
@pytest.mark.parametrize("policy", ["mixed_bf16", "mixed_f16", "always_f32"])
def test_what_is_not_idle_is_silent(fn, policy):
    """Nothing is said where something is lowered, or where there is no product to lower."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp(fn, policy)(jnp.ones((6, 7)), jnp.ones((7, 7)))
