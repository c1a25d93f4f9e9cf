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
from jaxamp.jaxprs.list_items import name_modules
from jaxamp.jaxprs.relu_masks import compare_relu_results
from jaxamp.jaxprs.shared_rules import share_rules
from jaxamp.trace.arguments import Signature, Static, is_array

_NEAR = 4  # how deep in a returned object arrays are looked for


def trace(
    signature: Signature, arrays: Sequence[Any], *, with_modules: bool = True
) -> tuple[ClosedJaxpr, Static]:
    """Trace a call once.

    Args:
      signature: the call without its arrays.
      arrays: arrays, tracers or ``jax.ShapeDtypeStruct`` to trace it with.
      with_modules: whether scopes have all modules and the items of lists of them, which reports
        and rules read.

    Returns:
      The jaxpr over the arrays, in order, and what the function returned besides arrays.
    """
    outputs = None
    source = _debug_info(signature)

    def flat(*values: Any) -> list[Any]:
        nonlocal outputs
        results, outputs = run(signature, values)
        return results

    flat.__name__ = flat.__qualname__ = signature.name
    vars(flat)["__fun_debug_info__"] = source
    with jax.disable_jit(False):  # the jaxpr is the same; running it obeys the user's setting
        jaxpr = jax.make_jaxpr(flat)(*arrays)
    assert outputs is not None
    named = name_modules(jaxpr) if with_modules else jaxpr
    return compare_relu_results(share_rules(named)), outputs


def run(signature: Signature, arrays: Sequence[Any]) -> tuple[list[Any], Static]:
    """Call the function as it is; return its arrays, and the rest of what it returned.

    A constant of the call that is returned stays weakly held.
    """
    leaves, treedef = jax.tree.flatten(signature.call(arrays), is_leaf=_is_iterator)
    constants = signature.rest.constants
    given = {id(constant()): constant for constant in constants if constant is not None}
    kept = [
        None if is_array(leaf) else given.get(id(leaf)) or _constant(leaf, signature)
        for leaf in leaves
    ]
    return [leaf for leaf in leaves if is_array(leaf)], Static(treedef, kept)


def _constant(leaf: Any, signature: Signature) -> Callable[[], Any]:
    _refuse_unfinished(leaf, signature)
    return lambda: leaf


def _debug_info(signature: Signature) -> DebugInfo:
    """Describe the function and its inputs for JAX's error messages."""
    return DebugInfo("jit", _source(signature), tuple(signature.names()), None)


def _source(signature: Signature) -> str:
    code = getattr(inspect.unwrap(signature.resolve()), "__code__", None)
    place = f" at {code.co_filename}:{code.co_firstlineno}" if code else ""
    return signature.name + place


def _refuse_unfinished(leaf: Any, signature: Signature) -> None:
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
    raise OutputError(f"A function under amp returned {kind}. {advice}\n  at: {_source(signature)}")


def _is_iterator(value: Any) -> bool:
    return isinstance(value, Iterator | Coroutine | AsyncIterator)


def _holds_tracer(value: Any) -> bool:
    """Return whether `value` holds a tracer nearby, where JAX does not look for arrays."""
    layer, seen = [value], {id(value)}
    for _ in range(_NEAR):
        layer = [part for held in layer for part in _held(held) if id(part) not in seen]
        if any(isinstance(part, Tracer) for part in layer):
            return True
        seen.update(map(id, layer))
    return False


def _held(value: Any) -> Iterator[Any]:
    """Yield what an object refers to; nothing for arrays, or for modules and classes."""
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
