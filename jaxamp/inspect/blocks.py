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

_NO_NUMBER = -1


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """An equation where it is called, with its name stack, enclosing equations first.

    One that holds jaxprs has their blocks, and a while loop its condition; others have a number.
    """

    eqn: JaxprEqn
    decision: Decision
    raw_scope: str
    number: int
    inner: tuple[Block, ...]
    test: Body | None

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


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A jaxpr where it is called, with its plan, and the equations that anything needs."""

    jaxpr: Jaxpr
    consts: Sequence[Any]
    plan: JaxprPlan
    sites: Sequence[Site]

    def numbers(self) -> range:
        """Return the numbers of its own equations, which are consecutive."""
        own = [site.number for site in self.sites if not site.inner]
        return range(own[0], own[-1] + 1) if own else range(0)

    def walk(self) -> Iterator[Site]:
        """Yield every equation that computes, in program order."""
        for site in self.sites:
            if not site.inner:
                yield site
            for block in site.inner:
                yield from block.walk()


def blocks_of(plan: Plan) -> Block:
    """Return the outermost block of a program."""
    return _block(plan.jaxpr, plan.body, "", itertools.count())


def _block(body: ClosedJaxpr, plan: JaxprPlan, scope: str, numbers: Iterator[int]) -> Block:
    pairs = zip(body.jaxpr.eqns, plan.decisions, strict=True)
    live = list(itertools.compress(pairs, live_equations(body.jaxpr)))
    bodies = list(itertools.starmap(_bodies, live))
    own = [_NO_NUMBER if held else next(numbers) for held in bodies]  # before those inside

    def site(eqn: JaxprEqn, decision: Decision, number: int, held: list[Body]) -> Site:
        around, is_while = joined_scope(scope, eqn), wiring(eqn) is Wiring.WHILE
        inner = tuple(_block(b, p, around, numbers) for b, p in held[is_while:])
        return Site(eqn, decision, around, number, inner, held[0] if is_while else None)

    sites = [site(*each, n, held) for each, n, held in zip(live, own, bodies, strict=True)]
    return Block(body.jaxpr, body.consts, plan, sites)


def _bodies(eqn: JaxprEqn, decision: Decision) -> list[Body]:
    """Return the jaxprs of an equation that an interpreter can enter, each with its plan."""
    is_entered = op_of(eqn.primitive).trait in (Trait.CALL, Trait.BRANCH, Trait.LOOP)
    return bodies_of(eqn, decision) if is_entered else []
