"""Compare a program's quantized dots with the FP8 products of its compiled form.

See: https://github.com/openxla/xla/issues/17887, where XLA silently lost such products.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxamp.compiled.deviceless import compile_all, exported, flattened
from jaxamp.compiled.hlo import Module, parse
from jaxamp.compiled.targets import TARGETS, target_named
from jaxamp.compiled.traffic import kernels
from jaxamp.inspect.dce import Live
from jaxamp.inspect.displayable import Displayable
from jaxamp.jaxprs.nested import Wiring, loop, nested, wiring
from jaxamp.quantized.primitives.quantized_dot import SCOPE, quantized_dot_p
from jaxamp.quantized.primitives.quantized_product import PRODUCT
from jaxamp.run.amp import amp, under
from jaxamp.trace.target import Target as Call

_DOTS = ("f8_dot", "dot_general", "accumulate")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Lowering(Displayable):
    """Quantized dots of a program, claimed and found after compilation; ``print`` shows it.

    Attributes:
      program: the function's name.
      target: the word for the chip; empty for the devices at hand.
      claimed: products of quantized operands in the rewritten program, each as often as it runs.
      found: products of 8-bit operands in the compiled program, each as often as it runs.
      missing: products that were to be of 8-bit operands and are not, by the names around them,
        each as often as it runs; a compiler drops the names of some.
    """

    program: str
    target: str
    claimed: int
    found: int
    missing: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Return whether every product that was claimed is there."""
        return self.claimed == self.found

    @property
    def lines(self) -> list[str]:
        """The verdict, and what is missing."""
        where = self.target or "the devices at hand"
        if not self.claimed:
            return [f"{self.program} on {where}: no FP8 products claimed; the plan says why."]
        lacks = self.target in TARGETS and "f8" not in TARGETS[self.target].rates
        first = [f"{TARGETS[self.target].title} multiplies no 8-bit floats."] if lacks else []
        verdict = "all" if self.complete else "not all"
        head = (
            f"{self.program} on {where}: {self.claimed} FP8 products claimed, {self.found} found "
            f"in the compiled program: {verdict}."
        )
        named = Counter(self.missing)
        rows = [f"  {times} not in 8 bits: {name}" for name, times in named.items()]
        nameless = self.claimed - self.found - named.total()
        more = [f"  {nameless} more, whose names the compiler has dropped"] if nameless > 0 else []
        return [*first, head, *rows, *more]


def verify_lowering(
    fn: Any, policy: Any = None, target: str | None = None
) -> Callable[..., Lowering]:
    """Compare the FP8 products that a policy asks for with those that the compiler made.

    A compiler may run a product of 8-bit numbers in 16 bits without a word: the chip lacks the
    format, or the program is not of the form that the compiler knows.

    Args:
      fn: whatever ``amp`` takes, or a function with amped ones in it, such as ``grad(amp(loss))``.
      policy: given to ``amp``; left out, ``fn`` is taken as it is.
      target: a chip that is not there, as for ``estimate``; left out, the devices at hand.

    Returns:
      A function of the same arguments as `fn`, in which ``jax.ShapeDtypeStruct`` may stand for an
      array. It returns a ``Lowering``.

    Raises:
      InspectionError: the target is unknown, or its compiler is not installed or fails.
      PolicyError: the policy is not understood.

    >>> x = jax.ShapeDtypeStruct((4096, 4096), "float32")
    >>> verify_lowering(jax.numpy.dot, "fp8_current")(x, x).claimed
    1
    """
    chip = None if target is None else target_named(target)
    parsed = None
    if policy is not None:
        fn, parsed = under(fn, policy)
    name = Call.of(fn).name

    def wrap(function: Any) -> Any:
        return function if parsed is None else amp(function, parsed.stateless)

    @functools.wraps(fn, updated=())
    def verify(*args: Any, **kwargs: Any) -> Lowering:
        flat, specs = flattened(fn, wrap, args, kwargs)
        traced = jax.jit(flat).trace(*specs)
        if chip is None:
            module = parse(traced.lower().compile().as_text() or "")
        else:
            with chip.described():
                program = exported(fn, wrap, args, kwargs, chip.platform)
            ((module, _),) = compile_all(chip, [program])
        found, missing = made(module)
        claimed = claims(traced.jaxpr)
        return Lowering(
            program=name,
            target=target or "",
            claimed=claimed,
            found=found,
            missing=() if claimed == found else missing,
        )

    return verify


def claims(closed: ClosedJaxpr) -> int:
    """Return the products of quantized operands that a program runs."""
    return _count(Live(), closed.jaxpr, (), "")


def _count(live: Live, jaxpr: Jaxpr, needed: Sequence[bool], around: str) -> int:
    total = 0
    for eqn, is_live, results in live.walk(jaxpr, needed):
        names = f"{around}/{eqn.source_info.name_stack}"
        is_dot = eqn.primitive.name in _DOTS
        if not is_live:
            continue
        if eqn.primitive is quantized_dot_p or (is_dot and PRODUCT in names):
            total += 1
            continue
        inner = [_count(live, body.jaxpr, results, names) for body in nested(eqn)]
        trips = loop(eqn).trips if wiring(eqn) is Wiring.SCAN else None
        total += (1 if trips is None else trips) * (
            max(inner) if wiring(eqn) is Wiring.BRANCHES else sum(inner)
        )
    return total


def made(module: Module) -> tuple[int, tuple[str, ...]]:
    """Count the products of 8-bit operands that run, and name those that were to be such."""
    found, missing = 0, []
    for kernel in kernels(module):
        source = kernel.instruction.source
        for contraction in kernel.contractions(module):
            if all(word.startswith("f8") for word in contraction.operands):
                found += kernel.runs
            elif SCOPE in source:
                missing += kernel.runs * [f"{contraction} in {source}"]
    return found, tuple(missing)
