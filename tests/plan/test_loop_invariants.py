"""What is the same in every turn of a loop: kept narrow, its cotangents added up in float32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from jaxamp import amp
from jaxamp.core import jax_compat
from tests.audit import equations
from tests.numerics.oracle import products_rounded

BATCH, TOKENS, WIDTH, TURNS = 2, 5, 8, 7
KEYS = jax.random.split(jax.random.key(0), 8)
Params = dict[str, jax.Array]


def params() -> Params:
    return {
        name: jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5
        for name, key in zip(("encode", "key", "query", "context", "state"), KEYS, strict=False)
    }


def decoded(p: Params, x: jax.Array, start: jax.Array) -> jax.Array:
    """A decoder that attends to all tokens in every turn (Bahdanau, Cho and Bengio 2015)."""
    memory = jnp.tanh(x @ p["encode"])
    keys = memory @ p["key"]

    def turn(state: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        scores = jnp.tanh(keys + (state @ p["query"])[:, None]) @ p["query"][0]
        context = jnp.einsum("bt,btw->bw", jax.nn.softmax(scores), memory)
        state = jnp.tanh(context @ p["context"] + state @ p["state"])
        return state, state

    _, states = lax.scan(turn, start, None, length=TURNS)
    return jnp.mean((states @ p["context"]) ** 2)


def arguments() -> tuple[Params, jax.Array, jax.Array]:
    x = jax.random.normal(KEYS[5], (BATCH, TOKENS, WIDTH))
    return params(), x, jax.random.normal(KEYS[6], (BATCH, WIDTH))


ORDERS: dict[str, Callable[..., Any]] = {
    "grad of amp": lambda fn, policy: jax.grad(amp(fn, policy)),
    "amp of grad": lambda fn, policy: amp(jax.grad(fn), policy),
}


def test_a_decoder_reads_its_memory_narrow() -> None:
    """No turn reads a float32 array of all tokens, and of nothing that large is there a copy."""
    closed = jax.make_jaxpr(amp(decoded))(*arguments())
    scans = [e for e in equations(closed.jaxpr) if e.primitive.name == "scan"]
    assert len(scans) == 1
    body = scans[0].params["jaxpr"]
    invars: list[Any] = body.jaxpr.invars
    wide = [v for v in invars if v.aval.shape == (BATCH, TOKENS, WIDTH)]
    wide = [v for v in wide if v.aval.dtype == jnp.float32]
    assert len(wide) == 2  # what cotangents are added up for
    run = jax.jit(jaxpr_as_fun(body))

    def changed(number: float) -> list[jax.Array]:
        return run(
            *[jnp.full(v.aval.shape, number if v in wide else 1, v.aval.dtype) for v in invars]
        )

    for one, other in zip(changed(1.0), changed(jnp.nan), strict=True):
        assert jnp.array_equal(one, other)


def test_the_backward_pass_of_a_decoder_reads_narrow_residuals() -> None:
    closed = jax.make_jaxpr(amp(jax.grad(decoded)))(*arguments())
    scans = [e for e in equations(closed.jaxpr) if e.primitive.name == "scan"]
    outs: list[Any] = [v.aval for e in scans for v in e.outvars]
    stacked = [aval.dtype for aval in outs if aval.shape == (TURNS, BATCH, TOKENS, WIDTH)]
    assert stacked
    assert set(stacked) == {jnp.dtype(jnp.bfloat16)}


@functools.cache
def exact_and_allowed() -> tuple[Params, Params]:
    """The gradient, and that of the program in which only operands of products are rounded."""
    fns = jax.grad(decoded), jax.grad(products_rounded(decoded, jnp.bfloat16))
    return tuple(jax.jit(fn)(*arguments()) for fn in fns)


@pytest.mark.product
@pytest.mark.parametrize("order", ORDERS)
def test_gradients_of_a_decoder_are_as_exact_as_products_allow(order: str) -> None:
    exact, allowed = exact_and_allowed()
    found = jax.jit(ORDERS[order](decoded, "auto_mixed_bf16"))(*arguments())
    for name, gradient in exact.items():
        error = jnp.linalg.norm(found[name] - gradient)
        assert error <= 3 * jnp.linalg.norm(allowed[name] - gradient), name


@pytest.mark.parametrize("order", ORDERS)
def test_cotangents_of_many_turns_are_added_up_in_float32(order: str) -> None:
    """In bfloat16 a sum of 2,000 equal addends stops at 256 of them."""
    turns, w, out = 2000, params()["key"], params()["query"]
    x = jax.random.normal(KEYS[7], (TOKENS, WIDTH))

    def loss(w: jax.Array) -> jax.Array:
        hidden = x @ w

        def turn(scale: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            return scale, jnp.sum(jnp.tanh(hidden * scale) @ out)

        return lax.scan(turn, jnp.float32(1), None, length=turns)[1].sum()

    exact = jax.jit(jax.grad(loss))(w)
    found = jax.jit(ORDERS[order](loss, "auto_mixed_bf16"))(w)
    assert jnp.linalg.norm(found - exact) < 0.02 * jnp.linalg.norm(exact)


def test_a_loop_that_is_differentiated_forward() -> None:
    """The tangent is that of the float32 value, once."""
    w, x = params()["key"], arguments()[1][0]

    def looped(w: jax.Array) -> jax.Array:
        hidden = x @ w
        return lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h + hidden), jnp.zeros_like(hidden))

    _, exact = jax.jvp(looped, (w,), (w,))
    _, found = jax.jvp(amp(looped), (w,), (w,))
    assert jnp.linalg.norm(found - exact) < 0.02 * jnp.linalg.norm(exact)


def test_a_cast_of_an_invariant_is_made_outside_of_the_loop() -> None:
    """Of weights that it reads rounded and as they are."""

    def looped(w: jax.Array, x: jax.Array) -> jax.Array:
        step = lambda h, _: (jnp.tanh(h @ w) * jnp.sum(jnp.sin(w)), None)  # noqa: E731
        return lax.scan(step, x, None, length=TURNS)[0]

    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    (scan,) = [
        e for e in equations(jax.make_jaxpr(amp(looped))(w, x).jaxpr) if e.primitive.name == "scan"
    ]
    casts = [e for e in equations(scan.params["jaxpr"].jaxpr) if "convert" in e.primitive.name]
    assert [e.invars[0].aval.shape for e in casts] == [x.shape]  # that of the carry alone


def test_a_loop_in_a_loop_gets_what_the_outer_one_got() -> None:
    """Cotangents of a narrow invariant of both are added up in float32, and not rounded between."""

    def looped(w: jax.Array, x: jax.Array) -> jax.Array:
        hidden = x @ w

        def step(h: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh((h @ hidden.T) @ hidden), None

        def turn(h: jax.Array, _: None) -> tuple[jax.Array, None]:
            return lax.scan(step, h, None, length=TURNS)[0] + 1, None

        return lax.scan(turn, x, None, length=TURNS)[0]

    w, x = jnp.ones((WIDTH, WIDTH)), jnp.ones((TOKENS, WIDTH))
    emitted = equations(jax.make_jaxpr(amp(looped))(w, x).jaxpr)
    outer = next(e for e in emitted if e.primitive.name == "scan")
    body: Any = outer.params["jaxpr"].jaxpr
    consts, _ = jax_compat.scan_layout(outer)
    invariants = {*body.invars[:consts]}
    wide = {v for v in invariants if v.aval.dtype == jnp.float32 and v.aval.shape == x.shape}
    (inner,) = [e for e in body.eqns if e.primitive.name == "scan"]
    assert len(wide) == 1
    assert wide <= {*inner.invars}
    assert not [e for e in body.eqns if "convert" in e.primitive.name and invariants & {*e.invars}]
