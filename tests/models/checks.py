"""What is asked of every model."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax

from jaxamp import amp, training
from tests import audit
from tests.models.registry import Solved, Trained
from tests.tolerances import bound, moved

LOW = {"auto_mixed_bf16": "bfloat16", "auto_mixed": "float16"}
STEPS = 12
NEAR = 0.12  # of the loss that training has taken away: the paths of two formats part slowly


def check(thing: Trained | Solved, policy: str) -> None:
    """A model under a policy.

    Raises:
        AssertionError: if it is less accurate than it may be, does not learn, or runs high.
    """
    if isinstance(thing, Trained):
        check_gradient(thing, policy)
        check_training(thing, policy)
    else:
        check_solution(thing, policy)


def check_gradient(net: Trained, policy: str) -> None:
    """Loss and gradient in both orders: float32, near those of float32, products low."""
    low = LOW[policy]
    plain = jax.jit(jax.value_and_grad(net.loss))
    want, nudged = plain(net.params, net.batch), plain(*moved((net.params, net.batch), low))
    for form in (
        jax.value_and_grad(amp(net.loss, policy)),
        amp(jax.value_and_grad(net.loss), policy),
    ):
        traced = jax.jit(form).trace(net.params, net.batch)
        _mostly_low(audit.products(traced.jaxpr.jaxpr))
        got = traced.lower().compile()(net.params, net.batch)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for order in (0, 1):
            x, y, z = (_flat(tree[order]) for tree in (got, want, nudged))
            assert np.isfinite(x).all()
            allowed = bound(net.tolerance, order, low, y, z)
            assert np.abs(x - y).max() <= allowed, (order, np.abs(x - y).max(), allowed)


def check_training(net: Trained, policy: str) -> None:
    """A short run learns what float32 learns."""
    want, got = (train(net, loss) for loss in (net.loss, amp(net.loss, policy)))
    assert np.isfinite(got).all()
    learnt = want[0] - want[-1]
    assert learnt > 0.05 * want[0], "float32 does not learn: choose another rate"
    np.testing.assert_allclose(got, want, rtol=0, atol=NEAR * learnt)
    assert got != want, "nothing ran low"


def train(net: Trained, loss: Any) -> list[float]:
    """Losses of a few steps of Adam; gradients are scaled, as f16 needs."""
    optimizer, scale = optax.adam(net.rate), training.StaticLossScale(2.0**8)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: scale.scale(loss(p, net.batch)))(params)
        updates, state = optimizer.update(scale.unscale(grads), state, params)
        return optax.apply_updates(params, updates), state, scale.unscale(value)

    params, state, losses = net.params, optimizer.init(net.params), []
    for _ in range(STEPS):
        params, state, value = step(params, state)
        losses.append(float(value))
    return losses


def check_solution(problem: Solved, policy: str) -> None:
    """The accuracy asked for is met; what has nothing to gain has no low value at all."""
    problem.check(jax.jit(problem.solve)(*problem.args))  # float32 meets it, so the check is fair
    amped = amp(problem.solve, policy)
    problem.check(amped(*problem.args))
    if problem.same:
        traced = jax.make_jaxpr(amped)(*problem.args)
        lowered = [e for e in audit.equations(traced.jaxpr) if _is_low(e)]
        assert not lowered, f"lowered for nothing: {lowered[:3]}"


def _is_low(eqn: Any) -> bool:
    return any(str(getattr(v.aval, "dtype", "")) in LOW.values() for v in eqn.outvars)


def _mostly_low(products: list[audit.Product]) -> None:
    """Most products are low, and none mixes formats; a product of a loss may stay."""
    floats = [p for p in products if p.is_float]
    assert not [p for p in floats if p.is_mixed]
    assert sum(p.is_low for p in floats) >= 0.8 * len(floats), floats


def _flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(leaf)) for leaf in jax.tree.leaves(tree)])
