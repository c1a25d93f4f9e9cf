"""Known numbers: what a loop reads, as JAX makes of literals on a mesh, and products of them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxamp import amp
from jaxamp.plan.graph.graph import Link
from jaxamp.plan.graph.unfold import unfold


@pytest.mark.parametrize("made", [lambda: jnp.ones(()), lambda: jnp.sqrt(jnp.ones(()))])
def test_a_known_number_is_known_inside_of_a_loop(made: Callable[[], jax.Array]) -> None:
    """The derivative `1 - gate` of a gate is told from a difference that cancels by its 1."""

    def gated(xs: jax.Array) -> jax.Array:
        one = made()
        return lax.scan(lambda h, x: ((one - jnp.tanh(x)) * h, None), xs[0], xs)[0]

    closed = jax.make_jaxpr(gated)(jnp.ones((5, 3)))
    graph, _ = unfold(closed)
    invariants = [node.outs[0] for node in graph.nodes if node.link is Link.INVARIANT]
    assert [graph.constants.get(value) for value in invariants] == [1.0]


@pytest.mark.product
@pytest.mark.parametrize("policy", ["bf16", "f16"])
def test_products_of_known_numbers_are_as_in_float32(policy: str) -> None:
    """The powers of a transition matrix, though a product reads one of them."""

    def chain(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        stays = jnp.linspace(0.9, 0.5, 6)[:, None, None]
        steps = stays * jnp.eye(4) + (1 - stays) / 4
        powers = lax.associative_scan(jnp.matmul, steps)
        return powers, powers[3] @ x

    powers, _ = amp(chain, policy)(jnp.ones((4, 4)) / 3)
    exact, _ = chain(jnp.ones((4, 4)) / 3)
    assert jnp.abs(powers - exact).max() < 1e-6
