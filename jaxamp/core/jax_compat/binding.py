"""Bind the primitives of equations again, with other operands or parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
from jax._src import core as _core
from jax._src import mesh as _mesh
from jax._src import source_info_util as _source_info_util
from jax._src.interpreters import partial_eval as _pe
from jax._src.sharding_impls import _internal_use_concrete_mesh
from jax.extend.core import JaxprEqn, Literal
from jax.extend.core.primitives import convert_element_type_p

from jaxamp.core.jax_compat.release import JAX


@contextmanager
def evaluating() -> Iterator[None]:
    """Compute with known numbers during a trace, and not on the devices of a mesh that is set."""
    with (
        jax.ensure_compile_time_eval(),
        _internal_use_concrete_mesh(_mesh.empty_concrete_mesh),
        jax.sharding.use_abstract_mesh(_mesh.empty_abstract_mesh),
    ):
        yield


_PLACES = ("sharding", "out_sharding")  # parameters that no number depends on


def computed(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Return the results of an equation for known numbers, wherever it is to run."""
    nowhere = {name: None for name in _PLACES if eqn.params.get(name) is not None}
    with evaluating():
        return bind(eqn, [jax.numpy.asarray(x) for x in operands], **nowhere)


@contextmanager
def emitting(eqn: JaxprEqn, around: Sequence[JaxprEqn] = ()) -> Iterator[None]:
    """Emit equations that carry the source line, scope and context of one within others."""
    info, scope = eqn.source_info, _source_info_util.current_name_stack()
    for each in (*around, eqn):
        scope += each.source_info.name_stack
    with _source_info_util.user_context(info.traceback, name_stack=scope), eqn.ctx.manager:
        yield


def bind(eqn: JaxprEqn, operands: Sequence[Any], **changes: Any) -> list[Any]:
    """Bind the primitive of ``eqn`` to other operands, with some of its parameters changed."""
    if not changes and (recorded := _recorded(eqn, operands)) is not None:
        return recorded
    params = eqn.primitive.get_bind_params({**eqn.params, **changes})
    results = eqn.primitive.bind(*operands, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def _recorded(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any] | None:
    """Record an equation in the jaxpr that is traced, where its operands have the types it had.

    So do its results then. JAX inlines jaxprs in the same way; to infer the types of results again,
    and to trace functions with rules of their own again, is most of what binding costs.
    """
    trace = _core.trace_ctx.trace
    if type(trace) is not _pe.DynamicJaxprTrace or eqn.effects:
        return None
    source, tracers = _source_info_util.current(), list[Any]()
    for atom, x in zip(eqn.invars, operands, strict=True):
        if isinstance(atom, Literal) and x is atom.val:
            x = _pe.DynamicJaxprTracer(trace, atom.aval, atom, source)
        elif getattr(x, "_trace", None) is not trace or x.aval != atom.aval:
            return None
        tracers.append(x)
    avals = [v.aval for v in eqn.outvars]
    return trace.emit_eqn(tracers, avals, eqn.primitive, eqn.params, eqn.effects, source)


def convert(value: Any, dtype: Any, *, weak_type: bool = False) -> Any:
    """Cast an array under its own mesh, from which an equation that reads it may lead away."""
    aval = jax.typeof(value)
    if aval.dtype == dtype and aval.weak_type == weak_type:
        return value
    with _at_home(aval):
        return convert_element_type_p.bind(
            value, new_dtype=dtype, weak_type=weak_type, sharding=None
        )


def _at_home(aval: Any) -> AbstractContextManager[Any]:
    """Enter the mesh of an array's type where JAX would refuse another one."""
    mesh, here = aval.sharding.mesh, jax.sharding.get_abstract_mesh()
    is_any = mesh.empty or here.empty or (mesh.are_all_axes_auto and here.are_all_axes_auto)
    return nullcontext() if is_any or mesh == here else jax.sharding.use_abstract_mesh(mesh)


def scan_layout(eqn: JaxprEqn) -> tuple[int, int]:
    """Return the number of loop invariants and of carries of a scan equation."""
    if JAX >= (0, 11):  # 0.11 put trees of the operands in the place of the two counts
        invariants, carries, _ = eqn.params["ft_in"].unpack()
        return len(invariants), len(carries)
    return eqn.params["num_consts"], eqn.params["num_carry"]


def scan_with_invariants(eqn: JaxprEqn, count: int) -> dict[str, Any]:
    """Return the parameters of a scan equation that change with `count` more leading invariants."""
    if not count:
        return {}
    if JAX >= (0, 11):  # trees of the operands since 0.11, as in `scan_layout`
        from jax._src import flattree  # pyright: ignore[reportAttributeAccessIssue]

        invariants, carries, sliced = eqn.params["ft_in"].unpack()
        more = flattree.nones(len(invariants) + count)
        return {"ft_in": flattree.pack((more, carries, sliced))}
    return {"num_consts": eqn.params["num_consts"] + count}
