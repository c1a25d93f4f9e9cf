"""Compare two policies on one program: what changes, where, and what it costs."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxamp.inspect.displayable import Displayable, plain
from jaxamp.inspect.operation import Operation, Place, grouped, total
from jaxamp.inspect.report import Report, report
from jaxamp.policy.policy import PrecisionPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An operation that runs otherwise; ``None`` on the side whose program lacks it."""

    before: Operation | None
    after: Operation | None

    @property
    def either(self) -> Operation:
        """The operation, on the side that has it."""
        found = self.after or self.before
        assert found is not None
        return found

    @property
    def words(self) -> str:
        """Precision before and after, such as ``"f32 → bf16"``."""
        return f"{_precisions(self.before)} → {_precisions(self.after)}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Difference(Displayable):
    """Differences between two policies on a program; ``print`` shows them.

    Attributes:
      before: the report under the first policy.
      after: the report under the second.
      changes: the operations that run otherwise, in program order.
    """

    before: Report
    after: Report
    changes: tuple[Change, ...]

    def lines(self) -> list[tuple[Place, str, list[Change]]]:
        """Group the changes by line and by what they change, most FLOPs first."""
        groups = grouped(self.changes, lambda change: (change.either.place, change.words))
        found = [(place, words, changes) for (place, words), changes in groups.items()]
        return sorted(found, key=lambda line: -total(c.either for c in line[2]).flops)

    def to_data(self) -> dict[str, Any]:
        """Return everything as plain words and numbers."""
        sides = {
            name: {"policy": side.policy, "total": side.total, "dots": side.dots()}
            for name, side in (("before", self.before), ("after", self.after))
        }
        changes = [{"before": change.before, "after": change.after} for change in self.changes]
        return plain({"program": self.after.program, **sides, "changes": changes})

    def __bool__(self) -> bool:
        return bool(self.changes)


def diff(policy: Any, other: Any) -> Callable[[Any], Callable[..., Difference]]:
    """Compare two policies on a program: ``diff(policy, other)(fn)(*args)``.

    Args:
      policy: what to start from; whatever ``amp`` takes as a policy.
      other: what to compare it with.

    Returns:
      A function of `fn` that returns a function of its arguments, in which
      ``jax.ShapeDtypeStruct`` may stand for an array. That returns a ``Difference``, which is true
      if there is any.

    Raises:
      PolicyError: a policy is not understood.

    >>> import jax.numpy as jnp
    >>> found = diff("always_f32", "mixed_f16")(jnp.dot)(jnp.ones((2, 3)), jnp.ones((3, 4)))
    >>> [change.words for change in found.changes]
    ['f32 → f16, stored f32']
    """
    policies = PrecisionPolicy.parse(policy), PrecisionPolicy.parse(other)

    def of(fn: Any) -> Callable[..., Difference]:
        reports = [report(fn, policy) for policy in policies]

        @functools.wraps(reports[0], updated=())
        def made(*args: Any, **kwargs: Any) -> Difference:
            before, after = (reported(*args, **kwargs) for reported in reports)
            changes = (
                Change(before=one, after=other)
                for one, other in _pairs(before.operations, after.operations)
                if one is None or other is None or _format(one) != _format(other)
            )
            return Difference(before=before, after=after, changes=tuple(changes))

        return made

    return of


def _pairs(
    before: Sequence[Operation], after: Sequence[Operation]
) -> Iterator[tuple[Operation | None, Operation | None]]:
    """Match each operation with its counterpart; a program may depend on its policy."""
    keys = [[_identity(o) for o in side] for side in (before, after)]
    matcher = difflib.SequenceMatcher(None, *keys, autojunk=False)
    same = keys[0] == keys[1]
    spans = [("equal", 0, len(before), 0, len(after))] if same else matcher.get_opcodes()
    for tag, start, stop, other_start, other_stop in spans:
        if tag == "equal":
            yield from zip(before[start:stop], after[other_start:other_stop], strict=True)
        else:
            yield from ((operation, None) for operation in before[start:stop])
            yield from ((None, operation) for operation in after[other_start:other_stop])


def _identity(operation: Operation) -> Any:
    place = operation.place
    return operation.primitive, place.file, place.line, operation.scope, operation.backward


def _format(operation: Operation) -> tuple[str, str]:
    return operation.arithmetic, operation.stored


def _precisions(operation: Operation | None) -> str:
    if operation is None:
        return "not there"
    arithmetic, stored = _format(operation)
    return arithmetic if arithmetic == stored else f"{arithmetic}, stored {stored}"
