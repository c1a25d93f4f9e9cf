"""Groups of operations that get one precision: by scope, function and kind."""

from __future__ import annotations

import dataclasses

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision
from jaxamp.core.taxonomy import OpKind
from jaxamp.inspect.blocks import Block, Site
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
    low = (site for site in block.walk() if site.decision and site.decision.is_narrow)
    return tuple(dict.fromkeys(map(Group.of, low)))
