"""Tracing: from a call to a jaxpr, with everything that is not an array set aside."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, DebugInfo

from jaxamp.errors import OutputError, article
from jaxamp.jaxprs.relu_masks import compare_results
from jaxamp.jaxprs.shared_rules import share_rules
from jaxamp.trace.arguments import Layout, is_array
from jaxamp.trace.static_arguments import Constants

_NEAR = 4  # how deep in a returned object arrays are looked for


class Outputs:
    """What a traced function returned, apart from the arrays: the side channel of a compiled call.

    Instances travel as the auxiliary data of the compiled function's output tree, so whichever
    compiled form runs, its own constants come back with its arrays.
    """

    __slots__ = ("constants", "is_all_arrays", "treedef")

    def __init__(self, treedef: Any, constants: Constants) -> None:
        self.treedef = treedef
        self.constants = constants
        self.is_all_arrays = all(constant is None for constant in constants)

    def join(self, arrays: Sequence[Any]) -> Any:
        """The function's result, from its arrays."""
        if self.is_all_arrays:
            return jax.tree.unflatten(self.treedef, arrays)
        values = iter(arrays)
        leaves = [next(values) if constant is None else constant() for constant in self.constants]
        return jax.tree.unflatten(self.treedef, leaves)


def trace(
    function: Callable[..., Any],
    layout: Layout,
    constants: Constants,
    traced: Sequence[Any],
    name: str,
) -> tuple[ClosedJaxpr, Outputs]:
    """Trace `function` once.

    Args:
      function: the function, called with owner, bound and given arguments in that order.
      layout: how the call's leaves are treated.
      constants: per leaf ``None`` where it is traced, else what returns the constant.
      traced: arrays, tracers or ``jax.ShapeDtypeStruct`` for the traced leaves.
      name: the function's name, for error messages.

    Returns:
      The jaxpr over the traced leaves, in order, and what the function returned besides arrays.
    """
    outputs = None
    names = [n for n, c in zip(layout.names(function), constants, strict=True) if c is None]
    source = _debug_info(function, name, names)

    def flat(*values: Any) -> list[Any]:
        nonlocal outputs
        owner, bound_args, bound_kwargs, args, kwargs = layout.join(values, constants)
        selves = () if owner is None else (owner,)
        result = function(*selves, *bound_args, *args, **{**bound_kwargs, **kwargs})
        arrays, outputs = _part_result(result, constants, source.func_src_info)
        return arrays

    flat.__name__ = flat.__qualname__ = name
    vars(flat)["__fun_debug_info__"] = source
    with jax.disable_jit(False):  # the jaxpr is the same; running it obeys the user's setting
        jaxpr = jax.make_jaxpr(flat)(*traced)
    assert outputs is not None
    return compare_results(share_rules(jaxpr)), outputs


def _debug_info(function: Callable[..., Any], name: str, names: Sequence[str]) -> DebugInfo:
    """What JAX says of the function and of its inputs in error messages."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    source = f"{name} at {code.co_filename}:{code.co_firstlineno}" if code else name
    return DebugInfo("jit", source, tuple(names), None)


def _part_result(result: Any, constants: Constants, source: str) -> tuple[list[Any], Outputs]:
    """Part a function's result into arrays and constants; an input constant stays weakly held."""
    leaves, treedef = jax.tree.flatten(result, is_leaf=_is_iterator)
    arrays = [leaf for leaf in leaves if is_array(leaf)]
    for leaf in leaves:
        if not is_array(leaf):
            _refuse_unfinished(leaf, source)
    given = {id(constant()): constant for constant in constants if constant is not None}
    kept = [
        None if is_array(leaf) else given.get(id(leaf)) or (lambda leaf=leaf: leaf)
        for leaf in leaves
    ]
    return arrays, Outputs(treedef, kept)


def _refuse_unfinished(leaf: Any, source: str) -> None:
    """Raise where a returned object would go on computing after its trace has ended."""
    if isinstance(leaf, Coroutine):
        leaf.close()
        kind, advice = "a coroutine", "Give amp what it awaits, a function that is not async."
    elif _is_iterator(leaf):
        kind = article(type(leaf).__name__.replace("_", " "))
        advice = "Return a list or tuple of its items."
    elif not _holds_tracer(leaf):
        return
    elif isinstance(leaf, FunctionType | MethodType | partial):
        kind, advice = (
            f"{leaf!r}, which captures arrays computed in it",
            "Return the arrays themselves, or jax.tree_util.Partial(function, *arrays).",
        )
    else:
        kind, advice = (
            f"{article(type(leaf).__qualname__)} that holds arrays computed in it",
            "Return the arrays, or register the class with jax.tree_util.register_dataclass.",
        )
    raise OutputError(f"A function under amp returned {kind}. {advice}\n  at: {source}")


def _is_iterator(value: Any) -> bool:
    return isinstance(value, Iterator | Coroutine | AsyncIterator)


def _holds_tracer(value: Any) -> bool:
    """Whether a tracer is near in what `value` holds, where JAX does not look for arrays."""
    layer, seen = [value], {id(value)}
    for _ in range(_NEAR):
        layer = [part for held in layer for part in _held(held) if id(part) not in seen]
        if any(isinstance(part, Tracer) for part in layer):
            return True
        seen.update(map(id, layer))
    return False


def _held(value: Any) -> Iterator[Any]:
    """What an object holds; nothing for arrays, and modules and classes outlive every trace."""
    if is_array(value) or isinstance(value, type | ModuleType):
        return
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from value
    elif isinstance(value, FunctionType):
        yield from (value.__defaults__, value.__kwdefaults__, *_captured(value))
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    else:
        yield from getattr(value, "__dict__", {}).values()
        slots = (vars(cls).get("__slots__", ()) for cls in type(value).__mro__)
        names = (name for some in slots for name in ([some] if isinstance(some, str) else some))
        yield from (getattr(value, name, None) for name in names if name != "__weakref__")


def _captured(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
