"""What a program computes in float64, and with nothing but its products rounded.

An interpreter of jaxprs. It shares no code with the transform that it judges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jaxamp.core import jax_compat
from tests.numerics.oracle import PRODUCTS

Values = list[Any]


class Oracle:
    """A way of evaluating float32 programs.

    Args:
        wide: the dtype that stands for float32.
        low: a dtype to which operands and results of products are rounded, or None.
    """

    def __init__(self, wide: Any, low: Any = None) -> None:
        self._wide, self._low = np.dtype(wide), low

    def run(self, closed: core.ClosedJaxpr, args: Sequence[Any]) -> Values:
        """Evaluate a jaxpr."""
        jaxpr, env = closed.jaxpr, {}

        def read(atom: Any) -> Any:
            if isinstance(atom, core.Literal):
                return jnp.asarray(atom.val, self._dtype(atom.aval.dtype))
            return env[atom]

        env.update(zip(jaxpr.constvars, map(self._widened, closed.consts), strict=True))
        env.update(zip(jaxpr.invars, map(self._widened, args), strict=True))
        for eqn in jaxpr.eqns:
            rule = _RULES.get(eqn.primitive.name, Oracle._plain)
            env.update(zip(eqn.outvars, rule(self, eqn, list(map(read, eqn.invars))), strict=True))
        return list(map(read, jaxpr.outvars))

    def _dtype(self, dtype: Any) -> Any:
        """What stands for a dtype of the program."""
        if dtype == jnp.float32:
            return self._wide
        if dtype == jnp.complex64:
            return np.result_type(self._wide, np.complex64)
        return dtype

    def _widened(self, x: Any) -> Any:
        return jnp.asarray(x, self._dtype(jnp.result_type(x)))

    def _plain(self, eqn: core.JaxprEqn, args: Values) -> Values:
        if any(core.jaxprs_in_params(eqn.params)):
            raise NotImplementedError(f"the oracle has no rule for {eqn.primitive.name}")
        params = dict(eqn.params)
        for name in ("new_dtype", "preferred_element_type", "dtype"):
            if params.get(name) is not None:
                params[name] = self._dtype(params[name])
        results = eqn.primitive.bind(*args, **params)
        return list(results) if eqn.primitive.multiple_results else [results]

    def _product(self, eqn: core.JaxprEqn, args: Values) -> Values:
        return list(map(self._round, self._plain(eqn, list(map(self._round, args)))))

    def _round(self, x: Any) -> Any:
        if self._low is None or x.dtype != self._wide:
            return x
        return x.astype(self._low).astype(x.dtype)

    def _bits(self, eqn: core.JaxprEqn, args: Values) -> Values:
        """The bits of a float32, whatever stands for it."""
        (x,), new = args, eqn.params["new_dtype"]
        x = x.astype(eqn.invars[0].aval.dtype)
        return [self._widened(lax.bitcast_convert_type(x, new))]

    def _scatter(self, eqn: core.JaxprEqn, args: Values) -> Values:
        """Anew, as the jaxpr by which two numbers are joined is typed."""
        names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        fn = getattr(lax, eqn.primitive.name.replace("-", "_"))
        return [fn(*args, **{name: eqn.params[name] for name in names})]

    def _call(self, eqn: core.JaxprEqn, args: Values) -> Values:
        name = next(n for n in ("call_jaxpr", "jaxpr") if n in eqn.params)
        return self.run(_closed(eqn.params[name]), args)

    def _cond(self, eqn: core.JaxprEqn, args: Values) -> Values:
        branches = [lambda *xs, b=b: self.run(b, xs) for b in eqn.params["branches"]]
        return lax.switch(args[0], branches, *args[1:])

    def _while(self, eqn: core.JaxprEqn, args: Values) -> Values:
        tests, bodies = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        test, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        return lax.while_loop(
            lambda carry: self.run(test, [*args[:tests], *carry])[0],
            lambda carry: self.run(body, [*args[tests:][:bodies], *carry]),
            args[tests + bodies :],
        )

    def _scan(self, eqn: core.JaxprEqn, args: Values) -> Values:
        consts, carries = jax_compat.scan_layout(eqn)

        def body(carry: Values, x: Values) -> tuple[Values, Values]:
            results = self.run(eqn.params["jaxpr"], [*args[:consts], *carry, *x])
            return results[:carries], results[carries:]

        options = {name: eqn.params[name] for name in ("length", "reverse")}
        init, xs = args[consts:][:carries], args[consts + carries :]
        carry, ys = lax.scan(body, init, xs, **options)
        return [*carry, *ys]

    def _linear_solve(self, eqn: core.JaxprEqn, args: Values) -> Values:
        """The solver that the program brings, without its derivative."""
        counts, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
        before = counts.matvec + counts.vecmat
        consts = args[before : before + counts.solve]
        return self.run(jaxprs.solve, [*consts, *args[sum(counts) :]])


def evaluated(fn: Callable[..., Any], args: Sequence[Any], oracles: Sequence[Oracle]) -> list[Any]:
    """Evaluate a function in several ways.

    Args:
        fn: a function of trees of arrays, which returns such a tree.
        args: its arguments.
        oracles: the ways.

    Returns:
        A tree of float64, integers or booleans for each way.
    """
    return [evaluate(*args) for evaluate in evaluators(fn, args, oracles)]


def evaluators(
    fn: Callable[..., Any], args: Sequence[Any], oracles: Sequence[Oracle]
) -> list[Callable[..., Any]]:
    """Compile a function in several ways, each for any arguments like these."""
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    return [_compiled(closed, jax.tree.structure(shape), oracle) for oracle in oracles]


def _compiled(closed: core.ClosedJaxpr, tree: Any, oracle: Oracle) -> Callable[..., Any]:
    options = {"xla_backend_optimization_level": 0}
    jitted = jax.jit(lambda leaves: oracle.run(closed, leaves), compiler_options=options)

    def evaluate(*args: Any) -> Any:
        with jax.enable_x64(True):
            results = jitted(jax.tree.leaves(args))
        return jax.tree.unflatten(tree, list(map(np.asarray, results)))

    return evaluate


def _closed(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> core.ClosedJaxpr:
    return jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else core.ClosedJaxpr(jaxpr, ())


_CALLS = ("jit", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint", "closed_call")

_SCATTERS = ("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max")

_RULES: dict[str, Callable[[Oracle, core.JaxprEqn, Values], Values]] = {
    **dict.fromkeys(PRODUCTS, Oracle._product),
    **dict.fromkeys(_CALLS, Oracle._call),
    **dict.fromkeys(_SCATTERS, Oracle._scatter),
    "bitcast_convert_type": Oracle._bits,
    "cond": Oracle._cond,
    "while": Oracle._while,
    "scan": Oracle._scan,
    "linear_solve": Oracle._linear_solve,
    "custom_linear_solve": Oracle._linear_solve,
}
