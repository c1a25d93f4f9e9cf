"""Optax and plain JAX: what people do with gradients, whatever the library of layers."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.public.data import STEPS, images, points, rng
from tests.public.registry import Losses, Places, public


def _mlp(*widths: int) -> list[Any]:
    draw = rng(7)
    pairs = itertools.pairwise(widths)
    return [
        {
            "w": jnp.asarray(draw.normal(size=pair) / pair[0] ** 0.5, jnp.float32),
            "b": jnp.zeros(pair[1]),
        }
        for pair in pairs
    ]


def _apply(params: Any, x: Any) -> Any:
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


@public(kept="step jit")
def lbfgs(at: Places) -> Losses:
    """A line search calls the loss itself, and keeps value and gradient for the next step."""
    params, (x, y), tx = _mlp(2, 16, 1), points(), optax.lbfgs()
    apply = at.model(_apply)
    loss_fn = at.loss(lambda params, x, y: jnp.mean((apply(params, x) - y) ** 2))

    def train_step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        def value(params):
            return loss_fn(params, x, y)

        loss, grads = optax.value_and_grad_from_state(value)(params, state=opt_state)
        updates, opt_state = tx.update(
            grads, opt_state, params, value=loss, grad=grads, value_fn=value
        )
        return optax.apply_updates(params, updates), opt_state, loss

    step, opt_state, losses = at.step(train_step), tx.init(params), []
    for _ in range(2):  # later ones amplify what a line search decides
        params, opt_state, loss = step(params, opt_state, x, y)
        losses.append(loss)
    return losses


@public()
def accumulation_and_averages(at: Places) -> Losses:
    """Two batches to a step, a schedule, a clip, and an average of the parameters."""
    params, (x, y) = _mlp(2, 16, 1), points()
    rate = optax.cosine_decay_schedule(3e-2, 10)
    tx = optax.MultiSteps(optax.chain(optax.clip(1.0), optax.adamw(rate)), 2)
    average, apply = optax.ema(0.9), at.model(_apply)
    loss_fn = at.loss(lambda params, x, y: jnp.mean((apply(params, x) - y) ** 2))

    def train_step(params: Any, opt_state: Any, averaged: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        _, averaged = average.update(params, averaged)
        return params, opt_state, averaged, loss

    step, losses = at.step(train_step, donate_argnums=(0, 1, 2)), []
    opt_state, averaged = tx.init(params), average.init(params)
    for n in range(2 * STEPS):
        rows = slice(n % 2 * 32, n % 2 * 32 + 32)
        params, opt_state, averaged, loss = step(params, opt_state, averaged, x[rows], y[rows])
        losses.append(loss)
    return losses


@public()
def adversarial(at: Places) -> Losses:
    """A generator and a critic, two optimizers in one step."""
    nets = {"make": _mlp(4, 16, 2), "judge": _mlp(2, 16, 1)}
    real, tx, apply = points()[0], optax.adam(1e-2, b1=0.5), at.model(_apply)

    @at.loss
    def both(nets: Any, noise: Any) -> Any:
        fake = apply(nets["make"], noise)
        fooled = jax.nn.softplus(-apply(jax.lax.stop_gradient(nets["judge"]), fake)).mean()

        def judge(x):
            return apply(nets["judge"], jax.lax.stop_gradient(x))

        caught = jax.nn.softplus(judge(fake)).mean() + jax.nn.softplus(-judge(real)).mean()
        return fooled + caught

    def train_step(nets: Any, opt_state: Any, noise: Any) -> Any:
        loss, grads = jax.value_and_grad(both)(nets, noise)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(nets, updates), opt_state, loss

    step, opt_state, losses = at.step(train_step), tx.init(nets), []
    for n in range(STEPS):
        noise = jax.random.normal(jax.random.key(n), (64, 4))
        nets, opt_state, loss = step(nets, opt_state, noise)
        losses.append(loss)
    return losses


@public()
def contrastive(at: Places) -> Losses:
    """Two views of each image, normalized, told apart from all others at a low temperature."""
    params, x, tx = _mlp(144, 32, 16), images(16)[0].reshape(16, -1), optax.lars(0.1)
    apply = at.model(_apply)

    @at.loss
    def loss_fn(params: Any, x: Any, key: Any) -> Any:
        views = x[None] + 0.3 * jax.random.normal(key, (2, *x.shape))
        found = apply(params, views.reshape(-1, x.shape[-1]))
        found = found / jnp.linalg.norm(found, axis=-1, keepdims=True)
        return optax.losses.ntxent(found, jnp.tile(jnp.arange(len(x)), 2), 0.2)

    def train_step(params: Any, opt_state: Any, x: Any, key: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, x, key)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    step, opt_state, losses = at.step(train_step), tx.init(params), []
    for n in range(STEPS):
        params, opt_state, loss = step(params, opt_state, x, jax.random.key(n))
        losses.append(loss)
    return losses


@public()
def meta_learning(at: Places) -> Losses:
    """A gradient through a gradient step, for several tasks at once."""
    params, (x, _), tx = _mlp(2, 16, 1), points(), optax.adam(1e-2)
    phases, apply = jnp.linspace(0, 3, 4), at.model(_apply)

    def error(params, x, y):
        return jnp.mean((apply(params, x) - y) ** 2)

    def of_task(params: Any, phase: Any) -> Any:
        y = jnp.sin(3 * x.sum(1, keepdims=True) + phase)
        grads = jax.grad(error)(params, x[:32], y[:32])
        adapted = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return error(adapted, x[32:], y[32:])

    loss_fn = at.loss(lambda params, phases: jax.vmap(of_task, (None, 0))(params, phases).mean())

    def train_step(params: Any, opt_state: Any, phases: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, phases)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    step, opt_state, losses = at.step(train_step), tx.init(params), []
    for _ in range(STEPS):
        params, opt_state, loss = step(params, opt_state, phases)
        losses.append(loss)
    return losses
