"""What an attention program of the tests is, and the lists that they join."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.programs.registry import Args, Draw, enter

B, T, N, K, H = 2, 32, 4, 2, 8
"""Examples, words, heads, key heads and the size of a head."""

SCALE = H**-0.5

Fn = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Program:
    """A float32 program that attends, or seems to.

    Attributes:
      name: unique in its list.
      build: makes the function and its arguments, deterministic.
      count: how many attentions it has.
      packages: what it imports.
      operands: whether its arguments begin with the queries, so that their size is that of the
        logits.
    """

    name: str
    build: Callable[[], tuple[Fn, Args]]
    count: int
    packages: tuple[str, ...] = ()
    operands: bool = False

    @property
    def missing(self) -> str | None:
        """In words, which package that it needs is not installed."""
        absent = [p for p in self.packages if importlib.util.find_spec(p) is None]
        return f"{', '.join(absent)} is not installed here" if absent else None

    @functools.cached_property
    def built(self) -> tuple[Fn, Args]:
        """The function and its arguments."""
        return self.build()


SPELLINGS: dict[str, Program] = {}
NEAR_MISSES: dict[str, Program] = {}
EXTRA_TERMS: dict[str, Program] = {}


def written(
    table: dict[str, Program],
    args: Callable[[Draw], Args],
    *,
    count: int = 1,
    operands: bool = True,
) -> Callable[[Fn], Fn]:
    """Enter the decorated function, written out, with the arguments that it is called with."""

    def decorate(fn: Fn) -> Fn:
        name = fn.__name__
        enter(table, name, Program(name, lambda: (fn, args(Draw(name))), count, operands=operands))
        return fn

    return decorate


def made(
    table: dict[str, Program], *packages: str, count: int = 1
) -> Callable[[Callable[[], tuple[Fn, Args]]], Any]:
    """Enter what the decorated function makes: a function of some package, and its arguments."""

    def decorate(build: Callable[[], tuple[Fn, Args]]) -> Any:
        name = build.__name__
        enter(table, name, Program(name, build, count, packages))
        return build

    return decorate


def gradient(fn: Fn, args: Args) -> tuple[Fn, Args]:
    """The value and gradient of a loss of a program's results, and its real arguments."""
    leaves, tree = jax.tree.flatten(args)
    where = [i for i, leaf in enumerate(leaves) if _is_float(leaf)]

    def loss(*floats: Any) -> Any:
        new = dict(enumerate(leaves)) | dict(zip(where, floats, strict=True))
        return weigh(fn(*jax.tree.unflatten(tree, new.values())))

    return jax.value_and_grad(loss, tuple(range(len(where)))), tuple(leaves[i] for i in where)


def weigh(out: Any) -> Any:
    """One number from all real leaves of `out`, each element with a weight of its own."""
    total = 0.0
    for leaf in filter(_is_float, jax.tree.leaves(out)):
        wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        total += jnp.sum(wide * np.cos(np.arange(leaf.size)).astype(wide.dtype).reshape(leaf.shape))
    return total


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", np.int32), jnp.floating)


# Arguments of functions that are written out.


def btnh(d: Draw) -> Args:
    """q, k and v in the layout of `jax.nn.dot_product_attention`."""
    return tuple(d.normal(B, T, N, H) for _ in range(3))


def bnth(d: Draw) -> Args:
    """The same with heads before words."""
    return tuple(d.normal(B, N, T, H) for _ in range(3))


def grouped(d: Draw) -> Args:
    """Fewer heads of keys and values."""
    return d.normal(B, T, N, H), d.normal(B, T, K, H), d.normal(B, T, K, H)


def cross(d: Draw) -> Args:
    """Half as many keys as queries."""
    return d.normal(B, T, N, H), d.normal(B, T // 2, N, H), d.normal(B, T // 2, N, H)


def one_head(d: Draw) -> Args:
    """Matrices."""
    return tuple(d.normal(T, H) for _ in range(3))


def lengths(d: Draw) -> np.ndarray:
    """How many words each example has."""
    return np.array([T, T // 2 + 3], np.int32)


def present(d: Draw) -> np.ndarray:
    """Which words are there, bool [B, T]; the first one always."""
    mask = d.mask(B, T)
    mask[:, 0] = True
    return mask


def qk(q: jax.Array, k: jax.Array) -> jax.Array:
    """Scores [B, N, T, S] of queries [B, T, N, H] and keys [B, S, N, H]."""
    return jnp.einsum("bqhd,bkhd->bhqk", q, k) * SCALE


def pv(weights: jax.Array, v: jax.Array) -> jax.Array:
    """The sum of values [B, S, N, H] under weights [B, N, T, S]."""
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def tril() -> jax.Array:
    """Which keys a query sees that sees none after its own."""
    return jnp.tril(jnp.ones((T, T), bool))
