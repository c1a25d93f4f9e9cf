"""Define a primitive of jaxamp: evaluation, types, derivatives, vmap and lowering in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxamp.core import jax_compat
from jaxamp.core.taxonomy import OpKind, Trait, register_op_kind

ORIGINALS: dict[Primitive, Callable[[Sequence[Any], dict[str, Any]], tuple[Any, Any, Any]]] = {}
"""Of a primitive that stands for one of JAX's: the function that returns that one, the types of its
operands and its parameters, given those of an equation."""


def define(
    primitive: Primitive,
    direct: Callable[..., Any],
    typed: Callable[..., Any],
    batch: Callable[..., Any],
    jvp: Callable[..., Any] | None = None,
    lowered: Mapping[str | None, Callable[..., Any]] | None = None,
    *,
    kind: OpKind = OpKind.BOUNDARY,
    trait: Trait = Trait.OPAQUE,
    addends: tuple[tuple[int, int], ...] = (),
) -> None:
    """Define a primitive by functions on arrays.

    `direct` computes its results by other primitives, `typed` is its abstract evaluation rule,
    `batch` its batching rule and `jvp` its JVP rule; left out, the caller defines derivatives. In a
    compiled program `lowered` computes them, per platform, ``None`` for all others; left out,
    `direct` does on all. Of kind, trait and addends see ``register_op_kind``.
    """
    primitive.def_impl(direct)
    primitive.def_abstract_eval(typed)
    batching.primitive_batchers[primitive] = batch
    if jvp is not None:
        ad.primitive_jvps[primitive] = jvp
    for platform, function in ({None: direct} if lowered is None else lowered).items():
        rule = mlir.lower_fun(function, multiple_results=primitive.multiple_results)
        mlir.register_lowering(primitive, rule, platform=platform)
    register_op_kind(primitive, kind, trait=trait, addends=addends)


def define_marker(
    primitive: Primitive, lowered: Mapping[str, Callable[..., Any]], **words: Any
) -> None:
    """Define a primitive that returns its operands; tangents and mapped axes are as they were.

    On platforms of which `lowered` says nothing, nothing is left of it.
    """

    def same(*values: Any, **_: Any) -> Any:
        return list(values) if primitive.multiple_results else values[0]

    def beside(values: Sequence[Any], others: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        return primitive.bind(*values, **params), same(*others)

    define(primitive, same, same, beside, beside, {None: same, **lowered}, **words)


def compiled(primitive: Primitive) -> Callable[..., Any]:
    """Return an evaluation rule that compiles a primitive, once for each set of parameters."""

    @lru_cache(maxsize=256)
    def jitted(params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
        return jax.jit(partial(primitive.bind, **dict(params)))

    return lambda *operands, **params: jitted(tuple(sorted(params.items())))(*operands)


def typed_as(form: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
    """Return the abstract evaluation rule of what a function of arrays and parameters computes."""

    @lru_cache(maxsize=1024)  # JAX asks again and again when it linearizes
    def types(avals: tuple[Any, ...], params: tuple[tuple[str, Any], ...]) -> Any:
        return jax_compat.result_avals(partial(form, **dict(params)), avals)

    return lambda *avals, **params: types(avals, tuple(sorted(params.items())))


def jvp_along(form: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """Return what a function computes, and its tangents along those that are not zero."""
    moving = [i for i, t in enumerate(tangents) if not isinstance(t, jax_compat.Zero)]

    def along(*moved: Any) -> Any:
        operands = dict(enumerate(primals)) | dict(zip(moving, moved, strict=True))
        return form(*operands.values())

    return jax.jvp(along, [primals[i] for i in moving], [tangents[i] for i in moving])
