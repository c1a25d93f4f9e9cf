"""`probe`: the effect of a policy on the numbers of a program, operation by operation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import jax
import jax.numpy as jnp
import numpy as np

from jaxamp.core import jax_compat
from jaxamp.errors import InspectionError
from jaxamp.numerics.nonfinite import Program, find_nonfinite
from jaxamp.numerics.probe_report import ProbeReport, report_of
from jaxamp.numerics.statistics import peak_of
from jaxamp.plan import plan_program
from jaxamp.policy.context import amp_scope
from jaxamp.run.amp import amp, inspected, parts_of, static_parameters, without_jit
from jaxamp.run.runner import Runner
from jaxamp.run.settings import Settings
from jaxamp.trace.arguments import Signature
from jaxamp.trace.trace import trace


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
      policy: as for `amp`; left out, that of an amped `fn`, else the default.
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
            return prober.form(call)(*call.arrays).report(str(amped.policy), call.arrays)

    return run


def differentiated(fn: Any, by: Callable[..., Any] = jax.value_and_grad) -> Any:
    """Return a derivative of `fn` under its own name and policy."""
    plain, settings = parts_of(fn)
    if settings is None:
        return by(fn)
    return amp(by(plain), settings.policy, strict=settings.strict)


class _Prober(Runner):
    """A Runner whose forms measure."""

    def __init__(self, function: Callable[..., Any], settings: Settings) -> None:
        super().__init__(function, settings)
        self._programs: list[Program] = []  # one for each trace

    def compile(self, signature: Signature) -> Callable[..., Any]:
        policy, strict, programs = self.settings.policy, self.settings.strict, self._programs

        def measure(*arrays: Any) -> _Measurement:
            with amp_scope(policy):
                jaxpr, outputs = trace(signature, arrays)
                plan = plan_program(jaxpr, policy, strict=strict)
                results = [path or "the result" for path in outputs.paths()]
                program = Program.of(plan.jaxpr, plan, signature.names(), results)
                outs, ledger = program.measured(*arrays)
            peaks = [
                peak_of(out)
                for out, var in zip(outs, program.results, strict=True)
                if var is not None and jnp.issubdtype(var.aval.dtype, jnp.inexact)
            ]
            programs.append(program)
            return _Measurement(peaks, ledger, _Weak(program))

        return jax.jit(measure)


class _Weak:
    """A weak reference to a program, for JAX's caches, which outlive it. Compared by identity."""

    __slots__ = ("program",)

    def __init__(self, program: Program) -> None:
        self.program = ref(program)


@jax.tree_util.register_pytree_node_class
class _Measurement:
    """Largest magnitudes of the results, the table of statistics, and the program they are of."""

    def __init__(self, peaks: Any, ledger: Any, measured: _Weak) -> None:
        self.peaks, self.ledger, self.measured = peaks, ledger, measured

    def report(self, policy: str, args: Sequence[Any]) -> ProbeReport:
        """Report what was measured; where a result is not finite, run the program again for why."""
        program = self.measured.program()
        assert program is not None  # its Runner holds it
        is_finite = np.isfinite(jax.device_get(self.peaks)).all()
        first = None if is_finite else find_nonfinite(program, args)
        sums, peaks = self.ledger
        return report_of(policy, program.block.walk(), sums, peaks, first)

    def tree_flatten(self) -> tuple[Any, _Weak]:
        return (self.peaks, self.ledger), self.measured

    @classmethod
    def tree_unflatten(cls, measured: _Weak, children: Any) -> _Measurement:
        peaks, ledger = children
        return cls(peaks, ledger, measured)
