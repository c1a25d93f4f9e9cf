"""Flax nnx: modules that hold their state, and transforms that carry it."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tests.public.data import STEPS, images, points, sentences
from tests.public.linen import cross_entropy
from tests.public.registry import Losses, Places, public


class ConvNet(nnx.Module):
    """Convolution, batch norm, dropout."""

    def __init__(self, rngs: nnx.Rngs, dtype: Any = None) -> None:
        self.conv = nnx.Conv(1, 8, (3, 3), strides=2, dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(8, 4, dtype=dtype, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.relu(self.norm(self.conv(x))).mean((1, 2))
        return self.head(self.dropout(x))


@public(dtype=True)
def nnx_digits_with_metrics(at: Places, dtype: Any = None) -> Losses:
    """Metrics that are updated in the step, beside the parameters and the statistics."""
    net = ConvNet(nnx.Rngs(0), dtype)
    net.train()
    optimizer = nnx.Optimizer(net, optax.adamw(5e-3), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    x, y = images(16)
    forward = at.model(lambda net, x: net(x))

    @at.loss
    def loss_fn(net: ConvNet, x: Any, y: Any) -> Any:
        logits = forward(net, x)
        return cross_entropy(logits, y), logits

    def train_step(net: Any, optimizer: Any, metrics: Any, x: Any, y: Any) -> None:
        gradient = nnx.value_and_grad(loss_fn, has_aux=True)
        (loss, logits), grads = gradient(net, x, y)
        metrics.update(loss=loss, logits=logits, labels=y)
        optimizer.update(net, grads)

    step, losses = at.step(train_step, nnx.jit), []
    for _ in range(STEPS):
        metrics.reset()
        step(net, optimizer, metrics, x, y)
        found = metrics.compute()
        assert 0 <= found["accuracy"] <= 1
        losses.append(found["loss"])
    return losses


class Layer(nnx.Module):
    """A layer of a decoder."""

    def __init__(self, rngs: nnx.Rngs, dtype: Any = None) -> None:
        self.norm = nnx.LayerNorm(32, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 32, decode=False, dtype=dtype, rngs=rngs)
        self.grow = nnx.Linear(32, 64, dtype=dtype, rngs=rngs)
        self.shrink = nnx.Linear(64, 32, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.dropout(self.shrink(nnx.gelu(self.grow(self.norm(x)))))


class Decoder(nnx.Module):
    """Layers made by a vmap and run by a scan, each under a checkpoint."""

    def __init__(self, rngs: nnx.Rngs, dtype: Any = None) -> None:
        self.embed = nnx.Embed(32, 32, dtype=dtype, rngs=rngs)
        make = nnx.vmap(partial(Layer, dtype=dtype), in_axes=0, out_axes=0)
        self.layers = nnx.split_rngs(splits=2)(make)(rngs)

    def __call__(self, rows: Any) -> Any:
        run = nnx.scan(
            nnx.remat(lambda x, layer: layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )
        return self.embed.attend(run(self.embed(rows), self.layers))


@public(dtype=True)
def nnx_language_model(at: Places, dtype: Any = None) -> Losses:
    """A scan over stacked layers, with dropout's streams split over them."""
    net, rows = Decoder(nnx.Rngs(0), dtype), sentences()
    optimizer = nnx.Optimizer(net, optax.adam(3e-3), wrt=nnx.Param)
    forward = at.model(lambda net, rows: net(rows))

    @at.loss
    def loss_fn(net: Decoder, rows: Any) -> Any:
        return cross_entropy(forward(net, rows[:, :-1]), rows[:, 1:])

    def train_step(net: Any, optimizer: Any, rows: Any) -> Any:
        loss, grads = nnx.value_and_grad(loss_fn)(net, rows)
        optimizer.update(net, grads)
        return loss

    step = at.step(train_step, nnx.jit)
    return [step(net, optimizer, rows) for _ in range(STEPS)]


class Adapted(nnx.Module):
    """A frozen network with adapters of low rank."""

    def __init__(self, rngs: nnx.Rngs, dtype: Any = None) -> None:
        self.first = nnx.LoRALinear(2, 32, lora_rank=4, dtype=dtype, rngs=rngs)
        self.second = nnx.LoRALinear(32, 1, lora_rank=4, dtype=dtype, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.second(nnx.tanh(self.first(x)))


@public(dtype=True)
def nnx_lora(at: Places, dtype: Any = None) -> Losses:
    """Only what has the type of an adapter is differentiated and updated."""
    net, (x, y) = Adapted(nnx.Rngs(0), dtype), points()
    optimizer = nnx.Optimizer(net, optax.adam(2e-2), wrt=nnx.LoRAParam)
    frozen = nnx.state(net, nnx.Param)
    forward = at.model(lambda net, x: net(x))

    @at.loss
    def loss_fn(net: Adapted, x: Any, y: Any) -> Any:
        return jnp.mean((forward(net, x) - y) ** 2)

    def train_step(net: Any, optimizer: Any, x: Any, y: Any) -> Any:
        wrt = nnx.DiffState(0, nnx.LoRAParam)
        loss, grads = nnx.value_and_grad(loss_fn, argnums=wrt)(net, x, y)
        optimizer.update(net, grads)
        return loss

    step = at.step(train_step, nnx.jit)
    losses = [step(net, optimizer, x, y) for _ in range(STEPS)]
    kept = nnx.state(net, nnx.filterlib.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
    assert jax.tree.leaves(kept)
    del frozen
    return losses


class Mlp(nnx.Module):
    """One member of an ensemble."""

    def __init__(self, rngs: nnx.Rngs, dtype: Any = None) -> None:
        self.hidden = nnx.Linear(2, 16, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(16, 1, dtype=dtype, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(nnx.relu(self.hidden(x)))


@public(dtype=True)
def nnx_ensemble(at: Places, dtype: Any = None) -> Losses:
    """Four networks at once, made and trained by a vmap."""
    make = nnx.vmap(partial(Mlp, dtype=dtype), in_axes=0, out_axes=0)
    nets, (x, y) = nnx.split_rngs(splits=4)(make)(nnx.Rngs(0)), points()
    optimizer = nnx.Optimizer(nets, optax.sgd(0.05, 0.9), wrt=nnx.Param)
    forward = at.model(lambda net, x: net(x))

    @at.loss
    def loss_fn(nets: Mlp, x: Any, y: Any) -> Any:
        each = nnx.vmap(lambda net, x: forward(net, x), in_axes=(0, None))(nets, x)
        return jnp.mean((each - y) ** 2)

    def train_step(nets: Any, optimizer: Any, x: Any, y: Any) -> Any:
        loss, grads = nnx.value_and_grad(loss_fn)(nets, x, y)
        optimizer.update(nets, grads)
        return loss

    step = at.step(train_step, nnx.jit)
    return [step(nets, optimizer, x, y) for _ in range(STEPS)]
