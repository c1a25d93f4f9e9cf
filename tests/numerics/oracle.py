"""The oracle: a program in which only the operands of products are rounded.

It is what mixed precision must cost and no more: the operands of dots and convolutions go through
the low format, all else is float32. It shares no code with the transform that it judges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core

from jaxamp.core import jax_compat

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def products_rounded(fn: Callable[..., Any], low: Any) -> Callable[..., Any]:
    """`fn` with the float32 operands of its products rounded to `low`.

    Args:
        fn: a function of arrays.
        low: a dtype.
    """

    def rounded(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        results = _run(closed, jax.tree.leaves(args), low)
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return rounded


def _run(closed: core.ClosedJaxpr, args: Sequence[Any], low: Any) -> list[Any]:
    env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(closed.jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    for eqn in closed.jaxpr.eqns:
        rule = _RULES.get(eqn.primitive.name, _plain)
        results = rule(eqn, [read(a) for a in eqn.invars], low)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(a) for a in closed.jaxpr.outvars]


def _plain(eqn: core.JaxprEqn, args: Sequence[Any], low: Any) -> Sequence[Any]:
    if any(core.jaxprs_in_params(eqn.params)) and eqn.primitive.name not in _TYPED:
        raise NotImplementedError(f"the oracle has no rule for {eqn.primitive.name}")
    results = eqn.primitive.bind(*args, **eqn.params)
    return results if eqn.primitive.multiple_results else [results]


def _product(eqn: core.JaxprEqn, args: Sequence[Any], low: Any) -> Sequence[Any]:
    return _plain(eqn, [_round(a, low) for a in args], low)


def _round(x: Any, low: Any) -> Any:
    return x.astype(low).astype(jnp.float32) if x.dtype == jnp.float32 else x


def _call(eqn: core.JaxprEqn, args: Sequence[Any], low: Any) -> Sequence[Any]:
    name = next(n for n in ("call_jaxpr", "jaxpr") if n in eqn.params)
    return _run(_closed(eqn.params[name]), args, low)


def _closed(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> core.ClosedJaxpr:
    return jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else core.ClosedJaxpr(jaxpr, ())


def _cond(eqn: core.JaxprEqn, args: Sequence[Any], low: Any) -> Sequence[Any]:
    branches = [lambda *xs, b=b: _run(b, xs, low) for b in eqn.params["branches"]]
    return lax.switch(args[0], branches, *args[1:])


def _while(eqn: core.JaxprEqn, args: Sequence[Any], low: Any) -> Sequence[Any]:
    tests, bodies = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    test_consts, consts, init = args[:tests], args[tests:][:bodies], args[tests + bodies :]

    def test(carry: Sequence[Array]) -> Array:
        return _run(eqn.params["cond_jaxpr"], [*test_consts, *carry], low)[0]

    def body(carry: Sequence[Array]) -> list[Array]:
        return _run(eqn.params["body_jaxpr"], [*consts, *carry], low)

    return lax.while_loop(test, body, list(init))


def _scan(eqn: core.JaxprEqn, args: Sequence[Any], low: Any) -> Sequence[Any]:
    consts, carries = jax_compat.scan_layout(eqn)
    fixed, init, xs = args[:consts], args[consts:][:carries], args[consts + carries :]

    def body(carry: list[Array], x: list[Array]) -> tuple[list[Array], list[Array]]:
        results = _run(eqn.params["jaxpr"], [*fixed, *carry, *x], low)
        return results[:carries], results[carries:]

    options = {name: eqn.params[name] for name in ("length", "reverse")}
    carry, ys = lax.scan(body, list(init), list(xs), **options)
    return [*carry, *ys]


# Their jaxprs only say how two scalars are joined.
_TYPED = ("scatter-add", "scatter-mul", "scatter", "scatter-max", "scatter-min", "reduce")

_RULES = {
    **dict.fromkeys(PRODUCTS, _product),
    **dict.fromkeys(("jit", "custom_jvp_call", "custom_vjp_call", "remat2", "closed_call"), _call),
    "cond": _cond,
    "while": _while,
    "scan": _scan,
}
