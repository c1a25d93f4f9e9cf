"""A transformer's train step on several devices: data parallel, FSDP, tensor parallel and both.

All are float32 programs, which compute in bfloat16 if their parameters are given to them so, as by
hand. Those with ``jit`` say where arrays lie and leave it to the compiler to move them; those with
``shard_map`` move them themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Params = dict[str, Any]
Precision = Callable[[Callable[..., Any]], Callable[..., Any]]
LEARNING_RATE = 0.1


@dataclass(frozen=True)
class Size:
    """How large the network is."""

    layers: int = 4
    width: int = 512
    heads: int = 8
    words: int = 1024
    length: int = 256
    batch: int = 16


def init(size: Size, key: Any) -> Params:
    """The parameters, layers stacked."""
    keys = iter(jax.random.split(key, 6))

    def normal(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape) / shape[-2] ** 0.5

    layers, width = size.layers, size.width
    return {
        "embed": normal(size.words, width),
        "layers": {
            "qkv": normal(layers, width, 3 * width),
            "out": normal(layers, width, width),
            "grow": normal(layers, width, 4 * width),
            "shrink": normal(layers, 4 * width, width),
            "scale": jnp.ones((layers, 2, width)),
        },
        "head": normal(width, size.words),
    }


def sample(size: Size, key: Any) -> Any:
    """Words, the first ``length`` of each row read and the last ``length`` predicted."""
    return jax.random.randint(key, (size.batch, size.length + 1), 0, size.words)


def norm(x: Any, scale: Any) -> Any:
    """Divides by the root mean square, in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return wide.astype(x.dtype) * scale


def loss_fn(
    size: Size,
    params: Params,
    words: Any,
    gather: Callable[[Any, int], Any] = lambda w, axis: w,
    total: Callable[[Any], Any] = lambda x: x,
    ways: int = 1,
    place: Callable[[Any], Any] = lambda x: x,
) -> Any:
    """The mean cross-entropy of the next word.

    Args:
      size: of the network.
      params: the parameters, or this device's part of them.
      words: the batch, or this device's part of it.
      gather: makes a parameter whole that is split along an axis (FSDP by hand).
      total: adds up what devices with a part of the heads have computed (tensor parallel by hand).
      ways: over how many devices the heads are split by hand.
      place: tells the compiler where the activations between two layers lie.
    """
    heads = size.heads // ways

    def layer(x: Any, weights: Params) -> tuple[Any, None]:
        normed = norm(x, weights["scale"][0])
        qkv = normed @ gather(weights["qkv"], 0)
        query, key, value = jnp.moveaxis(qkv.reshape(*x.shape[:2], heads, 3, -1), 3, 0)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = place(x + total(mixed.reshape(*x.shape[:2], -1) @ gather(weights["out"], 1)))
        normed = norm(x, weights["scale"][1])
        hidden = jax.nn.gelu(normed @ gather(weights["grow"], 0))
        return place(x + total(hidden @ gather(weights["shrink"], 1))), None

    x = place(gather(params["embed"], 1)[words[:, :-1]])
    x, _ = jax.lax.scan(layer, x, params["layers"])
    logits = x @ gather(params["head"], 0)
    chosen = jnp.take_along_axis(logits, words[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def update(params: Params, grads: Params) -> Params:
    """Gradient descent; the parameters stay float32."""
    return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads)


# --- With jit: where arrays lie ------------------------------------------------------------------

_LAYER = ("qkv", "out", "grow", "shrink", "scale")
SPLITS: dict[str, Params] = {
    "data parallel": {"embed": P(), "head": P(), "layers": dict.fromkeys(_LAYER, P())},
    "fsdp": {
        "embed": P(None, ("x", "y")),
        "head": P(("x", "y"), None),
        "layers": {
            "qkv": P(None, ("x", "y"), None),
            "out": P(None, None, ("x", "y")),
            "grow": P(None, ("x", "y"), None),
            "shrink": P(None, None, ("x", "y")),
            "scale": P(),
        },
    },
    "tensor parallel": {
        "embed": P(),
        "head": P(),
        "layers": {
            "qkv": P(None, None, "y"),
            "out": P(None, "y", None),
            "grow": P(None, None, "y"),
            "shrink": P(None, "y", None),
            "scale": P(),
        },
    },
}
"""How the parameters are split over a mesh with the axes x and y, for each strategy."""

BATCHES = {"data parallel": P(("x", "y")), "fsdp": P(("x", "y")), "tensor parallel": P("x")}
"""How the batch is split over the mesh."""


def shardings(strategy: str, mesh: Mesh) -> tuple[Params, NamedSharding]:
    """Where parameters and batch lie."""
    place = partial(NamedSharding, mesh)
    return jax.tree.map(place, SPLITS[strategy]), place(BATCHES[strategy])


def jit_step(size: Size, strategy: str, mesh: Mesh, loss_in: Precision, step_in: Precision) -> Any:
    """The compiled-to-be train step; the compiler moves arrays.

    Args:
      size: of the network.
      strategy: one of ``SPLITS``.
      mesh: with the axes x and y.
      loss_in: what is done to the loss before it is differentiated, such as ``amp``.
      step_in: what is done to the whole step.
    """

    split, rows = shardings(strategy, mesh)
    # Without this the compiler sends activations, which are larger here, to where weights lie.
    place = partial(jax.lax.with_sharding_constraint, shardings=rows)

    def step(params: Params, words: Any) -> tuple[Params, Any]:
        loss, grads = jax.value_and_grad(loss_in(partial(loss_fn, size, place=place)))(
            params, words
        )
        return update(params, grads), loss

    whole = NamedSharding(mesh, P())
    return jax.jit(step_in(step), in_shardings=(split, rows), out_shardings=(split, whole))


# --- With shard_map: each device's program -------------------------------------------------------


def shard_map_step(
    size: Size, strategy: str, mesh: Mesh, loss_in: Precision, step_in: Precision
) -> Any:
    """The compiled-to-be train step; the program moves arrays. Arguments as for `jit_step`."""
    axes = BATCHES[strategy][0]
    ways = mesh.shape["y"] if strategy == "tensor parallel" else 1

    def gather(w: Any, axis: int) -> Any:
        return jax.lax.all_gather(w, axes, axis=axis, tiled=True) if strategy == "fsdp" else w

    def total(x: Any) -> Any:
        return jax.lax.psum(x, "y") if ways > 1 else x

    def mean_loss(params: Params, words: Any) -> Any:
        local = loss_in(partial(loss_fn, size, gather=gather, total=total, ways=ways))
        return jax.lax.pmean(local(params, words), axes)

    def step(params: Params, words: Any) -> tuple[Params, Any]:
        loss, grads = jax.value_and_grad(mean_loss)(params, words)
        return update(params, grads), loss

    split, rows = SPLITS[strategy], BATCHES[strategy]
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(split, rows), out_specs=(split, P()))
    split, rows = shardings(strategy, mesh)
    whole = NamedSharding(mesh, P())
    return jax.jit(step_in(mapped), in_shardings=(split, rows), out_shardings=(split, whole))


STYLES = {"jit": jit_step, "shard_map": shard_map_step}
