"""Emit what plans hint at: barriers, fused groups, and sums and lookups in forms of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxamp.plan import CotangentRounding, Fusion
from jaxamp.plan.graph.graph import is_smaller
from jaxamp.policy.policy import PrecisionPolicy
from jaxamp.rewrite.emitter import Emitter
from jaxamp.xla.hints.techniques import Technique
from jaxamp.xla.primitives.checkpoint_barriers import (
    GroupPolicy,
    group_of,
    mark_residual,
    recomputation_barrier,
)
from jaxamp.xla.primitives.label_gather import (
    gathers_one_of_each_row,
    label_gather,
    scatter_by_comparison,
    scatters_one_to_each_row,
)
from jaxamp.xla.primitives.rounding_barrier import (
    rounding_barrier,
    unbarriered,
    with_rounded_cotangent,
)
from jaxamp.xla.primitives.split_sums import LARGE
from jaxamp.xla.relu_masks import compare_relu_results

_LONG_ROW = 16  # numbers that a lookup finds for each index, and that are worth a copy of those


class SteeringEmitter(Emitter):
    """Emission of hints by the techniques that a policy has on."""

    def __init__(self, policy: PrecisionPolicy) -> None:
        self._chosen = policy.xla
        self._has_barriers = Technique.RECOMPUTATION_BARRIERS in self._chosen
        forms = (Technique.NARROW_MOVES, Technique.ROW_BROADCASTS, Technique.SPLIT_SUMS)
        self._group = GroupPolicy(self._has_barriers, *(form in self._chosen for form in forms))

    def rounded(self, value: Any, *, of_sum: bool) -> Any:
        """Put a barrier behind a rounding."""
        return rounding_barrier(value, of_sum=of_sum)

    def copied(self, value: Any) -> Any:
        """Put a barrier behind the rounding of a copy."""
        return rounding_barrier(value) if Technique.ROUNDING_BARRIERS in self._chosen else value

    def residual(self, value: Any) -> Any:
        """Mark a residual of a fused group."""
        return mark_residual(value)

    def rule(self, closed: ClosedJaxpr, *, saves: bool) -> ClosedJaxpr:
        """Compare the results of ReLUs, which are saved, rather than their operands."""
        return compare_relu_results(closed) if saves else closed

    def unbarriered(self, value: Any) -> Any:
        """Read a rounding from before its barrier."""
        return unbarriered(value)

    def fused(self, function: Callable[..., list[Any]], group: Fusion) -> Callable[..., list[Any]]:
        """Return the function under a checkpoint, with what it recomputes behind a barrier."""

        def emitted(*args: Any) -> list[Any]:
            return function(*recomputation_barrier(args, group.read_by_recomputed, group.equations))

        inside = emitted if self._has_barriers and group.recomputed > 0 else function
        return partial(group_of(self._group), inside)

    def add(self, eqn: JaxprEqn, operands: Sequence[Any], of: CotangentRounding) -> Any:
        """Add, subtract or multiply; the transpose rounds the cotangent."""
        return with_rounded_cotangent(eqn, operands, of)

    def gather(self, table: Any, indices: Any, params: dict[str, Any]) -> Any:
        """Gather one number of each row, so that its transpose is a comparison."""
        is_known = gathers_one_of_each_row(table, indices, params)
        is_chosen = is_known and Technique.LABEL_COMPARISONS in self._chosen
        return label_gather(table, indices, params) if is_chosen else None

    def places(self, indices: Any, table: Any, found: Any) -> Any:
        """Put the indices of a lookup that repeats rows behind a barrier.

        XLA looks rows up again for the backward pass, and makes one kernel of the lookups of all
        layers that have their indices in common: they would all be in memory until they are read.
        Of short rows the indices take as much, and would be stored beside what they are made of.
        """
        is_known = self._has_barriers and isinstance(found.size, int)  # symbolic ones may be small
        is_large = is_known and found.size >= max(LARGE, _LONG_ROW * indices.size)
        is_repeated = is_large and not is_smaller(found.size, table.size)
        return lax.optimization_barrier(indices) if is_repeated else indices

    def scatter(self, target: Any, indices: Any, numbers: Any, params: dict[str, Any]) -> Any:
        """Put a number in each row of zeros by a comparison."""
        if not scatters_one_to_each_row(target, indices, params):
            return None
        (axis,) = params["dimension_numbers"].scatter_dims_to_operand_dims
        return scatter_by_comparison(numbers, indices, target.shape, axis)
