"""Values by variable and precision: what is cast keeps its type but for the precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxamp import amp

SCALARS: dict[str, Callable[[Any], Any]] = {
    "product": lambda s: s * 2.0,
    "branch": lambda s: lax.cond(s > 0, jnp.sin, jnp.cos, s),
    "loop": lambda s: lax.fori_loop(0, 3, lambda _, c: c * 2.0, s),
    "call": lambda s: jax.jit(lambda s: s * 2.0)(s),
}


@pytest.mark.parametrize("name", SCALARS)
def test_results_are_as_weakly_typed_as_they_were(name: str) -> None:
    """Python's numbers are computed in float16, and what comes back bends to other dtypes again."""
    plain, low = (jax.make_jaxpr(f)(1.5) for f in (SCALARS[name], amp(SCALARS[name], "always_f16")))
    assert "f16" in str(low)
    assert low.out_avals[0].weak_type
    assert low.out_avals == plain.out_avals
