"""Rules name functions and classes of JAX and of libraries, as their users see them."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxamp import PrecisionPolicy, Rule, plan_of
from jaxamp.errors import RuleError


class _Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(nn.LayerNorm()(nn.Dense(8)(x)))


class _Nnx(nnx.Module):
    def __init__(self):
        self.norm = nnx.LayerNorm(8, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.head(self.norm(self.head(x)))


class _Equinox(eqx.Module):
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __call__(self, x):
        return self.head(self.norm(self.head(x)))


X = jnp.ones((4, 8))


def _linen():
    net = _Linen()
    return net.apply, net.init(jax.random.key(0), X), X


def _equinox():
    net = _Equinox(eqx.nn.LayerNorm(8), eqx.nn.Linear(8, 8, key=jax.random.key(0)))
    return jax.vmap(net), X


MODULES = {"linen": _linen, "nnx": lambda: (_Nnx(), X), "equinox": _equinox}


def _decided(fn, args, function):
    """Names of the primitives that a rule decides, and how many operations there are."""
    policy = PrecisionPolicy.MIXED_BF16.with_rules(Rule(precision="f32", function=function))
    decisions = list(plan_of(fn, policy)(*args).decisions())
    return {d.primitive for d in decisions if d.reason.startswith("rule")}


@pytest.mark.parametrize("library", MODULES)
def test_a_class_of_a_library(library):
    """A layer's class stands for what its methods compute, and for nothing else."""
    fn, *args = MODULES[library]()
    decided = _decided(fn, args, "LayerNorm")
    assert "rsqrt" in decided
    assert "dot_general" not in decided
    assert _decided(fn, args, "Dense" if library == "linen" else "Linear") >= {"dot_general"}


@pytest.mark.parametrize(
    ("function", "primitive"),
    [("softmax", "exp"), ("logsumexp", "log"), ("gelu", "tanh"), ("mean", "reduce_sum")],
)
@pytest.mark.parametrize("grad", [False, True])
def test_a_function_of_jax(function, primitive, grad):
    """A function of jax.nn or jax.numpy stands for what it computes, compiled or not."""

    def loss(x):
        y = jax.nn.gelu(jax.nn.softmax(x @ x))
        return jnp.mean(jax.nn.logsumexp(y, axis=0) + jnp.sin(y))

    decided = _decided(jax.grad(loss) if grad else loss, (jnp.ones((8, 8)),), function)
    assert primitive in decided or grad
    assert decided
    assert not decided & {"sin", "cos", "dot_general"}


@pytest.mark.parametrize("name", ["softmax", "logsumexp", "einsum"])
def test_a_function_is_no_primitive(name):
    """The error says which key to write, and that key is accepted."""
    with pytest.raises(RuleError, match=f"function='{name}'"):
        Rule(precision="f32", primitive=name)
    Rule(precision="f32", function=name)
