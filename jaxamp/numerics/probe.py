"""`probe`: the effect of a policy on the numbers of a program, operation by operation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
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
from jaxamp.plan import make_plan
from jaxamp.policy.context import amp_scope
from jaxamp.policy.settings import Settings
from jaxamp.run.amp import Answer, amp, answering, parts_of, without_jit
from jaxamp.run.runner import Runner
from jaxamp.trace.arguments import Layout
from jaxamp.trace.static_arguments import kept
from jaxamp.trace.trace import Outputs, trace


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
    >>> found = probe(lambda x: jnp.exp(x) @ x, "auto_mixed")(jnp.full((2, 2), 12.0))
    >>> found.first.primitive, found.first.dtype, found.first.largest
    ('dot_general', 'float16', 162754.796875)
    """
    plain = differentiated(without_jit(fn)) if grad else without_jit(fn)
    ask = answering(plain, policy, _Prober, strict=strict)

    @functools.wraps(fn, updated=())
    def run(*args: Any, **kwargs: Any) -> ProbeReport:
        if jax_compat.is_tracing():
            raise InspectionError(
                "probe looks at numbers, and inside of jax.jit or another transformation there "
                "are none yet. Call it outside, and put the transformation into the function."
            )
        return ask(*args, **kwargs)

    return run


def differentiated(fn: Any, by: Callable[..., Any] = jax.value_and_grad) -> Any:
    """Return a derivative of `fn` under its own name and policy."""
    plain, settings = parts_of(fn)
    if settings is None:
        return by(fn)
    return amp(by(plain), settings.policy, strict=settings.strict)


class _Prober(Runner):
    """A Runner that measures."""

    def __init__(
        self, function: Callable[..., Any], settings: Settings, *, pure: bool = False
    ) -> None:
        super().__init__(function, settings, pure=pure)
        self._measured: dict[Hashable, Callable[..., _Measurement]] = {}
        self._programs: list[Program] = []  # one for each trace

    def run(
        self,
        layout: Layout,
        leaves: Sequence[Any],
        traced: Sequence[Any],
        keys: Sequence[Hashable],
        name: str,
    ) -> Any:
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            raise InspectionError("probe runs the program: give it arrays rather than shapes.")
        key = (layout, keys)
        forms = self._measured
        form = forms.get(key) or forms.setdefault(key, self._measuring(layout, leaves, keys, name))
        raise Answer(form(*traced).report(str(self.settings.policy), traced))

    def _measuring(
        self, layout: Layout, leaves: Sequence[Any], keys: Sequence[Hashable], name: str
    ) -> Callable[..., Any]:
        constants, function = kept(leaves, keys), self.resolve()
        named = zip(layout.names(function), keys, strict=True)
        inputs = [input_name for input_name, k in named if k is None]

        def measure(*arrays: Any) -> _Measurement:
            with amp_scope(self.settings.policy), jax_compat.lines_of_backward_rules():
                jaxpr, outputs = trace(function, layout, constants, arrays, name)
                plan = make_plan(jaxpr, self.settings.policy, strict=self.settings.strict)
                program = Program.of(jaxpr, plan, inputs, output_names(outputs))
                outs, ledger = program.measured(*arrays)
            peaks = [
                peak_of(out)
                for out, var in zip(outs, program.results, strict=True)
                if var is not None and jnp.issubdtype(var.aval.dtype, jnp.inexact)
            ]
            self._programs.append(program)
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


def output_names(outputs: Outputs) -> list[str]:
    """Name the arrays that a function returns by their path in its result."""
    arrays = iter(range(len(outputs.constants)))
    leaves = [next(arrays) if constant is None else None for constant in outputs.constants]
    tree = jax.tree.unflatten(outputs.treedef, leaves)
    paths = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)[0]
    return [jax.tree_util.keystr(path) or "the result" for path, leaf in paths if leaf is not None]
