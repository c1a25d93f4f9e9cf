"""The placement of casts as a problem of its own: numbered labels, each wide or narrow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NARROW, WIDE = 0, 1
"""The first two labels of every problem stand for the two formats themselves."""

Labels = Sequence[bool]
"""Whether each label is wide."""

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Problem:
    """What may be wide or narrow, and what it costs.

    Attributes:
      elements: how many elements each value has in memory, over all turns of the loops around it.
      given: values that are in memory anyway, wide: what the program is called with.
      pinned: labels that have to be wide.
      equal: pairs of labels that are one.
      stored: pairs (value, label): memory holds the value in the format of the label.
      fused: pairs (value, label): a fused operation of that label reads the value.
    """

    elements: tuple[int, ...]
    given: frozenset[int]
    pinned: frozenset[int]
    equal: Pairs
    stored: Pairs
    fused: Pairs

    @property
    def free(self) -> list[int]:
        """The labels that something is to be decided of, one of each that have to be equal."""
        of = self.representatives()
        fixed = {of[label] for label in (NARROW, WIDE, *self.pinned)}
        return sorted({label for label in of if label not in fixed})

    def representatives(self) -> list[int]:
        """One label for all that are equal to it."""
        of = list(range(len(self.elements)))

        def root(label: int) -> int:
            while of[label] != label:
                label = of[label]
            return label

        for one, other in self.equal:
            first, second = sorted((root(one), root(other)))
            of[second] = first
        return [root(label) for label in of]

    def spread(self, wide: Sequence[int]) -> list[bool]:
        """The labels in which these free ones are wide and the other free ones narrow."""
        of = self.representatives()
        chosen = {of[label] for label in (WIDE, *self.pinned, *wide)}
        return [label in chosen for label in of]

    def allows(self, labels: Labels) -> bool:
        """Whether labels keep to what is pinned and equal."""
        if labels[NARROW] or not labels[WIDE]:
            return False
        one = all(labels[a] == labels[b] for a, b in self.equal)
        return one and all(labels[label] for label in self.pinned)
