"""``fused_group`` primitive: a fused group, differentiated as ``jax.checkpoint`` is.

The backward pass of a group reads what `mark_residual` marks, and recomputes the rest. It is not
JAX's own primitive so that its lowering can differ, while JAX lowers the checkpoints that users
write. There is a primitive for each way to lower a group; all have one name.

See: https://docs.jax.dev/en/latest/gradient-checkpointing.html
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Primitive

from jaxamp.core import jax_compat
from jaxamp.core.define import define
from jaxamp.core.taxonomy import OpKind, Trait, register_op_kind

residual_p = Primitive("residual")


def mark_residual(value: Any) -> Any:
    """Mark a residual: the backward pass of a fused group reads it rather than recompute it."""
    return residual_p.bind(value)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class GroupPolicy:
    """Policy of a group's checkpoint: save what `mark_residual` marks.

    Attributes:
      barriers: whether what is recomputed is lowered with a barrier before its operands.
      row_broadcasts: whether numbers of rows are lowered as flat arrays.
    """

    barriers: bool
    row_broadcasts: bool

    def __call__(self, primitive: Any, *_: Any, **__: Any) -> bool:
        """Return whether the forward pass saves what an equation computes."""
        return primitive is residual_p


register_op_kind("fused_group", OpKind.BOUNDARY, trait=Trait.CALL, dtype_params=("jaxpr",))
GROUPS = {
    GroupPolicy(barriers=barriers, row_broadcasts=rows): Primitive("fused_group")
    for barriers in (True, False)
    for rows in (True, False)
}
"""The primitive of each policy."""
_CALLS = {policy: jax_compat.define_checkpoint(p, policy) for policy, p in GROUPS.items()}


def call_fused(function: Callable[..., list[Any]], policy: GroupPolicy, *args: Any) -> list[Any]:
    """Call a flat function as one fused group."""
    return _CALLS[policy](function, *args)


def _beside(values: Sequence[Any], others: Sequence[Any]) -> tuple[Any, Any]:
    """Mark a value; what comes with it, such as its tangent, is no residual."""
    return mark_residual(*values), *others


define(
    residual_p,
    lambda value: value,
    lambda value: value,
    _beside,
    _beside,
    kind=OpKind.DATA_MOVEMENT,
    trait=Trait.SHAPE,
    taylor=_beside,
)
