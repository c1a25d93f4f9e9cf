"""Policies, amped functions and amped modules survive pickle and deepcopy, and still work."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxamp
from jaxamp import PrecisionPolicy, Rule, amp, training

POLICY = PrecisionPolicy.AUTO_MIXED.with_rules(Rule(precision="f32", scope="head"))
WAYS = {"pickle": lambda x: pickle.loads(pickle.dumps(x)), "deepcopy": copy.deepcopy}
X = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)


def dense(x: Any, w: Any) -> Any:
    """A product."""
    return jnp.tanh(x @ w)


class Net(eqx.Module):
    """A method that is decorated where it is defined."""

    layer: eqx.nn.Linear

    @amp(policy=POLICY)
    def __call__(self, x: Any) -> Any:
        return jax.vmap(self.layer)(x)


@amp(policy=POLICY)
def decorated(x: Any, w: Any) -> Any:
    """A product, found under its name in mixed precision only."""
    return jnp.tanh(x @ w)


@amp(policy="fp8_delayed")
def delayed(x: Any, w: Any) -> Any:
    """A step with a history."""
    return jnp.tanh(x @ w)


class Trainer:
    """A method with a history."""

    @amp(policy="fp8_delayed")
    def step(self, x: Any, w: Any) -> Any:
        return x @ w


def stepped(step: Any) -> Any:
    """The result of a first step."""
    return step(step.init(X, X.T), X, X.T)[0]


LINEN = nn.Dense(3, kernel_init=nn.initializers.ones)  # by default a local function, not to pickle
THINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "function": (lambda: amp(dense, POLICY), lambda f: f(X, X.T)),
    "transformed": (lambda: jax.tree_util.Partial(amp(dense), X), lambda f: f(X.T)),
    "equinox": (
        lambda: amp(eqx.nn.Linear(4, 3, key=jax.random.key(0)), POLICY),
        lambda m: jax.vmap(m)(X),
    ),
    "equinox method": (
        lambda: Net(eqx.nn.Linear(4, 3, key=jax.random.key(0))),
        lambda m: m(X),
    ),
    "decorated": (lambda: decorated, lambda f: f(X, X.T)),
    "linen": (
        lambda: amp(LINEN.apply, POLICY),
        lambda apply: apply(LINEN.init(jax.random.key(0), X), X),
    ),
    "nnx": (lambda: amp(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), POLICY), lambda m: m(X)),
    "delayed": (lambda: amp(dense, "fp8_delayed"), stepped),
    "delayed decorated": (lambda: delayed, stepped),
    "delayed method": (lambda: Trainer().step, stepped),
    "loss scale": (
        lambda: training.DynamicLossScale(2.0**10),
        lambda s: s.scale(jnp.float32(3.0)),
    ),
}


@pytest.mark.product("name")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", THINGS)
@pytest.mark.parametrize("used", [False, True], ids=["unused", "used"])
def test_a_copy_does_what_the_original_does(name: str, way: str, used: bool) -> None:
    """Before and after the first call, which fills caches that are not to travel."""
    make, use = THINGS[name]
    thing = make()
    want = use(thing) if used else use(make())
    again = WAYS[way](thing)
    np.testing.assert_array_equal(use(again), want)
    np.testing.assert_array_equal(use(thing), want)


@pytest.mark.parametrize("way", WAYS)
def test_what_copies_say_of_themselves(way: str) -> None:
    """A copy has the policy, the name and the plan of the original."""
    function = amp(dense, POLICY)
    again = WAYS[way](function)
    assert again.policy == POLICY
    assert again.__name__ == "dense"
    plan, other = (jaxamp.plan_of(f)(X, X.T) for f in (function, again))
    assert str(other) == str(plan)
    assert WAYS[way](plan.policy) == POLICY
