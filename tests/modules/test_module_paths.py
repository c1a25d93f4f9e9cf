"""Scopes of modules: rules and reports know the modules of every library without named scopes."""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxamp import PrecisionPolicy, Rule, plan_of

X = jnp.ones((2, 4, 8))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.lin = nnx.Linear(8, 8, rngs=rngs)

    def mixed(self, x):
        return self.lin(x)

    def __call__(self, x):
        return x + jax.nn.silu(self.mixed(self.norm(x)))


class NnxNet(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(2)])
        self.first, self.head = NnxBlock(rngs), nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        for _, block in enumerate(self.blocks):
            x = block(x)
        return self.head(self.blocks[0](self.first(x)))


class EqxBlock(eqx.Module):
    norm: eqx.nn.LayerNorm
    lin: eqx.nn.Linear

    def __init__(self, key):
        self.norm, self.lin = eqx.nn.LayerNorm(8), eqx.nn.Linear(8, 8, key=key)

    def mixed(self, x):
        return jax.vmap(self.lin)(x)

    def __call__(self, x):
        return x + jax.nn.silu(self.mixed(jax.vmap(lambda row: self.norm(row))(x)))


class EqxNet(eqx.Module):
    blocks: list
    first: EqxBlock
    head: eqx.nn.Linear

    def __init__(self):
        key = jax.random.key(0)
        self.blocks = [EqxBlock(key) for _ in range(2)]
        self.first, self.head = EqxBlock(key), eqx.nn.Linear(8, 2, key=key)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(self.blocks[0](self.first(x)))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, name="head")(nn.LayerNorm(name="norm")(x))


def _haiku(x):
    return hk.Linear(2, name="head")(hk.LayerNorm(-1, True, True, name="norm")(x))


def _program(library):
    """Return a loss of a model of the library, and its arguments."""
    if library == "nnx":
        return lambda net, x: jnp.mean(net(x) ** 2), (NnxNet(), X)
    if library == "equinox":
        return lambda net, x: jnp.mean(jax.vmap(net)(x) ** 2), (EqxNet(), X)
    if library == "haiku":
        net = hk.without_apply_rng(hk.transform(_haiku))
        return net.apply, (net.init(jax.random.key(0), X), X)
    return LinenNet().apply, (LinenNet().init(jax.random.key(0), X), X)


def _gradient(library):
    fn, args = _program(library)
    if library == "nnx":
        return nnx.value_and_grad(fn), args
    if library == "equinox":
        return eqx.filter_jit(eqx.filter_value_and_grad(fn)), args
    return jax.value_and_grad(lambda *args: jnp.sum(fn(*args))), args


@pytest.mark.parametrize("library", ["nnx", "equinox", "linen", "haiku"])
def test_a_rule_names_a_module(library):
    """The products of the head, forward and backward, and no others, follow the rule."""
    fn, args = _gradient(library)
    policy = PrecisionPolicy.MIXED_BF16.with_rules(
        Rule(precision="f32", scope="head", kind="compute")
    )
    plan = plan_of(fn, policy)(*args)
    dots = [d for d in plan.decisions() if d.primitive == "dot_general"]
    f32 = [d.scope for d in dots if d.operand.short == "f32"]
    assert len(f32) == 3
    assert all("head" in scope.split("/") for scope in f32)
    assert plan.unmatched_rules == ()


@pytest.mark.parametrize("library", ["nnx", "equinox"])
@pytest.mark.parametrize("call", [_program, _gradient])
def test_paths_are_those_of_attributes(library, call):
    """Loops, indices, vmap, own methods and jitted functions lead to the attribute's path."""
    fn, args = call(library)
    plan = plan_of(fn)(*args)
    net = type(args[0]).__name__
    dots = {d.scope.partition("/eqx")[0] for d in plan.decisions() if d.primitive == "dot_general"}
    assert dots == {f"{net}/{at}" for at in ("blocks/0/lin", "blocks/1/lin", "first/lin", "head")}
    silu = {d.scope for d in plan.decisions() if d.primitive == "logistic"}
    assert silu == {f"{net}/{at}" for at in ("blocks/0", "blocks/1", "first")}


def test_a_scope_of_ones_own_is_around_the_modules():
    """Names that the user writes come first; code outside of modules has these alone."""

    def loss(net, x):
        with jax.named_scope("model"):
            y = net(x)
        with jax.named_scope("error"):
            return jnp.mean(y**2)

    scopes = {d.scope for d in plan_of(loss)(NnxNet(), X).decisions()}
    assert {"model/NnxNet/head", "error"} <= scopes
    assert all(scope.startswith(("model/NnxNet", "error")) for scope in scopes if scope)


def test_plain_functions_have_no_module_path():
    """A program without classes has the scopes that it names, and no others."""
    plan = plan_of(lambda w, x: jax.nn.softmax(x @ w))(jnp.ones((8, 8)), X)
    assert {d.scope for d in plan.decisions()} == {""}
