"""Known numbers that a loop reads as operands: of arrays on a mesh JAX makes such of literals."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxamp.plan.graph.graph import Link
from jaxamp.plan.graph.unfold import unfold


@pytest.mark.parametrize("made", [lambda: jnp.ones(()), lambda: jnp.sqrt(jnp.ones(()))])
def test_a_known_number_is_known_inside_of_a_loop(made: Callable[[], jax.Array]) -> None:
    """The derivative `1 - gate` of a gate is told from a difference that cancels by its 1."""

    def gated(xs: jax.Array) -> jax.Array:
        one = made()
        return lax.scan(lambda h, x: ((one - jnp.tanh(x)) * h, None), xs[0], xs)[0]

    closed = jax.make_jaxpr(gated)(jnp.ones((5, 3)))
    graph, _ = unfold(closed.jaxpr, closed.consts)
    invariants = [node.outs[0] for node in graph.nodes if node.link is Link.INVARIANT]
    assert [graph.constants.get(value) for value in invariants] == [1.0]
