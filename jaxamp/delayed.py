"""Delayed scaling: scales that come from the magnitudes of earlier steps, which the caller keeps.

A scale for a whole tensor needs two passes over it: one to find the largest magnitude, one to
round. With the magnitudes of the steps before, one pass is enough. They are a pytree that goes into
every step and comes out of it: nothing is hidden, and a checkpoint holds it like any other array.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.lax import optimization_barrier_p

from jaxamp import _compat
from jaxamp.calls import is_array, is_found
from jaxamp.compiled import Result
from jaxamp.constants import constant_key
from jaxamp.errors import RewriteError, TrainingError, shown
from jaxamp.formats import CastConfig
from jaxamp.lowp import ScaledArray
from jaxamp.lowp.arithmetic import scale_factor
from jaxamp.lowp.quantize import stored_scale, with_scale
from jaxamp.plan import Scaled
from jaxamp.plan.wiring import call_body
from jaxamp.policy import PrecisionPolicy
from jaxamp.rewrite.product import product
from jaxamp.rewrite.quantized_dot import quantized_dot_p
from jaxamp.settings import Settings, in_force
from jaxamp.trace import Outputs

History = dict[str, Any]
_PLACE = re.compile(r"\d+:\w+")  # a key of a history: the number of an equation, and its name


class DelayedFunction:
    """A train step with delayed scaling; what ``amp`` returns under ``fp8_delayed``.

    The step has to contain its gradient: the magnitudes of gradients are kept as well. Dots in
    ``while`` loops, branches and ``shard_map`` are scaled by the tensor at hand, and so are blocks.
    What looks at the step without running it, ``plan_of`` for one, takes its arguments alone.
    """

    def __init__(self, fn: Callable[..., Any], amped: Callable[..., Any], settings: Settings):
        functools.update_wrapper(self, fn, updated=())
        self.__wrapped__ = fn
        self._amped, self._settings = amped, settings
        self._compiled: dict[Any, Any] = {}
        self._bound: tuple[Any, ...] = ()  # the object whose method this is

    @property
    def policy(self) -> PrecisionPolicy:
        """The policy that the step runs under."""
        return self._settings.policy

    def init(self, *args: Any, **kwargs: Any) -> History:
        """The history before the first step: what a run on these arguments would find.

        Args:
          *args: arguments of a step.
          **kwargs: keyword arguments of a step.

        Returns:
          For each quantized dot the largest magnitudes of both operands in earlier steps, the last
          one first; zeros where there was none. A dot in a scan has a row for each turn.
        """
        return self._run(None, args, kwargs)[1]

    def __call__(self, history: History, *args: Any, **kwargs: Any) -> tuple[Any, History]:
        """One step.

        Args:
          history: what ``init`` or the step before returned.
          *args: arguments of the step.
          **kwargs: keyword arguments of the step.

        Returns:
          What the function returns, and the history for the next step.

        Raises:
          TrainingError: the first argument is no history, or that of another step.
        """
        if not _is_history(history):
            raise TrainingError(
                f"Under {self.policy} a step takes its history first, and {shown(history)} is "
                "none. Write history = step.init(*args), then "
                "result, history = step(history, *args)."
            )
        return self._run(history, args, kwargs)

    def amp_parts(self) -> tuple[Callable[..., Any], Settings]:
        """The function as it was given, and how it is rewritten."""
        return self.__wrapped__, self._settings

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        bound = object.__new__(DelayedFunction)  # what is compiled is shared
        method = MethodType(self.__wrapped__, instance)
        vars(bound).update(vars(self), __wrapped__=method, _bound=(instance,))
        return bound

    def __reduce__(self) -> Any:
        # What is compiled stays here. A method, and what a decorator has put in the place of its
        # function, are found by name.
        if self._bound:
            return getattr, (*self._bound, vars(self)["__name__"])
        parts = self.__wrapped__, self._amped, self._settings
        return vars(self)["__qualname__"] if is_found(self) else (DelayedFunction, parts)

    def __repr__(self) -> str:
        return f"<amp of {self.__wrapped__!r}, {self.policy}>"

    def _run(self, history: History | None, args: Any, kwargs: Any) -> tuple[Any, History]:
        leaves, tree = jax.tree.flatten(((*self._bound, *args), kwargs))
        places = [i for i, leaf in enumerate(leaves) if is_array(leaf) or type(leaf) is float]
        constants = [constant_key(leaf) for i, leaf in enumerate(leaves) if i not in places]
        key = tree, tuple(places), tuple(constants), history is None
        if key not in self._compiled:
            self._compiled[key] = self._jitted(leaves, tree, places)
        result, made = self._compiled[key](history, *(leaves[i] for i in places))
        return result.join(), made

    def _jitted(self, leaves: Sequence[Any], tree: Any, places: Sequence[int]) -> Any:
        given = [None if i in places else leaf for i, leaf in enumerate(leaves)]

        @jax.jit
        def run(history: History | None, *arrays: Any) -> tuple[Result, History]:
            outputs: list[Outputs] = []

            def flat(*arrays: Any) -> list[Any]:
                values = list(given)
                for i, array in zip(places, arrays, strict=True):
                    values[i] = array
                args, kwargs = jax.tree.unflatten(tree, values)
                returned, structure = jax.tree.flatten(self._amped(*args, **kwargs))
                outputs[:] = [Outputs(structure, [_constant(r) for r in returned])]
                return [r for r in returned if is_array(r)]

            closed = jax.make_jaxpr(flat)(*arrays)
            thread = functools.partial(
                _Threader(self.policy.scaling.history).run, closed.jaxpr, closed.consts
            )
            # Whoever tries another policy on the step has no history for it.
            tried = in_force(self._settings).policy != self.policy
            results, made = _threaded(thread, arrays, None if tried else history)
            return Result(results, outputs[0]), made

        return run


def _is_history(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(key, str) and _PLACE.fullmatch(key) for key in value
    )


def _threaded(
    thread: Callable[..., tuple[list[Any], History]],
    arrays: Sequence[Any],
    history: History | None,
) -> tuple[list[Any], History]:
    """What `thread` makes of arrays and a history, which has to be one that it makes itself."""
    if history is None:
        return thread(arrays, None)
    try:
        result = thread(arrays, history)
        if _kinds(result[1]) == _kinds(history):
            return result
    except Exception:
        if _kinds(jax.eval_shape(lambda: thread(arrays, None)[1])) == _kinds(history):
            raise
    raise TrainingError(
        "The history is not this step's: of another function, policy or constant argument, or of "
        "loops with another number of turns. Make a new one with step.init(*args)."
    )


def _kinds(history: History) -> dict[str, Any]:
    """Shape and dtype of each window, by its place; whatever the containers are."""
    leaves = jax.tree_util.tree_leaves_with_path(history)
    return {jax.tree_util.keystr(path): (leaf.shape, leaf.dtype) for path, leaf in leaves}


def _constant(value: Any) -> Callable[[], Any] | None:
    return None if is_array(value) else lambda: value


class _Threader:
    """Runs a program whose quantized dots take their scales from a history."""

    def __init__(self, length: int) -> None:
        self.length = length

    def run(
        self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], history: History | None
    ) -> tuple[list[Any], History]:
        env: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
        env.update(zip(jaxpr.constvars, consts, strict=True))
        made: History = {}
        for index, eqn in enumerate(jaxpr.eqns):
            operands = [_compat.read_atom(env, atom) for atom in eqn.invars]
            with _compat.emitting(eqn):
                if _is_threaded(eqn):
                    key = f"{index}:{eqn.primitive.name}"
                    rule = _RULES[eqn.primitive.name]
                    part = None if history is None else history[key]
                    outs, made[key] = rule(self, eqn, operands, part)
                else:
                    outs = _compat.bind(eqn, operands)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [_compat.read_atom(env, atom) for atom in jaxpr.outvars], made

    def dot(
        self, eqn: JaxprEqn, operands: Sequence[Any], history: History | None
    ) -> tuple[list[Any], History]:
        """A quantized dot, and the histories of its operands with this step in them."""
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
        """A call, emitted in place; what is computed again stays apart from the first time."""
        body = call_body(eqn)
        if eqn.params.get("prevent_cse"):
            operands = optimization_barrier_p.bind(*operands)
        return self.run(body.jaxpr, body.consts, operands, history)

    def scan(
        self, eqn: JaxprEqn, operands: Sequence[Any], history: History | None
    ) -> tuple[list[Any], History]:
        """A loop, whose histories have a row for each turn."""
        body, params = call_body(eqn), eqn.params
        consts, carries = _compat.scan_layout(eqn)
        fixed, init = operands[:consts], operands[consts : consts + carries]

        def turn(carry: Any, slices: Any) -> Any:
            xs, rows = slices
            outs, made = self.run(body.jaxpr, body.consts, [*fixed, *carry, *xs], rows)
            return outs[:carries], (outs[carries:], made)

        carry, (stacks, made) = lax.scan(
            turn,
            list(init),
            (list(operands[consts + carries :]), history),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *stacks], made


@jax.custom_jvp
def _sealed(x: Any) -> Any:
    """The array itself, which cannot be differentiated any more."""
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
    """An array with the scale that belongs to a magnitude; what is larger is clipped."""
    scale = scale_factor(amax, cast.out_dtype, round_up=cast.round_sf)
    scale = jnp.where(amax == 0, np.float32(1), scale)  # nothing is known of it yet
    return with_scale(x, stored_scale(scale, cast), cast)


_RULES = {
    "quantized_dot": _Threader.dot,
    "scan": _Threader.scan,
    **dict.fromkeys(
        ("jit", "pjit", "checkpoint", "closed_call", "custom_jvp_call", "custom_vjp_call"),
        _Threader.call,
    ),
}


def _is_threaded(eqn: JaxprEqn) -> bool:
    if eqn.primitive is quantized_dot_p:
        return all(cast.sf_block is None for cast in eqn.params["how"].casts)
    return eqn.primitive.name in _RULES and _has_dots(call_body(eqn).jaxpr)


def _has_dots(jaxpr: Jaxpr) -> bool:
    return any(map(_is_threaded, jaxpr.eqns))
