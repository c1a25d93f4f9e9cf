"""What is elementwise of logits is computed for each of its readers: no other one stores it."""

import jax
import pytest
from jax.extend.core import jaxpr_as_fun

from tests.found.cross_entropy.finding import ORDERS, replaced
from tests.found.cross_entropy.spellings import LOSSES
from tests.scopes import equations_of


@pytest.mark.parametrize("order", ORDERS)
def test_a_soft_cap_is_computed_for_each_reader(order):
    """For the maximum, the sum and the cotangents, from logits that barriers keep apart."""
    _, found, args = replaced(LOSSES["soft_cap"], order)
    fn = jaxpr_as_fun(found.jaxpr)
    if order == "forward":
        fn = jax.grad(lambda *xs: jaxpr_as_fun(found.jaxpr)(*xs)[0], (0, 1))
    names = [eqn.primitive.name for eqn, _ in equations_of(fn, *args)]
    assert names.count("tanh") >= 3
    assert names.count("optimization_barrier") >= 2
