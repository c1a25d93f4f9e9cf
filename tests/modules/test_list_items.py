"""Items of lists in Python loops have the scopes that indices in the source would give."""

from collections import Counter
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxamp import PrecisionPolicy, Rule, amp, plan_of, report

X = jnp.ones((4, 8))


def _forward(net, x):
    if net.written:
        x = net.blocks[0](x)
        x = net.blocks[1](x)
        x = net.blocks[2](x)
    else:
        for block in net.blocks:
            x = block(x)
    return x


def _backward(net, x):
    if net.written:
        x = net.blocks[2](x)
        x = net.blocks[0](x)
    else:
        for block in reversed(net.blocks[:1] + net.blocks[2:]):
            x = block(x)
    return x


class EqxBlock(eqx.Module):
    norm: eqx.nn.LayerNorm
    lin: eqx.nn.Linear

    def __init__(self, key):
        self.norm, self.lin = eqx.nn.LayerNorm(8), eqx.nn.Linear(8, 8, key=key)

    def __call__(self, x):
        y = jax.nn.softmax(jax.vmap(self.lin)(jax.vmap(self.norm)(x)) @ x.T)
        return x + jax.nn.gelu(y @ x)


class EqxNet(eqx.Module):
    blocks: list
    run: object = eqx.field(static=True)
    written: bool = eqx.field(static=True)

    def __init__(self, run, written, make=EqxBlock):
        self.run, self.written = run, written
        self.blocks = [make(key=jax.random.key(n)) for n in range(3)]

    def __call__(self, x):
        return self.run(self, x)


class NnxBlock(nnx.Module):
    def __init__(self, key):
        rngs = nnx.Rngs(key)
        self.norm, self.lin = nnx.LayerNorm(8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        y = jax.nn.softmax(self.lin(self.norm(x)) @ x.T)
        return x + jax.nn.gelu(y @ x)


class NnxNet(nnx.Module):
    def __init__(self, run, written):
        self.run, self.written = run, written
        self.blocks = nnx.List([NnxBlock(jax.random.key(n)) for n in range(3)])

    def __call__(self, x):
        return self.run(self, x)


def loss(net, x):
    return jnp.mean(net(x) ** 2)


CALLS = {
    "loss": {"eqx": loss, "nnx": loss},
    "gradient": {"eqx": eqx.filter_grad(loss), "nnx": nnx.grad(loss)},
    "jitted": {"eqx": eqx.filter_jit(eqx.filter_grad(loss)), "nnx": nnx.jit(nnx.grad(loss))},
}


def scopes(fn, *args):
    """How often each primitive computes in each scope."""
    plan = plan_of(fn)(*args)
    return Counter((d.scope, d.primitive) for d in plan.decisions() if d.scope)


@pytest.mark.product("library")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("library", "net"), [("eqx", EqxNet), ("nnx", NnxNet)])
def test_a_loop_is_as_written_out(library, net, call):
    """Every equation, forward and backward, is in the scope that a constant index gives it."""
    fn = CALLS[call][library]
    looped, written = (scopes(fn, net(_forward, is_written), X) for is_written in (False, True))
    assert {scope.split("/")[2] for scope, _ in written if "blocks" in scope} == set("012")
    assert looped == written


def test_an_order_of_its_own():
    """An index is that of the parameters, not that of the call."""
    looped, written = (scopes(loss, EqxNet(_backward, w), X) for w in (False, True))
    assert looped == written


def test_items_of_two_lists_have_the_name_of_neither():
    """Which of the two a loop is at is known nowhere."""

    class Net(eqx.Module):
        old: list
        new: list

        def __call__(self, x):
            for block in self.old + self.new:
                x = block(x)
            return x

    blocks = EqxNet(_forward, False).blocks
    found = scopes(loss, Net(blocks[:1], blocks[1:]), X)
    assert {scope.split("/")[1] for scope, _ in found if scope.startswith("Net/")} == {"EqxBlock"}


def test_layers_alone():
    """Also where an item is one layer, whose gradient reads none of its parameters."""

    def run(net, x):
        if net.written:
            x = jax.nn.relu(jax.vmap(net.blocks[0])(x))
            x = jax.nn.relu(jax.vmap(net.blocks[1])(x))
            return jax.nn.relu(jax.vmap(net.blocks[2])(x))
        for layer in net.blocks:
            x = jax.nn.relu(jax.vmap(layer)(x))
        return x

    make = partial(eqx.nn.Linear, 8, 8)
    grads = eqx.filter_grad(loss)
    looped, written = (scopes(grads, EqxNet(run, w, make), X) for w in (False, True))
    assert looped == written


def test_lists_in_lists():
    """An item of an inner list is that of an item of the outer one."""

    class Stage(eqx.Module):
        blocks: list

        def __init__(self, key):
            self.blocks = [EqxBlock(k) for k in jax.random.split(key)]

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    class WrittenStage(Stage):
        def __call__(self, x):
            return self.blocks[1](self.blocks[0](x))

    looped = scopes(eqx.filter_grad(loss), EqxNet(_forward, False, Stage), X)
    written = scopes(eqx.filter_grad(loss), EqxNet(_forward, True, WrittenStage), X)
    assert "EqxNet/blocks/2/blocks/1" in {scope for scope, _ in written}
    assert looped == written


def test_a_rule_names_an_item():
    """All that one item computes follows a rule, and nothing of the others; values are the same."""
    policy = PrecisionPolicy.MIXED_BF16.with_rules(Rule(precision="f32", scope="blocks/1"))
    net = EqxNet(_forward, written=False)
    plan = plan_of(eqx.filter_grad(loss), policy)(net, X)
    assert plan.unmatched_rules == ()
    dots = Counter(
        (d.scope.split("/")[2], d.operand.short)
        for d in plan.decisions()
        if d.primitive == "dot_general"
    )
    assert {index for index, precision in dots if precision == "f32"} == {"1"}
    assert {index for index, precision in dots if precision == "bf16"} == {"0", "2"}
    ours, written = (amp(loss, policy)(EqxNet(_forward, w), X) for w in (False, True))
    assert ours == written


def test_equal_items_are_one_row():
    """Three blocks are three times one row of a report."""
    shown = report(eqx.filter_grad(loss))(EqxNet(_forward, written=False), X)
    shown = str(shown.full())
    (first, *_) = [
        line for line in shown.splitlines() if "EqxNet/blocks/*/lin" in line and "fwd" in line
    ]
    assert "× 3" in first


def test_items_without_parameters_keep_the_list_s_name():
    """What nothing tells apart is not numbered."""

    def run(net, x):
        for layer in (jnp.tanh, *net.blocks, jnp.sin):
            x = layer(x)
        return x

    found = {scope for scope, _ in scopes(loss, EqxNet(run, written=False), X)}
    assert not any(scope.endswith(("tanh", "sin")) for scope in found)
