"""Arguments as they are typed: ``f32[8,128]``, a number, a dict of such, or what builds them."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxamp.cli.load import is_reference, load
from jaxamp.core.formats import Precision
from jaxamp.errors import InspectionError, accepted

_SCALAR = re.compile(r"\b([A-Za-z]\w*)\[\]")  # `f32[]` is no Python, `f32[()]` is
_KEYWORD = re.compile(r"([A-Za-z_]\w*)=(?!=)(.*)", re.DOTALL)
_DTYPES: dict[str, Any] = {
    **{precision.short: precision.dtype for precision in Precision},
    **{f"i{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"u{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    "bool": np.dtype(bool),
    "c64": np.dtype("complex64"),
    "c128": np.dtype("complex128"),
}
_BY_NAME = {dtype.name: dtype for dtype in _DTYPES.values()}  # as numpy writes them


def read_args(texts: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, positional and by name, with ``ShapeDtypeStruct`` for arrays.

    >>> read_args(["f32[8,128]", "rate=0.1"])
    ((ShapeDtypeStruct(shape=(8, 128), dtype=float32),), {'rate': 0.1})
    """
    if len(texts) == 1 and is_reference(texts[0]):
        built = load(texts[0])()
        return (built if isinstance(built, tuple) else (built,)), {}
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for text in texts:
        named = _KEYWORD.fullmatch(text.strip())
        if named:
            kwargs[named[1]] = read_value(named[2])
        elif kwargs:
            raise InspectionError(f"{text!r} comes after a named argument: name it too.")
        else:
            args.append(read_value(text))
    return tuple(args), kwargs


def read_value(text: str) -> Any:
    """Parse one argument.

    >>> read_value("{'w': f32[2], 'flags': [True, None]}")
    {'w': ShapeDtypeStruct(shape=(2,), dtype=float32), 'flags': [True, None]}
    >>> read_value("float32[2]") == read_value("f32[2]")
    True
    """
    if is_reference(text):
        return load(text)()
    try:
        tree = ast.parse(_SCALAR.sub(r"\1[()]", text.strip()), mode="eval")
        return _value(tree.body, text)
    except SyntaxError:
        raise InspectionError(
            f"{text!r} is not an argument. Write a shape (f32[8,128]), a number, a quoted text, "
            "key, a list, tuple or dict of these, name=... for a keyword, or "
            "package.module:function that builds it."
        ) from None


def with_values(tree: Any) -> Any:
    """Replace shapes by arrays: normal floats, zeros elsewhere."""
    seeds = iter(range(1_000_000))

    def fill(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        key = jax.random.key(next(seeds))
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return key
        if jnp.issubdtype(leaf.dtype, np.floating):
            return jax.random.normal(key, leaf.shape).astype(leaf.dtype)
        return jnp.zeros(leaf.shape, leaf.dtype)

    return jax.tree.map(fill, tree)


def _value(node: ast.AST, text: str) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.List():
            return [_value(item, text) for item in node.elts]
        case ast.Tuple():
            return tuple(_value(item, text) for item in node.elts)
        case ast.Dict() if None not in node.keys:
            pairs = zip(node.keys, node.values, strict=True)
            return {_value(key, text): _value(value, text) for key, value in pairs if key}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Name(id="key"):
            return jax.eval_shape(jax.random.key, 0)
        case ast.Subscript():
            return _array(node, text)
    raise SyntaxError(text)


def _array(node: ast.Subscript, text: str) -> Any:
    word = node.value.id if isinstance(node.value, ast.Name) else ""
    dtype = _DTYPES.get(word) or _BY_NAME.get(word)
    if dtype is None:
        words = accepted(word, _DTYPES).rstrip(".")
        raise InspectionError(f"{text!r} names no dtype. {words}; or their long names, float32.")
    shape = _value(node.slice, text)
    sizes = shape if isinstance(shape, tuple) else (shape,)
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise InspectionError(f"The shape in {text!r} is not a list of sizes: write f32[8,128].")
    return jax.ShapeDtypeStruct(sizes, dtype)
