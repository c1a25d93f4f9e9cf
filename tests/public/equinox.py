"""Equinox: modules that are pytrees, and transforms that filter them."""

from __future__ import annotations

from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from tests.public.data import STEPS, images, points, sentences
from tests.public.linen import cross_entropy
from tests.public.registry import Losses, Places, public


def _train(
    at: Places, net: Any, loss_fn: Any, tx: Any, *batch: Any, donate: str = "none"
) -> Losses:
    """Train as the library's examples do."""
    loss_fn = at.loss(loss_fn)

    def train_step(net: Any, opt_state: Any, *batch: Any) -> Any:
        loss, grads = eqx.filter_value_and_grad(loss_fn)(net, *batch)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(net, eqx.is_array))
        return eqx.apply_updates(net, updates), opt_state, loss

    step = at.step(train_step, eqx.filter_jit, donate=donate)
    opt_state, losses = tx.init(eqx.filter(net, eqx.is_array)), []
    for n in range(STEPS):
        net, opt_state, loss = step(net, opt_state, *batch, jax.random.key(n))
        losses.append(loss)
    return losses


@public()
def equinox_cnn(at: Places) -> Losses:
    """Convolutions of single images under a vmap; model and state are donated."""
    keys = jax.random.split(jax.random.key(0), 3)
    net = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(1, 4, 3, key=keys[0]),
            eqx.nn.MaxPool2d(2, 2),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(100, 4, key=keys[1]),
        ]
    )
    x, y = images()
    forward = at.model(lambda net, x: jax.vmap(net)(x))

    def loss(net, x, y, _):
        return cross_entropy(forward(net, x), y)

    return _train(at, net, loss, optax.adam(3e-3), x.transpose(0, 3, 1, 2), y, donate="all")


class Denoiser(eqx.Module):
    """A mixer that is told the time."""

    first: eqx.nn.MLP
    second: eqx.nn.MLP
    norm: eqx.nn.LayerNorm

    def __init__(self, key: Any) -> None:
        one, two = jax.random.split(key)
        self.first = eqx.nn.MLP(145, 48, 48, 1, key=one)
        self.second = eqx.nn.MLP(48, 144, 48, 1, key=two)
        self.norm = eqx.nn.LayerNorm(48)

    def __call__(self, time: Any, x: Any) -> Any:
        hidden = self.first(jnp.append(x.ravel(), time))
        return self.second(self.norm(hidden)).reshape(x.shape)


@public()
def diffusion(at: Places) -> Losses:
    """Score matching at random times, weighted, of a process that preserves variance."""
    net, x = Denoiser(jax.random.key(0)), images()[0][..., 0]
    score = at.model(lambda net, t, x: net(t, x))

    def single(net: Denoiser, x: Any, t: Any, key: Any) -> Any:
        mean, variance = x * jnp.exp(-0.5 * t), 1 - jnp.exp(-t)
        noise = jax.random.normal(key, x.shape)
        found = score(net, t, mean + jnp.sqrt(variance) * noise)
        return variance * jnp.mean((found + noise / jnp.sqrt(variance)) ** 2)

    def loss(net: Denoiser, x: Any, key: Any) -> Any:
        when, how = jax.random.split(key)
        t = (jax.random.uniform(when, (len(x),)) + jnp.arange(len(x))) / len(x) * 4 + 0.05
        return jnp.mean(jax.vmap(single, (None, 0, 0, 0))(net, x, t, jax.random.split(how, len(x))))

    return _train(at, net, loss, optax.adabelief(3e-3), x)


class Recurrent(eqx.Module):
    """A GRU run by a scan."""

    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        one, two = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(32, 16, key=one)
        self.head = eqx.nn.Linear(16, 1, key=two)

    def __call__(self, row: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            return self.cell(x, carry), None

        carry, _ = jax.lax.scan(step, jnp.zeros(16), jax.nn.one_hot(row, 32))
        return self.head(carry)[0]


@public()
def equinox_rnn(at: Places) -> Losses:
    """Rows sorted into two classes by their first word."""
    net, rows = Recurrent(jax.random.key(0)), sentences()
    labels = (rows[:, 0] % 2).astype(jnp.float32)
    forward = at.model(lambda net, rows: jax.vmap(net)(rows))

    def loss(net, rows, y, _):
        return optax.sigmoid_binary_cross_entropy(forward(net, rows), y).mean()

    return _train(at, net, loss, optax.adam(1e-2), rows, labels)


class Field(eqx.Module):
    """The right-hand side of an equation."""

    mlp: eqx.nn.MLP

    def __call__(self, t: Any, y: Any, args: Any) -> Any:
        return self.mlp(y)


@public()
def neural_ode(at: Places) -> Losses:
    """Trajectories of a spiral, solved with a fixed number of steps."""
    net = Field(eqx.nn.MLP(2, 2, 16, 2, jax.nn.softplus, key=jax.random.key(0)))
    times = jnp.linspace(0, 1, 8)
    y0 = points(8)[0]

    def spiral(t):
        return jnp.array([[jnp.cos(3 * t), -jnp.sin(3 * t)], [jnp.sin(3 * t), jnp.cos(3 * t)]])

    wanted = jnp.stack([y0 @ spiral(t) for t in times], 1)

    def solve(net: Field, y0: Any) -> Any:
        return diffrax.diffeqsolve(
            diffrax.ODETerm(net),
            diffrax.Tsit5(),
            t0=0.0,
            t1=1.0,
            dt0=0.125,
            y0=y0,
            saveat=diffrax.SaveAt(ts=times),
            max_steps=16,
        ).ys

    forward = at.model(lambda net, y0: jax.vmap(solve, (None, 0))(net, y0))

    def loss(net, y0, wanted, _):
        return jnp.mean((forward(net, y0) - wanted) ** 2)

    return _train(at, net, loss, optax.adam(1e-2), y0, wanted)


class Normed(eqx.Module):
    """A network with running statistics, which are threaded through."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        one, two = jax.random.split(key)
        self.first, self.last = eqx.nn.Linear(2, 16, key=one), eqx.nn.Linear(16, 1, key=two)
        self.norm = eqx.nn.BatchNorm(16, axis_name="batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x: Any, state: Any, key: Any) -> Any:
        hidden, state = self.norm(self.first(x), state)
        return self.last(self.dropout(jax.nn.silu(hidden), key=key)), state


@public()
def equinox_with_state(at: Places) -> Losses:
    """A batch norm in a vmap with a named axis, and dropout with a key for each row."""
    net, state = eqx.nn.make_with_state(Normed)(jax.random.key(0))
    x, y = points()
    forward = at.model(
        lambda net, x, state, keys: jax.vmap(
            net, in_axes=(0, None, 0), out_axes=(0, None), axis_name="batch"
        )(x, state, keys)
    )

    @at.loss
    def loss_fn(net: Normed, state: Any, x: Any, y: Any, key: Any) -> Any:
        found, state = forward(net, x, state, jax.random.split(key, len(x)))
        return jnp.mean((found - y) ** 2), state

    tx = optax.adam(1e-2)

    def train_step(net: Any, state: Any, opt_state: Any, x: Any, y: Any, key: Any) -> Any:
        gradient = eqx.filter_value_and_grad(loss_fn, has_aux=True)
        (loss, state), grads = gradient(net, state, x, y, key)
        updates, opt_state = tx.update(grads, opt_state)
        return eqx.apply_updates(net, updates), state, opt_state, loss

    step = at.step(train_step, eqx.filter_jit)
    opt_state, losses = tx.init(eqx.filter(net, eqx.is_inexact_array)), []
    for n in range(STEPS):
        net, state, opt_state, loss = step(net, state, opt_state, x, y, jax.random.key(n))
        losses.append(loss)
    return losses
