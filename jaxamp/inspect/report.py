"""The report of a policy on a program, as a value."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from jaxamp.compiled.targets import target_named
from jaxamp.core.features import Outcome, works
from jaxamp.core.formats import Precision
from jaxamp.errors import InspectionError, accepted, counted
from jaxamp.inspect.count import Tally
from jaxamp.inspect.displayable import Displayable, plain
from jaxamp.inspect.half_range import too_large_for_f16
from jaxamp.inspect.operation import (
    Operation,
    Place,
    common_scope,
    grouped,
    is_float,
    numberless,
    total,
)
from jaxamp.inspect.walk import Residual, Walk, count_casts
from jaxamp.plan import Plan
from jaxamp.run.amp import inspected, plan_of, under
from jaxamp.trace.target import Target

HERE = "here"  # the target that is at hand
WIDE = "f32", "f64"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report(Displayable):
    """The effect of a policy on a program.

    Printed it is one screen; ``full()`` prints everything, and ``save`` writes it as a page.

    Attributes:
      program: the function's name.
      policy: the policy's name.
      operations: every operation, in program order.
      casts: conversions between float formats that the rewritten program has more, each as often as
        it runs; a compiler fuses and merges many of them.
      unmatched_rules: the policy's rules that decided nothing.
      unknown: unknown primitives.
      unknown_loops: lines of loops whose number of trips is not known: they count once.
      lowerings: where it was compiled, the FP8 products planned and found.
      residuals: values stored for the backward pass, where both passes are in the program.
      regions: regions that one kernel runs, or that stay as they are written, with reasons.
      too_large: remarks on arguments whose numbers float16 cannot hold, where it is used.
      everything: whether ``print`` shows all tables.

    >>> import jax.numpy as jnp
    >>> found = report(lambda x, w: jnp.tanh(x @ w))(jnp.ones((2, 3)), jnp.ones((3, 4)))
    >>> found.total.flops, found.dots()
    (56, {'bf16': 1})
    """

    program: str
    policy: str
    operations: tuple[Operation, ...]
    casts: int
    unmatched_rules: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    unknown_loops: tuple[Place, ...] = ()
    lowerings: tuple[Any, ...] = ()
    residuals: tuple[Residual, ...] = ()
    regions: tuple[Outcome, ...] = ()
    too_large: tuple[str, ...] = ()
    everything: bool = dataclasses.field(default=False, repr=False)

    @classmethod
    def of(cls, plan: Plan, program: str = "") -> Report:
        """Return the report of a plan."""
        walk = Walk(plan)
        return cls(
            program=program,
            policy=str(plan.policy),
            operations=tuple(walk.operations),
            unmatched_rules=tuple(map(str, plan.unmatched_rules)),
            unknown=plan.unknown,
            unknown_loops=tuple(walk.unknown_loops),
            residuals=tuple(walk.residuals),
            casts=count_casts(plan),
            regions=_regions_of(plan),
        )

    def full(self) -> Report:
        """Return the report that prints all of its tables."""
        return dataclasses.replace(self, everything=True)

    @property
    def total(self) -> Tally:
        """Everything together."""
        return total(self.operations)

    def by(self, *keys: str) -> dict[tuple[str, ...], Tally]:
        """Return totals by attributes of the operations, largest first.

        Args:
          *keys: names of attributes of ``Operation``, e.g. ``"kind", "arithmetic"``.

        Raises:
          InspectionError: an operation has no such attribute.
        """
        fields = [field.name for field in dataclasses.fields(Operation)]
        for key in keys:
            if not hasattr(Operation, key):
                raise InspectionError(f"An operation has no {key!r}. {accepted(key, fields)}")
        groups = grouped(self.operations, lambda o: tuple(str(getattr(o, key)) for key in keys))
        found = [(key, total(group)) for key, group in groups.items()]
        return dict(sorted(found, key=lambda item: (-item[1].flops, -item[1].bytes, item[0])))

    def dots(self) -> dict[str, int]:
        """Count the dots and convolutions that run, by the precision of their operands.

        FP8 ones are what the policy claims; ``lowerings`` say what the compiler made.
        """
        found: Counter[str] = Counter()
        for operation in self.contractions:
            found[operation.arithmetic] += operation.runs
        return {word: n for word, n in found.items() if n}

    @property
    def contractions(self) -> tuple[Operation, ...]:
        """Every dot and convolution."""
        return tuple(o for o in self.operations if o.contraction)

    @property
    def headline(self) -> str:
        """The share of the FLOPs of products that run narrow."""
        products = [o for o in self.contractions if o.tally.flops]
        low = [o for o in products if is_float(o.arithmetic) and o.arithmetic not in WIDE]
        if not products:
            return "no matrix products, so nothing runs narrow"
        if not low:
            return (
                f"all matrix products in {' and '.join(sorted({o.arithmetic for o in products}))}"
            )
        share = f"{100 * total(low).flops / total(products).flops:.1f}".removesuffix(".0")
        words = {f"{o.arithmetic} ({o.emulated})".removesuffix(" ()") for o in low}
        return f"{share} % of the FLOPs of matrix products in {' and '.join(sorted(words))}"

    def residual_bytes(self) -> dict[tuple[str, str], int]:
        """Return the bytes of residuals by scope and dtype, largest first.

        Equal layers are together: their scopes have a star for the number.
        """
        groups = grouped(self.residuals, lambda value: (numberless(value.scope), value.dtype))
        found = {
            (common_scope([value.scope for value in group]), word): sum(v.bytes for v in group)
            for (_, word), group in groups.items()
        }
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def notes(self) -> list[str]:
        """Remarks that the totals are to be read with."""
        emulated, eight = Counter[str](), 0
        for o in self.contractions:
            emulated[o.emulated] += o.runs
            eight += o.runs * (o.arithmetic.startswith("f8") and not o.emulated)
        notes = [
            *self.too_large,
            *(
                f"{counted(n, 'dot')} of quantized operands {'are' if n > 1 else 'is'} {words}, as "
                "blocks are on every chip"
                for words, n in emulated.items()
                if words and n
            ),
        ]
        notes += [f"rule matched nothing: {rule}" for rule in self.unmatched_rules]
        notes += [f"unknown primitive, left as it is: {name}" for name in self.unknown]
        places = dict.fromkeys(map(str, self.unknown_loops))
        notes += [f"a loop counts once, as its number of trips is not known: {p}" for p in places]
        if eight and not self.lowerings:
            notes.append(
                f"{eight} dots in FP8 are planned; with target= the compiled program is checked"
            )
        return [*notes, *(line for lowering in self.lowerings for line in lowering.lines)]

    @property
    def guards(self) -> dict[str, int]:
        """Number of operations that each guard decided, most first."""
        return dict(Counter(o.guard for o in self.operations if o.guard).most_common())

    def to_data(self) -> dict[str, Any]:
        """Return everything as plain words and numbers."""
        groups = [
            {"kind": kind, "arithmetic": word, **dataclasses.asdict(tally)}
            for (kind, word), tally in self.by("kind", "arithmetic").items()
        ]
        fields = Displayable.to_data(self)
        renamed = {"unknown_primitives": fields.pop("unknown"), "fp8": fields.pop("lowerings")}
        derived = {
            "total": self.total,
            "by_kind_and_precision": groups,
            "dots": self.dots(),
            "guards": self.guards,
            "unknown_loops": list(map(str, self.unknown_loops)),
        }
        return plain(fields | renamed | derived)


def report(
    fn: Any,
    policy: Any = None,
    *,
    target: str | None = None,
    everything: bool = False,
    strict: bool = False,
) -> Callable[..., Report]:
    """Report how much of a program runs in which precision, where and why.

    Nothing is run. FLOPs and bytes follow from the shapes: bytes are what the operations would
    move were each a kernel of its own, and the compiler fuses many of them; ``jaxamp.estimate``
    says what is left. Loops count as often as they run, a branch if it costs most.

    Args:
      fn: whatever ``amp`` takes, or what it returned.
      policy: as for ``amp``; by default that of an amped `fn`, else `mixed_bf16`.
      target: where to compile the program, to look for the FP8 products that it claims: a chip that
        is not there, as for ``estimate``, or ``"here"``; by default it is not compiled.
      everything: print all tables, as ``full()`` of the report does.
      strict: as for ``amp``.

    Returns:
      A function of the same arguments as `fn`, in which ``jax.ShapeDtypeStruct`` may stand for an
      array. It returns a ``Report``.

    Raises:
      InspectionError: the target is unknown, or its compiler is not installed or fails.

    >>> import jax, jax.numpy as jnp
    >>> spec = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    >>> found = report(lambda x, w: jnp.sum(x @ w), "mixed_bf16")(spec, spec)
    >>> [(o.primitive, o.arithmetic, o.each.flops) for o in found.operations]
    [('dot_general', 'bf16', 524288), ('reduce_sum', 'f32', 4096)]
    """
    amped = inspected(fn, policy, strict=strict)
    planned, has_f16 = plan_of(fn, policy, strict=strict), Precision.F16 in amped.policy.low
    plain, own = under(fn, policy)
    name = Target.of(plain).name
    where = None if target == HERE else target
    chip = None if where is None else target_named(where)
    looks = [] if target is None else [w.verify(plain, own, where) for w in works() if w.verify]

    @functools.wraps(planned, updated=())
    def made(*args: Any, **kwargs: Any) -> Report:
        with chip.described() if chip else nullcontext():
            found = Report.of(planned(*args, **kwargs), name)
        with amped.prepared(args, kwargs) if has_f16 else nullcontext() as call:
            named = (call.signature().names(), call.arrays) if call else ((), ())
        return dataclasses.replace(
            found,
            lowerings=tuple(look(*args, **kwargs) for look in looks),
            everything=everything,
            too_large=too_large_for_f16(*named),
        )

    return made


def _regions_of(plan: Plan) -> tuple[Outcome, ...]:
    """Return the regions of a program, and those that another policy or device would replace."""
    others = (work.elsewhere(plan) for work in works() if work.elsewhere)
    return tuple(o for of in (plan, *others) for o in (*_once(of.found), *of.refused))


def _once(found: Sequence[Outcome]) -> Sequence[Outcome]:
    """Leave out backward passes of their own, which are no other regions."""
    return [o for o in found if o.forward] or found
