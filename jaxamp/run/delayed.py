"""Delayed scaling: scales that come from the magnitudes of earlier steps, which the caller keeps.

A scale for a whole tensor needs two passes over it: one to find the largest magnitude, one to
round. With the magnitudes of the steps before, one pass is enough. They are a pytree that goes into
every step and comes out of it: nothing is hidden, and a checkpoint holds it like any other array.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import jax

from jaxamp.errors import TrainingError, shown
from jaxamp.policy.policy import PrecisionPolicy
from jaxamp.policy.settings import Settings, in_force
from jaxamp.run.amax_history import History, is_history, run_with_history
from jaxamp.run.emit import Result
from jaxamp.trace.arguments import is_array, is_found
from jaxamp.trace.captured_arrays import Held, are_held, captured
from jaxamp.trace.static_arguments import constant_key
from jaxamp.trace.trace import Outputs


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
          TrainingError: the first argument is not a history, or that of another step.
        """
        if not is_history(history):
            raise TrainingError(
                f"Under {self.policy} a step takes its history first, but got {shown(history)}. "
                "Write history = step.init(*args), then result, history = step(history, *args)."
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
        traced = tuple(is_array(leaf) or type(leaf) is float for leaf in leaves)
        arrays = [leaf for leaf, is_traced in zip(leaves, traced, strict=True) if is_traced]
        constants = [
            None if is_traced else leaf for leaf, is_traced in zip(leaves, traced, strict=True)
        ]
        key = tree, traced, tuple(map(constant_key, constants)), history is None
        run, borne = self._compiled.get(key, (None, ()))
        if run is None or not are_held(borne, (self.__wrapped__, *constants)):
            run, _ = self._compiled[key] = self._jitted(tree, traced, constants)
        result, made = run(history, *arrays)
        return result.join(), made

    def _jitted(
        self, tree: Any, traced: Sequence[bool], constants: Sequence[Any]
    ) -> tuple[Any, list[Held]]:
        """The compiled form, and the arrays of objects that it will have captured."""
        borne: list[Held] = []

        @jax.jit
        def run(history: History | None, *arrays: Any) -> tuple[Result, History]:
            outputs: list[Outputs] = []

            def flat(*arrays: Any) -> list[Any]:
                rest = iter(arrays)
                leaves = zip(constants, traced, strict=True)
                values = [next(rest) if is_traced else leaf for leaf, is_traced in leaves]
                args, kwargs = jax.tree.unflatten(tree, values)
                returned, structure = jax.tree.flatten(self._amped(*args, **kwargs))
                outputs[:] = [Outputs(structure, [_constant(r) for r in returned])]
                return [r for r in returned if is_array(r)]

            closed = jax.make_jaxpr(flat)(*arrays)
            borne.extend(captured(closed, (self.__wrapped__, *constants)))
            # Whoever tries another policy on the step has no history for it.
            tried = in_force(self._settings).policy != self.policy
            results, made = run_with_history(
                closed, arrays, None if tried else history, self.policy.scaling.history
            )
            return Result(results, outputs[0]), made

        return run, borne


def _constant(value: Any) -> Callable[[], Any] | None:
    return None if is_array(value) else lambda: value
