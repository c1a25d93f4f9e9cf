"""``fused_group`` primitive: a group under a checkpoint, with barriers before what it recomputes.

The backward pass of a group reads what `mark_residual` marks, and recomputes the rest. It is not
JAX's own primitive so that its lowering can differ, while JAX lowers the checkpoints that users
write. There is a primitive for each way to lower a group that is met; all have one name.

Without a barrier, XLA merges the forward pass with its recomputation (common subexpression
elimination) and keeps the float32 values in memory. Only large operands of the recomputation need
one, as only they make large values; a barrier before a small one would cost a kernel. Nor do those
of a group without a reduction, where they are several that XLA may have made in one product, or one
beside the other factor of a gate: behind a barrier each would be copied out of that, and what is
elementwise is computed in each kernel that reads it. Cotangents that are summed over columns are in
memory before the sum, where they are read again after it, so they get one as well; those summed
over rows stay in the kernel, and so do those whose sum is a result, as that of a bias is.

There are none on a TPU. XLA:TPU fuses a softmax or norm with the products around it, and chooses
itself what to keep; with barriers it stored the float32 insides in both passes, twice the bytes of
an attention.

See: https://docs.jax.dev/en/latest/gradient-checkpointing.html, ``prevent_cse`` of
``jax.checkpoint``, and https://github.com/jax-ml/jax/pull/31278 for barriers before some operands.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive
from jax.interpreters import ad

from jaxamp.core import jax_compat
from jaxamp.core.define import define_marker
from jaxamp.core.taxonomy import OpKind, Trait, op_of, register_op_kind
from jaxamp.jaxprs.nested import nested
from jaxamp.plan.graph.graph import is_smaller
from jaxamp.xla.primitives.narrow_moves import inlined, narrow_moves
from jaxamp.xla.primitives.row_broadcasts import flatten_row_broadcasts
from jaxamp.xla.primitives.split_sums import LARGE, split_sums

residual_p = Primitive("residual")


def mark_residual(value: Any) -> Any:
    """Mark a residual: the backward pass of a fused group reads it rather than recompute it."""
    return residual_p.bind(value)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class GroupPolicy:
    """Policy of a group's checkpoint: save what `mark_residual` marks."""

    barriers: bool  # whether what is recomputed is lowered with a barrier before its operands
    narrow_moves: bool  # whether arrays are moved while they are narrow, on a TPU
    row_broadcasts: bool  # whether numbers of rows are lowered as flat arrays
    split_sums: bool  # whether sums over middle axes are lowered in parts

    def __call__(self, primitive: Any, *_: Any, **__: Any) -> bool:
        """Return whether the forward pass saves what an equation computes."""
        return primitive is residual_p

    def lowered(self, context: Any, closed: ClosedJaxpr) -> ClosedJaxpr:
        """Return a group as it is lowered for a TPU, or for one GPU."""
        if jax_compat.is_for_tpu(context):
            return narrow_moves(closed) if self.narrow_moves else closed
        if not jax_compat.is_for_gpu(context) or jax_compat.is_partitioned(context):
            return closed
        whole = _inlined(closed)
        split = split_sums(whole) if self.split_sums else whole
        return flatten_row_broadcasts(split) if self.row_broadcasts else split


_inlined = jax_compat.kept_with(inlined)  # a rounding inside a call is read before its barrier
register_op_kind("fused_group", OpKind.BOUNDARY, trait=Trait.CALL, dtype_params=("jaxpr",))


@functools.cache
def group_of(policy: GroupPolicy) -> Callable[..., list[Any]]:
    """Return what calls a flat function as a group; each policy has a primitive, made if asked."""
    group_p = Primitive("fused_group")
    needs = _needs_barrier if policy.barriers else lambda _, whole: [False] * len(whole.in_avals)
    jax_compat.lower_checkpoints(group_p, needs, policy.lowered)
    return jax_compat.define_checkpoint(group_p, policy)


define_marker(residual_p, {}, kind=OpKind.DATA_MOVEMENT, trait=Trait.SAME)
ad.primitive_transposes[residual_p] = lambda cotangent, _: [cotangent]  # of a rule's tangents


recomputation_barrier_p = Primitive("recomputation_barrier")
recomputation_barrier_p.multiple_results = True


def recomputation_barrier(
    values: Sequence[Any], recomputed: Sequence[bool], eqns: Sequence[JaxprEqn]
) -> list[Any]:
    """Put the large operands that recomputed equations read behind a barrier; tangents get none."""
    read = tuple(recomputed)
    return recomputation_barrier_p.bind(*values, recomputed=read, reduces=_reduces(eqns))


def needs_barrier(
    avals: Sequence[Any], recomputed: Sequence[bool], *, reduces: bool = True, others: bool = False
) -> list[bool]:
    """Return whether each operand needs a barrier, by its size: those that are recomputed from do.

    So do the `others` that are as large, if it is said; fewer of a group that reduces nothing.

    >>> import jax.numpy as jnp
    >>> activation, scale, cotangent = jnp.ones((512, 512)), jnp.ones(512), jnp.ones((512, 512))
    >>> needs_barrier([activation, scale, cotangent], recomputed=[True, True, False])
    [True, False, False]
    """
    sizes = [getattr(aval, "size", 0) for aval in avals]
    if not any(recomputed) or not all(isinstance(size, int) for size in sizes):
        return [any(recomputed)] * len(sizes)  # symbolic sizes cannot be compared
    largest = max(size for size, is_read in zip(sizes, recomputed, strict=True) if is_read)
    large = [size * _RATIO >= largest for size in sizes]
    read = list(map(operator.and_, large, recomputed))
    is_alone = sum(read) == 1 and sum(large) < 3  # a cotangent comes from elsewhere
    if largest < (LARGE if reduces or is_alone else _JOINED):
        return [False] * len(sizes)
    return large if others else read


# Chosen by what JAX 0.10.2 compiles for an H200:
# `python -m benchmarks.techniques --target h200 --only all recomputation-barriers`.
_RATIO = 16  # parameters and statistics of rows are at least so many times smaller
# XLA joins products that take 64 MiB with what they read (`xla_gpu_dot_merger_threshold_mb`):
# 48 MiB in 16 bits, of three times as many columns as the activation has.
_JOINED = 3 * 2**23


def _needs_barrier(context: Any, closed: ClosedJaxpr) -> list[bool]:
    """Return whether each operand of a group's backward pass needs a barrier, on its platform."""
    avals = closed.in_avals
    if not jax_compat.is_for_gpu(context):  # as `jax.checkpoint` has it, but for none on a TPU
        return [not jax_compat.is_for_tpu(context)] * len(avals)
    # JAX lowers forward passes in a loop as checkpoints too, but they recompute nothing.
    recomputed = jax_compat.read_by_recomputation(closed.jaxpr)
    body = _inlined(closed).jaxpr
    return needs_barrier(avals, recomputed, reduces=_reduces(body.eqns), others=_puts_back(body))


def _reduces(eqns: Sequence[JaxprEqn]) -> bool:
    return any(
        (op_of(eqn.primitive).kind is OpKind.REDUCTION and eqn.primitive.name != "add_any")
        or any(_reduces(body.jaxpr.eqns) for body in nested(eqn))
        for eqn in eqns
    )


def _puts_back(jaxpr: Jaxpr) -> bool:
    """Return whether large arrays are made of sums, none of rows; those of a bias are results."""
    sums: set[Any] = set()
    for eqn in jaxpr.eqns:
        is_sum = eqn.primitive.name == "reduce_sum"
        if is_sum and eqn.invars[0].aval.ndim - 1 in eqn.params["axes"]:  # type: ignore[attr-defined]
            return False
        operands = [v for v in eqn.invars if not isinstance(v, Literal)]
        if is_sum or nested(eqn) or any(v in sums for v in operands):
            sums.update(eqn.outvars)
    made, read = ({getattr(v.aval, "size", 0) for v in found} for found in (sums, jaxpr.invars))
    return any(not any(is_smaller(size * _RATIO, other) for other in read) for size in made)


def _lowered(*values: Any, **params: Any) -> list[Any]:
    chosen = needs_barrier(values, **params)
    if not any(chosen):
        return list(values)
    barriered = iter(lax.optimization_barrier([*compress(values, chosen)]))
    return [
        next(barriered) if has_barrier else x for x, has_barrier in zip(values, chosen, strict=True)
    ]


# On a CPU a barrier keeps a rounding that XLA leaves out where it is read first.
define_marker(recomputation_barrier_p, {"cuda": _lowered, "rocm": _lowered})
jax_compat.split_by_operand(recomputation_barrier_p, "recomputed")
