"""A transformer's train step on several devices: data parallel, FSDP, tensor parallel and both.

All are float32 programs, which compute in bfloat16 if their parameters are given to them so, as by
hand. Those with ``jit`` say where arrays lie and leave it to the compiler to move them; those with
``shard_map`` move them themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Params = dict[str, Any]
Precision = Callable[[Callable[..., Any]], Callable[..., Any]]
LEARNING_RATE = 0.1


@dataclass(frozen=True)
class Size:
    """How large the network is, and whether its layers are written out instead of scanned."""

    layers: int = 4
    width: int = 512
    heads: int = 8
    words: int = 1024
    length: int = 256
    batch: int = 16
    unrolled: bool = False


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


def nll(logits: Any, labels: Any) -> Any:
    """The negative logarithm of each label's probability, in float32."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


@dataclass(frozen=True)
class Moves:
    """What a program says itself of how arrays move; by default nothing.

    Attributes:
      gather: makes a parameter whole that is split along an axis (FSDP).
      look_up: finds words in the table.
      join: multiplies where each device has a part of what is summed over (tensor parallel).
      nll: the loss of each word; its logits may be split (tensor parallel).
      place: tells the compiler where the activations between two layers lie.
      ways: over how many devices the heads are split in a program of one device.
    """

    gather: Callable[[Any, int], Any] = lambda w, axis: w
    look_up: Callable[[Any, Any], Any] = lambda table, words: table[words]
    join: Callable[[Any, Any], Any] = lambda x, w: x @ w
    nll: Callable[[Any, Any], Any] = nll
    place: Callable[[Any], Any] = lambda x: x
    ways: int = 1


def loss_fn(size: Size, moves: Moves, params: Params, words: Any) -> Any:
    """The mean cross-entropy of the next word.

    Args:
      size: of the network.
      moves: how arrays move.
      params: the parameters, or this device's part of them.
      words: the batch, or this device's part of it.
    """
    heads, gather, join = size.heads // moves.ways, moves.gather, moves.join

    def layer(x: Any, weights: Params) -> tuple[Any, None]:
        normed = norm(x, weights["scale"][0])
        qkv = normed @ gather(weights["qkv"], 0)
        query, key, value = jnp.moveaxis(qkv.reshape(*x.shape[:2], heads, 3, -1), 3, 0)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = moves.place(x + join(mixed.reshape(*x.shape[:2], -1), gather(weights["out"], 1)))
        normed = norm(x, weights["scale"][1])
        hidden = jax.nn.gelu(normed @ gather(weights["grow"], 0))
        return moves.place(x + join(hidden, gather(weights["shrink"], 1))), None

    x = moves.place(moves.look_up(gather(params["embed"], 1), words[:, :-1]))
    if size.unrolled:
        for number in range(size.layers):
            x, _ = layer(x, jax.tree.map(itemgetter(number), params["layers"]))
    else:
        x, _ = jax.lax.scan(layer, x, params["layers"])
    return jnp.mean(moves.nll(x @ gather(params["head"], 0), words[:, 1:]))


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
    "fsdp and tensor parallel": {
        "embed": P("y", "x"),
        "head": P("x", "y"),
        "layers": {
            "qkv": P(None, "x", "y"),
            "out": P(None, "y", "x"),
            "grow": P(None, "x", "y"),
            "shrink": P(None, "y", "x"),
            "scale": P(),
        },
    },
}
"""How the parameters are split over a mesh with the axes x and y, for each strategy."""

BATCHES = {
    "data parallel": P(("x", "y")),
    "fsdp": P(("x", "y")),
    "tensor parallel": P("x"),
    "fsdp and tensor parallel": P("x"),
}
"""How the batch is split over the mesh."""

MESHES = dict.fromkeys(SPLITS, (2, 2)) | {"fsdp and tensor parallel": (2, 4)}
"""How many devices there are along x and y."""


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
    _, rows = shardings(strategy, mesh)
    # Without this the compiler sends activations, which are larger here, to where weights lie.
    moves = Moves(place=partial(jax.lax.with_sharding_constraint, shardings=rows))
    return _partitioned(size, strategy, mesh, moves, loss_in, step_in)


def _partitioned(
    size: Size, strategy: str, mesh: Mesh, moves: Moves, loss_in: Precision, step_in: Precision
) -> Any:
    """A step over whole arrays, whose parameters are donated."""
    split, rows = shardings(strategy, mesh)

    def step(params: Params, words: Any) -> tuple[Params, Any]:
        loss, grads = jax.value_and_grad(loss_in(partial(loss_fn, size, moves)))(params, words)
        return update(params, grads), loss

    whole = NamedSharding(mesh, P())
    return jax.jit(
        step_in(step), in_shardings=(split, rows), out_shardings=(split, whole), donate_argnums=0
    )


# --- With Explicit axes: shardings are types -----------------------------------------------------


def explicit_step(
    size: Size, strategy: str, mesh: Mesh, loss_in: Precision, step_in: Precision
) -> Any:
    """The compiled-to-be train step; types say where arrays lie. Arguments as for `jit_step`."""
    rows = NamedSharding(mesh, P(*BATCHES[strategy], None, None))

    def gather(w: Any, axis: int) -> Any:
        """Leave only the split of tensor parallelism, along the other axis."""
        kept = jax.typeof(w).sharding.spec[1 - axis] if "tensor" in strategy else None
        split = P(None, kept) if axis == 0 else P(kept, None)
        return jax.reshard(w, NamedSharding(mesh, split))

    def look_up(table: Any, words: Any) -> Any:
        return table.at[words].get(out_sharding=rows)

    def join(x: Any, w: Any) -> Any:
        return jnp.dot(x, w, out_sharding=rows)

    def of_words(logits: Any, labels: Any) -> Any:
        """With a mask, as no device has all logits of a word."""
        logits = logits.astype(jnp.float32)
        spec = P(jax.typeof(logits).sharding.spec[-1])
        numbers = jax.reshard(jnp.arange(size.words), NamedSharding(mesh, spec))
        chosen = jnp.where(labels[..., None] == numbers, logits, 0)
        return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(chosen, axis=-1)

    moves = Moves(gather, look_up, join, of_words)
    return _partitioned(size, strategy, mesh, moves, loss_in, step_in)


# --- With shard_map: each device's program -------------------------------------------------------


def shard_map_step(
    size: Size, strategy: str, mesh: Mesh, loss_in: Precision, step_in: Precision
) -> Any:
    """The compiled-to-be train step; the program moves arrays. Arguments as for `jit_step`."""
    axes = BATCHES[strategy][0]
    ways = mesh.shape["y"] if "tensor" in strategy else 1
    splits_words = SPLITS[strategy]["embed"][:1] == ("y",)

    def gather(w: Any, axis: int) -> Any:
        return jax.lax.all_gather(w, axes, axis=axis, tiled=True) if "fsdp" in strategy else w

    def join(x: Any, w: Any) -> Any:
        return jax.lax.psum(x @ w, "y") if ways > 1 else x @ w

    def own(words: Any, count: int) -> tuple[Any, Any]:
        """Places of words in this device's part of them, and which of them are there."""
        places = words - jax.lax.axis_index("y") * count
        is_own = (places >= 0) & (places < count)
        return jnp.where(is_own, places, 0), is_own

    def look_up(table: Any, words: Any) -> Any:
        places, is_own = own(words, len(table))
        return jax.lax.psum(jnp.where(is_own[..., None], table[places], 0), "y")

    def of_words(logits: Any, labels: Any) -> Any:
        logits = logits.astype(jnp.float32)
        top = jax.lax.pmax(jax.lax.stop_gradient(logits.max(-1)), "y")
        total = jax.lax.psum(jnp.exp(logits - top[..., None]).sum(-1), "y")
        places, is_own = own(labels, logits.shape[-1])
        chosen = jnp.take_along_axis(logits, places[..., None], axis=-1)[..., 0]
        return jnp.log(total) + top - jax.lax.psum(jnp.where(is_own, chosen, 0), "y")

    words_apart = {"look_up": look_up, "nll": of_words} if splits_words else {}
    moves = Moves(gather=gather, join=join, ways=ways, **words_apart)

    def mean_loss(params: Params, words: Any) -> Any:
        return jax.lax.pmean(loss_in(partial(loss_fn, size, moves))(params, words), axes)

    def step(params: Params, words: Any) -> tuple[Params, Any]:
        loss, grads = jax.value_and_grad(mean_loss)(params, words)
        return update(params, grads), loss

    split, rows = SPLITS[strategy], BATCHES[strategy]
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(split, rows), out_specs=(split, P()))
    split, rows = shardings(strategy, mesh)
    whole = NamedSharding(mesh, P())
    return jax.jit(
        step_in(mapped), in_shardings=(split, rows), out_shardings=(split, whole), donate_argnums=0
    )


STYLES = {"jit": jit_step, "explicit": explicit_step, "shard_map": shard_map_step}
AXIS_TYPES = dict.fromkeys(STYLES, AxisType.Auto) | {"explicit": AxisType.Explicit}
"""The type of a mesh's axes, for each style."""
