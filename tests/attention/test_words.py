"""What turns fused attention off, and what is said where it is refused."""

import jax
import jax.numpy as jnp
import pytest

import jaxamp
from tests.attention import near_misses, spellings  # noqa: F401
from tests.attention.corpus import NEAR_MISSES, SPELLINGS
from tests.attention.finding import FUSED, ORDERS, found


def _policies():
    plain = FUSED
    yield "off", plain.replace(fused_attention=False)
    yield "a rule", plain.replace(rules=[jaxamp.Rule(scope="attention", precision="f32")])
    yield "float32", jaxamp.PrecisionPolicy.ALWAYS_F32


@pytest.mark.parametrize("order", ORDERS)
def test_words_turn_it_off(order):
    """A field of the policy, a rule for the scope, and a policy of float32."""
    program = SPELLINGS["under_a_name"]
    for word, policy in _policies():
        assert not found(program, order, policy).any, word
    for word in ("f16", "auto_mixed"):
        policy = jaxamp.PrecisionPolicy.parse(word).replace(fused_attention=True)
        assert found(program, order, policy).any, word


_values_alone = pytest.param(
    2, marks=pytest.mark.xfail(reason="no cotangent of scores says that it is an attention")
)


@pytest.mark.parametrize("operand", [0, 1, _values_alone])
def test_a_part_of_the_gradient_is_enough(operand):
    """The gradient of queries alone, of keys alone and of values alone."""
    fn, args = SPELLINGS["einsum_words_first"].built
    gradient = jax.grad(lambda *xs: jnp.sum(jnp.sin(fn(*xs))), operand)
    plan = jaxamp.plan_of(gradient, FUSED)(*args)
    assert [(a.forward, a.backward) for a in plan.attentions] == [(True, True)]


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_refused_says_why(order):
    """A reason in words."""
    for name, word in {"weights_returned": "weight", "large_heads": "300"}.items():
        reasons = found(NEAR_MISSES[name], order).refused
        assert any(word in reason for reason in reasons), reasons
