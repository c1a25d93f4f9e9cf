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


def _looped(x, w):
    for _ in range(2):
        with jax.named_scope("blocks"):
            x = jnp.tanh(x @ w)
    return x


def _highest(x, w):
    return jnp.dot(x, w, precision="highest")


def _of_complex(x, w):
    return jnp.abs(jax.lax.complex(x, x) @ jax.lax.complex(w, w))


def _rules(*rules):
    return _BF16.with_rules(*(Rule(precision="f32", **rule) for rule in rules))


IDLE = {
    "scope": (_layer, _rules({"scope": "hed"}), "head"),
    "one of a list": (_looped, _rules({"scope": "blocks.1"}), "share one scope.*named_scope"),
    "function": (_layer, _rules({"function": "jax.nn.softmx"}), "Did you mean 'softmax'"),
    "own function": (_layer, _rules({"function": "layer"}), "Functions of the program: _layer"),
    "second of two": (_layer, _rules({"scope": "head"}, {"scope": "tail"}), "scope=tail"),
    "fp8, a small dot": (_layer, "mxfp8", "not a multiple"),
    "fp8, no dot": (lambda x, w: jnp.sin(x) + w, "fp8_current", "no matrix product"),
    "explicit precision": (_highest, "mixed_bf16", "stay in float32 .*precision"),
    "complex": (_of_complex, "mixed_bf16", "stay in float32 .*not float32: left as written"),
    "all kept": (_layer, _rules({"kind": "compute"}), "stay in float32 .*rule: kind="),
    "no product": (lambda x, w: jnp.sin(x) + w, "mixed_bf16", "nothing in .*no matrix product"),
}
_WITHOUT_PRODUCT = "fp8, no dot", "no product"


def _mean(fn):
    """The same as a loss, and a function that no cache knows."""
    return lambda *args: jnp.mean(fn(*args))


PLACES = {
    "eager": amp,
    "jit around": lambda fn, policy: jax.jit(amp(fn, policy)),
    "jit inside": lambda fn, policy: amp(jax.jit(fn), policy),
    "gradient of it": lambda fn, policy: jax.grad(amp(fn, policy)),
    "of the gradient": lambda fn, policy: amp(jax.grad(fn), policy),
    "step": lambda fn, policy: jax.jit(amp(jax.value_and_grad(fn), policy)),
    "checkpoint": lambda fn, policy: jax.grad(jax.checkpoint(amp(fn, policy))),
    "map": lambda fn, policy: jax.vmap(amp(fn, policy), axis_size=2, in_axes=None),
    "scan": lambda fn, policy: (
        lambda *args: jax.lax.scan(lambda c, _: (amp(fn, policy)(*args), c), 0.0, length=2)
    ),
}


@pytest.mark.parametrize("case", IDLE)
def test_idle_parts_are_told_once(case):
    """One warning for each trace, which names the part and what there is instead."""
    fn, policy, word = IDLE[case]
    x, w = jnp.ones((6, 7)), jnp.ones(7) if case in _WITHOUT_PRODUCT else jnp.ones((7, 7))
    amped = amp(fn, policy)
    with pytest.warns(IdlePolicyWarning, match=word) as found:
        [amped(x, w) for _ in range(2)]
    assert len(found) == 1


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", ["scope", "fp8, a small dot", "all kept", "no product"])
def test_idle_parts_are_told_wherever_amp_stands(place, case):
    """Once for each trace, at the line of the user's that asked for it."""
    fn, policy, word = IDLE[case]
    x, w = jnp.ones((6, 7)), jnp.ones(7) if case in _WITHOUT_PRODUCT else jnp.ones((7, 7))
    made = PLACES[place](_mean(fn), policy)
    with pytest.warns(IdlePolicyWarning, match=word) as found:
        made(x, w)
    assert [warning.filename for warning in found] == [__file__]


@pytest.mark.parametrize(
    "fn",
    [
        _layer,
        lambda x, w: amp(_layer)(x, w) + 1,
        lambda x, w: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16),
        jax.value_and_grad(lambda x, w: _layer(x, w)[0, 0]),
    ],
    ids=["product", "amped already", "narrow already", "gradient"],
)
@pytest.mark.parametrize("policy", ["mixed_bf16", "mixed_f16", "always_f32"])
def test_what_is_not_idle_is_silent(fn, policy):
    """Nothing is said where something is lowered, or is narrow as it is written."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp(fn, policy)(jnp.ones((6, 7)), jnp.ones((7, 7)))
