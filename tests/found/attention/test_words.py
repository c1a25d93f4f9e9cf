"""What turns fused attention off, and what is said where it is refused."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jaxamp
from jaxamp.kernels.target_gpu import TargetGpu, lowering_for
from tests.found.attention import near_misses, spellings  # noqa: F401
from tests.found.attention.corpus import NEAR_MISSES, SPELLINGS
from tests.found.attention.finding import FUSED, ORDERS, found


def _policies(plain=FUSED):
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


DEFAULT = jaxamp.PrecisionPolicy.MIXED_BF16


@pytest.mark.parametrize("order", ORDERS)
def test_it_is_on_where_the_device_has_a_kernel(order):
    """By default on a Hopper and on a TPU; on a CPU, and on a Volta, programs are what they are."""
    hopper, volta = TargetGpu((9, 0), 91200), TargetGpu((7, 0), 91200)
    program = SPELLINGS["under_a_name"]
    assert not found(program, order, DEFAULT).any
    with lowering_for(volta):
        assert not found(program, order, DEFAULT).any
    with lowering_for(hopper):
        for word in ("bf16", "f16", "mixed_f16_conservative", "always_f16", "fp8_current"):
            assert found(program, order, jaxamp.PrecisionPolicy.parse(word)).any, word
        for _, policy in _policies(DEFAULT):
            assert not found(program, order, policy).any


def test_a_kernel_is_asked_for_its_backward_pass_too():
    """Shapes that only the forward pass takes stay as they are."""

    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, k, v)

    q, k = (jax.ShapeDtypeStruct((1, 64, n, 256), jnp.float32) for n in (2, 1))
    with lowering_for(TargetGpu((8, 0), 91200)):  # heads of 256 are Hopper's, groups cuDNN's
        plan = jaxamp.plan_of(attend, DEFAULT)(q, k, k)
        assert not plan.found
        assert "cuDNN" in plan.refused[0].obstacle


def test_a_program_on_a_cpu_is_the_same_with_and_without():
    """The default there is what `fused_attention=False` is."""
    fn, args = SPELLINGS["jax_nn_causal"].built
    default, off = (
        jax.jit(jaxamp.amp(fn, policy)).lower(*args).as_text()
        for policy in (DEFAULT, DEFAULT.replace(fused_attention=False))
    )
    assert default == off


@pytest.mark.parametrize("message", ["INTERNAL: cuDNN graph failed", "INTERNAL: out of memory"])
def test_a_late_refusal_names_the_scope_and_the_word(message, monkeypatch):
    """What a compiler says of a kernel gets a note; what else it says gets none."""
    fn, args = SPELLINGS["under_a_name"].built

    def refuse(*_):
        raise jax.errors.JaxRuntimeError(message)

    amped = jaxamp.amp(fn, DEFAULT.replace(fused_attention=True))
    monkeypatch.setattr("jaxamp.run.runner.function_result", refuse)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        amped(*args)
    notes = "".join(getattr(caught.value, "__notes__", []))
    assert ("fused_attention=False" in notes and "attention, " in notes) == ("cuDNN" in message)


_values_alone = pytest.param(
    2, marks=pytest.mark.xfail(reason="no cotangent of scores says that it is an attention")
)


@pytest.mark.parametrize("operand", [0, 1, _values_alone])
def test_a_part_of_the_gradient_is_enough(operand):
    """The gradient of queries alone, of keys alone and of values alone."""
    fn, args = SPELLINGS["einsum_words_first"].built
    gradient = jax.grad(lambda *xs: jnp.sum(jnp.sin(fn(*xs))), operand)
    plan = jaxamp.plan_of(gradient, FUSED)(*args)
    assert [(a.forward, a.backward) for a in plan.found] == [(True, True)]


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_refused_says_why(order):
    """A reason in words."""
    words = {
        "weights_returned": "weight",
        "large_heads": "300",
        "scores_of_two_products": "a sum of two products",
    }
    for name, word in words.items():
        reasons = found(NEAR_MISSES[name], order).refused
        assert any(word in reason for reason in reasons), reasons


def test_what_looks_little_like_attention_is_not_told():
    """A softmax of what no product has made is refused in silence."""
    assert found(NEAR_MISSES["efficient_attention"], "forward").refused == ()


def test_one_product_in_float32_is_enough():
    """Scores that the program asks to be exact stay so."""
    q, k, v = (jnp.ones((2, 32, 4, 8)) for _ in range(3))

    def attend(q, k, v):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest")
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    assert not jaxamp.plan_of(attend, FUSED)(q, k, v).found


def test_a_rule_may_be_made_before_anything_is_planned():
    """The planner, which knows the primitive, is loaded later."""
    rule = "import jaxamp; jaxamp.Rule(primitive='attention_forward', precision='f32')"
    subprocess.run([sys.executable, "-c", rule], check=True)
