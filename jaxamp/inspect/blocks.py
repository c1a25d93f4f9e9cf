"""Number the equations of a program for interpreters: each jaxpr where it is called is a block.

A jaxpr that is called from two places is two blocks, and one inside a loop is one block however
often it runs. What an interpreter finds of an equation is stored under the equation's number.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxamp.core.taxonomy import OpKind, Trait, op_of
from jaxamp.inspect.as_written import Body, bodies_of
from jaxamp.inspect.dce import live_equations
from jaxamp.inspect.operation import Place, frames_of, innermost
from jaxamp.jaxprs.name_stack import clean_scope, is_transposed, joined_scope
from jaxamp.jaxprs.nested import Wiring, wiring
from jaxamp.plan import Decision, JaxprPlan, Plan


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """An equation that computes, where it is called.

    Its raw scope is the name stack, enclosing equations first.
    """

    number: int
    eqn: JaxprEqn
    decision: Decision
    raw_scope: str

    @property
    def place(self) -> Place:
        """The innermost line of the user's own code, or else of a library."""
        info = self.eqn.source_info
        return innermost(info, frames_of(info))

    @property
    def scope(self) -> str:
        """Scope path as the user wrote it."""
        return clean_scope(self.raw_scope)

    @property
    def backward(self) -> bool:
        """True in a backward pass."""
        return is_transposed(self.raw_scope)

    @property
    def kind(self) -> OpKind:
        """Its kind."""
        return op_of(self.eqn.primitive).kind


@dataclass(slots=True, eq=False)
class Block:
    """A jaxpr where it is called, with its plan.

    Per equation it has whether anything needs that, the site, unless it is of higher order or not
    needed, and the blocks of its jaxprs; and per while loop, by position, the condition.
    """

    jaxpr: Jaxpr
    consts: Sequence[Any]
    plan: JaxprPlan
    live: Sequence[bool]
    sites: list[Site | None]
    inner: list[tuple[Block, ...]]
    test: dict[int, tuple[ClosedJaxpr, JaxprPlan]]

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


def blocks_of(plan: Plan) -> Block:
    """Return the outermost block of a program."""
    return _block(plan.jaxpr, plan.body, "", itertools.count())


def _block(body: ClosedJaxpr, plan: JaxprPlan, scope: str, numbers: Iterator[int]) -> Block:
    live = live_equations(body.jaxpr)
    block = Block(body.jaxpr, body.consts, plan, live, [], [], {})
    scopes = [joined_scope(scope, eqn) for eqn in body.jaxpr.eqns]
    bodies = list(map(_bodies, body.jaxpr.eqns, plan.decisions))
    for i, eqn in enumerate(body.jaxpr.eqns):  # the numbers of one block are consecutive
        computes = live[i] and not bodies[i]
        site = Site(next(numbers), eqn, plan.decisions[i], scopes[i]) if computes else None
        block.sites.append(site)
    for i, eqn in enumerate(body.jaxpr.eqns):
        entered = bodies[i]
        if wiring(eqn) is Wiring.WHILE:
            block.test[i], *entered = entered
        inner = (_block(b, p, scopes[i], numbers) for b, p in entered if live[i])
        block.inner.append(tuple(inner))
    return block


def _bodies(eqn: JaxprEqn, decision: Decision) -> list[Body]:
    """Return the jaxprs of an equation that an interpreter can enter, each with its plan."""
    is_entered = op_of(eqn.primitive).trait in (Trait.CALL, Trait.BRANCH, Trait.LOOP)
    return bodies_of(eqn, decision) if is_entered else []
