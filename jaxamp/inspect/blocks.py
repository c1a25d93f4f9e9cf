"""Blocks of a program: each jaxpr where it is called, with a number for every computing equation.

A jaxpr that is called from two places is two blocks, and one inside a loop is one block however
often it runs. What an interpreter finds out about an equation goes by the equation's number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxamp.core.taxonomy import OpKind, Trait, lookup
from jaxamp.inspect.operation import Place, frames_of, innermost
from jaxamp.jaxprs.name_stack import clean_scope, joined_scope
from jaxamp.jaxprs.nested import Body, branches, call_body, is_region, loop
from jaxamp.plan import Decision, JaxprPlan


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """An equation that computes, where it is called.

    Attributes:
      number: its number in the program.
      eqn: the equation.
      decision: how it runs; ``None`` where it runs as it is written.
      raw_scope: name stack, enclosing equations first.
      depth: how many loops are around it.
    """

    number: int
    eqn: JaxprEqn
    decision: Decision | None
    raw_scope: str
    depth: int

    @property
    def scope(self) -> str:
        """Scope path as the user wrote it."""
        return clean_scope(self.raw_scope)

    @property
    def backward(self) -> bool:
        """Whether it is in a backward pass."""
        return "transpose(" in self.raw_scope

    @property
    def kind(self) -> OpKind:
        """Its kind."""
        op = lookup(self.eqn.primitive)
        return op.kind if op else OpKind.BOUNDARY


@dataclass(slots=True, eq=False)
class Block:
    """A jaxpr where it is called.

    Attributes:
      jaxpr: the program.
      consts: its constants.
      plan: what was decided for it; ``None`` where it runs as it is written.
      live: per equation, whether anything needs it.
      sites: per equation, its site; ``None`` for one that holds other programs, or is not needed.
      inner: per equation, the blocks that it holds.
      test: per while loop, by position, the program that says whether it goes on.
    """

    jaxpr: Jaxpr
    consts: Sequence[Any]
    plan: JaxprPlan | None
    live: Sequence[bool]
    sites: list[Site | None]
    inner: list[tuple[Block, ...]]
    test: dict[int, tuple[Body, JaxprPlan | None]]

    @property
    def is_low(self) -> bool:
        """Whether anything in it is lowered."""
        return self.plan is not None and not self.plan.unchanged

    def decision(self, position: int) -> Decision | None:
        """Return the decision for an equation; ``None`` where nothing was decided."""
        return self.plan.decisions[position] if self.plan else None

    def numbers(self) -> range:
        """Return the numbers of its own sites, which are consecutive."""
        own = [site.number for site in self.sites if site]
        return range(own[0], own[-1] + 1) if own else range(0)

    def walk(self) -> Iterator[Site]:
        """Yield every site, in program order."""
        for site, blocks in zip(self.sites, self.inner, strict=True):
            if site:
                yield site
            for block in blocks:
                yield from block.walk()


def blocks_of(jaxpr: Jaxpr, consts: Sequence[Any], plan: JaxprPlan | None) -> Block:
    """Return the outermost block of a program.

    Args:
      jaxpr: the program.
      consts: its constants.
      plan: what was decided for it; ``None`` to take it as it is written.
    """
    return _Numbering().block(Body(jaxpr, tuple(consts)), plan, "", 0)


def place_of(site: Site) -> Place:
    """Return the innermost line that is the user's own, or else that of a library."""
    info = site.eqn.source_info
    return innermost(info, frames_of(info))


class _Numbering:
    """Numbers the sites of a program; those of one block are consecutive."""

    def __init__(self) -> None:
        self.next = 0

    def block(self, body: Body, plan: JaxprPlan | None, scope: str, depth: int) -> Block:
        live = _live(body.jaxpr)
        block = Block(body.jaxpr, body.consts, plan, live, [], [], {})
        scopes = [joined_scope(scope, eqn) for eqn in body.jaxpr.eqns]
        held = [_held(eqn, block.decision(i)) for i, eqn in enumerate(body.jaxpr.eqns)]
        for i, eqn in enumerate(body.jaxpr.eqns):
            computes = live[i] and not held[i]
            site = self._site(eqn, block.decision(i), scopes[i], depth) if computes else None
            block.sites.append(site)
        for i, eqn in enumerate(body.jaxpr.eqns):
            deeper = depth + (_trait(eqn) is Trait.LOOP)
            inner = (self.block(b, p, scopes[i], deeper) for b, p in held[i] if live[i])
            block.inner.append(tuple(inner))
            if _trait(eqn) is Trait.LOOP and (test := loop(eqn).test):
                decision = block.decision(i)
                block.test[i] = test, decision.inner[0] if decision else None
        return block

    def _site(self, eqn: JaxprEqn, decision: Decision | None, scope: str, depth: int) -> Site:
        self.next += 1
        return Site(self.next - 1, eqn, decision, scope, depth)


def _live(jaxpr: Jaxpr) -> list[bool]:
    """Return, per equation, whether a result or an effect needs it."""
    wanted, live = {v for v in jaxpr.outvars if not isinstance(v, Literal)}, []
    for eqn in reversed(jaxpr.eqns):
        live.append(bool(eqn.effects) or any(v in wanted for v in eqn.outvars))
        if live[-1]:
            wanted.update(v for v in eqn.invars if not isinstance(v, Literal))
    return live[::-1]


def _held(eqn: JaxprEqn, decision: Decision | None) -> list[tuple[Body, JaxprPlan | None]]:
    """Return the jaxprs of an equation that an interpreter can enter, each with its plan."""
    trait = _trait(eqn)
    plans = decision.inner if decision and not is_region(eqn) else ()
    if trait is Trait.CALL:
        return [(call_body(eqn), plans[0] if plans else None)]
    if trait is Trait.BRANCH:
        bodies = branches(eqn)
        return list(zip(bodies, plans or [None] * len(bodies), strict=True))
    if trait is Trait.LOOP:
        return [(loop(eqn).body, plans[-1] if plans else None)]
    return []


def _trait(eqn: JaxprEqn) -> Trait:
    op = lookup(eqn.primitive)
    return op.trait if op else Trait.OPAQUE
