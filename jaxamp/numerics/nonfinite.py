"""The origin of the first infinity or NaN of a program."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision
from jaxamp.inspect.displayable import Data
from jaxamp.inspect.half_range import beyond_f16, largest_finite, peak_of_f32
from jaxamp.inspect.operation import Place, frames_of, innermost
from jaxamp.jaxprs.name_stack import clean_scope, is_transposed
from jaxamp.numerics.blame import INFINITY, NAN, earliest, kind_of, marked_results
from jaxamp.rewrite.primitives.accumulate import accumulate_p, contraction_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Nonfinite(Data):
    """The origin of the first infinity or NaN of a program.

    Attributes:
      output: the first result that is not finite, by its path in what the function returned.
      kind: ``"infinity"`` or ``"NaN"``, whichever the operation made.
      primitive: the operation; ``"input"`` if the function was given such a number.
      dtype: dtype that the operation computed in, or of the cast around it that made the number.
      largest: largest magnitude among the finite numbers that the operation took.
      source: the user's source line, as JAX prints it.
      place: the innermost line that is the user's own.
      scope: the scope path, as the user wrote it.
      backward: whether it is in a backward pass.
      iterations: which iteration of the loops around it, outermost first.
      argument: the argument that holds numbers beyond float16, where the operation read it in that.
      operands: what the operation took, before it was cast for it if that made the number.
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


def find_nonfinite(
    closed: ClosedJaxpr, args: Sequence[Any], inputs: Sequence[str], paths: Sequence[str]
) -> Nonfinite | None:
    """Run a program, and find what made the first number that is not finite; ``None`` if none.

    `inputs` are the names of its arguments, `paths` those of its results.
    """
    results = zip(makes(closed.jaxpr), marked_results(closed, args), paths, strict=True)
    bad = [
        (path or "the result", value.mark)
        for is_made, value, path in results
        if is_made and value.mark is not None
    ]
    if not bad:
        return None
    output, first = bad[0][0], earliest(mark for _, mark in bad)
    if first.eqn is None:  # an argument, or a constant
        named = zip(inputs, map(kind_of, args), strict=True)
        source, kind = next((pair for pair in named if pair[1]), ("a constant", NAN))
        return Nonfinite(output=output, kind=kind, primitive="input", source=source, place=Place())
    info, operands = first.eqn.source_info, tuple(map(np.asarray, first.operands))
    largest = max(map(largest_finite, operands), default=0.0)
    argument = ""
    if first.dtype == "float16" and largest > Precision.F16.max:
        peaks = zip(inputs, map(peak_of_f32, args), strict=True)
        argument = next((word for word, peak in peaks if peak == largest), "")
    return Nonfinite(
        output=output,
        kind=first.born,
        primitive=_primitive(first.eqn),
        dtype=first.dtype,
        largest=largest,
        source=jax_compat.user_line(info),
        place=innermost(info, frames_of(info)),
        scope=clean_scope(first.name_stack),
        backward=is_transposed(first.name_stack),
        iterations=first.iterations,
        argument=argument,
        operands=operands,
    )


def makes(jaxpr: Jaxpr) -> list[bool]:
    """Return which of its results a program makes: the others are inputs or literals."""
    made = {var for eqn in jaxpr.eqns for var in eqn.outvars}
    return [not isinstance(v, Literal) and v in made for v in jaxpr.outvars]


def _primitive(eqn: JaxprEqn) -> str:
    """Return the name of an operation; of a product in low precision that of the product."""
    primitive = contraction_of(eqn.params)[0] if eqn.primitive is accumulate_p else eqn.primitive
    return primitive.name
