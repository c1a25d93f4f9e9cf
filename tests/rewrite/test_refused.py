"""What cannot be rewritten: strict and unknown primitives, and primitives that refuse a format."""

from __future__ import annotations

import gc
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import jaxamp
from jaxamp import PrecisionPolicy, Rule, amp, keep_precision, plan_of
from jaxamp.errors import RewriteError, UnknownPrimitiveError

X = jnp.linspace(0.1, 0.5, 9).reshape(3, 3)


def _primitive(name):
    """A linear primitive that hands on its operand, and takes no other dtype than float32."""
    made = Primitive(name)

    @made.def_abstract_eval
    def _(aval):
        if aval.dtype != jnp.float32:
            raise TypeError(f"{name} takes float32, not {aval.dtype}")
        return aval

    made.def_impl(lambda x: x)
    mlir.register_lowering(made, lambda context, x: [x])
    ad.deflinear2(made, lambda cotangent, x: [made.bind(cotangent)])
    batching.defvectorized(made)
    return made


mystery, picky = _primitive("jaxamp_test_mystery"), _primitive("jaxamp_test_picky")
jaxamp.register_op_kind(picky, "compute")


def unknown(x):
    """A product, and a primitive that nobody has described."""
    return mystery.bind(x @ x) @ x


def refusing(x):
    """A product, and a primitive that is said to be lowered and cannot be."""
    return picky.bind(x @ x) @ x


PLACES = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    "while": lambda f: (
        lambda x: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, f(c[1])), (0, x))[1]
    ),
    "cond": lambda f: lambda x: jax.lax.cond(x[0, 0] > 0, f, jnp.sin, x),
    "remat": jax.checkpoint,
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None]),
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "scan in cond": lambda f: PLACES["cond"](PLACES["scan"](f)),
}


def _line(fn):
    return re.escape(f"{__file__}:{fn.__code__.co_firstlineno + 2}")


@pytest.mark.parametrize("call", [amp, lambda f, **s: jax.jit(amp(f, **s)), plan_of])
@pytest.mark.parametrize("place", PLACES)
def test_strict_refuses_what_nobody_has_described(place, call):
    """Wherever it is, before anything runs: its name, the user's line, and what to do."""
    with pytest.raises(UnknownPrimitiveError, match="register_op_kind") as caught:
        call(PLACES[place](unknown), strict=True)(X)
    assert caught.value.primitive == "jaxamp_test_mystery"
    assert re.search(_line(unknown), caught.value.source)
    assert caught.value.source in str(caught.value)


@pytest.mark.parametrize("place", PLACES)
def test_without_strict_it_runs_in_its_own_dtype(place):
    """It gets float32, the products around it are lowered, and the plan names it."""
    fn = PLACES[place](unknown)
    got, plan = amp(fn)(X), plan_of(fn)(X)
    np.testing.assert_allclose(got, fn(X), rtol=2e-2)
    assert got.dtype == jnp.float32
    assert plan.unknown == ("jaxamp_test_mystery",)
    assert "unknown primitive, left as it is: jaxamp_test_mystery" in str(plan)
    assert amp(PLACES[place](lambda x: x @ x), strict=True)(X).dtype == jnp.float32


def test_what_is_taught_is_no_longer_unknown(monkeypatch):
    """A strict call that was refused is made after the primitive was registered."""
    monkeypatch.setattr(jaxamp.core.taxonomy, "_registered", {})
    step = amp(unknown, strict=True)
    with pytest.raises(UnknownPrimitiveError):
        step(X)
    jaxamp.register_op_kind(mystery, "boundary")
    np.testing.assert_allclose(step(X), unknown(X), rtol=2e-2)


@pytest.mark.parametrize("place", PLACES)
def test_an_equation_that_cannot_be_emitted(place):
    """What was tried and why it failed, the user's line, and two ways out, which work."""
    fn = PLACES[place](refusing)
    with pytest.raises(RewriteError, match=r"operands in bf16.*takes float32, not") as caught:
        amp(fn)(X)
    assert caught.value.primitive == "jaxamp_test_picky"
    assert re.search(_line(refusing), caught.value.source)
    (advice,) = re.findall(r"policy\.with_rules\((Rule\(.*?\))\)", str(caught.value))
    policy = PrecisionPolicy.AUTO_MIXED_BF16.with_rules(eval(advice, {"Rule": Rule}))
    assert amp(fn, policy)(X).dtype == jnp.float32
    assert "keep_precision('f32')" in str(caught.value)
    kept = PLACES[place](lambda x: keep_precision("f32")(picky.bind)(x @ x) @ x)
    np.testing.assert_allclose(amp(kept)(X), fn(X), rtol=2e-2)


@jax.custom_vjp
def ruled(x):
    """A product whose backward rule cannot be rewritten."""
    return x @ x


ruled.defvjp(lambda x: (x @ x, x), lambda x, g: (picky.bind(g @ x) @ x,))


@pytest.mark.parametrize(
    "order",
    [lambda f: jax.grad(lambda x: amp(f)(x).sum()), lambda f: amp(jax.grad(lambda x: f(x).sum()))],
    ids=["grad of amp", "amp of grad"],
)
def test_a_backward_rule_that_cannot_be_emitted(order):
    """A rule that is planned only when something is differentiated; the forward pass works."""

    def layer(x):
        return ruled(x)

    assert amp(layer)(X).dtype == jnp.float32
    with pytest.raises(RewriteError, match=r"operands in bf16") as caught:
        order(layer)(X)
    assert __file__ in caught.value.source


@pytest.mark.parametrize("fn", [refusing, unknown])
def test_a_refusal_leaves_nothing_behind(fn):
    """Not what was passed, nor the function, nor a policy in force; other calls are as before."""

    class Box:
        pass

    def call():
        box, x = Box(), X * 2

        def step(x, box):
            return fn(x)

        with pytest.raises((RewriteError, UnknownPrimitiveError)):
            amp(step, strict=True)(x, box)
        return [weakref.ref(thing) for thing in (box, x, step)]

    before = jaxamp.policy.context.current_policy()
    references = call()
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
    assert jaxamp.policy.context.current_policy() == before
    np.testing.assert_allclose(amp(lambda x: x @ x, strict=True)(X), X @ X, rtol=2e-2)
