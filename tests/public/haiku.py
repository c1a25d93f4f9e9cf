"""Haiku: functions that are transformed, with parameters and state beside them."""

from __future__ import annotations

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from tests.public.data import STEPS, images, sentences
from tests.public.linen import cross_entropy
from tests.public.registry import Losses, Places, public


@public()
def haiku_transformer(at: Places) -> Losses:
    """A decoder with dropout, its keys taken inside."""

    def network(rows: Any, is_training: bool) -> Any:
        x = hk.Embed(32, 32)(rows)
        x = x + hk.get_parameter(
            "places", (rows.shape[1], 32), init=hk.initializers.RandomNormal(0.02)
        )
        mask = jnp.tril(jnp.ones((1, 1, rows.shape[1], rows.shape[1])))
        init = hk.initializers.VarianceScaling(0.5)
        for _ in range(2):
            normed = hk.LayerNorm(-1, True, True)(x)
            mixed = hk.MultiHeadAttention(2, 16, w_init=init)(normed, normed, normed, mask)
            x = x + (hk.dropout(hk.next_rng_key(), 0.1, mixed) if is_training else mixed)
            x = x + hk.nets.MLP([64, 32], w_init=init)(hk.LayerNorm(-1, True, True)(x))
        return hk.Linear(32)(hk.LayerNorm(-1, True, True)(x))

    net, rows = hk.transform(network), sentences()
    params = net.init(jax.random.key(0), rows[:, :-1], True)
    apply = at.model(lambda params, key, rows: net.apply(params, key, rows, True))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))

    @at.loss
    def loss_fn(params: Any, key: Any, rows: Any) -> Any:
        return cross_entropy(apply(params, key, rows[:, :-1]), rows[:, 1:])

    def train_step(params: Any, opt_state: Any, key: Any, rows: Any) -> Any:
        key, used = jax.random.split(key)
        loss, grads = jax.value_and_grad(loss_fn)(params, used, rows)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, key, loss

    step, opt_state, losses = at.step(train_step), tx.init(params), []
    key = jax.random.key(1)
    for _ in range(STEPS):
        params, opt_state, key, loss = step(params, opt_state, key, rows)
        losses.append(loss)
    return losses


@public()
def haiku_residual_network(at: Places) -> Losses:
    """Batch norms with state, weight decay in the loss."""

    def network(x: Any, is_training: bool) -> Any:
        def norm():
            return hk.BatchNorm(True, True, 0.9)

        x = hk.Conv2D(8, 3, with_bias=False)(x)
        for _ in range(2):
            shortcut = x
            x = jax.nn.relu(norm()(hk.Conv2D(8, 3, with_bias=False)(x), is_training))
            x = norm()(hk.Conv2D(8, 3, with_bias=False)(x), is_training)
            x = jax.nn.relu(x + shortcut)
        return hk.Linear(4)(x.mean((1, 2)))

    net, (x, y) = hk.transform_with_state(network), images()
    params, state = net.init(jax.random.key(0), x, True)
    apply, tx = (
        at.model(lambda params, state, x: net.apply(params, state, None, x, True)),
        optax.sgd(0.05),
    )

    @at.loss
    def loss_fn(params: Any, state: Any, x: Any, y: Any) -> Any:
        logits, state = apply(params, state, x)
        decay = sum(jnp.sum(p**2) for p in jax.tree.leaves(params) if p.ndim > 1)
        return cross_entropy(logits, y) + 1e-4 * decay, state

    def train_step(params: Any, state: Any, x: Any, y: Any) -> Any:
        (loss, state), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, state, x, y)
        updates, _ = tx.update(grads, tx.init(params))
        return optax.apply_updates(params, updates), state, loss

    step, losses = at.step(train_step, donate_argnums=(0, 1)), []
    for _ in range(STEPS):
        params, state, loss = step(params, state, x, y)
        losses.append(loss)
    return losses


@public()
def haiku_vq_vae(at: Places) -> Losses:
    """A codebook of moving averages, chosen by distance, straight through."""

    def network(x: Any) -> Any:
        z = hk.Linear(8)(jax.nn.relu(hk.Linear(32)(x)))
        coded = hk.nets.VectorQuantizerEMA(8, 16, 0.25, 0.9)(
            z.reshape(-1, 2, 4).repeat(2, -1), True
        )
        decoded = hk.nets.MLP([32, x.shape[-1]])(coded["quantize"].reshape(len(x), -1))
        return decoded, coded["loss"]

    net, x = hk.transform_with_state(network), images(16)[0].reshape(16, -1)
    params, state = net.init(jax.random.key(0), x)
    apply, tx = (
        at.model(lambda params, state, x: net.apply(params, state, None, x)),
        optax.adam(3e-3),
    )

    @at.loss
    def loss_fn(params: Any, state: Any, x: Any) -> Any:
        (decoded, commitment), state = apply(params, state, x)
        return jnp.mean((decoded - x) ** 2) + commitment, state

    def train_step(params: Any, state: Any, opt_state: Any, x: Any) -> Any:
        (loss, state), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, state, x)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), state, opt_state, loss

    step, opt_state, losses = at.step(train_step), tx.init(params), []
    for _ in range(STEPS):
        params, state, opt_state, loss = step(params, state, opt_state, x)
        losses.append(loss)
    return losses
