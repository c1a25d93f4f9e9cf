"""How many attentions of a program are found, and what is said of the others."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.extend.core import ClosedJaxpr

import jaxamp
from jaxamp.found.attention.kernels.known_masks import Segments
from jaxamp.found.attention.kernels.spec import AttentionSpec
from tests.audit import equations
from tests.found.attention.corpus import Program, gradient

FORWARD, JOINT = ORDERS = ("forward", "joint")
"""The program as it is, for `grad(amp(f))`; the program with its gradient, for `amp(grad(f))`."""


FUSED = jaxamp.PrecisionPolicy.AUTO_MIXED_BF16.replace(fused_attention=True)
"""The policy under which it is looked for."""


@dataclasses.dataclass(frozen=True)
class Found:
    """What a plan says of a program.

    Attributes:
      count: attentions replaced; in the joint order those whose backward pass is, too.
      any: whether anything is replaced at all.
      refused: why others are not.
    """

    count: int
    any: bool
    refused: tuple[str, ...]


def found(program: Program, order: str, policy: Any = FUSED) -> Found:
    """Plan a program in one of `ORDERS`, and count its attentions."""
    fn, args = program.built
    if order == JOINT:
        fn, args = gradient(fn, args)
    plan = jaxamp.plan_of(fn, policy)(*args)
    whole = [a for a in plan.found if (a.backward if order == JOINT else a.forward)]
    refused = tuple(attention.obstacle for attention in plan.refused)
    return Found(len(whole), bool(plan.found), refused)


def kind(spec: AttentionSpec) -> str:
    """What the mask is that a kernel is told of, in a word."""
    if spec.mask is not None:
        return "segments" if isinstance(spec.mask, Segments) else "intervals"
    return "none" if not spec.causal else "causal" if spec.window is None else "window"


def masks(closed: ClosedJaxpr) -> list[str]:
    """The kind of each attention of a program, or that it reads a bias alone."""
    found = [eqn for eqn in equations(closed.jaxpr) if eqn.primitive.name == "attention_forward"]
    kinds = [(kind(eqn.params["spec"]), len(eqn.invars) > 3) for eqn in found]
    return ["bias" if word == "none" and has_bias else word for word, has_bias in kinds]
