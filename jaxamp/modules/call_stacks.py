"""Read module paths from the call stack of an equation, joined with those around it.

flax linen and haiku write the names of modules into name stacks. equinox, nnx and classes of one's
own do not, but the call stack has their methods, and the source has the attribute that was called:
``self.attention(x)``. So nothing is intercepted while a program is traced. The index of a module in
a list is known where the source has it: of ``self.layers[0](x)``, not of a loop; see
`list_items.py`.

JAX begins the call stacks of an inner jaxpr where that was traced: in the function that
``jax.checkpoint``, ``jax.jit`` or ``jax.lax.scan`` was given. What called it is told by the stack
of the equation around. Where JAX differentiates a checkpoint, it takes equations of the forward
pass out of it. Their stacks begin inside as well, and the checkpoint that is left tells the rest.
"""

from __future__ import annotations

import functools
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn

from jaxamp.core import jax_compat
from jaxamp.jaxprs.nested import nested
from jaxamp.modules.attributes import Calls, called_through, method_of

_NAMED = re.compile(r"[/\\](flax[/\\](linen|core)|haiku[/\\]_src)[/\\]")  # write names themselves
_PLUMBING = re.compile(r"[/\\](jaxlib|jax|equinox|flax|jaxtyping|optax|numpy)[/\\](?!.*\bnn[/\\])")
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]|[/\\]functools\.py$")
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep


@functools.lru_cache(maxsize=4096)  # of one program, which is read twice
def shown_calls(traceback: Any) -> Calls:
    """Return the frames around an equation that count, outermost first."""
    calls = jax_compat.calls(traceback)
    return tuple([call for call in calls if _is_shown(call[0].co_filename)])


@functools.cache
def _is_shown(file: str) -> bool:
    """Return whether the frames of a file count: not those of what is between modules."""
    if file.startswith(_OURS):
        return False
    return bool(_NAMED.search(file)) or not (_INSTALLED.search(file) and _PLUMBING.search(file))


@functools.lru_cache(maxsize=65536)
def modules_of(calls: Calls) -> tuple[tuple[str, int], ...]:
    """Return the modules of shown calls, outermost first, each with the frame of its method."""
    found: list[tuple[str, int]] = []
    owner = ""
    for n, (code, _) in enumerate(calls):
        if _NAMED.search(code.co_filename):
            return ()
        cls, method = method_of(code)
        if not cls:
            continue
        called = called_through(calls[:n], method) if n else None
        names = called if called is not None else (cls,) * (cls != owner)
        found += [(name, n) for name in names]
        owner = cls
    return tuple(found)


Frames = tuple[tuple[int, int], ...]  # code and instruction; codes themselves hash slowly
Around = tuple[Any, ...]  # source infos of equations, outermost first


def calls_within(around: Around) -> Calls:
    """Return the calls around what is within some equations, outermost first."""
    return tuple([call for info in around for call in shown_calls(info.traceback)])


def frames_of(calls: Calls) -> Frames:
    """Return calls as what hashes fast."""
    return tuple([(id(code), at) for code, at in calls])


def entered(jaxpr: Jaxpr) -> dict[int, CodeType]:
    """Return the functions in which the call stacks of a jaxpr's equations begin."""
    first = (shown_calls(eqn.source_info.traceback)[:1] for eqn in jaxpr.eqns)
    return {id(code): code for calls in first for code, _ in calls}


def calls_of_all(eqns: Sequence[JaxprEqn]) -> Calls:
    """Return the first calls of the call stacks of some equations, as far as all have them."""
    stacks = [calls for eqn in eqns if (calls := shown_calls(eqn.source_info.traceback))]
    common: list[tuple[CodeType, int]] = []
    for calls in zip(*stacks, strict=False):
        if len({id(code) for code, _ in calls}) > 1:
            break
        common.append(calls[0])
        if len({at for _, at in calls}) > 1:
            break
    return tuple(common)


def taken_out(jaxpr: Jaxpr) -> list[Around]:
    """Return what each equation was taken out of: source infos, outermost first; mostly none."""
    if len(entered(jaxpr)) < 2:
        return [()] * len(jaxpr.eqns)
    by_trace: dict[int, dict[Frames, _Place]] = defaultdict(dict)
    by_root: dict[int, dict[Frames, _Place]] = defaultdict(dict)
    for outermost in jaxpr.eqns:
        own, operands = _root(outermost.source_info), {*map(id, outermost.invars)}
        for around, inside in _inside(outermost, ()):
            place, frames = _Place(around, operands), frames_of(calls_within(around))
            for info in (eqn.source_info for eqn in inside):
                if (root := _root(info)) != own:
                    for places in (by_trace[id(info.traceback)], by_root[root]):
                        known = places.setdefault(frames, place)
                        if known is not place:
                            known.operands.update(operands)
    options = []
    for eqn in jaxpr.eqns:
        info = eqn.source_info
        options.append(by_trace.get(id(info.traceback)) or by_root.get(_root(info)) or {})
    return _chosen(jaxpr.eqns, options)


class _Place(NamedTuple):
    """Equations around, outermost first, and the operands of all that are in this place."""

    around: Around
    operands: set[int]


def _chosen(eqns: Sequence[JaxprEqn], options: Sequence[dict[Frames, _Place]]) -> list[Around]:
    """Choose the place of each equation: that with its operands, or else that of one near by.

    A function that is traced once has the same call stacks wherever it is called.
    """
    known = [_of_operands(eqn, places) for eqn, places in zip(eqns, options, strict=True)]
    found: list[Around] = [()] * len(eqns)
    for order in (range(len(eqns)), range(len(eqns) - 1, -1, -1)):
        last: Frames = ()
        for n in order:
            last = known[n] or last
            if not found[n] and last in options[n]:
                found[n] = options[n][last].around
    return found


def _of_operands(eqn: JaxprEqn, places: dict[Frames, _Place]) -> Frames:
    """Return the only place, or the only one that has an operand of an equation."""
    for operand in eqn.invars if len(places) > 1 else ():
        having = [f for f, place in places.items() if id(operand) in place.operands]
        if len(having) == 1:
            return having[0]
    return next(iter(places)) if len(places) == 1 else ()


def _inside(eqn: JaxprEqn, around: Around) -> Iterator[tuple[Around, Sequence[JaxprEqn]]]:
    """Yield the equations of each jaxpr inside of one, with the source infos around them."""
    around = (*around, eqn.source_info)
    for body in nested(eqn):
        yield around, body.jaxpr.eqns
        for inner in body.jaxpr.eqns:
            yield from _inside(inner, around)


def _root(source_info: Any) -> int:
    calls = shown_calls(source_info.traceback)
    return id(calls[0][0]) if calls else 0
