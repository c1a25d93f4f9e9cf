"""Whole training steps: the gradient and the update are inside the program."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax import Array, lax

from tests.programs.registry import Draw, program

Params = dict[str, Array]


def _problem(d: Draw) -> tuple:
    params = {"w": d.weight(8, 6), "b": d.normal(6), "v": d.weight(6, 3)}
    return params, d.normal(4, 8), d.integers(3, 4)


def _loss(params: Params, x: Array, y: Array) -> Array:
    logits = jax.nn.relu(x @ params["w"] + params["b"]) @ params["v"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def _step(optimizer: Any, params: Params, state: Any, x: Array, y: Array) -> tuple:
    loss, grads = jax.value_and_grad(_loss)(params, x, y)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


@program(_problem, tags="compute", tolerance="deep")
def sgd_step(params: Params, x: Array, y: Array) -> tuple[Params, Array]:
    """Plain gradient descent with a small rate."""
    loss, grads = jax.value_and_grad(_loss)(params, x, y)
    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), loss


@program(_problem, tags="compute", tolerance="deep")
def adamw_step(params: Params, x: Array, y: Array) -> tuple:
    """AdamW with weight decay and its state."""
    optimizer = optax.adamw(1e-3)
    return _step(optimizer, params, optimizer.init(params), x, y)


@program(_problem, tags="compute", tolerance="deep")
def clipped_momentum_step(params: Params, x: Array, y: Array) -> tuple:
    """A global norm clip, momentum and a schedule."""
    schedule = optax.cosine_decay_schedule(1e-2, 100)
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(schedule, momentum=0.9))
    return _step(optimizer, params, optimizer.init(params), x, y)


@program(lambda d: ({"w": d.normal(5)}, {"w": d.normal(5, scale=1e-5)}), tolerance="f32")
def adam_update_alone(params: Params, grads: Params) -> tuple:
    """The update without the loss: nothing here gains from low precision."""
    optimizer = optax.adam(1e-3)
    updates, state = optimizer.update(grads, optimizer.init(params), params)
    return optax.apply_updates(params, updates), state


@program(
    lambda d: (_problem(d)[0], d.normal(5, 4, 8), d.integers(3, 5, 4)),
    tags="compute",
    tolerance="deep",
)
def train_scan(params: Params, xs: Array, ys: Array) -> tuple[Params, Array]:
    """Five steps of training in one scan, parameters and moments carried."""
    optimizer = optax.adam(1e-3)

    def body(carry, batch):
        params, state, loss = _step(optimizer, *carry, *batch)
        return (params, state), loss

    (params, _), losses = lax.scan(body, (params, optimizer.init(params)), (xs, ys))
    return params, losses


@program(_problem, tags="compute", tolerance="deep")
def ema_and_norms(params: Params, x: Array, y: Array) -> tuple:
    """An average of parameters and norms of gradients beside the step."""
    grads = jax.grad(_loss)(params, x, y)
    ema = jax.tree.map(lambda p, g: 0.999 * p + 0.001 * (p - 0.1 * g), params, grads)
    return ema, optax.global_norm(jax.tree.map(lambda g: g, params))


@program(_problem, tags="compute", tolerance="dot")
def hessian_vector_product(params: Params, x: Array, y: Array) -> Params:
    """Forward over reverse inside the program."""
    grad = jax.grad(lambda p: _loss(p, x, y))
    return jax.jvp(grad, (params,), (params,))[1]
