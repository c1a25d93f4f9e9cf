"""Tracing: from a call to a jaxpr, with everything that is not an array set aside."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from types import FunctionType
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, DebugInfo

from jaxamp.calls import Layout, is_array
from jaxamp.constants import Constants
from jaxamp.errors import OutputError


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

    def flat(*values: Any) -> list[Any]:
        nonlocal outputs
        owner, bound_args, bound_kwargs, args, kwargs = layout.join(values, constants)
        selves = () if owner is None else (owner,)
        result = function(*selves, *bound_args, *args, **{**bound_kwargs, **kwargs})
        arrays, outputs = _part_result(result, constants)
        return arrays

    flat.__name__ = flat.__qualname__ = name
    vars(flat)["__fun_debug_info__"] = _debug_info(
        function,
        name,
        [n for n, c in zip(layout.names(function), constants, strict=True) if c is None],
    )
    with jax.disable_jit(False):  # the jaxpr is the same; running it obeys the user's setting
        jaxpr = jax.make_jaxpr(flat)(*traced)
    assert outputs is not None
    return jaxpr, outputs


def _debug_info(function: Callable[..., Any], name: str, names: Sequence[str]) -> DebugInfo:
    """What JAX says of the function and of its inputs in error messages."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    source = f"{name} at {code.co_filename}:{code.co_firstlineno}" if code else name
    return DebugInfo("jit", source, tuple(names), None)


def _part_result(result: Any, constants: Constants) -> tuple[list[Any], Outputs]:
    """Part a function's result into arrays and constants; an input constant stays weakly held."""
    leaves, treedef = jax.tree.flatten(result, is_leaf=_is_iterator)
    for leaf in leaves:
        _refuse_unfinished(leaf)
    given = {id(constant()): constant for constant in constants if constant is not None}
    arrays = [leaf for leaf in leaves if is_array(leaf)]
    kept = [
        None if is_array(leaf) else given.get(id(leaf)) or (lambda leaf=leaf: leaf)
        for leaf in leaves
    ]
    return arrays, Outputs(treedef, kept)


def _refuse_unfinished(leaf: Any) -> None:
    """Raise where a returned object would go on computing after its trace has ended."""
    if _is_iterator(leaf):
        kind, advice = f"a {type(leaf).__name__}", "Return a list or tuple of its items."
    elif isinstance(leaf, FunctionType) and any(map(_is_tracer, _captured(leaf))):
        kind, advice = (
            f"the function {leaf.__qualname__}, which captures arrays computed in it",
            ("Return the arrays themselves, or jax.tree_util.Partial(function, *arrays)."),
        )
    elif any(map(_is_tracer, getattr(leaf, "__dict__", {}).values())):
        kind, advice = (
            f"a {type(leaf).__qualname__} that holds arrays computed in it",
            ("Return the arrays, or register the class with jax.tree_util.register_dataclass."),
        )
    else:
        return
    raise OutputError(f"A function under amp returned {kind}. {advice}")


def _is_iterator(value: Any) -> bool:
    return isinstance(value, Iterator | Coroutine | AsyncIterator)


def _captured(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _is_tracer(value: Any) -> bool:
    return isinstance(value, Tracer)
