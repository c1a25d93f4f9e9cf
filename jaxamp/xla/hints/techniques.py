"""Techniques that steer XLA beside the precisions, each with a switch of its own."""

from __future__ import annotations

from jaxamp.core.enum_words import Word


class Technique(Word):
    """A way to make XLA fuse and store as the plan supposes.

    None of them changes in which precision an equation runs, or in which its results are stored.
    Some work on what others emit and do nothing without them: see `WORKS_ON`.

    >>> Technique("fused-groups") in ALL_TECHNIQUES
    True
    """

    ROUNDING_BARRIERS = "rounding-barriers"  # so that XLA does not undo roundings
    UNBARRIERED_READS = "unbarriered-reads"  # arithmetic on such a rounding before its barrier
    COTANGENT_ROUNDINGS = "cotangent-roundings"  # one rounding for an activation and its bias
    LABEL_COMPARISONS = "label-comparisons"  # lookups of labels whose transpose is a comparison
    REVERSED_WEIGHTS = "reversed-weights"  # weights of a convolution rounded before their reversal
    CONSTANT_REMATERIALIZATION = "constant-rematerialization"  # masks made inside of loops
    FUSED_GROUPS = "fused-groups"  # softmax or norm under a checkpoint, recomputed from what is low
    SHARED_RECOMPUTATION = "shared-recomputation"  # what a later group recomputes, not reads
    CONCATENATION_PARTS = "concatenation-parts"  # stored parts read again, not what joins them
    SAVED_STATISTICS = "saved-statistics"  # reductions that are residuals: a kernel of their own
    RELU_RESIDUALS = "relu-residuals"  # a rule's ReLU saves its rounded result, and compares that
    RECOMPUTATION_BARRIERS = "recomputation-barriers"  # what is recomputed reads behind a barrier
    NARROW_MOVES = "narrow-moves"  # arrays moved before they are widened, on a TPU
    ROW_BROADCASTS = "row-broadcasts"  # maxima and sums of rows broadcast from a flat array
    SPLIT_SUMS = "split-sums"  # sums over middle axes added up in parts


ALL_TECHNIQUES = frozenset(Technique)
WORKS_ON = {
    Technique.UNBARRIERED_READS: Technique.ROUNDING_BARRIERS,
    Technique.SHARED_RECOMPUTATION: Technique.FUSED_GROUPS,
    Technique.CONCATENATION_PARTS: Technique.FUSED_GROUPS,
    Technique.SAVED_STATISTICS: Technique.FUSED_GROUPS,
    Technique.RELU_RESIDUALS: Technique.FUSED_GROUPS,
    Technique.RECOMPUTATION_BARRIERS: Technique.FUSED_GROUPS,
    Technique.NARROW_MOVES: Technique.FUSED_GROUPS,
    Technique.ROW_BROADCASTS: Technique.FUSED_GROUPS,
    Technique.SPLIT_SUMS: Technique.FUSED_GROUPS,
}
"""By technique, the one on whose equations it works, and without which it does nothing."""
