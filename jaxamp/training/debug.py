"""Find why a training step is not finite: the operation, and the rule that would prevent it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision
from jaxamp.errors import InspectionError
from jaxamp.inspect.displayable import Data
from jaxamp.inspect.half_range import too_large_for_f16
from jaxamp.numerics.nonfinite import Nonfinite, find_nonfinite
from jaxamp.policy.policy import PrecisionPolicy
from jaxamp.policy.rules import Rule
from jaxamp.run.amp import parts_of, without_jit
from jaxamp.run.settings import overriding
from jaxamp.trace.arguments import AS_ARGUMENT, Layout, Signature, split
from jaxamp.trace.trace import trace
from jaxamp.training.loss_scale import scales_at_one

_MOST_RULES = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis(Data):
    """Diagnosis of a step that is not finite.

    Attributes:
      first: the operation that made the first infinity or NaN; ``None`` if all is finite.
      rules: override rules that prevent it: the step was run with them, and was finite. Empty if
        there are none.
      finite_in_f32: whether the step is finite when everything runs in float32.
      finite_unscaled: whether it is under a loss scale of one; ``None`` if the operation to blame
        is not in a backward pass.
      runs: how often the step was run.
      too_large: remarks on arguments whose numbers float16 cannot hold, of a finite step that
        uses it: a bounded curve may hide their infinities.
    """

    first: Nonfinite | None
    rules: tuple[Rule, ...] = ()
    finite_in_f32: bool = True
    finite_unscaled: bool | None = None
    runs: int = 1
    too_large: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.first is None:
            return "\n".join(("The step is finite.", *self.too_large))
        return "\n".join((str(self.first), *self._advice()))

    def __rich__(self) -> str:
        return str(self)

    def _advice(self) -> Iterator[str]:
        if not self.finite_in_f32:
            yield (
                "Precision is not the cause: the step is not finite in float32 either. Look "
                "at that line."
            )
            return
        if self.finite_unscaled:
            yield (
                "The loss scale is too large: under a scale of 1 the step is finite. Take a "
                "smaller one, or a DynamicLossScale, which shrinks after such a step."
            )
        if self.rules:
            rules, too = ", ".join(map(_code, self.rules)), " too" if self.finite_unscaled else ""
            yield f"Verified by running it again, this prevents it{too}: policy.with_rules({rules})"
        else:
            yield "No rule prevents it. In float32 the step is finite."


def debug_step(step: Callable[..., Any]) -> Callable[..., Diagnosis]:
    """Find the operation that first became non-finite in a training step, and the rule against it.

    The step is run again, with a mark beside each value; then with override rules for the operation
    to blame and for what fails after it, until the step is finite. No state is changed.

    Args:
      step: a train step with ``amp`` or ``scaled_value_and_grad`` around or in it, compiled or not.

    Returns:
      A function of the step's arguments that returns a ``Diagnosis``.

    Raises:
      InspectionError: called inside of ``jax.jit`` or another transformation.

    >>> import jax.numpy as jnp, jaxamp
    >>> step = jaxamp.amp(lambda w, x: x @ w @ w @ w, "mixed_f16")
    >>> found = debug_step(step)(jnp.full((4, 4), 1e3), jnp.ones((4, 4)))
    >>> found.first.primitive, found.finite_in_f32, len(found.rules) > 0
    ('dot_general', True, True)
    """
    plain = without_jit(step)

    @functools.wraps(step, updated=())
    def debug(*args: Any, **kwargs: Any) -> Diagnosis:
        search, unscaled = _Search(plain, args, kwargs), None
        first = search.run()
        if first is None:
            given, signature = _as_traced(plain, args, kwargs)
            named = (signature.names(), given) if search.used_f16 else ((), ())
            return Diagnosis(first=None, runs=search.runs, too_large=too_large_for_f16(*named))
        if search.run(lambda _: PrecisionPolicy.ALWAYS_F32) is not None:
            return Diagnosis(first=first, finite_in_f32=False, runs=search.runs)
        if first.backward:
            with scales_at_one():
                unscaled = search.run() is None
        rules = search.rules(first)
        return Diagnosis(first=first, rules=rules, finite_unscaled=unscaled, runs=search.runs)

    return debug


class _Search:
    """Runs of one step under changed policies."""

    def __init__(self, step: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.step, self.args, self.kwargs = step, args, kwargs
        self.runs, self.used_f16 = 0, False

    def run(
        self, change: Callable[[PrecisionPolicy], PrecisionPolicy] = lambda policy: policy
    ) -> Nonfinite | None:
        """Run the step, under changed policies, and return its first non-finite operation."""

        def noted(policy: PrecisionPolicy) -> PrecisionPolicy:
            self.used_f16 |= Precision.F16 in policy.low
            return change(policy)

        self.runs += 1
        with overriding(noted):
            return explain_nonfinite(self.step)(*self.args, **self.kwargs)

    def rules(self, first: Nonfinite) -> tuple[Rule, ...]:
        """Search rules that make the step finite: for the first operation and what fails next."""
        found: list[Rule] = []
        failing: Nonfinite | None = first
        while failing is not None and len(found) < _MOST_RULES:
            new = next((r for r in _candidates(failing) if r not in found), None)
            if new is None:
                return ()
            found.append(new)
            failing = self._with(found)
        return () if failing is not None else self._needed(found)

    def _needed(self, rules: Sequence[Rule]) -> tuple[Rule, ...]:
        """Return the rules without those that a later, wider one has made superfluous."""
        kept = list(rules)
        for rule in rules[:-1]:
            fewer = [r for r in kept if r is not rule]
            if self._with(fewer) is None:
                kept = fewer
        return tuple(kept)

    def _with(self, rules: Sequence[Rule]) -> Nonfinite | None:
        """Return the first non-finite operation with these rules."""
        return self.run(lambda policy: policy.with_rules(*rules))


def _candidates(failing: Nonfinite) -> list[Rule]:
    """Return rules for an operation, the narrowest first."""
    function = failing.place.function.rpartition(".")[2] or None
    scope = failing.scope or None
    keys = [
        {"scope": scope, "function": function},
        {"function": function},
        {"scope": scope},
        {"scope": scope.rpartition("/")[0] if scope else None},
        {"primitive": "*"},
    ]
    named = ({k: v for k, v in key.items() if v} for key in keys)
    return [Rule(precision=Precision.F32, **key) for key in named if key]


def _code(rule: Rule) -> str:
    keys = ", ".join(f"{key}={value!r}" for key, value in rule.to_data().items())
    return f"Rule({keys})"


def explain_nonfinite(fun: Callable[..., Any]) -> Callable[..., Nonfinite | None]:
    """Find the operation of `fun` that made the first infinity or NaN to reach a result.

    Runs `fun` once more, with a mark beside each value: ask when a flag was `False`.

    Args:
      fun: any function of arrays: what ``scaled_value_and_grad`` returned, a loss, a train step.

    Returns:
      A function of `fun`'s arguments, which returns ``None`` if all results are finite.

    Raises:
      InspectionError: called inside of ``jax.jit`` or another transformation.

    >>> import jaxamp
    >>> def loss_fn(w, x):
    ...     return jnp.sum((x @ w) * 3.0)
    >>> step = jaxamp.training.scaled_value_and_grad(loss_fn, policy="mixed_f16", loss_scale=None)
    >>> found = explain_nonfinite(step)(jnp.full((2, 2), 300.0), jnp.full((2, 2), jnp.inf))
    >>> found.kind, found.primitive
    ('infinity', 'input')
    >>> found = explain_nonfinite(lambda x: {"y": jnp.log(x - 1)})(jnp.ones(3))
    >>> found.output, found.kind, found.primitive, found.largest
    ("['y']", 'infinity', 'log', 0.0)
    """

    @functools.wraps(fun, updated=())
    def explain(*args: Any, **kwargs: Any) -> Nonfinite | None:
        if jax_compat.is_tracing():
            raise InspectionError(
                "explain_nonfinite and debug_step look at numbers, and inside of jax.jit or "
                "another transformation there are none yet. Call them outside, on the function "
                "that is transformed."
            )
        given, signature = _as_traced(fun, args, kwargs)
        jaxpr, outputs = trace(signature, given, is_named=False)
        arrays = [jnp.asarray(array) for array in given]
        return find_nonfinite(jaxpr, arrays, signature.names(), outputs.paths())

    return explain


def _as_traced(fun: Callable[..., Any], args: Any, kwargs: Any) -> tuple[list[Any], Signature]:
    """Return the arrays of a call, and the rest of it, as the function would trace them."""
    settings, numbers = parts_of(fun)[1], ()
    if settings is not None:
        (args, kwargs), numbers = settings.statics.mark(args, kwargs, 0), AS_ARGUMENT
    given, rest = split((None, (), {}, args, kwargs), numbers=numbers)
    return given, Signature(lambda: fun, Layout.of(rest.treedef), rest, "")
