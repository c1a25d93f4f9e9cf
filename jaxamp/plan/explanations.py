"""Explain why each equation runs as it does, in each of the places that share one plan."""

from __future__ import annotations

from collections.abc import Mapping

from jaxamp.core.formats import Precision
from jaxamp.plan.decision import Ground
from jaxamp.plan.graph.graph import Frame, Nest, Node, sites_of
from jaxamp.plan.precision.choose import Choice


class Grounds:
    """Factory of explanations; equal choices are one object, and so are their explanations.

    Args:
      choices: what was chosen for each node.
    """

    def __init__(self, choices: Mapping[Node, Choice]) -> None:
        self.choices = choices
        self._made: dict[tuple[int, str], Ground] = {}

    def of(self, site: Node | Nest) -> Ground:
        """Return why an equation runs as it does."""
        choice = _INSIDE if isinstance(site, Nest) else self.choices[site]
        place = id(choice), site.scope
        ground = self._made.get(place)
        if ground is None:
            ground = self._made[place] = Ground(choice.reason, choice.guard, site.scope)
        return ground


def grounds_of(frame: Frame, choices: Mapping[Node, Choice]) -> tuple[Ground, ...]:
    """Return the explanation of every equation, nested ones after the one that holds them."""
    return tuple(map(Grounds(choices).of, sites_of(frame)))


_INSIDE = Choice(None, Precision.F32, "planned equation by equation")
