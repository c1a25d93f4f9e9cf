"""Reductions with the elementwise operations around them, by hand and from libraries.

Each island stands between two products by identity matrices. The first hands on a low-precision
input exactly, the second shows exactly what low-precision number the island's result became.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array, lax

from tests.programs.registry import Draw

ROWS = (2, 8, 16)
IMAGE = (2, 4, 4, 8)
INPUTS = {"near": (0.5, 2.0), "far": (100.0, 4.0)}
"""Mean and deviation of the input."""


@dataclasses.dataclass(frozen=True)
class Island:
    """A function between two products.

    Attributes:
        name: library and function.
        fn: of its input, its parameters and other arrays.
        shape: of its input.
        params: arrays to differentiate by.
        extras: arrays that are not differentiated.
        own_product: whether `fn` makes its input itself, by a product with `extras`.
    """

    name: str
    fn: Callable[[Array, Any, Any], Array]
    shape: tuple[int, ...]
    params: Any
    extras: Any
    own_product: bool

    def __str__(self) -> str:
        return self.name

    def program(self, x: Array, params: Any, extras: Any, before: Array, after: Array) -> Array:
        """The island between its products; `before` and `after` are identity matrices."""
        y = x if self.own_product else x @ before
        return self.fn(y, params, extras) @ after

    def input(self, where: str, low: Any) -> np.ndarray:
        """A float32 input of numbers of `low`; `where` is a key of `INPUTS`."""
        mean, deviation = INPUTS[where]
        x = mean + Draw(self.name).normal(*self.shape, scale=deviation)
        return x.astype(low).astype(np.float32)


ISLANDS: dict[str, Island] = {}


def island(
    name: str,
    *,
    shape: tuple[int, ...] = ROWS,
    params: Callable[[Draw], Any] = lambda d: (),
    extras: Callable[[Draw], Any] = lambda d: (),
    own_product: bool = False,
) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
    """Enters a function `(y, params, extras)` into `ISLANDS`; see `Island`."""

    def enter(fn: Callable[..., Array]) -> Callable[..., Array]:
        if name in ISLANDS:
            raise ValueError(f"two islands are called {name}")
        draw = Draw(f"{name} parameters")
        ISLANDS[name] = Island(name, fn, shape, params(draw), extras(draw), own_product)
        return fn

    return enter


def _scale_and_bias(size: int) -> Callable[[Draw], tuple[np.ndarray, np.ndarray]]:
    return lambda d: (1.0 + d.normal(size, scale=0.2), d.normal(size, scale=0.2))


def _one_hot(d: Draw) -> np.ndarray:
    return np.eye(16, dtype=np.float32)[d.integers(16, 2, 8)]


# --- jax.nn, jax.numpy and jax.scipy

for _name, _fn in {
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
    "standardize": jax.nn.standardize,
    "logsumexp": lambda y: jax.nn.logsumexp(y, -1),
    "logmeanexp": lambda y: jax.nn.logmeanexp(y, -1),
}.items():
    island(f"jax.nn.{_name}")(lambda y, params, extras, fn=_fn: fn(y))

for _name, _fn in {
    "var": lambda y: jnp.var(y, -1),
    "var_unbiased": lambda y: jnp.var(y, -1, ddof=1),
    "std": lambda y: jnp.std(y, -1),
    "mean": lambda y: jnp.mean(y, -1),
    "norm": lambda y: jnp.linalg.norm(y, axis=-1),
}.items():
    island(f"jax.numpy.{_name}")(lambda y, params, extras, fn=_fn: fn(y))


@island("jax.nn.softmax of a part", extras=lambda d: d.mask(2, 8, 16))
def _softmax_where(y: Array, params: Any, extras: Any) -> Array:
    return jax.nn.softmax(y, where=extras)


# --- by hand


@island("hand.softmax")
def _softmax(y: Array, params: Any, extras: Any) -> Array:
    e = jnp.exp(y - y.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@island("hand.log_softmax")
def _log_softmax(y: Array, params: Any, extras: Any) -> Array:
    y = y - lax.stop_gradient(y.max(-1, keepdims=True))
    return y - jnp.log(jnp.exp(y).sum(-1, keepdims=True))


@island("hand.logsumexp")
def _logsumexp(y: Array, params: Any, extras: Any) -> Array:
    top = y.max(-1, keepdims=True)
    return (top + jnp.log(jnp.exp(y - top).sum(-1, keepdims=True)))[..., 0]


@island("hand.layer_norm", params=_scale_and_bias(16))
def _layer_norm(y: Array, params: Any, extras: Any) -> Array:
    centred = y - y.mean(-1, keepdims=True)
    var = (centred**2).mean(-1, keepdims=True)
    return centred / jnp.sqrt(var + 1e-5) * params[0] + params[1]


@island("hand.layer_norm by moments", params=_scale_and_bias(16))
def _layer_norm_by_moments(y: Array, params: Any, extras: Any) -> Array:
    mean = y.mean(-1, keepdims=True)
    var = (y * y).mean(-1, keepdims=True) - mean * mean
    return (y - mean) * lax.rsqrt(var + 1e-6) * params[0] + params[1]


@island("hand.rms_norm", params=lambda d: 1.0 + d.normal(16, scale=0.2))
def _rms_norm(y: Array, params: Any, extras: Any) -> Array:
    return y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * params


@island("hand.group_norm", shape=IMAGE, params=_scale_and_bias(8))
def _group_norm(y: Array, params: Any, extras: Any) -> Array:
    g = y.reshape(2, 4, 4, 2, 4)
    mean = g.mean((1, 2, 4), keepdims=True)
    g = (g - mean) * lax.rsqrt(g.var((1, 2, 4), keepdims=True) + 1e-5)
    return g.reshape(y.shape) * params[0] + params[1]


@island("hand.batch_norm", shape=IMAGE, params=_scale_and_bias(8))
def _batch_norm(y: Array, params: Any, extras: Any) -> Array:
    mean, var = y.mean((0, 1, 2)), y.var((0, 1, 2))
    return (y - mean) / jnp.sqrt(var + 1e-5) * params[0] + params[1]


@island("hand.batch_norm by moments", shape=IMAGE, params=_scale_and_bias(8))
def _batch_norm_by_moments(y: Array, params: Any, extras: Any) -> Array:
    mean = y.mean((0, 1, 2))
    var = (y * y).mean((0, 1, 2)) - mean * mean
    return (y - mean) * (lax.rsqrt(var + 1e-5) * params[0]) + params[1]


@island("hand.l2_normalisation")
def _l2_normalisation(y: Array, params: Any, extras: Any) -> Array:
    return y / (jnp.sqrt((y * y).sum(-1, keepdims=True)) + 1e-12)


@island("hand.l2_normalisation at least")
def _l2_at_least(y: Array, params: Any, extras: Any) -> Array:
    return y / jnp.maximum(jnp.linalg.norm(y, axis=-1, keepdims=True), 1e-12)


@island("hand.cosine_similarity")
def _cosine_similarity(y: Array, params: Any, extras: Any) -> Array:
    a, b = jnp.split(y, 2, -1)
    norms = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
    return (a * b).sum(-1) / jnp.maximum(norms, 1e-8)


@island("hand.cross_entropy of integers", extras=lambda d: d.integers(16, 2, 8))
def _cross_entropy(y: Array, params: Any, extras: Any) -> Array:
    logp = jax.nn.log_softmax(y)
    return -jnp.take_along_axis(logp, extras[..., None], -1)[..., 0]


@island("hand.cross_entropy of smoothed labels", extras=_one_hot)
def _soft_cross_entropy(y: Array, params: Any, extras: Any) -> Array:
    labels = 0.9 * extras + 0.1 / 16.0
    return -(labels * jax.nn.log_softmax(y)).sum(-1)


@island("hand.focal_loss", extras=_one_hot)
def _focal_loss(y: Array, params: Any, extras: Any) -> Array:
    logp = (extras * jax.nn.log_softmax(y)).sum(-1)
    return -((1.0 - jnp.exp(logp)) ** 2) * logp


@island("hand.kl_divergence")
def _kl_divergence(y: Array, params: Any, extras: Any) -> Array:
    p, q = (jax.nn.log_softmax(half) for half in jnp.split(y, 2, -1))
    return (jnp.exp(p) * (p - q)).sum(-1)


@island("hand.masked_mean", extras=lambda d: d.mask(2, 8, 16).astype(np.float32))
def _masked_mean(y: Array, params: Any, extras: Any) -> Array:
    return (y * extras).sum(-1) / (extras.sum(-1) + 1e-8)


# --- attention weights: scores, scaled and masked


def _masks(d: Draw) -> np.ndarray:
    """Each row keeps something but the last one."""
    mask = d.mask(2, 8, 16) | (np.arange(16) == np.arange(8)[:, None])
    mask[:, -1] = False
    return mask


def _kept_masks(d: Draw) -> np.ndarray:
    return d.mask(2, 8, 16) | (np.arange(16) == np.arange(8)[:, None])


@island("attention.additive", extras=_masks)
def _additive(y: Array, params: Any, extras: Any) -> Array:
    return jax.nn.softmax(y * 0.25 + jnp.where(extras, 0.0, -1e9))


@island("attention.additive by arithmetic", extras=_masks)
def _arithmetic(y: Array, params: Any, extras: Any) -> Array:
    return jax.nn.softmax(y / 4.0 + (1.0 - extras.astype(jnp.float32)) * -1e9)


@island("attention.where finfo.min", extras=_masks)
def _where_min(y: Array, params: Any, extras: Any) -> Array:
    return jax.nn.softmax(jnp.where(extras, y * 0.25, jnp.finfo(jnp.float32).min))


@island("attention.where -inf", extras=_kept_masks)
def _where_inf(y: Array, params: Any, extras: Any) -> Array:
    return jax.nn.softmax(jnp.where(extras, y * 0.25, -jnp.inf))


@island("attention.where -inf, a row fully masked", extras=_masks)
def _where_inf_full(y: Array, params: Any, extras: Any) -> Array:
    weights = jax.nn.softmax(jnp.where(extras, y * 0.25, -jnp.inf))
    return jnp.where(extras.any(-1, keepdims=True), weights, 0.0)


@island("attention.by hand, -1e30", extras=_masks)
def _by_hand(y: Array, params: Any, extras: Any) -> Array:
    s = jnp.where(extras, y * 0.25, -1e30)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _heads(d: Draw) -> tuple[np.ndarray, np.ndarray]:
    """A mask, and keys that hand the queries on."""
    keys = np.broadcast_to(np.eye(16, dtype=np.float32)[:, None], (2, 16, 1, 16))
    return _masks(d)[:, None], keys


@island("flax.linen.dot_product_attention_weights", extras=_heads, own_product=True)
def _linen_attention(y: Array, params: Any, extras: Any) -> Array:
    mask, keys = extras
    return nn.dot_product_attention_weights(y[:, :, None], keys, mask=mask)[:, 0]


@island("jax.nn.dot_product_attention", extras=_heads, own_product=True)
def _jax_attention(y: Array, params: Any, extras: Any) -> Array:
    mask, keys = extras
    return jax.nn.dot_product_attention(y[:, :, None], keys, keys, mask=mask)[:, :, 0]


@island("flax.nnx.dot_product_attention", extras=_heads, own_product=True)
def _nnx_attention(y: Array, params: Any, extras: Any) -> Array:
    mask, keys = extras
    return nnx.dot_product_attention(y[:, :, None], keys, keys, mask=mask)[:, :, 0]


# --- flax linen


def _linen(module: nn.Module, shape: tuple[int, ...]) -> None:
    def fn(y: Array, params: Any, extras: Any) -> Array:
        variables = {"params": params, **extras}
        return module.apply(variables, y, mutable=[*extras])[0]

    variables = jax.jit(module.init)(jax.random.key(0), np.zeros(shape, "f"))
    params = variables.pop("params")
    name = f"flax.linen.{type(module).__name__}"
    island(name, shape=shape, params=lambda d: _shaken(d, params), extras=lambda d: variables)(fn)


def _shaken(d: Draw, params: Any) -> Any:
    """Parameters moved from ones and zeros."""
    return jax.tree.map(lambda p: np.asarray(p) + d.normal(*p.shape, scale=0.2), params)


_linen(nn.LayerNorm(), ROWS)
_linen(nn.RMSNorm(), ROWS)
_linen(nn.GroupNorm(num_groups=2), IMAGE)
_linen(nn.InstanceNorm(), IMAGE)
_linen(nn.BatchNorm(use_running_average=False), IMAGE)


# --- flax nnx


def _nnx(module: nnx.Module, shape: tuple[int, ...]) -> None:
    """Parameters and statistics travel as plain arrays: a `State` would be written back to."""
    graph, *states = nnx.split(module, nnx.Param, ...)
    (params, params_tree), (others, others_tree) = map(jax.tree.flatten, states)

    def fn(y: Array, params: Any, extras: Any) -> Array:
        states = jax.tree.unflatten(params_tree, params), jax.tree.unflatten(others_tree, extras)
        return nnx.merge(graph, *states)(y)

    name = f"flax.nnx.{type(module).__name__}"
    island(name, shape=shape, params=lambda d: _shaken(d, params), extras=lambda d: others)(fn)


_nnx(nnx.LayerNorm(16, rngs=nnx.Rngs(0)), ROWS)
_nnx(nnx.RMSNorm(16, rngs=nnx.Rngs(0)), ROWS)
_nnx(nnx.GroupNorm(8, num_groups=2, rngs=nnx.Rngs(0)), IMAGE)
_nnx(nnx.BatchNorm(8, use_running_average=False, rngs=nnx.Rngs(0)), IMAGE)


# --- equinox


def _equinox(module: Any, shape: tuple[int, ...], axes: int) -> None:
    """`axes` are vmapped away: equinox's modules take one example."""
    params, static = eqx.partition(module, eqx.is_inexact_array)

    def fn(y: Array, params: Any, extras: Any) -> Array:
        layer = eqx.combine(params, static)
        for _ in range(axes):
            layer = jax.vmap(layer)
        return layer(y)

    island(f"equinox.{type(module).__name__}", shape=shape, params=lambda d: _shaken(d, params))(fn)


_equinox(eqx.nn.LayerNorm(16), ROWS, 2)
_equinox(eqx.nn.RMSNorm(16), ROWS, 2)
_equinox(eqx.nn.GroupNorm(2, 4), (2, 4, 16), 1)


def _equinox_batch_norm() -> None:
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(8, axis_name="batch", mode="batch")
    params, static = eqx.partition(norm, eqx.is_inexact_array)

    def fn(y: Array, params: Any, extras: Any) -> Array:
        layer = eqx.combine(params, static)
        return jax.vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(y, extras)[
            0
        ]

    make = island(
        "equinox.BatchNorm",
        shape=(16, 8),
        params=lambda d: _shaken(d, params),
        extras=lambda d: state,
    )
    make(fn)


_equinox_batch_norm()


# --- optax


@island("optax.softmax_cross_entropy", extras=_one_hot)
def _optax_soft(y: Array, params: Any, extras: Any) -> Array:
    return optax.softmax_cross_entropy(y, optax.smooth_labels(extras, 0.1))


@island("optax.softmax_cross_entropy_with_integer_labels", extras=lambda d: d.integers(16, 2, 8))
def _optax_integers(y: Array, params: Any, extras: Any) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(y, extras)


@island("optax.cosine_similarity", extras=lambda d: d.normal(2, 8, 16))
def _optax_cosine(y: Array, params: Any, extras: Any) -> Array:
    return optax.cosine_similarity(y, extras, epsilon=1e-8)


@island("optax.kl_divergence", extras=lambda d: d.uniform(2, 8, 16))
def _optax_kl(y: Array, params: Any, extras: Any) -> Array:
    return optax.kl_divergence(jax.nn.log_softmax(y), extras / extras.sum(-1, keepdims=True))


@island("optax.safe_norm")
def _optax_norm(y: Array, params: Any, extras: Any) -> Array:
    return y / optax.safe_norm(y, 1e-8, axis=-1, keepdims=True)
