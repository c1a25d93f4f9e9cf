"""What is asked of products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import export

from jaxamp.jaxprs.contracted import multiplies_by_vector


@pytest.mark.parametrize("rows", ["8", "rows"])
@pytest.mark.parametrize(
    ("spec", "of", "alone", "in_batches"),
    [
        ("rd,de->re", (64, 128), False, False),
        ("rd,de->re", (64, 1), True, False),
        ("rd,d->r", (64,), True, False),
        ("rd,rd->r", ("rows", 64), True, True),
        ("rd,rde->re", ("rows", 64, 2), True, True),
    ],
)
def test_a_product_with_a_vector(
    spec: str, of: tuple[int | str, ...], alone: bool, in_batches: bool, rows: str
) -> None:
    """Whatever the number of rows, which an export may leave open."""
    (count,) = export.symbolic_shape(rows)
    shapes = (count, 64), tuple(count if n == "rows" else n for n in of)
    args = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    (eqn,) = (
        e
        for e in jax.jit(lambda x, w: jnp.einsum(spec, x, w)).trace(*args).jaxpr.eqns
        if e.primitive.name == "dot_general"
    )
    assert multiplies_by_vector(eqn) == alone
    assert multiplies_by_vector(eqn, in_batches=True) == in_batches
