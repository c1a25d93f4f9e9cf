"""Tracing: from a call to a jaxpr, with everything that is not an array set aside."""

from __future__ import annotations

import copy
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, DebugInfo

from jaxamp.core import features
from jaxamp.core.keep_precision import region_around
from jaxamp.errors import OutputError, article
from jaxamp.jaxprs.hashing import share_rules
from jaxamp.trace.arguments import Signature, Static
from jaxamp.trace.contents import UNFINISHED, atom, has_value, is_array, is_known_apart, reachable


class _TracedFor(str):
    """Says in JAX's errors what a function is traced for.

    They have more of it when the trace has ended: a value of it that is met then was left behind.
    """

    has_ended = False

    def __format__(self, _: str) -> str:
        return _LEFT_BEHIND if self.has_ended else str(self)


_LEFT_BEHIND = (
    "amp. amp traces the function that it wraps, as jax.jit does: what the function computes "
    "leaves it as a result, and cannot be left in an object, a scope or a global variable. Wrap "
    "what is one level up and returns that state: a train step, numpyro's svi.update, a Keras "
    "model's stateless_call, a flax or haiku network's apply"
)


def trace(
    signature: Signature, arrays: Sequence[Any], *, is_named: bool = True
) -> tuple[ClosedJaxpr, Static]:
    """Trace a call once; return its jaxpr over arrays, in order, and what else it returned.

    If it `is_named`, it has the scopes that features add, for reports and rules.
    """
    outputs = None
    traced_for = _TracedFor("amp")  # the function and its inputs, for JAX's error messages
    source = DebugInfo(traced_for, _source(signature), tuple(signature.names()), None)

    def flat(*values: Any) -> list[Any]:
        nonlocal outputs
        with region_around():
            results, outputs = run(signature, values)
        return results

    flat.__name__ = flat.__qualname__ = signature.name
    vars(flat)["__fun_debug_info__"] = source
    with jax.disable_jit(False):  # the jaxpr is the same; running it obeys the user's setting
        jaxpr = jax.make_jaxpr(flat)(*arrays)
    traced_for.has_ended = True
    assert outputs is not None
    for work in features.works():
        if is_named and work.name:
            jaxpr = work.name(jaxpr)
    return share_rules(jaxpr), outputs


def run(signature: Signature, arrays: Sequence[Any]) -> tuple[list[Any], Static]:
    """Call the function as it is; return its arrays, and the rest of what it returned.

    A constant of the call that is returned stays weakly held.
    """
    leaves, treedef = jax.tree.flatten(
        signature.call(arrays), is_leaf=lambda leaf: isinstance(leaf, UNFINISHED)
    )
    constants = signature.rest.constants
    given = {id(constant()): constant for constant in constants if constant is not None}
    times = Counter(map(id, leaves))
    leaves.append(object())  # nobody holds it, as nobody does what the function has made
    *counts, alone = [sys.getrefcount(leaf) for leaf in leaves]
    kept = [
        None
        if is_array(leaf)
        else given.get(id(leaf)) or _constant(leaf, count - times[id(leaf)] < alone, signature)
        for leaf, count in zip(leaves, counts, strict=False)
    ]
    return [leaf for leaf in leaves[:-1] if is_array(leaf)], Static(treedef, kept)


def _constant(leaf: Any, is_made: bool, signature: Signature) -> Callable[[], Any]:
    """Return what returns a constant result: a new one each time, if the function has made it."""
    _refuse_unfinished(leaf, signature)
    if not is_made or atom(leaf) is not None or is_known_apart(leaf):
        return lambda: leaf
    arrays = {id(part): part for part in reachable(leaf) if is_array(part)}
    try:
        copy.deepcopy(leaf, {**arrays})
    except Exception:  # a class may refuse to be copied in any way
        if has_value(leaf):
            return lambda: leaf
        kind = type(leaf).__qualname__
        raise OutputError(
            f"A function under amp made {article(kind)} and returned it. It is made when the "
            "function is traced, each call needs one of its own, and it cannot be copied. "
            f"Return its parts.\n  at: {_source(signature)}"
        ) from None
    return lambda: copy.deepcopy(leaf, {**arrays})


def _source(signature: Signature) -> str:
    code = getattr(inspect.unwrap(signature.resolve()), "__code__", None)
    place = f" at {code.co_filename}:{code.co_firstlineno}" if code else ""
    return signature.name + place


def _refuse_unfinished(leaf: Any, signature: Signature) -> None:
    """Raise where a returned object would go on computing after its trace has ended."""
    if isinstance(leaf, Coroutine):
        leaf.close()
        kind, advice = "a coroutine", "Give amp what it awaits, a function that is not async."
    elif isinstance(leaf, UNFINISHED):
        kind = article(type(leaf).__name__.replace("_", " "))
        advice = "Return a list or tuple of its items."
    elif not any(isinstance(part, Tracer) for part in reachable(leaf)):
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
