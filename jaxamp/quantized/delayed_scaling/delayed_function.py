"""Delayed scaling: scales from the magnitudes of earlier steps, which the caller keeps.

A scale for a whole tensor takes two passes over it: one to find the largest magnitude, one to
round. With the magnitudes of earlier steps one pass does both: it rounds, and finds the magnitude
for later steps. They are a pytree that each step takes and returns, and that a checkpoint saves
like any other array.

See: Micikevicius et al. 2022, arXiv:2209.05433.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from jaxamp.errors import TrainingError, shown
from jaxamp.quantized.delayed_scaling.amax_history import run_with_history
from jaxamp.quantized.delayed_scaling.carried_parameters import returned_parameters
from jaxamp.quantized.delayed_scaling.history import History, is_history
from jaxamp.run.amp import AmpFunction
from jaxamp.run.emit import compiled, function_result
from jaxamp.run.runner import Runner
from jaxamp.run.settings import Settings, in_force
from jaxamp.trace.arguments import Signature


class DelayedFunction(AmpFunction[..., Any]):
    """A train step with delayed scaling; what ``amp`` returns under ``fp8_delayed``.

    The step has to contain its gradient: the magnitudes of gradients are kept as well. Dots in
    ``while`` loops, branches and ``shard_map`` are scaled by the tensor at hand, and so are blocks.
    ``plan_of``, ``report`` and the like take the arguments of the step alone.
    """

    takes_history = True  # unlike what `amp` returns otherwise
    _leading = 1

    def __init__(
        self,
        fn: Callable[..., Any],
        settings: Settings,
        owner: tuple[Any, ...] = (),
        runner: Callable[[Callable[..., Any], Settings], Runner] | None = None,
    ) -> None:
        super().__init__(fn, settings, runner or _HistoryRunner)
        self._owner = owner  # the object whose method this is

    def init(self, *args: Any, **kwargs: Any) -> History:
        """Return the history before the first step, of the structure that a step returns.

        It is made anew for parameters that no step has returned, as of a checkpoint without one.

        Returns:
          Under ``"amax"`` a row for each earlier step, the last one first, and a column for each
          tensor that is quantized: its largest magnitude, zero where there was none. Loops have
          histories of their own, with a leading axis over iterations. Under ``"carried"``, if the
          policy says so, the parameters that quantized products read, in 8 bits.

        Raises:
          TrainingError: parameters are carried, but the step does not return them first.
        """
        return self._run(None, args, kwargs, runs=False)[1]

    def __call__(self, history: History, *args: Any, **kwargs: Any) -> tuple[Any, History]:
        """Run one step.

        Args:
          history: what ``init`` or the step before returned.
          *args: arguments of the step.
          **kwargs: keyword arguments of the step.

        Returns:
          What the function returns, and the history for the next step.

        Raises:
          TrainingError: the first argument is not a history, or that of another step.
        """
        self._check(history)
        return self._run(history, args, kwargs)

    def unmeasured(self, history: History, *args: Any, **kwargs: Any) -> tuple[Any, History]:
        """Run one step with the scales of a history, and find no magnitudes for later ones.

        The kernels that quantize then need not reduce, and on a GPU write both layouts that
        products read. Numbers beyond the scales are clipped until a step is measured again.

        Args:
          history: what ``init`` or the step before returned.
          *args: arguments of the step.
          **kwargs: keyword arguments of the step.

        Returns:
          What the function returns, and the history for the next step: magnitudes as they were, and
          the new parameters in 8 bits if these are carried.

        Raises:
          TrainingError: the first argument is not a history, or that of another step.
        """
        self._check(history)
        result, made = self._run(history, args, kwargs, measures=False)
        return result, {**history, **made}

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        method = MethodType(self.__wrapped__, instance)
        # What is compiled is shared.
        return DelayedFunction(method, self.settings, (instance,), lambda *_: self.runner)

    def __reduce__(self) -> Any:
        # What is compiled stays here. A method is found by name.
        if self._owner:
            return getattr, (*self._owner, vars(self)["__name__"])
        return super().__reduce__()

    def _check(self, history: Any) -> None:
        if not is_history(history):
            raise TrainingError(
                f"Under {self.policy} a step takes its history first, but got {shown(history)}. "
                "Write history = step.init(*args), then result, history = step(history, *args)."
            )

    def _run(
        self,
        history: History | None,
        args: Any,
        kwargs: Any,
        *,
        measures: bool = True,
        runs: bool = True,
    ) -> tuple[Any, History]:
        with self.prepared(args, kwargs, abstract=False) as call:
            form = self.runner.form(call)
            result, made = form(history, *call.arrays, measures=measures, runs=runs)
            return call.finish(function_result(result)) if runs else None, made


class _HistoryRunner(Runner):
    """A Runner whose compiled forms also take and return a history."""

    def compile(self, signature: Signature) -> Callable[..., Any]:
        settings, policy = self.settings, self.settings.policy
        rewritten = compiled(signature, settings._replace(policy=policy.stateless))

        @functools.partial(jax.jit, static_argnames=("measures", "runs"))
        def step(
            history: History | None, *arrays: Any, measures: bool, runs: bool
        ) -> tuple[Any, History]:
            closed, shapes = jax.make_jaxpr(rewritten, return_shape=True)(*arrays)
            structure = jax.tree.structure(shapes)
            # Under another policy, as while tuning, there is no history.
            tried = in_force(settings).policy != policy
            carries = policy.scaling.carried and not tried
            results, made = run_with_history(
                closed,
                arrays,
                None if tried else history,
                policy.scaling.history,
                measures=measures,
                returned=_returned(signature, closed, structure) if carries else {},
                advances=runs,
            )
            # What no result needs is not computed.
            return jax.tree.unflatten(structure, results) if runs else None, made

        return step


def _returned(signature: Signature, closed: ClosedJaxpr, structure: Any) -> dict[int, int]:
    """Return the positions of the first argument's arrays and of their new values."""
    given, returned = (
        [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        for avals in (closed.in_avals, closed.out_avals)
    )
    result = function_result(jax.tree.unflatten(structure, returned))
    return returned_parameters(signature, given, returned, result)
