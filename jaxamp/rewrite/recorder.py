"""Record the casts of a rewrite, for reports; programs that run are emitted without a record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxamp.core.formats import Precision, is_narrow
from jaxamp.plan import FusionCall, JaxprPlan, Reading

Cast = tuple[Any, Precision | None]  # a variable, and the precision that it is cast to


@dataclass(slots=True)
class Casts:
    """Casts of one equation: inserted, shared with an earlier reader, and cancelled."""

    inserted: int = 0
    shared: int = 0
    cancelled: int = 0


class Log:
    """The casts of one jaxpr, per equation; an environment reports them as they happen.

    A fused group has an environment of its own. A cast that is inserted to be passed into a group,
    or out of it, is that of the equation that reads it first.
    """

    def __init__(self, casts: Sequence[Casts], results: Casts) -> None:
        self.results = results
        self._casts = casts
        self._current: Casts | None = None
        self._unread: set[Cast] = set()

    def enter_equation(self, index: int) -> None:
        """Count what follows as casts of one equation."""
        self._current = self._casts[index]

    def enter_results(self) -> None:
        """Count what follows as casts of the results."""
        self._current = self.results

    def defer(self) -> None:
        """Count what follows as casts of the equations that read them first."""
        self._current = None

    def insert(self, cast: Cast | None = None) -> None:
        """Count a cast that is inserted; if it is named, other readers may share it."""
        if self._current is not None:
            self._current.inserted += 1
        elif cast is not None:
            self._unread.add(cast)

    def share(self, cast: Cast) -> None:
        """Count a reader that gets a cast that was inserted before."""
        if self._current is None:
            return
        if cast in self._unread:
            self._unread.remove(cast)
            self._current.inserted += 1
        else:
            self._current.shared += 1

    def cancel(self, precision: Precision | None) -> None:
        """Count a reader that takes a value as it is stored, in the precision that it wants."""
        if self._current is not None:
            self._current.cancelled += is_narrow(precision)

    def enter_group(self, call: FusionCall) -> Log:
        """Return the log of a fused group, which is the first to read some of its inputs."""
        log = Log([self._casts[index] for index in call.members], self.results)
        self._hand_over(call.inputs, log, call.fusion.inputs)
        return log

    def leave_group(self, call: FusionCall, log: Log) -> None:
        """Take over the casts of a group's outputs that it has not read itself."""
        log._hand_over(call.fusion.outputs, self, call.outputs)

    def _hand_over(self, mine: Sequence[Reading], other: Log, theirs: Sequence[Reading]) -> None:
        for here, there in zip(mine, theirs, strict=True):
            if (here.var, here.precision) in self._unread:
                self._unread.remove((here.var, here.precision))
                other._unread.add((there.var, here.precision))


@dataclass(slots=True)
class Recorder:
    """The casts of a program.

    Attributes:
      equations: by the plan of a jaxpr: the casts of each of its equations. A jaxpr that is called
        in several places is emitted, and recorded, once.
      results: by the plan of a jaxpr: the casts of its results.
    """

    equations: dict[JaxprPlan, Sequence[Casts]] = field(default_factory=dict)
    results: dict[JaxprPlan, Casts] = field(default_factory=dict)

    def log(self, plan: JaxprPlan) -> Log:
        """Start the record of a jaxpr."""
        self.equations[plan] = [Casts() for _ in plan.decisions]
        self.results[plan] = Casts()
        return Log(self.equations[plan], self.results[plan])
