"""Interpreters that enter nested jaxprs: calls are inlined, loops and branches rebuilt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxamp.core import jax_compat
from jaxamp.core.taxonomy import Trait, op_of
from jaxamp.inspect.blocks import Block
from jaxamp.jaxprs.nested import loop
from jaxamp.plan import JaxprPlan
from jaxamp.rewrite.interpreter import interpret
from jaxamp.rewrite.registry import RewriteContext


class Value(NamedTuple):
    """One value of the program, and what it is in the original one, where that is another."""

    low: Any
    shadow: Any = None


class Interpreter:
    """An interpreter of blocks, with a state that passes from one equation to the next.

    Without a context for the rewrite nothing runs as it is planned, and there are no shadows.
    """

    context: Any = None

    def run(self, block: Block, values: Sequence[Value], state: Any) -> tuple[list[Value], Any]:
        """Run a block on its inputs."""
        raise NotImplementedError

    def enter(
        self, block: Block, position: int, values: Sequence[Value], state: Any
    ) -> tuple[list[Value], Any]:
        """Run an equation that holds blocks, and return its results and the state."""
        eqn, inner = block.jaxpr.eqns[position], block.inner[position]
        trait = op_of(eqn.primitive).trait
        if trait is Trait.BRANCH:
            return self._branch(eqn, inner, values, state)
        if trait is Trait.LOOP:
            if position in block.test:
                return self._while(eqn, block.test[position], inner[0], values, state)
            return self._scan(eqn, inner[0], values, state)
        params = eqn.params
        is_rematerialized = eqn.primitive.name in ("fused_group", "remat2")
        if is_rematerialized and params["differentiated"] and params["prevent_cse"]:
            # As JAX lowers it: what was computed before is not to be used again.
            values = lax.optimization_barrier(list(values))
        return self.run(inner[0], values, state)

    def _match_shadows(
        self, values: Sequence[Value], variables: Any, shadowed: bool
    ) -> list[Value]:
        """Add shadows to all floats if `shadowed`, or drop them: carries need one structure."""
        matched = []
        for (low, shadow), aval in zip(values, (var.aval for var in variables), strict=True):
            has_one = shadowed and self.context is not None and is_floating(aval)
            wide = low if shadow is None else shadow
            matched.append(
                Value(low, lax.convert_element_type(wide, aval.dtype) if has_one else None)
            )
        return matched

    def _branch(
        self, eqn: JaxprEqn, inner: Sequence[Block], values: Sequence[Value], state: Any
    ) -> tuple[list[Value], Any]:
        shadowed = _any_shadowed(inner, values)

        def branch(block: Block) -> Any:
            def run(values: Sequence[Value], state: Any) -> Any:
                outs, state = self.run(block, values, state)
                return self._match_shadows(outs, eqn.outvars, shadowed), state

            return run

        index = jnp.asarray(values[0].low, jnp.int32)
        return lax.switch(index, list(map(branch, inner)), list(values[1:]), state)

    def _scan(
        self, eqn: JaxprEqn, block: Block, values: Sequence[Value], state: Any
    ) -> tuple[list[Value], Any]:
        wired, shadowed = loop(eqn), _any_shadowed([block], values)
        _, invariants, carries, whole = wired.parts(values)
        inputs = wired.parts(block.jaxpr.invars)[2]

        def step(carried: Any, slices: Any) -> Any:
            carry, state = carried
            given = [Value(*pair) for pair in slices]
            outs, state = self.run(block, [*invariants, *carry, *given], state)
            carry = self._match_shadows(outs[: wired.carries], inputs, shadowed)
            return (carry, state), outs[wired.carries :]

        (carry, state), made = lax.scan(
            step,
            (self._match_shadows(carries, inputs, shadowed), state),
            whole,
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
        )
        return [*carry, *made], state

    def _while(
        self,
        eqn: JaxprEqn,
        test: tuple[ClosedJaxpr, JaxprPlan],
        block: Block,
        values: Sequence[Value],
        state: Any,
    ) -> tuple[list[Value], Any]:
        wired, shadowed = loop(eqn), _any_shadowed([block], values)
        constants, invariants, carries, _ = wired.parts(values)
        inputs = block.jaxpr.invars[wired.invariants :]

        def goes_on(carried: Any) -> Any:
            lows = [value.low for value in (*constants, *carried[0])]
            return tested(self.context, *test, lows)

        def body(carried: Any) -> Any:
            carry, state = carried
            outs, state = self.run(block, [*invariants, *carry], state)
            return self._match_shadows(outs, inputs, shadowed), state

        carry = self._match_shadows(carries, inputs, shadowed)
        return lax.while_loop(goes_on, body, (carry, state))


def run_live(block: Block, run: Callable[[int], None]) -> None:
    """Run, by position, the equations of a block that are needed, each with its line and scope."""
    for position, eqn in enumerate(block.jaxpr.eqns):
        if block.live[position]:
            with jax_compat.emitting(eqn):
                run(position)


def tested(
    context: RewriteContext | None, body: ClosedJaxpr, plan: JaxprPlan, values: Sequence[Any]
) -> Any:
    """Evaluate the test of a while loop, as it is planned, or else as it is written."""
    if context is None:
        return eval_jaxpr(body.jaxpr, body.consts, *values)[0]
    return interpret(context, body.jaxpr, plan, body.consts, values)[0]


def _any_shadowed(blocks: Sequence[Block], values: Sequence[Value]) -> bool:
    """Return whether values in such blocks can differ from those of the original program."""
    return not all(b.plan.unchanged for b in blocks) or any(v.shadow is not None for v in values)


def literal(atom: Any) -> Any:
    """Return the value of a literal; ``None`` for a variable."""
    return jax_compat.literal_value(atom) if hasattr(atom, "val") else None


def is_floating(aval: Any) -> bool:
    """Return whether an aval is that of an array of floats: other numbers have no shadows."""
    return jax_compat.is_plain_array(aval) and jnp.issubdtype(aval.dtype, jnp.floating)


def is_inexact(aval: Any) -> bool:
    """Return whether an aval is that of an array of floats or complex numbers."""
    return jax_compat.is_plain_array(aval) and jnp.issubdtype(aval.dtype, jnp.inexact)
