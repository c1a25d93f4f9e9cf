"""The table of what primitives do to a rounding and to signs."""

from __future__ import annotations

import numpy as np
import pytest
from jax import lax

from jaxamp.core.semantics import SEMANTICS, Linear, semantics_of
from jaxamp.core.taxonomy import TABLE, OpKind, Trait

POINTS = np.array([-3, -1, -0.5, 0, 0.25, 0.5, 1, 2, 6], np.float32)
UNARY = {
    **{name: getattr(lax, name) for name in ("abs", "neg", "sign", "sqrt", "ceil", "floor")},
    **{name: getattr(lax, name) for name in ("tanh", "logistic", "exp", "exp2", "expm1", "log1p")},
    **{name: getattr(lax, name) for name in ("square", "rsqrt", "sinh", "cosh", "erfc")},
}


def test_the_table_is_complete() -> None:
    """A line for all that computes elementwise, reduces or orders, and for nothing else."""
    kinds = (OpKind.ELEMENTWISE, OpKind.REDUCTION)
    arithmetic = {n for n, op in TABLE.items() if op.kind in kinds or op.trait is Trait.EXTREMUM}
    assert SEMANTICS.keys() == arithmetic


@pytest.mark.parametrize("name", UNARY)
def test_facts_of_curves_hold(name: str) -> None:
    facts, values = semantics_of(name), np.asarray(UNARY[name](POINTS))
    assert not facts.nonnegative or not (values < 0).any()
    assert not facts.keeps_sign or not (values[POINTS >= 0] < 0).any()
    if facts.monotone:
        steps = np.diff(values)
        assert (steps >= 0).all() or (steps <= 0).all()
        np.testing.assert_allclose([facts.monotone(float(x)) for x in POINTS], values, rtol=1e-5)
    if facts.linear is Linear.ALL:
        np.testing.assert_allclose(UNARY[name](2 * POINTS), 2 * values)
