"""Read module paths from the call stack of an equation: ``Transformer/layers/attention``.

flax linen and haiku write the names of modules into name stacks. equinox, nnx and classes of one's
own do not, but the call stack has their methods, and the source has the attribute that was called:
``self.attention(x)``. So nothing is intercepted while a program is traced. The index of a module in
a list is known where the source has it: of ``self.layers[0](x)``, not of a loop; see
`list_items.py`.
"""

from __future__ import annotations

import ast
import functools
import os
import re
from collections.abc import Iterator
from types import CodeType
from typing import Any

from jaxamp.core import jax_compat
from jaxamp.jaxprs.call_sites import call_at, tree_of

_NAMED = re.compile(r"[/\\](flax[/\\](linen|core)|haiku[/\\]_src)[/\\]")  # write names themselves
_PLUMBING = re.compile(r"[/\\](jaxlib|jax|equinox|flax|jaxtyping|optax|numpy)[/\\](?!.*\bnn[/\\])")
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]|[/\\]functools\.py$")
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
Calls = tuple[tuple[CodeType, int], ...]
Path = tuple[str, ...]


def module_path(source_info: Any) -> str:
    """Return the modules that were called around an equation, outermost first, joined by dots.

    Args:
      source_info: that of the equation.
    """
    return ".".join(name for name, _ in modules_of(shown_calls(source_info)))


def shown_calls(source_info: Any) -> Calls:
    """Return the frames around an equation that count, outermost first.

    Args:
      source_info: that of the equation.
    """
    return _calls_of(source_info.traceback)


@functools.lru_cache(maxsize=4096)  # of one program, which is read twice
def _calls_of(traceback: Any) -> Calls:
    calls = jax_compat.calls(traceback)
    return tuple([call for call in calls if _is_shown(call[0].co_filename)])


def with_items(modules: Path, item: Path) -> Path:
    """Return a path with the indices that another has of its lists.

    >>> with_items(("Net", "blocks", "linear"), ("Net", "blocks", "2"))
    ('Net', 'blocks', '2', 'linear')
    """
    found, rest = list[str](), list(modules)
    for name in item:
        if rest and rest[0] == name:
            found.append(rest.pop(0))
        elif name.isdigit():
            found.append(name)
        else:
            return modules
    return (*found, *rest)


@functools.cache
def _is_shown(file: str) -> bool:
    """Return whether the frames of a file count: not those of what is between modules."""
    if file.startswith(_OURS):
        return False
    return bool(_NAMED.search(file)) or not (_INSTALLED.search(file) and _PLUMBING.search(file))


@functools.lru_cache(maxsize=65536)
def modules_of(calls: Calls) -> tuple[tuple[str, int], ...]:
    """Return the modules of a call stack, outermost first, each with the frame of its method.

    Args:
      calls: as ``shown_calls`` has them.
    """
    found: list[tuple[str, int]] = []
    owner = ""
    for n, (code, _) in enumerate(calls):
        if _NAMED.search(code.co_filename):
            return ()
        *_, cls, method = ["", *code.co_qualname.split(".")]
        if cls in ("", "<locals>") or method.startswith("<"):
            continue
        called = _attributes(*calls[n - 1], method) if n else None
        names = called if called is not None else (cls,) * (cls != owner)
        found += [(name, n) for name in names]
        owner = cls
    return tuple(found)


@functools.lru_cache(maxsize=16384)
def _attributes(code: CodeType, at: int, method: str) -> tuple[str, ...] | None:
    """Return the attributes through which an object's method was called at a place of a caller.

    ``None`` where it was no attribute of anything local; empty where it was the caller's own.
    """
    node = call_at(code, at)
    if node is None:
        return None
    local = frozenset((*code.co_varnames, *code.co_freevars, *code.co_cellvars))
    for found in ast.walk(node.func):
        names = _chain(found, local)
        if isinstance(found, ast.Name) and found.id in local:
            names = _bound_to(code, found, local)
        if names:
            return names[:-1] if names[-1] == method != "__call__" else names
    return None


def _chain(node: ast.AST, local: frozenset[str]) -> tuple[str, ...]:
    """Return the names of ``self.layers[0].norm``; empty for attributes of nothing local."""
    match node:
        case ast.Attribute(value=ast.Name(id=root), attr=name):
            return (name,) if root in local else ()
        case ast.Attribute(value=inner, attr=name) if names := _chain(inner, local):
            return (*names, name)
        case ast.Subscript(value=inner, slice=ast.Constant(value=int(index))):
            names = _chain(inner, local)
            return (*names, str(index)) if names else ()
        case ast.Subscript(value=inner):
            return _chain(inner, local)
    return ()


def _bound_to(code: CodeType, name: ast.Name, local: frozenset[str]) -> tuple[str, ...]:
    """Return the attributes that a local variable goes through or is set to in its function."""
    for target, value in _bindings(code.co_filename):
        if code.co_firstlineno <= target.lineno <= name.lineno:
            for place, source in _pairs(target, value):
                if isinstance(place, ast.Name) and place.id == name.id:
                    chains = (_chain(part, local) for part in ast.walk(source))
                    return next(filter(None, chains), ())
    return ()


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield names and what they go through: of a ``zip`` and ``enumerate`` one by one."""
    match target, value:
        case ast.Tuple(elts=names), ast.Call(func=ast.Name(id="zip"), args=args):
            for pair in zip(names, args, strict=False):
                yield from _pairs(*pair)
        case ast.Tuple(elts=[_, item]), ast.Call(func=ast.Name(id="enumerate"), args=[source, *_]):
            yield from _pairs(item, source)
        case _:
            yield target, value


@functools.lru_cache(maxsize=256)
def _bindings(file: str) -> list[tuple[ast.expr, ast.expr]]:
    """Return what every variable of a file is set to or goes through, the last first."""
    found: list[tuple[ast.expr, ast.expr]] = []
    for node in ast.walk(tree_of(file)):
        match node:
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                found.append((target, value))
            case ast.Assign(targets=[target], value=ast.Attribute() | ast.Subscript() as value):
                found.append((target, value))
    return sorted(found, key=lambda pair: -pair[0].lineno)
