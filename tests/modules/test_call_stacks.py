"""Scopes and functions inside of checkpoints, loops and jitted functions are those without them."""

from collections import Counter

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxamp import PrecisionPolicy, Rule, explain, plan_of, report

X = jnp.ones((2, 8))


class EqxBlock(eqx.Module):
    lin: eqx.nn.Linear

    def __call__(self, x):
        return x + jnp.tanh(jax.vmap(self.lin)(x))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.lin = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.lin(x))


@jax.checkpoint
def checkpointed(block, x):
    return block(x)


def eqx_net(call):
    """Return a network whose blocks are called by `call`, and its input."""

    class Net(eqx.Module):
        first: EqxBlock
        blocks: list

        def __call__(self, x):
            return call(self, x)

    keys = jax.random.split(jax.random.key(0), 4)
    first, *blocks = (EqxBlock(eqx.nn.Linear(8, 8, key=key)) for key in keys)
    return Net(first, blocks), X


def nnx_net(call):
    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.first = NnxBlock(rngs)
            self.blocks = nnx.List([NnxBlock(rngs) for _ in range(3)])

        def __call__(self, x):
            return call(self, x)

    return Net(), X


def plain(self, x):
    x = self.first(x)
    for block in self.blocks:
        x = block(x)
    return x


def filter_checkpoint(self, x):
    x = eqx.filter_checkpoint(self.first)(x)
    for block in self.blocks:
        x = eqx.filter_checkpoint(block)(x)
    return x


def filter_jit(self, x):
    x = eqx.filter_jit(self.first)(x)
    for block in self.blocks:
        x = eqx.filter_jit(block)(x)
    return x


def closures(self, x):
    x = jax.checkpoint(lambda x: self.first(x))(x)
    for block in self.blocks:
        x = jax.checkpoint(lambda x: block(x))(x)  # noqa: B023 - called at once
    return x


def one_function(self, x):
    x = checkpointed(self.first, x)
    for block in self.blocks:
        x = checkpointed(block, x)
    return x


def scanned(self, x):
    x, _ = jax.lax.scan(lambda x, _: (self.first(x), None), x, length=2)
    for block in self.blocks:
        x, _ = jax.lax.scan(lambda x, _: (block(x), None), x, length=2)  # noqa: B023
    return x


def remat_functions(self, x):
    x = nnx.remat(lambda block, x: block(x))(self.first, x)
    for block in self.blocks:
        x = nnx.remat(lambda block, x: block(x))(block, x)
    return x


def remat_methods(self, x):
    x = nnx.remat(NnxBlock.__call__)(self.first, x)
    for block in self.blocks:
        x = nnx.remat(NnxBlock.__call__)(block, x)
    return x


def jitted(self, x):
    x = nnx.jit(lambda block, x: block(x))(self.first, x)
    for block in self.blocks:
        x = nnx.jit(lambda block, x: block(x))(block, x)
    return x


EQX = [filter_checkpoint, filter_jit, one_function, closures, scanned]
NNX = [remat_functions, remat_methods, jitted]


def loss(net, x):
    return jnp.mean(net(x) ** 2)


def scopes(fn, args):
    """The modules in which products and tanh are computed."""
    found = [d for d in plan_of(fn)(*args).decisions() if d.primitive in ("dot_general", "tanh")]
    return {(d.scope.partition("/eqx")[0], d.primitive) for d in found}


@pytest.mark.product("call", every=2)
@pytest.mark.parametrize("call", [*EQX, *NNX])
def test_modules_are_those_of_plain_calls(call):
    """Forward, backward and jitted."""
    make, grad, jit = (
        (eqx_net, eqx.filter_grad, eqx.filter_jit) if call in EQX else (nnx_net, nnx.grad, nnx.jit)
    )
    for fn in (loss, grad(loss), jit(grad(loss))):
        expected = scopes(loss, make(plain))
        assert scopes(fn, make(call)) == expected
    assert ("Net/blocks/2/lin", "dot_general") in expected


@pytest.mark.parametrize("call", [filter_checkpoint, remat_functions])
def test_a_rule_names_an_item(call):
    """All products of one block, forward, recomputed and backward, follow a rule."""
    net, x = eqx_net(call) if call in EQX else nnx_net(call)
    grad = eqx.filter_grad if call in EQX else nnx.grad
    policy = PrecisionPolicy.MIXED_BF16.with_rules(
        Rule(precision="f32", scope="blocks/1", kind="compute")
    )
    for fn in (grad(loss), loss):
        plan = plan_of(fn, policy)(net, x)
        dots = [d for d in plan.decisions() if d.primitive == "dot_general"]
        wide = {d.scope.split("/")[2] for d in dots if d.operand.short == "f32"}
        narrow = {d.scope.split("/")[2] for d in dots if d.operand.short == "bf16"}
        assert wide == {"1"}
        assert {"0", "2"} <= narrow
        assert "1" not in narrow


def test_reports_have_the_modules():
    """Rows, what is explained, and memory that waits for the backward pass."""
    args = eqx_net(filter_checkpoint)
    shown = report(eqx.filter_grad(loss))(*args)
    assert "Net/blocks/*/lin" in str(shown)
    assert {r.scope for r in shown.residuals} >= {"Net/blocks/0", "Net/blocks/1"}
    notes = explain(eqx.filter_grad(loss), where="blocks/1")(*args).notes
    assert {note.scope.partition("/eqx")[0] for note in notes} >= {"Net/blocks/1/lin"}


def attend(w, x):
    """Products in all that begins a call stack of its own."""
    x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=2)
    x = jax.checkpoint(lambda x: jnp.sin(x @ w))(x)
    x = jax.jit(lambda x: jnp.cos(x @ w))(x)
    return jax.lax.cond(x[0, 0] > 0, lambda x: x @ w, jnp.exp, x)


def test_a_rule_names_a_function_around():
    """All that a function computes follows its rule, in whatever it is computed; no other does."""

    def loss(w, x):
        return jnp.sum(attend(w, x) @ w)

    policy = PrecisionPolicy.MIXED_BF16.with_rules(Rule(precision="f32", function="attend"))
    args = jnp.ones((8, 8)), X
    for fn in (loss, jax.grad(loss), jax.jit(jax.grad(loss))):
        dots = [d for d in plan_of(fn, policy)(*args).decisions() if d.primitive == "dot_general"]
        told = Counter((d.operand.short, d.reason.startswith("rule: ")) for d in dots)
        assert set(told) == {("f32", True), ("bf16", False)}
        assert told["bf16", False] == (1 if fn is loss else 3)
