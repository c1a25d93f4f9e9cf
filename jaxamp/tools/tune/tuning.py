"""The result of ``tune``: a policy, and for each group of operations why it is what it is."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision
from jaxamp.core.taxonomy import OpKind
from jaxamp.errors import TuningError
from jaxamp.inspect.blocks import Block, Site
from jaxamp.inspect.displayable import Displayable
from jaxamp.policy.policy import PrecisionPolicy
from jaxamp.policy.rules import Rule


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Group:
    """The operations of one kind, written in one function and running in one scope.

    Attributes:
      scope: scope path, as the user wrote it.
      function: the innermost function, without its class.
      kind: kind of the operations, as ``OpKind`` spells it.

    >>> print(Group("net/head", "attend", "Compute").rule("f32", "cancels"))
    cancels
    """

    scope: str
    function: str
    kind: str

    @classmethod
    def of(cls, site: Site) -> Group:
        """Return the group of an operation."""
        names, _ = jax_compat.functions(site.eqn.source_info.traceback)
        return cls(site.scope, names[0].rpartition(".")[2] if names else "", site.kind.value)

    def rule(self, precision: str | Precision, label: str = "") -> Rule:
        """Return the rule that gives these operations, and no others, a precision."""
        return Rule(
            precision=precision,
            scope=f"/{self.scope}/" if self.scope else "/",
            function=f"/{self.function}" if self.function else None,
            kind=OpKind(self.kind),
            label=label,
        )

    def __str__(self) -> str:
        return " ".join(filter(None, (self.scope, self.function, self.kind)))


def lowered_groups(block: Block) -> tuple[Group, ...]:
    """Return the groups in which anything is lowered, in program order."""
    low = (site for site in block.walk() if site.decision.is_narrow)
    return tuple(dict.fromkeys(map(Group.of, low)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A choice of groups to lower.

    Attributes:
      cost: modelled seconds.
      predicted: predicted error.
      measured: error when it was run; ``None`` if it was not.
    """

    cost: float
    predicted: float
    measured: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Outcome of the search for one group.

    Attributes:
      group: which operations.
      low: whether they are low.
      predicted: error if this group alone is low.
      saved: modelled seconds that lowering it saves.
    """

    group: Group
    low: bool
    predicted: float
    saved: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Tuning(Displayable):
    """The cheapest policy found that keeps the error within the budget.

    Attributes:
      policy: the given one with a rule for each group that stays in f32.
      budget: the largest error that was allowed.
      error: error of the policy, measured.
      cost: its modelled time.
      cost_f32: that of the original program.
      cost_low: that of the given policy.
      runs: how many choices were run, the original program included.
      verdicts: every group, the most sensitive first.
      curve: what lies between accuracy and cost, the cheapest first.
    """

    policy: PrecisionPolicy
    budget: float
    error: float
    cost: float
    cost_f32: float
    cost_low: float
    runs: int
    verdicts: tuple[Verdict, ...]
    curve: tuple[Choice, ...]

    def picture(self, path: str | Path) -> None:
        """Draw the trade-off between cost and error; the suffix says in which format.

        Raises:
          TuningError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise TuningError("A picture needs matplotlib: pip install matplotlib.") from error
        figure = Figure(layout="constrained")
        axes = figure.subplots()
        for kind, mark in (("predicted", "o-"), ("measured", "s")):
            found = [(c.cost / self.cost_f32, getattr(c, kind)) for c in self.curve]
            shown = [(cost, error) for cost, error in found if error and error < math.inf]
            axes.plot([x for x, _ in shown], [y for _, y in shown], mark, label=kind)
        axes.plot(self.cost / self.cost_f32, self.error, "*", markersize=14, label="chosen")
        axes.axhline(self.budget, linewidth=0.8, label="budget")
        axes.set(xlabel="modelled time, float32 = 1", ylabel="error", yscale="log")
        axes.legend()
        figure.savefig(path)
