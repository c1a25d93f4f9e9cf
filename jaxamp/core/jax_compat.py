"""The one door to JAX internals: every private import and every version test lives here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import takewhile
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import ad_checkpoint as _ad_checkpoint
from jax._src import ad_util as _ad_util
from jax._src import api_util as _api_util
from jax._src import checkify as _checkify
from jax._src import core as _core
from jax._src import linear_util as _lu
from jax._src import pjit as _pjit
from jax._src import sharding_impls as _sharding_impls
from jax._src import source_info_util as _source_info_util
from jax._src import traceback_util as _traceback_util
from jax._src import util as _util
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _pe
from jax._src.lib import _jax as _xla  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir import ir as _ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.state import types as _state
from jax.experimental import jet as _jet
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive

ShapedArray = _core.ShapedArray
Zero = _ad_util.Zero
DropVar = _core.DropVar
_Traceback = _xla.Traceback
_Scope = _source_info_util.Scope
_WRITES = (_state.WriteEffect, _state.AccumEffect)
JAX = jax.__version_info__[:2]
boundary = _traceback_util.api_boundary  # errors that leave a function so marked lose hidden frames


def is_tracing() -> bool:
    """Whether a transformation is at work: what runs now is recorded rather than just computed."""
    return not _core.trace_state_clean()


def is_plain_array(aval: Any) -> bool:
    """Whether an aval is an array value, rather than a Ref, a token or a key of some kind."""
    return type(aval) is ShapedArray


def is_ref(aval: Any) -> bool:
    """Whether an aval is a mutable array's."""
    return isinstance(aval, _state.AbstractRef)


def writes_to_ref(eqn: JaxprEqn) -> bool:
    """Whether an equation writes to a mutable array that it is given."""
    return any(isinstance(effect, _WRITES) for effect in eqn.effects)


def has_typed_sharding(aval: Any) -> bool:
    """Whether the mesh of an array is explicit: each result's sharding is part of its type."""
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return jax.sharding.AxisType.Explicit in (getattr(mesh, "axis_types", None) or ())


remembered = _util.weakref_lru_cache
"""Remembers what a function gives for a jaxpr, as long as that lives."""


def trace_to_jaxpr(
    fun: Callable[..., Sequence[Any]], avals: Sequence[Any], debug_info: Any
) -> ClosedJaxpr:
    """Traces a flat function at exact avals: weak types, shardings and Refs are kept."""
    wrapped = _lu.wrap_init(fun, debug_info=debug_info.with_unknown_names())
    jaxpr, _, consts = _pe.trace_to_jaxpr_dynamic(wrapped, list(avals))
    return ClosedJaxpr(jaxpr, consts)


def live(closed: ClosedJaxpr) -> Jaxpr:
    """A jaxpr without the equations that its results do not need."""
    return _pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))[0]


def without_consts(closed: ClosedJaxpr) -> tuple[Jaxpr, list[Any]]:
    """An open jaxpr that takes its former constants as leading inputs, and those constants."""
    return _pe.convert_constvars_jaxpr(closed.jaxpr), list(closed.consts)


def is_saved(policy: Callable[..., Any], eqn: JaxprEqn) -> bool:
    """Whether a checkpoint policy keeps what an equation makes, on the device or elsewhere."""
    case = policy(eqn.primitive, *(atom.aval for atom in eqn.invars), **eqn.params)
    return _pe.ensure_enum(case) is not _pe.Recompute


@contextmanager
def emitting(eqn: JaxprEqn) -> Iterator[None]:
    """Emits equations that carry the source line, scope and context of ``eqn``."""
    info = eqn.source_info
    scope = _source_info_util.current_name_stack() + info.name_stack
    with _source_info_util.user_context(info.traceback, name_stack=scope), eqn.ctx.manager:
        yield


def bind(eqn: JaxprEqn, operands: Sequence[Any], **changes: Any) -> list[Any]:
    """Binds the primitive of ``eqn`` to other operands, with some of its parameters changed."""
    params = eqn.primitive.get_bind_params({**eqn.params, **changes})
    results = eqn.primitive.bind(*operands, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def bind_custom_jvp(
    eqn: JaxprEqn,
    operands: Sequence[Any],
    fun: Callable[..., Sequence[Any]],
    rule: Callable[..., Sequence[Any]],
) -> list[Any]:
    """Binds ``custom_jvp_call`` with a new function and a new flat rule (primals then tangents)."""
    debug_info = eqn.params["call_jaxpr"].jaxpr.debug_info.with_unknown_names()
    subfuns = (
        _lu.wrap_init(fun, debug_info=debug_info),
        _lu.wrap_init(rule, debug_info=debug_info),
    )
    return eqn.primitive.bind(
        *operands, subfuns=subfuns, symbolic_zeros=eqn.params["symbolic_zeros"]
    )


def bind_custom_vjp(
    eqn: JaxprEqn,
    operands: Sequence[Any],
    fun: Callable[..., Sequence[Any]],
    forward: Callable[..., Sequence[Any]],
    backward: Callable[..., tuple[Sequence[Any], Any]],
) -> list[Any]:
    """Binds ``custom_vjp_call`` with a new function and new flat rules.

    ``forward`` takes (value, is-differentiated) pairs, ``backward`` residuals then cotangents and
    returns what `backward_results` does.
    """
    debug_info = eqn.params["call_jaxpr"].jaxpr.debug_info.with_unknown_names()

    def without_logs(*args: Any) -> Any:
        return backward(*args)[0]

    # 0.11 has backward rules return what they log beside the cotangents.
    rule = backward if JAX >= (0, 11) else without_logs
    subfuns = tuple(_lu.wrap_init(f, debug_info=debug_info) for f in (fun, forward, rule))
    return eqn.primitive.bind(
        *operands,
        subfuns=subfuns,
        out_trees=eqn.params["out_trees"],
        symbolic_zeros=eqn.params["symbolic_zeros"],
    )


def backward_results(eqn: JaxprEqn, args: Sequence[Any]) -> tuple[Sequence[Any], Any]:
    """What the backward rule of a ``custom_vjp_call`` gives: cotangents, and what it logs."""
    results = eqn.params["bwd"].call_wrapped(*args)
    return results if JAX >= (0, 11) else (results, None)  # 0.11 introduced logs


def jvp_rule(eqn: JaxprEqn) -> Any:
    """The user's rule of a ``custom_jvp_call``, with how it takes its arguments.

    ``None`` where the rule also depends on arguments that are not differentiated, and for all other
    primitives.
    """
    if eqn.primitive.name != "custom_jvp_call":
        return None
    thunk = _closure(eqn.params["jvp_jaxpr_fun"].f).get("fn")
    rule = _closure(thunk).get("jvp")
    if rule is None or rule.params:
        return None
    names = [transform.__name__ for transform, _ in rule.transforms]
    if names != ["_flatten_jvp"]:  # another may hold values that the rule depends on
        return None
    ((_, (*how, _)),) = rule.transforms  # the last is a thunk of the results' types
    return rule.f, tuple(how), rule.in_type


def _closure(function: Any) -> dict[str, Any]:
    """What a function has captured, by name."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def lower_checkpoints(
    policy: Callable[..., Any],
    platform: str,
    choose: Callable[[Jaxpr], Sequence[bool]],
    whole: Callable[[ClosedJaxpr], ClosedJaxpr] | None = None,
) -> None:
    """Chooses how the checkpoints of a policy are lowered; others are lowered there as ever.

    Args:
      policy: of the checkpoints, by identity.
      platform: where they are lowered so.
      choose: from the jaxpr of a checkpoint, whether its backward pass reads each operand behind a
        barrier; that of others reads all behind one.
      whole: gives what is lowered instead where no array is divided among devices.
    """

    def lower(context: Any, *args: Any, jaxpr: Jaxpr, prevent_cse: Any, **params: Any) -> Any:
        if params["policy"] is policy:
            prevent_cse = tuple(choose(jaxpr))
            if whole is not None and not _is_partitioned(context):
                jaxpr = whole(ClosedJaxpr(jaxpr, ())).jaxpr
        return _ad_checkpoint._remat_lowering(
            context, *args, jaxpr=jaxpr, prevent_cse=prevent_cse, **params
        )

    _mlir.register_lowering(_ad_checkpoint.remat_p, lower, platform=platform)


def lower_calls(prefix: str, whole: Callable[[ClosedJaxpr], ClosedJaxpr]) -> None:
    """Chooses what is lowered for GPUs of ``jax.jit`` inside of another, by name.

    The rule is for all platforms, as JAX's own is: it does not part calls by platform.

    Args:
      prefix: of the names; others are lowered as ever.
      whole: gives what is lowered instead where no array is divided among devices.
    """
    as_ever = _mlir._lowerings[_pjit.jit_p].rule

    def lower(context: Any, *args: Any, jaxpr: ClosedJaxpr, name: str, **params: Any) -> Any:
        is_ours = name.startswith(prefix) and is_for_gpu(context)
        if is_ours and not _is_partitioned(context):
            jaxpr = whole(jaxpr)
        return as_ever(context, *args, jaxpr=jaxpr, name=name, **params)

    _mlir.register_lowering(_pjit.jit_p, lower, cacheable=False)


def _is_partitioned(context: Any) -> bool:
    """Whether a compiler may divide arrays among devices, other than as ``shard_map`` says."""
    if any(map(has_typed_sharding, context.avals_in)):
        return True  # on a mesh of one device too
    axes = context.module_context.axis_context
    if isinstance(axes, _sharding_impls.SPMDAxisContext):
        return bool(set(axes.mesh.axis_names) - axes.manual_axes)
    return getattr(axes, "num_devices", 1) > 1


def is_for_gpu(context: Any) -> bool:
    """Whether a module is lowered for GPUs alone."""
    return set(context.module_context.platforms) <= {"cuda", "rocm"}


def before_barrier(value: Any) -> tuple[Any, np.dtype] | None:
    """What a lowered value is a widening of, before the barrier there; ``None`` without one.

    Args:
      value: of the module that is being made.

    Returns:
      The narrow value and its dtype.
    """
    held = _maker(value, "stablehlo.convert", 0)
    named = _maker(held, "stablehlo.reduce_precision", 0)  # what JAX makes of a saved residual
    rounded = _maker(named or held, "stablehlo.optimization_barrier", None)
    dtype = _NARROW.get(str(rounded.type.element_type)) if rounded is not None else None
    return None if dtype is None else (rounded, dtype)


def _maker(value: Any, name: str, operand: int | None) -> Any:
    """An operand of the operation of a name that makes a value; ``None``: the one it hands on."""
    owner: Any = getattr(value, "owner", None)
    if getattr(owner, "name", None) != name:
        return None
    return owner.operands[_ir.OpResult(value).result_number if operand is None else operand]


_NARROW = {"bf16": np.dtype(jax.numpy.bfloat16), "f16": np.dtype(np.float16)}


def read_again(jaxpr: Jaxpr) -> list[bool]:
    """Which operands of a checkpoint's backward pass its forward pass reads, once more.

    >>> import jax
    >>> square = jax.checkpoint(lambda x: jax.numpy.sin(x) ** 2)
    >>> [read_again(e.params["jaxpr"]) for e in jax.make_jaxpr(jax.grad(square))(1.0).eqns[-1:]]
    [[True, False]]
    """
    again = {
        var
        for eqn in jaxpr.eqns
        if any(getattr(s, "name", None) == _AGAIN for s in eqn.source_info.name_stack.stack)
        for var in eqn.invars
        if not isinstance(var, Literal)
    }
    return [var in again for var in jaxpr.invars]


_AGAIN = "rematted_computation"  # the scope of what a backward pass computes again


def is_symbolic_zero(value: Any) -> bool:
    """Whether a tangent or cotangent is a zero that was never made into an array."""
    return isinstance(value, Zero | jax.custom_derivatives.SymbolicZero)


def retyped_zero(zero: Any, dtype: Any) -> Any:
    """A symbolic zero of the same kind for another dtype."""
    return type(zero)(zero.aval.update(dtype=dtype))


def to_tangent_aval(aval: Any) -> Any:
    """The aval of a tangent of ``aval`` (float0 for integers)."""
    return aval.to_tangent_aval()


def user_line(source_info: Any) -> str:
    """``file:line (function)`` of the user's frame that made an equation, as JAX prints it."""
    return _source_info_util.summarize(source_info)


_current = _source_info_util.current
_wanting_rules: list[int] = []  # threads inside of `lines_of_backward_rules`
_changing = threading.Lock()


@contextmanager
def lines_of_backward_rules() -> Iterator[None]:
    """Gives operations of ``custom_vjp`` backward rules the lines where those were written.

    JAX gives to all that a backward pass emits the line of the forward operation. Only what this
    thread traces is affected.
    """
    thread = threading.get_ident()
    with _changing:
        _wanting_rules.append(thread)
        _source_info_util.current = _current_of_rules
    try:
        yield
    finally:
        with _changing:
            _wanting_rules.remove(thread)
            if not _wanting_rules:
                _source_info_util.current = _current


def _current_of_rules() -> Any:
    info = _current()
    if threading.get_ident() not in _wanting_rules:
        return info
    fresh = _Traceback.get_traceback()
    for code in fresh.raw_frames()[0]:
        if code.co_name.startswith(("backward_pass", "eval_jaxpr")):
            break
        if _source_info_util.is_user_filename(code.co_filename):
            return info.replace(traceback=fresh)
    return info


def hide_frames(directory: str) -> None:
    """Leaves the files of ``directory`` out of tracebacks and of equations' source lines."""
    _traceback_util.register_exclusion(directory)
    _source_info_util.register_exclusion(directory)


def leave_out_frame(error: Exception) -> None:
    """Takes the frame that handles an error out of its traceback."""
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next


def user_functions(source_info: Any) -> tuple[str, ...]:
    """Names of the user's functions on the call stack of an equation, innermost first."""
    return tuple(f.function_name for f in _source_info_util.user_frames(source_info.traceback))


def user_frames(source_info: Any) -> tuple[tuple[str, int, str], ...]:
    """File, line and function of the user's frames that made an equation, innermost first."""
    frames = _source_info_util.user_frames(source_info.traceback)
    return tuple((f.file_name, f.start_line, f.function_name) for f in frames)


def literal_value(literal: Literal) -> Any:
    """The value of a literal as numpy or Python scalar."""
    return literal.val


def scan_layout(eqn: JaxprEqn) -> tuple[int, int]:
    """How many loop invariants and how many carries a scan equation has."""
    if JAX >= (0, 11):  # 0.11 put trees of the operands in the place of the two counts
        invariants, carries, _ = eqn.params["ft_in"].unpack()
        return len(invariants), len(carries)
    return eqn.params["num_consts"], eqn.params["num_carry"]


def scan_with_invariants(eqn: JaxprEqn, count: int) -> dict[str, Any]:
    """The parameters of a scan equation that change if it gets more invariants, ahead of others."""
    if not count:
        return {}
    if JAX >= (0, 11):  # trees of the operands since 0.11, as in `scan_layout`
        from jax._src import flattree  # pyright: ignore[reportAttributeAccessIssue]

        invariants, carries, sliced = eqn.params["ft_in"].unpack()
        more = flattree.nones(len(invariants) + count)
        return {"ft_in": flattree.pack((more, carries, sliced))}
    return {"num_consts": eqn.params["num_consts"] + count}


def to_cotangent_aval(aval: Any) -> Any:
    """The aval of a cotangent of ``aval`` (float0 for integers)."""
    return aval.to_ct_aval()


def zero_tangent(aval: Any) -> Any:
    """What a ``custom_jvp`` rule returns for a tangent that is zero."""
    return jax.custom_derivatives.SymbolicZero(aval.to_tangent_aval())


def zero_cotangent(aval: Any) -> Any:
    """What a flat ``custom_vjp`` backward rule returns for a cotangent that is zero."""
    return Zero(aval.to_ct_aval())


def refuse_captured(differentiated: Sequence[bool]) -> None:
    """Raises JAX's own error if a ``custom_vjp`` is differentiated by what it has captured."""
    if any(differentiated):
        raise _ad.CustomVJPException()


def symbolic_zero_like(value: Any) -> Any:
    """What a primitive's jvp rule returns for a tangent that is zero."""
    return Zero(jax.typeof(value).to_tangent_aval())


def check_nans(primitive: Primitive, named: Callable[[dict[str, Any]], str]) -> None:
    """Has ``checkify`` look for NaNs in what a primitive of ours gives.

    Args:
      primitive: of one result.
      named: gives what errors call an equation of it, by its parameters.
    """

    def check(*args: Any, **params: Any) -> Any:
        called = SimpleNamespace(
            name=named(params), bind=primitive.bind, multiple_results=primitive.multiple_results
        )
        return _checkify.nan_error_check(called, *args, **params)

    _checkify.error_checks[primitive] = check


def check_like(primitive: Primitive, original: Primitive) -> None:
    """Has ``checkify`` look at a primitive of ours, of two operands, as at one of JAX's.

    Args:
      primitive: gives what `original` gives.
      original: is emitted too; nothing reads its result, and XLA drops it.
    """

    def check(*args: Any, **params: Any) -> Any:
        error, _ = _checkify.error_checks[original](*args, **params)
        return error, primitive.bind(*args[-2:], **params)

    _checkify.error_checks[primitive] = check


def complete_jet() -> None:
    """Teaches ``jax.experimental.jet`` checkpoints and the names in them, which JAX leaves out."""

    def checkpoint(primals: Any, series: Any, *, jaxpr: Jaxpr, **_: Any) -> Any:
        def run(*args: Any) -> list[Any]:
            return _core.eval_jaxpr(jaxpr, (), *args)

        return _jet.jet(run, primals, series, factorial_scaled=False)

    def name(primals: Any, series: Any, **_: Any) -> Any:
        return primals[0], series[0]

    _jet.jet_rules.setdefault(_ad_checkpoint.remat_p, checkpoint)
    _jet.jet_rules.setdefault(_ad_checkpoint.name_p, name)


def read_atom(env: dict[Any, Any], atom: Any) -> Any:
    """The value of a variable or literal."""
    return atom.val if isinstance(atom, Literal) else env[atom]


class Around(NamedTuple):
    """Names that are around all equations of a group.

    Attributes:
      entries: how many entries of their name stacks are the same, from the outermost on.
      scopes: how many names are the same after those, once transformations are left aside: what
        `jvp(layer/norm)` and `transpose(jvp(layer/norm))` have in common.
    """

    entries: int = 0
    scopes: int = 0


def names_around(eqns: Sequence[JaxprEqn]) -> Around:
    """The names that are around all of some equations."""
    stacks = [
        *{id(e.source_info.name_stack): e.source_info.name_stack.stack for e in eqns}.values()
    ]
    entries = _common(stacks)
    return Around(entries, _common([_parted(stack[entries:])[1] for stack in stacks]))


def _common(stacks: Sequence[tuple[Any, ...]]) -> int:
    """How many of their first entries are the same."""
    return sum(
        1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*stacks, strict=False))
    )


def _parted(stack: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The transformations that a name stack begins with, and what they are around."""
    first = next((n for n, entry in enumerate(stack) if isinstance(entry, _Scope)), len(stack))
    return stack[:first], stack[first:]


def _within(stack: tuple[Any, ...], around: Around) -> tuple[Any, ...]:
    """A name stack without the names around it."""
    stack = stack[around.entries :]
    if not around.scopes:
        return stack
    transforms, names = _parted(stack)
    return transforms + names[around.scopes :]


def within_scope(eqn: JaxprEqn, around: Around) -> JaxprEqn:
    """An equation with only those names around it."""
    stack = eqn.source_info.name_stack.stack
    _, names = _parted(stack[around.entries :])
    return _named(eqn, stack[: around.entries] + names[: around.scopes])


def without_scope(eqn: JaxprEqn, around: Around) -> JaxprEqn:
    """An equation without those names around it."""
    return _named(eqn, _within(eqn.source_info.name_stack.stack, around))


def _named(eqn: JaxprEqn, stack: tuple[Any, ...]) -> JaxprEqn:
    info = eqn.source_info
    if stack == info.name_stack.stack:
        return eqn
    return eqn.replace(source_info=info.replace(name_stack=type(info.name_stack)(stack)))


def origin(eqn: JaxprEqn, around: Around) -> tuple[Any, ...]:
    """Where an equation comes from, apart from names around it, and the context it runs in."""
    info = eqn.source_info
    return info.traceback, _within(info.name_stack.stack, around), eqn.ctx


def result_avals(fun: Callable[..., Sequence[Any]], avals: Sequence[Any]) -> tuple[Any, ...]:
    """The avals that a flat function gives for those of its arguments."""
    info = _api_util.debug_info("result_avals", fun, tuple(avals), {})
    return tuple(trace_to_jaxpr(fun, avals, info).out_avals)


def has_module(name: str) -> bool:
    """Whether a package that JAX wants without declaring it is installed."""
    return find_spec(name) is not None


def is_gpu_interpreter(params: Any) -> bool:
    """Whether interpreter parameters are those of Mosaic GPU, public since JAX 0.11 only."""
    return type(params).__name__ == "InterpretGPUParams"


def cuda_capability() -> float | None:
    """Compute capability of the GPU at hand; ``None`` where there is none."""
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError:
        return None
    capability = getattr(device, "compute_capability", None)
    return float(capability) if capability else None


def indexed_for_load(ref: Any, index: Any) -> tuple[Any, ...]:
    """What ``plgpu.load`` takes for a part of a Ref."""
    return (ref.at[index],) if JAX >= (0, 11) else (ref, index)  # 0.11 put the index first


# JAX 0.11 multiplies e4m3 with e5m2 in wgmma; before, both operands had to be of one format.
WGMMA_MIXES_FP8 = JAX >= (0, 11)
