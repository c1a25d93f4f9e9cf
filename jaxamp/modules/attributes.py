"""Read from the source through which attributes a method was called: ``self.layers[0].norm(x)``."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from types import CodeType

from jaxamp.jaxprs.call_sites import call_at, tree_of
from jaxamp.jaxprs.name_stack import Path

Calls = tuple[tuple[CodeType, int], ...]  # code and instruction of each frame, outermost first


def called_through(callers: Calls, method: str) -> Path | None:
    """Return the attributes through which an object's method was called, by the last of `callers`.

    ``None`` where it was no attribute of anything local; empty where it was the caller's own.
    """
    for name, path in _called(*callers[-1], method):
        if path := path or _given(callers, name):
            return path[:-1] if path[-1] == method != "__call__" else path
    return None


def method_of(code: CodeType) -> tuple[str, str]:
    """Return the class and the name of a method; both empty for what is none."""
    *_, cls, method = ["", *code.co_qualname.split(".")]
    return ("", "") if cls in ("", "<locals>") or method.startswith("<") else (cls, method)


@functools.lru_cache(maxsize=16384)
def _called(code: CodeType, at: int, method: str) -> tuple[tuple[str, Path], ...]:
    """Return whose method may be called at a place: variables, and attributes that they are."""
    node = call_at(code, at)
    local = _local(code)
    found: list[tuple[str, Path]] = []
    for part in _wrapped_first(node, method) if node else ():
        if path := _chain(part, local):
            found.append(("", path))
        elif isinstance(part, ast.Name) and part.id in local:
            found.append((part.id, _bound_to(code, part.id, part.lineno, local)))
    return tuple(found)


def _wrapped_first(call: ast.Call, method: str) -> Iterator[ast.AST]:
    """Walk through what is called; in ``vmap(self.layer)(x)``, what is wrapped comes first.

    Last is the object that a class's function is given: ``remat(Layer.__call__)(self.layer, x)``.
    """
    node = call.func
    while isinstance(node, ast.Call):
        for argument in node.args:
            yield from ast.walk(argument)
        node = node.func
    yield from ast.walk(node)
    names = (part.attr for part in ast.walk(call.func) if isinstance(part, ast.Attribute))
    if call.args and method in names:
        yield from ast.walk(call.args[0])


def _given(callers: Calls, name: str) -> Path:
    """Return the attributes that a function inside of a method was given under a name."""
    *outer, (code, _) = callers
    if name in code.co_freevars:
        while outer and name not in outer[-1][0].co_cellvars:
            outer.pop()
        return _held(tuple(outer), name)
    argument = _argument(outer[-1], code, name) if outer else None
    if argument is None:
        return ()
    for part in ast.walk(argument):
        path = _chain(part, _inside_methods(outer))
        if path or (isinstance(part, ast.Name) and (path := _held(tuple(outer), part.id))):
            return path
    return ()


def _held(callers: Calls, name: str) -> Path:
    """Return the attributes that a variable of the last caller holds, inside of a method."""
    if not callers:
        return ()
    code, at = callers[-1]
    node = call_at(code, at)
    line = node.lineno if node else code.co_firstlineno
    return _bound_to(code, name, line, _inside_methods(callers)) or _given(callers, name)


def _inside_methods(callers: Sequence[tuple[CodeType, int]]) -> frozenset[str]:
    """Return the variables of the last caller; none outside of methods: `step(state.model)`."""
    is_inside = any(method_of(code)[0] for code, _ in callers)
    return _local(callers[-1][0]) if is_inside else frozenset()


def _local(code: CodeType) -> frozenset[str]:
    return frozenset((*code.co_varnames, *code.co_freevars, *code.co_cellvars))


def _argument(caller: tuple[CodeType, int], code: CodeType, name: str) -> ast.expr | None:
    """Return what a caller gives a function for an argument, through wrappers such as ``vmap``."""
    node, names = call_at(*caller), code.co_varnames[: code.co_argcount]
    if node is None or name not in names:
        return None
    if any(_is_function(part, code) for given in node.args for part in ast.walk(given)):
        return None  # `scan(function, x, xs)`: other code calls it
    has_object = bool(method_of(code)[0]) and len(node.args) < len(names)
    place = names.index(name) - has_object
    named = (keyword.value for keyword in node.keywords if keyword.arg == name)
    return node.args[place] if 0 <= place < len(node.args) else next(named, None)


def _is_function(node: ast.AST, code: CodeType) -> bool:
    match node:
        case ast.Lambda():
            return True
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name == code.co_name
    return False


def _chain(node: ast.AST, local: frozenset[str]) -> Path:
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


@functools.lru_cache(maxsize=16384)
def _bound_to(code: CodeType, name: str, line: int, local: frozenset[str]) -> Path:
    """Return the attributes that a variable goes through, or is set to, before a line."""
    for target, value in _bindings(code.co_filename):
        if code.co_firstlineno <= target.lineno <= line:
            for place, source in _pairs(target, value):
                if isinstance(place, ast.Name) and place.id == name:
                    paths = set(_chains(source, local))
                    return paths.pop() if len(paths) == 1 else ()
    return ()


def _chains(node: ast.AST, local: frozenset[str]) -> Iterator[Path]:
    """Yield the attributes in an expression: two in ``[self.first, *self.layers]``."""
    if path := _chain(node, local):
        yield path
        return
    for part in ast.iter_child_nodes(node):
        yield from _chains(part, local)


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
