"""Runs a program whose quantized dots take their scales from a history of magnitudes."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.lax import optimization_barrier_p

from jaxamp.core import jax_compat
from jaxamp.core.formats import CastConfig
from jaxamp.errors import RewriteError, TrainingError
from jaxamp.jaxprs.interpret import evaluate
from jaxamp.jaxprs.nested import Wiring, called, loop, nested, wiring
from jaxamp.lowp import ScaledArray
from jaxamp.lowp.arithmetic import scale_factor
from jaxamp.lowp.quantize import stored_scale, with_scale
from jaxamp.plan import Scaled
from jaxamp.rewrite.primitives.quantized_dot import quantized_dot_p
from jaxamp.rewrite.primitives.quantized_product import product

History = dict[str, Any]
_PLACE = re.compile(r"\d+:\w+")  # a key of a history: the number of an equation, and its name


def is_history(value: Any) -> bool:
    """Return whether a value has the keys of a history."""
    return isinstance(value, Mapping) and all(
        isinstance(key, str) and _PLACE.fullmatch(key) for key in value
    )


def run_with_history(
    closed: ClosedJaxpr, arrays: Sequence[Any], history: History | None, length: int
) -> tuple[list[Any], History]:
    """Run a program whose quantized dots take their scales from a history.

    Args:
      closed: the program.
      arrays: its arguments.
      history: one that this program has made; ``None`` for its first step.
      length: for how many steps a magnitude is kept.

    Returns:
      The results, and the history with this step in it.

    Raises:
      TrainingError: the history is of another program.
    """
    run = functools.partial(_Threader(length).run, closed)
    if history is None:
        return run(arrays, None)
    try:
        result = run(arrays, history)
        if _kinds(result[1]) == _kinds(history):
            return result
    except Exception:
        if _kinds(jax.eval_shape(lambda: run(arrays, None)[1])) == _kinds(history):
            raise
    raise TrainingError(
        "The history is not this step's: of another function, policy or constant argument, or of "
        "loops with another number of iterations. Make a new one with step.init(*args)."
    )


def _kinds(history: History) -> dict[str, Any]:
    """Return the shape and dtype of each window, by its place; whatever the containers are."""
    leaves = jax.tree_util.tree_leaves_with_path(history)
    return {jax.tree_util.keystr(path): (leaf.shape, leaf.dtype) for path, leaf in leaves}


class _Threader:
    """Run a program whose quantized dots take their scales from a history."""

    def __init__(self, length: int) -> None:
        self.length = length

    def run(
        self, closed: ClosedJaxpr, args: Sequence[Any], history: History | None
    ) -> tuple[list[Any], History]:
        made: History = {}
        numbers = itertools.count()

        def emit(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
            number = next(numbers)
            if not _is_threaded(eqn):
                return jax_compat.bind(eqn, operands)
            key = f"{number}:{eqn.primitive.name}"
            part = None if history is None else history[key]
            rule = _RULES[wiring(eqn)]
            results, made[key] = rule(self, eqn, operands, part)
            return results

        return evaluate(closed, args, emit), made

    def dot(
        self, eqn: JaxprEqn, operands: Sequence[Any], history: History | None
    ) -> tuple[list[Any], History]:
        """Emit a quantized dot; return its operands' histories, too, with this step in them."""
        how: Scaled = eqn.params["how"]
        made, narrow, finite = {}, [], True
        for side, x, cast in zip(("lhs", "rhs"), map(_sealed, operands), how.casts, strict=True):
            amax = jnp.max(jnp.abs(x), initial=0).astype(np.float32)
            window = jnp.zeros(self.length, np.float32) if history is None else history[side]
            narrow.append(_rounded(x, amax if history is None else jnp.max(window), cast))
            finite &= amax < np.inf
            seen = jnp.where(amax < np.inf, amax, 0)
            made[side] = jnp.concatenate([seen[None], window])[: self.length]
        out = product(narrow[0], narrow[1], eqn.params["dtype"], how.kernel)
        # An infinity that was clipped must not pass for a number.
        return [jnp.where(finite, out, jnp.asarray(np.nan, out.dtype))], made

    def call(
        self, eqn: JaxprEqn, operands: Sequence[Any], history: History | None
    ) -> tuple[list[Any], History]:
        """Emit a call in place; recomputation stays behind a barrier, as in a checkpoint."""
        if eqn.params.get("prevent_cse"):
            operands = optimization_barrier_p.bind(*operands)
        return self.run(called(eqn), operands, history)

    def scan(
        self, eqn: JaxprEqn, operands: Sequence[Any], history: History | None
    ) -> tuple[list[Any], History]:
        """Emit a scan, whose histories have a row for each iteration."""
        wired = loop(eqn)
        _, invariants, carries, sliced = wired.parts(operands)

        def iteration(carry: Any, slices: Any) -> Any:
            xs, rows = slices
            outs, made = self.run(wired.body, [*invariants, *carry, *xs], rows)
            return outs[: wired.carries], (outs[wired.carries :], made)

        params = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        carry, (stacks, made) = lax.scan(
            iteration, list(carries), (list(sliced), history), **params
        )
        return [*carry, *stacks], made


@jax.custom_jvp
def _sealed(x: Any) -> Any:
    """Return the array itself, and refuse to be differentiated."""
    return x


@_sealed.defjvp
def _refuse(*_: Any) -> Any:
    raise RewriteError(
        "A step under delayed scaling is not differentiated: the magnitudes of its gradients are "
        "part of its history. Put the gradient inside: "
        "amp(lambda *args: jax.value_and_grad(loss)(*args), 'fp8_delayed').",
        primitive="quantized_dot",
    )


def _rounded(x: Any, amax: Any, cast: CastConfig) -> ScaledArray:
    """Quantize an array with the scale that belongs to a magnitude; larger values are clipped."""
    scale = scale_factor(amax, cast.out_dtype, round_up=cast.round_sf)
    scale = jnp.where(amax == 0, np.float32(1), scale)  # nothing is known of it yet
    return with_scale(x, stored_scale(scale, cast), cast)


_RULES = {
    None: _Threader.dot,  # a quantized dot, which holds no jaxpr
    Wiring.SCAN: _Threader.scan,
    Wiring.CALL: _Threader.call,
}


def _is_threaded(eqn: JaxprEqn) -> bool:
    if eqn.primitive is quantized_dot_p:
        return all(cast.sf_block is None for cast in eqn.params["how"].casts)
    is_entered = eqn.primitive.name != "shard_map" and wiring(eqn) in _RULES
    return is_entered and any(_has_dots(body.jaxpr) for body in nested(eqn))


def _has_dots(jaxpr: Jaxpr) -> bool:
    return any(map(_is_threaded, jaxpr.eqns))
