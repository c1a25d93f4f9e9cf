"""The origin of the first infinity or NaN of a program."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision
from jaxamp.inspect.blocks import Block, Site, blocks_of
from jaxamp.inspect.displayable import Data
from jaxamp.inspect.half_range import beyond_f16, largest_finite, peak_of_f32
from jaxamp.inspect.operation import Place
from jaxamp.numerics.blame import INFINITY, NAN, Blaming, earliest, given, kind_of
from jaxamp.numerics.nested_interpreter import Value, is_inexact
from jaxamp.numerics.shadow import Shadowing
from jaxamp.numerics.statistics import Ledger
from jaxamp.plan import Plan
from jaxamp.rewrite.primitives.accumulate import accumulate_p, contraction_of
from jaxamp.rewrite.registry import RewriteContext


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Nonfinite(Data):
    """The origin of the first infinity or NaN of a program.

    Attributes:
      output: the first result that is not finite, by its path in what the function returned.
      kind: ``"infinity"`` or ``"NaN"``, whichever the operation made.
      primitive: the operation; ``"input"`` if the function was given such a number.
      dtype: dtype that the operation computed in, or stored its result in if that is narrower.
      largest: largest magnitude among the finite numbers that the operation took.
      source: the user's source line, as JAX prints it.
      place: the innermost line that is the user's own.
      scope: the scope path, as the user wrote it.
      backward: whether it is in a backward pass.
      iterations: which iteration of the loops around it, outermost first.
      argument: the argument that holds numbers beyond float16, where the operation read it in that.
      operands: what the operation took, before it was cast for it.
    """

    output: str
    kind: str
    primitive: str
    dtype: str = ""
    largest: float = 0.0
    source: str
    place: Place
    scope: str = ""
    backward: bool = False
    iterations: tuple[int, ...] = ()
    argument: str = ""
    operands: tuple[np.ndarray, ...] = dataclasses.field(default=(), repr=False, compare=False)

    def __str__(self) -> str:
        if self.primitive == "input":
            return f"{self.output} is not finite because an input holds {self.kind}: {self.source}"
        where = f" in {self.scope}" if self.scope else ""
        when = ", in the backward pass" if self.backward else ""
        loops = f", iteration {', '.join(map(str, self.iterations))}" if self.iterations else ""
        return (
            f"{self.output} is not finite. The first {self.kind} was made by {self.primitive} in "
            f"{self.dtype}{where}, at {self.source}{when}{loops}, from operands {self._taken}."
            + (f" {beyond_f16(self.argument, self.largest)}" if self.argument else "")
        )

    @property
    def _taken(self) -> str:
        """The operands, in a few words."""
        infinite = any(kind_of(operand) == INFINITY for operand in self.operands)
        return "with infinities" if infinite else f"of at most {self.largest:.4g}"


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A program that can be run beside its shadow, with the names of its arguments and results.

    Without a context for the rewrite it runs as it is written.
    """

    block: Block
    context: RewriteContext | None
    inputs: Sequence[str]
    outputs: Sequence[str]

    @classmethod
    def of(
        cls, jaxpr: ClosedJaxpr, plan: Plan | None, inputs: Sequence[str], paths: Sequence[str]
    ) -> Program:
        """Return the program of a jaxpr; without a plan, as it is written."""
        block = blocks_of(jaxpr, plan.body if plan else None)
        context = RewriteContext(plan.policy, plan.repeated) if plan else None
        return cls(block, context, inputs, [path or "the result" for path in paths])

    @property
    def results(self) -> list[Any]:
        """Per result its variable; ``None`` for one that is an input or a literal."""
        made = {var for eqn in self.block.jaxpr.eqns for var in eqn.outvars}
        outvars = self.block.jaxpr.outvars
        return [v if not isinstance(v, Literal) and v in made else None for v in outvars]

    def measured(self, *args: Any) -> tuple[list[Any], Any]:
        """Run it beside its shadow; return its results and the table of statistics."""
        assert self.context is not None  # only what is planned is measured
        values = list(map(Value, args))
        ledger = Ledger.empty(sum(1 for _ in self.block.walk()))
        outs, ledger = Shadowing(self.context).run(self.block, values, ledger)
        return [value.low for value in outs], ledger


def find_nonfinite(program: Program, args: Sequence[Any]) -> Nonfinite | None:
    """Run a program, and find what made the first number that is not finite; ``None`` if none."""
    found = Blaming(program.context).run(program.block, list(map(given, args)), ())
    bad = [
        (name, value.mark)
        for var, value, name in zip(program.results, found, program.outputs, strict=True)
        if var is not None and value.mark is not None
    ]
    if not bad:
        return None
    name, first = bad[0][0], earliest(mark for _, mark in bad)
    if first.site is None:  # an argument, or a constant
        named = zip(program.inputs, map(kind_of, args), strict=True)
        source, kind = next((pair for pair in named if pair[1]), ("a constant", NAN))
        return Nonfinite(output=name, kind=kind, primitive="input", source=source, place=Place())
    site, operands = first.site, tuple(map(np.asarray, first.operands))
    largest = max(map(largest_finite, operands), default=0.0)
    argument = ""
    if _dtype(site) == "float16" and largest > Precision.F16.max:
        peaks = zip(program.inputs, map(peak_of_f32, args), strict=True)
        argument = next((word for word, peak in peaks if peak == largest), "")
    return Nonfinite(
        output=name,
        kind=first.born,
        primitive=_primitive(site),
        dtype=_dtype(site),
        largest=largest,
        source=jax_compat.user_line(site.eqn.source_info),
        place=site.place,
        scope=site.scope,
        backward=site.backward,
        iterations=first.iterations,
        argument=argument,
        operands=operands,
    )


def _primitive(site: Site) -> str:
    """Return the name of an operation; of a product in low precision that of the product."""
    eqn = site.eqn
    primitive = contraction_of(eqn.params)[0] if eqn.primitive is accumulate_p else eqn.primitive
    return primitive.name


def _dtype(site: Site) -> str:
    """Return the narrowest float dtype of a planned operation; else that of its result."""
    decided = (site.decision.operand, site.decision.output) if site.decision else ()
    known = [precision for precision in decided if precision is not None]
    if known:
        return str(min(known, key=lambda precision: precision.bits).dtype)
    avals: list[Any] = [var.aval for var in site.eqn.outvars]
    return next((str(aval.dtype) for aval in avals if is_inexact(aval)), "")
