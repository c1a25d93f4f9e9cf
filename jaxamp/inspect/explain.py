"""Annotate the user's own source: what runs in which precision on each line, and why."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxamp.core.taxonomy import OpKind, op_of
from jaxamp.errors import InspectionError, accepted
from jaxamp.inspect.displayable import Data, Displayable
from jaxamp.inspect.operation import (
    Operation,
    Place,
    common_scope,
    few,
    grouped,
    is_float,
    numberless,
    total,
)
from jaxamp.inspect.walk import Walk
from jaxamp.policy.rules import Rule, scope_matches
from jaxamp.run.amp import plan_of, under
from jaxamp.trace.target import Target

# Names of primitives as jax.numpy, or users, have them.
_NAMES = {
    "add_any": "add",
    "conv_general_dilated": "convolution",
    "dot_general": "product",
    "logistic": "sigmoid",
    "ragged_dot_general": "product",
    "select_n": "where",
}
_COMPUTING = (OpKind.COMPUTE, OpKind.ELEMENTWISE, OpKind.REDUCTION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Note(Data):
    """The operations of one line that run in one precision.

    Attributes:
      place: the line.
      arithmetic: the precision.
      primitives: names and numbers of the primitives; the most expensive first.
      reason: why the most expensive runs in this precision, in one phrase.
      guard: the guard that decided it; empty if none did.
      scope: its scope.
      modules: the scopes of all, with a star for numbers; the most expensive first.
      backward: whether some of them are in a backward pass.
      flops: their total cost.
      bytes: what they would move, were each a kernel of its own.
    """

    place: Place
    arithmetic: str
    primitives: tuple[tuple[str, int], ...]
    reason: str
    guard: str
    scope: str
    modules: tuple[str, ...]
    backward: bool
    flops: int
    bytes: int

    @property
    def what(self) -> str:
        """The primitives in a few words."""
        return few(dict(self.primitives))

    @property
    def computes(self) -> str:
        """Computations of floats, in a few words of jax.numpy's; empty if there are none."""
        found: Counter[str] = Counter()
        for name, n in self.primitives:
            if is_float(self.arithmetic) and op_of(name).kind in _COMPUTING:
                found[_NAMES.get(name, name.removeprefix("reduce_"))] += n
        return few(found)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanation(Displayable):
    """Source with notes. Printed it is one screen of the lines that cost most; ``full()`` has all.

    Attributes:
      program: the function's name.
      policy: the policy's name.
      where: the scope that was asked for; empty for the whole program.
      notes: by file and line, the most expensive of a line first.
      everything: whether ``print`` shows whole functions, with operations without floats.
    """

    program: str
    policy: str
    where: str
    notes: tuple[Note, ...]
    everything: bool = dataclasses.field(default=False, repr=False)

    def full(self) -> Explanation:
        """Return the explanation that prints every line."""
        return dataclasses.replace(self, everything=True)


def explain(
    fn: Any, policy: Any = None, *, where: str = "", everything: bool = False, strict: bool = False
) -> Callable[..., Explanation]:
    """Annotate the source of a program with what runs in which precision, and why.

    Args:
      fn: whatever ``amp`` takes, or what it returned.
      policy: as for ``amp``; by default that of an amped `fn`, else `mixed_bf16`.
      where: a scope, as in a ``Rule``: only what is inside is shown.
      everything: show whole functions, and what moves data or computes integers too, by the names
        of JAX's primitives.
      strict: as for ``amp``.

    Returns:
      A function of the same arguments as `fn`, in which ``jax.ShapeDtypeStruct`` may stand for an
      array. It returns an ``Explanation``.

    Raises:
      InspectionError: nothing of the program is inside `where`.

    >>> import jax.numpy as jnp
    >>> found = explain(lambda x, w: jnp.tanh(x @ w))(jnp.ones((2, 3)), jnp.ones((3, 4)))
    >>> [(note.arithmetic, note.what) for note in found.notes]
    [('bf16', 'dot_general'), ('f32', 'tanh')]
    """
    planned = plan_of(fn, policy, strict=strict)
    name = Target.of(under(fn, policy)[0]).name

    @functools.wraps(planned, updated=())
    def made(*args: Any, **kwargs: Any) -> Explanation:
        plan = planned(*args, **kwargs)
        operations = _inside(Walk(plan).operations, where)
        groups = grouped(operations, lambda o: (o.place, o.arithmetic))
        notes = [_note(place, word, group) for (place, word), group in groups.items()]
        notes.sort(key=lambda n: (n.place.file, n.place.line, -n.flops, n.arithmetic))
        return Explanation(
            program=name,
            policy=str(plan.policy),
            where=where,
            notes=tuple(notes),
            everything=everything,
        )

    return made


def _inside(operations: Sequence[Operation], where: str) -> Sequence[Operation]:
    if not where:
        return operations
    Rule(precision="f32", scope=where)  # refuses what can never match
    inside = [o for o in operations if scope_matches(where, o.scope)]
    if not inside:
        scopes = sorted({o.scope for o in operations if o.scope})
        known = (
            accepted(where, scopes)
            if scopes
            else "The program has neither jax.named_scope nor modules."
        )
        raise InspectionError(f"No operation of the program is in the scope {where!r}. {known}")
    return inside


def _note(place: Place, arithmetic: str, group: list[Operation]) -> Note:
    ordered = sorted(group, key=lambda o: (-o.tally.flops, -o.tally.bytes))
    first, cost = ordered[0], total(group)
    scopes = grouped((o.scope for o in ordered), numberless)
    return Note(
        place=place,
        arithmetic=arithmetic,
        primitives=tuple(Counter(o.primitive for o in ordered).items()),
        reason=first.reason,
        guard=first.guard,
        scope=first.scope,
        modules=tuple(common_scope(those) for those in scopes.values()),
        backward=any(o.backward for o in group),
        flops=cost.flops,
        bytes=cost.bytes,
    )
