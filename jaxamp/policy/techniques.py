"""Techniques: what XLA is told beside the precisions, each with a switch of its own."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from jaxamp.errors import PolicyError, accepted


class Technique(enum.Enum):
    """A way to make XLA fuse and store as the plan supposes.

    None of them changes in which precision an equation runs, or in which its results are stored.

    >>> Technique("fused-groups") in ALL_TECHNIQUES
    True
    """

    HELD_ROUNDINGS = "held-roundings"  # roundings behind a barrier, so that XLA does not undo them
    UNBARRIERED_SUMS = "unbarriered-sums"  # sums that read such a rounding before its barrier
    COTANGENT_ROUNDINGS = "cotangent-roundings"  # one rounding for an activation and its bias
    LABEL_COMPARISONS = "label-comparisons"  # lookups of labels whose transpose is a comparison
    FUSED_GROUPS = "fused-groups"  # softmax or norm under a checkpoint, recomputed from what is low
    CONSTANT_REMATERIALIZATION = "constant-rematerialization"  # masks made inside of loops

    __hash__ = object.__hash__  # Enum's own goes through the name, in Python


ALL_TECHNIQUES = frozenset(Technique)


def parse_techniques(
    techniques: Technique | str | Iterable[Technique | str],
) -> frozenset[Technique]:
    """Read techniques: one or several ``Technique`` or words; ``"all"`` for all, nothing for none.

    Raises:
      PolicyError: a word names no technique.

    >>> parse_techniques("fused-groups")
    frozenset({<Technique.FUSED_GROUPS: 'fused-groups'>})
    """
    if isinstance(techniques, (Technique, str)):
        return ALL_TECHNIQUES if techniques == "all" else frozenset({_parse(techniques)})
    if not isinstance(techniques, Iterable):
        raise PolicyError(f"Techniques are words or none at all, `()`, not {techniques!r}.")
    return frozenset(map(_parse, techniques))


def _parse(word: Technique | str) -> Technique:
    if isinstance(word, Technique):
        return word
    words = {technique.value: technique for technique in Technique}
    key = str(word).strip().lower().replace("_", "-")
    if key not in words:
        raise PolicyError(f"Unknown technique {word!r}. {accepted(key, words)}")
    return words[key]
