"""`probe`: the effect of a policy on the numbers of a program, operation by operation."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import jax
import numpy as np

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision
from jaxamp.errors import InspectionError
from jaxamp.inspect.blocks import blocks_of
from jaxamp.inspect.half_range import too_large_for_f16
from jaxamp.numerics.nested_interpreter import is_inexact
from jaxamp.numerics.nonfinite import find_nonfinite, makes
from jaxamp.numerics.probe_report import ProbeReport, operations_of
from jaxamp.numerics.shadow import run_beside
from jaxamp.numerics.statistics import peak_of
from jaxamp.plan import Plan
from jaxamp.rewrite import run_plan
from jaxamp.run.amp import amp, inspected, parts_of, static_parameters, without_jit
from jaxamp.run.emit import Result, plan_call
from jaxamp.run.runner import Runner
from jaxamp.run.settings import Settings
from jaxamp.trace.arguments import Signature


def probe(
    fn: Any, policy: Any = None, *, grad: bool = False, strict: bool = False
) -> Callable[..., ProbeReport]:
    """Measure the effect of `policy` on the numbers of `fn`.

    One compiled pass runs the mixed-precision program and, beside each value that differs, what the
    original program would have computed. It goes through calls, loops, branches, remat and custom
    derivatives; each operation has one row of statistics however often it runs. Where a loop ends
    and which branch is taken is decided by the mixed-precision program.

    A train step that takes its own gradients is probed as it is, backward pass included.

    Args:
      fn: whatever `amp` takes, or what it returned; ``jax.jit`` around it is looked through.
      policy: as for `amp`; by default that of an amped `fn`, else `mixed_bf16`.
      grad: probe ``jax.value_and_grad(fn)`` instead: `fn` returns a scalar and is differentiated by
        its first argument.
      strict: as for `amp`.

    Returns:
      A function of `fn`'s arguments that returns the ``ProbeReport``.

    Raises:
      InspectionError: called inside of ``jax.jit`` or another transformation.

    >>> import jax.numpy as jnp
    >>> found = probe(lambda x: jnp.exp(x) @ x, "mixed_f16")(jnp.full((2, 2), 12.0))
    >>> found.first.primitive, found.first.dtype, found.first.largest
    ('dot_general', 'float16', 162754.796875)
    """
    plain = differentiated(without_jit(fn)) if grad else without_jit(fn)
    amped = inspected(plain, policy, strict=strict, statics=static_parameters(fn), runner=_Prober)
    prober = amped.runner

    @functools.wraps(fn, updated=())
    def run(*args: Any, **kwargs: Any) -> ProbeReport:
        if jax_compat.is_tracing():
            raise InspectionError(
                "probe looks at numbers, and inside of jax.jit or another transformation there "
                "are none yet. Call it outside, and put the transformation into the function."
            )
        with amped.prepared(args, kwargs) as call:
            if any(isinstance(array, jax.ShapeDtypeStruct) for array in call.arrays):
                raise InspectionError("probe runs the program: give it arrays rather than shapes.")
            measured = prober.form(call)(*call.arrays)
            traced, (results, sums, peaks) = measured.outputs(), measured.arrays
            first, plan = None, traced.plan
            if not np.isfinite(jax.device_get(results)).all():  # run again, to say why
                emitted = jax.make_jaxpr(functools.partial(run_plan, plan.jaxpr, plan))
                closed = emitted(*call.arrays)
                first = find_nonfinite(closed, call.arrays, traced.inputs, traced.outputs)
        named = (traced.inputs, call.arrays) if Precision.F16 in amped.policy.low else ((), ())
        return ProbeReport(
            policy=str(amped.policy),
            operations=operations_of(blocks_of(plan).walk(), sums, peaks),
            first=first,
            too_large=too_large_for_f16(*named),
        )

    return run


def differentiated(fn: Any, by: Callable[..., Any] = jax.value_and_grad) -> Any:
    """Return a derivative of `fn` under its own name and policy."""
    plain, settings = parts_of(fn)
    if settings is None:
        return by(fn)
    return amp(by(plain), settings.policy, strict=settings.strict)


@dataclass(frozen=True, eq=False)
class _Traced:
    """The plan of a call, with the names of its arguments and results."""

    plan: Plan
    inputs: Sequence[str]
    outputs: Sequence[str]


class _Prober(Runner):
    """A Runner whose forms return largest magnitudes of the results, and the two tables.

    The rest of what they return is a reference to what was traced, weak for the sake of JAX's
    caches, which outlive it.
    """

    def __init__(self, function: Callable[..., Any], settings: Settings) -> None:
        super().__init__(function, settings)
        self._traced: list[_Traced] = []

    def compile(self, signature: Signature) -> Callable[..., Any]:
        settings, all_traced = self.settings, self._traced

        def measure(*arrays: Any) -> Result:
            plan, outputs = plan_call(signature, arrays, settings)
            traced = _Traced(plan, signature.names(), outputs.paths())
            outs, ledger = run_beside(plan, *arrays)
            made = itertools.compress(outs, makes(plan.jaxpr.jaxpr))
            peaks = [peak_of(out) for out in made if is_inexact(jax.typeof(out))]
            all_traced.append(traced)
            return Result((peaks, *ledger), ref(traced))

        return jax.jit(measure)
