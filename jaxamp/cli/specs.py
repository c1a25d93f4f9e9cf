"""Programs, policies and arguments as they are typed: ``train.py:loss``, ``f32[8,128]``."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxamp.core.formats import Precision
from jaxamp.errors import InspectionError, accepted
from jaxamp.policy.policy import PrecisionPolicy

_REFERENCE = re.compile(r"[\w./\\-]+:[A-Za-z_][\w.]*")


def is_reference(text: str) -> bool:
    """Return whether a text is ``package.module:function`` or ``file.py:function``.

    >>> is_reference("models.vit:loss"), is_reference("{'w': f32[2]}")
    (True, False)
    """
    return bool(_REFERENCE.fullmatch(text.strip()))


def load(reference: str) -> Any:
    """Return the callable that a reference names.

    >>> load("jax.numpy:dot").__name__
    'dot'
    """
    if not is_reference(reference):
        raise InspectionError(
            f"{reference!r} names no function. Write package.module:function or "
            "path/to/file.py:function."
        )
    where, _, path = reference.strip().rpartition(":")
    found: Any = _file(Path(where)) if where.endswith(".py") else _module(where)
    for name in path.split("."):
        if not hasattr(found, name):
            public = [n for n, value in vars(found).items() if callable(value) and n[0] != "_"]
            raise InspectionError(f"{where} has no {name!r}. {accepted(name, public)}")
        found = getattr(found, name)
    if not callable(found):
        raise InspectionError(f"{reference} is {type(found).__name__}, and cannot be called.")
    return found


def load_policy(text: str) -> PrecisionPolicy:
    """Return a policy: what ``amp`` accepts as a word, or a file that ``to_json`` wrote."""
    if not text.endswith(".json"):
        return PrecisionPolicy.parse(text)
    path = Path(text)
    if not path.is_file():
        raise InspectionError(f"There is no file {text}.")
    return PrecisionPolicy.from_json(path.read_text())


def _module(name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise  # the module is there, and what it imports is not
        raise InspectionError(
            f"There is no module {error.name!r} in {Path.cwd()} or among the installed packages. "
            "Start the command where `import` finds it, or name a file: path/to/file.py:function."
        ) from None


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InspectionError(f"There is no file {path}.")
    folder = str(path.resolve().parent)
    if folder not in sys.path:  # what lies beside it is imported as `python file.py` would
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


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
        return ast.literal_eval(_Shapes(text).visit(tree))
    except InspectionError:
        raise
    except (SyntaxError, TypeError, ValueError):
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


class _Shapes(ast.NodeTransformer):
    """Puts types of arrays into the place of ``f32[8,128]``, and that of a key for ``key``."""

    def __init__(self, text: str) -> None:
        self.text = text

    def visit_Name(self, node: ast.Name) -> ast.AST:
        is_key = node.id == "key"
        return ast.Constant(jax.eval_shape(jax.random.key, 0)) if is_key else node  # type: ignore

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        word = node.value.id if isinstance(node.value, ast.Name) else ""
        dtype = _DTYPES.get(word) or _BY_NAME.get(word)
        if dtype is None:
            words = accepted(word, _DTYPES).rstrip(".")
            raise InspectionError(
                f"{self.text!r} names no dtype. {words}; or their long names, float32."
            )
        shape = ast.literal_eval(node.slice)
        sizes = shape if isinstance(shape, tuple) else (shape,)
        if not all(type(size) is int and size >= 0 for size in sizes):
            raise InspectionError(
                f"The shape in {self.text!r} is not a list of sizes: write f32[8,128]."
            )
        return ast.Constant(jax.ShapeDtypeStruct(sizes, dtype))  # type: ignore
