"""Interpreters that enter nested jaxprs: calls are inlined, loops and branches rebuilt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.core import eval_jaxpr

from jaxamp.core import jax_compat
from jaxamp.core.taxonomy import Trait, op_of
from jaxamp.inspect.blocks import Block, Site
from jaxamp.jaxprs.nested import loop
from jaxamp.rewrite.interpreter import interpret


class Value(NamedTuple):
    """One value of the program, and what it is in the original one, where that is another."""

    low: Any
    shadow: Any = None


class Interpreter:
    """The run of one block, with a state that passes from one equation to the next.

    Without a context for the rewrite nothing runs as it is planned, and there are no shadows.
    """

    context: Any = None

    def run(self, block: Block, values: Sequence[Value], state: Any) -> tuple[list[Value], Any]:
        """Run a block inside of this one on its inputs."""
        raise NotImplementedError

    def enter(self, site: Site, values: Sequence[Value], state: Any) -> tuple[list[Value], Any]:
        """Run an equation that holds blocks, and return its results and the state."""
        trait = op_of(site.eqn.primitive).trait
        if trait is Trait.BRANCH:
            return self._branch(site, values, state)
        if trait is Trait.LOOP:
            go = self._scan if site.test is None else self._while
            return go(site, values, state)
        params = site.eqn.params
        is_rematerialized = site.eqn.primitive.name in ("fused_group", "remat2")
        if is_rematerialized and params["differentiated"] and params["prevent_cse"]:
            # As JAX lowers it: what was computed before is not to be used again.
            values = lax.optimization_barrier(list(values))
        return self.run(site.inner[0], values, state)

    def _match_shadows(
        self, values: Sequence[Value], variables: Any, shadowed: bool
    ) -> list[Value]:
        """Add shadows to all that have some if `shadowed`, or drop them: carries are alike."""
        matched = []
        for (low, shadow), var in zip(values, variables, strict=True):
            wide = low if shadow is None else shadow
            if shadowed and self.context is not None and is_inexact(var.aval):
                matched.append(Value(low, lax.convert_element_type(wide, var.aval.dtype)))
            else:
                matched.append(Value(low))
        return matched

    def _branch(self, site: Site, values: Sequence[Value], state: Any) -> tuple[list[Value], Any]:
        shadowed = _any_shadowed(site, values)

        def branch(block: Block) -> Any:
            def run(values: Sequence[Value], state: Any) -> Any:
                outs, state = self.run(block, values, state)
                return self._match_shadows(outs, site.eqn.outvars, shadowed), state

            return run

        index = jnp.asarray(values[0].low, jnp.int32)
        return lax.switch(index, list(map(branch, site.inner)), list(values[1:]), state)

    def _scan(self, site: Site, values: Sequence[Value], state: Any) -> tuple[list[Value], Any]:
        wired, shadowed = loop(site.eqn), _any_shadowed(site, values)
        params, block = site.eqn.params, site.inner[0]
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
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *made], state

    def _while(self, site: Site, values: Sequence[Value], state: Any) -> tuple[list[Value], Any]:
        wired, shadowed = loop(site.eqn), _any_shadowed(site, values)
        assert site.test is not None
        (test, plan), block = site.test, site.inner[0]
        constants, invariants, carries, _ = wired.parts(values)
        inputs = block.jaxpr.invars[wired.invariants :]

        def goes_on(carried: Any) -> Any:
            lows = [value.low for value in (*constants, *carried[0])]
            if self.context is None:
                return eval_jaxpr(test.jaxpr, test.consts, *lows)[0]
            return interpret(self.context, test.jaxpr, plan, test.consts, lows)[0]

        def body(carried: Any) -> Any:
            carry, state = carried
            outs, state = self.run(block, [*invariants, *carry], state)
            return self._match_shadows(outs, inputs, shadowed), state

        carry = self._match_shadows(carries, inputs, shadowed)
        return lax.while_loop(goes_on, body, (carry, state))


def run_sites(block: Block, run: Callable[[Site], None]) -> None:
    """Run the equations of a block, each with its line and scope."""
    for site in block.sites:
        with jax_compat.emitting(site.eqn):
            run(site)


def _any_shadowed(site: Site, values: Sequence[Value]) -> bool:
    """Return whether values inside can differ from those of the original program."""
    is_low = not all(block.plan.unchanged for block in site.inner)
    return is_low or any(value.shadow is not None for value in values)


def is_inexact(aval: Any) -> bool:
    """Return whether an aval is that of an array of floats or complex numbers: others are exact."""
    return jax_compat.is_plain_array(aval) and jnp.issubdtype(aval.dtype, jnp.inexact)
