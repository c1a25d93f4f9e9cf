"""The transforms that programs are tested under, each a line of the product.

A transform takes `wrap` (the identity, or `amp` with a policy), a function and its arguments,
and gives the function to run and the arguments to run it on. The wrapped and the plain function
then differ in `wrap` alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Fn = Callable[..., Any]
Wrap = Callable[[Fn], Fn]
Args = tuple[Any, ...]
Build = Callable[[Wrap, Fn, Args], tuple[Fn, Args]]


@dataclasses.dataclass(frozen=True)
class Transform:
    """A way to use a function, and how often it differentiates it."""

    name: str
    build: Build
    order: int


TRANSFORMS: dict[str, Transform] = {}


def transform(order: int = 0) -> Callable[[Build], Build]:
    """Enters the decorated builder into `TRANSFORMS` under its own name."""

    def enter(build: Build) -> Build:
        TRANSFORMS[build.__name__] = Transform(build.__name__, build, order)
        return build

    return enter


class NothingToDifferentiateError(TypeError):
    """The program has no float32 array among its arguments."""


def split_floats(args: Args) -> tuple[list[Any], Callable[..., Args]]:
    """The float32 arrays among `args`, and what puts others in their place."""
    leaves, tree = jax.tree.flatten(args)
    where = [i for i, leaf in enumerate(leaves) if getattr(leaf, "dtype", None) == jnp.float32]
    if not where:
        raise NothingToDifferentiateError("the program has no float32 argument")

    def rebuild(floats: Any) -> Args:
        new = list(leaves)
        for i, value in zip(where, floats, strict=True):
            new[i] = value
        return jax.tree.unflatten(tree, new)

    return [leaves[i] for i in where], rebuild


def weigh(out: Any) -> Any:
    """One number from all inexact leaves of `out`, each element with a weight of its own."""
    total = jnp.float32(0)
    for leaf in jax.tree.leaves(out):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            shape = jnp.shape(leaf)
            weights = np.cos(np.arange(np.prod(shape), dtype=np.float32)).reshape(shape)
            total += jnp.sum(jnp.real(leaf).astype(jnp.float32) * weights)
    return total


def copies(args: Args, count: int) -> Args:
    """`count` versions of `args` stacked; floats are scaled a little, integers kept."""

    def stack(leaf: Any) -> np.ndarray:
        leaf = np.asarray(leaf, None if hasattr(leaf, "dtype") else jnp.result_type(leaf))
        if leaf.dtype == np.float32:
            return np.stack([(leaf * (1 - 0.05 * k)).astype(np.float32) for k in range(count)])
        return np.stack([leaf] * count)

    return jax.tree.map(stack, args)


def _loss(fn: Fn, rebuild: Callable[..., Args]) -> Fn:
    return lambda *floats: weigh(fn(*rebuild(floats)))


def _gradient(fn: Fn, floats: list[Any]) -> Fn:
    return jax.grad(fn, argnums=tuple(range(len(floats))))


@transform()
def plain(wrap: Wrap, fn: Fn, args: Args) -> tuple[Fn, Args]:
    """Called without any transform."""
    return wrap(fn), args


@transform()
def jit(wrap: Wrap, fn: Fn, args: Args) -> tuple[Fn, Args]:
    """jit(amp(f))."""
    return jax.jit(wrap(fn)), args


@transform(order=1)
def grad_of_amp(wrap: Wrap, fn: Fn, args: Args) -> tuple[Fn, Args]:
    """grad(amp(f)), the loss outside the region."""
    floats, rebuild = split_floats(args)
    return _gradient(_loss(wrap(fn), rebuild), floats), tuple(floats)


@transform(order=1)
def amp_of_grad(wrap: Wrap, fn: Fn, args: Args) -> tuple[Fn, Args]:
    """amp(grad(f))."""
    floats, rebuild = split_floats(args)
    return wrap(_gradient(_loss(fn, rebuild), floats)), tuple(floats)


@transform(order=1)
def jvp(wrap: Wrap, fn: Fn, args: Args) -> tuple[Fn, Args]:
    """The value and a directional derivative of amp(f)."""
    floats, rebuild = split_floats(args)
    amped = wrap(fn)

    def run(*floats: Any) -> Any:
        tangents = tuple(
            jnp.cos(jnp.arange(x.size, dtype=x.dtype).reshape(x.shape)) for x in floats
        )
        out, dots = jax.jvp(lambda *xs: amped(*rebuild(xs)), floats, tangents)
        return out, [d for d in jax.tree.leaves(dots) if d.dtype != jax.dtypes.float0]

    return run, tuple(floats)


@transform()
def vmap(wrap: Wrap, fn: Fn, args: Args) -> tuple[Fn, Args]:
    """vmap(amp(f)) over two versions of the arguments."""
    return jax.vmap(wrap(fn)), copies(args, 2)


@transform(order=1)
def vmap_of_grad(wrap: Wrap, fn: Fn, args: Args) -> tuple[Fn, Args]:
    """vmap(grad(amp(f))): gradients by example."""
    floats, rebuild = split_floats(args)
    return jax.vmap(_gradient(_loss(wrap(fn), rebuild), floats)), copies(tuple(floats), 2)


@transform(order=1)
def remat(wrap: Wrap, fn: Fn, args: Args) -> tuple[Fn, Args]:
    """The value and gradient of checkpoint(amp(f))."""
    floats, rebuild = split_floats(args)
    loss = _loss(jax.checkpoint(wrap(fn)), rebuild)
    return jax.value_and_grad(loss, argnums=tuple(range(len(floats)))), tuple(floats)


@transform()
def scan(wrap: Wrap, fn: Fn, args: Args) -> tuple[Fn, Args]:
    """amp(f) as the body of a scan."""
    amped = wrap(fn)
    return lambda *xs: lax.scan(lambda n, x: (n + 1, amped(*x)), 0, xs), copies(args, 2)


@transform()
def shard_map(wrap: Wrap, fn: Fn, args: Args) -> tuple[Fn, Args]:
    """amp(f) on each of four devices, checking replication where the plain function can."""
    mesh, stacked = _mesh(), copies(args, 4)

    def mapped(inner: Fn, check: bool) -> Fn:
        def one(*xs: Any) -> Any:
            out = inner(*jax.tree.map(lambda x: x[0], xs))
            return jax.tree.map(lambda y: y[None], out)

        return jax.shard_map(
            one, mesh=mesh, in_specs=P("batch"), out_specs=P("batch"), check_vma=check
        )

    return mapped(wrap(fn), _traces(mapped(fn, True), stacked)), stacked


def _mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]), ("batch",))


def _traces(fn: Fn, args: Args) -> bool:
    try:
        jax.eval_shape(fn, *args)
    except Exception:
        return False
    return True


@transform()
def export(wrap: Wrap, fn: Fn, args: Args) -> tuple[Fn, Args]:
    """amp(f) exported, serialised, read back and called."""
    amped, trees = wrap(fn), []

    def flat(*args: Any) -> list[Any]:
        leaves, tree = jax.tree.flatten(amped(*args))
        trees[:] = [tree]  # JAX does not serialise the node types of other libraries
        return leaves

    def run(*args: Any) -> Any:
        exported = jax.export.export(jax.jit(flat))(*jax.tree.map(_shape, args))
        if exported.nr_devices > 1:
            args = lax.with_sharding_constraint(args, NamedSharding(_mesh(), P()))
        call = jax.export.deserialize(exported.serialize()).call
        return jax.tree.unflatten(trees[0], call(*args))

    return run, args


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


@transform(order=2)
def grad_of_grad(wrap: Wrap, fn: Fn, args: Args) -> tuple[Fn, Args]:
    """A second derivative of amp(f)."""
    floats, rebuild = split_floats(args)
    inner = _gradient(_loss(wrap(fn), rebuild), floats)
    return _gradient(lambda *xs: weigh(inner(*xs)), floats), tuple(floats)
