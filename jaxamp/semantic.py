"""Dtypes by their role, and the policy that is in force where library code runs.

Library code that is to work under any policy names the role of a dtype, ``"compute"``, ``"param"``
or ``"output"``, and leaves it to the policy in force what dtype that is: that of the innermost
``policy_scope``, and inside of ``amp`` that of ``amp``.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxamp import _compat
from jaxamp.errors import PolicyError, accepted
from jaxamp.formats import Precision
from jaxamp.policy import PrecisionPolicy
from jaxamp.regions import KEEPABLE, keep_precision

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])


class SemanticDType(enum.StrEnum):
    """A dtype by its role; members are texts, so that the words can be used as well.

    >>> SemanticDType("parameter") is SemanticDType.PARAM
    True
    """

    COMPUTE = "compute"  # what matrix products are computed in
    PARAM = "param"  # what parameters are stored in
    OUTPUT = "output"  # what results are handed over in

    @classmethod
    def _missing_(cls, value: object) -> SemanticDType | None:
        return _role(value)

    def precision(self, policy: Any = None) -> Precision:
        """What the role means under a policy.

        Args:
          policy: whatever is accepted as a policy; left out, the one in force.

        >>> SemanticDType.COMPUTE.precision("auto_mixed"), SemanticDType.PARAM.precision()
        (<Precision.F16: 'float16'>, <Precision.F32: 'float32'>)
        """
        parsed = current_policy() if policy is None else PrecisionPolicy.parse(policy)
        if self is SemanticDType.COMPUTE:
            return parsed.base
        own = parsed.param_dtype if self is SemanticDType.PARAM else parsed.output_dtype
        return own or Precision.F32


DTypeish: TypeAlias = (
    DTypeLike
    | Precision
    | SemanticDType
    | Literal["compute", "param", "params", "parameter", "output"]
)
"""A dtype, its name, or its role."""


def resolve_dtype(dtypeish: DTypeish, policy: Any = None) -> np.dtype:
    """The dtype that a dtype, its name or its role stands for.

    Args:
      dtypeish: a dtype, a ``Precision``, their names, or a role.
      policy: what gives a role its dtype; left out, the policy in force.

    Raises:
      PolicyError: it names neither a role nor a float format.

    >>> resolve_dtype("compute", "p=f32,c=bf16,o=f32"), resolve_dtype("half", "auto_mixed")
    (dtype(bfloat16), dtype('float16'))
    """
    return _precision(dtypeish, policy).dtype


def cast_floating(tree: _T, dtypeish: DTypeish | None, policy: Any = None) -> _T:
    """The tree with its float arrays in another dtype; all else as it is.

    Args:
      tree: any tree of arrays, ``jax.ShapeDtypeStruct`` included; numpy arrays stay numpy arrays,
        and Python numbers are left alone.
      dtypeish: a dtype, its name or its role; ``None`` changes nothing.
      policy: what gives a role its dtype; left out, the policy in force.

    Raises:
      PolicyError: `dtypeish` names neither a role nor a float format.

    >>> tree = {"w": jnp.ones(2), "steps": jnp.arange(3)}
    >>> with policy_scope("auto_mixed_bf16"):
    ...     low = cast_floating(tree, "compute")
    >>> low["w"].dtype, low["steps"].dtype
    (dtype(bfloat16), dtype('int32'))
    """
    if dtypeish is None:
        return tree
    dtype = resolve_dtype(dtypeish, policy)
    return jax.tree.map(lambda leaf: _cast(leaf, dtype), tree)


def policy_scope(policy: Any) -> PolicyScope:
    """Puts a policy in force, for a ``with`` block or, as a decorator, for a function.

    Each thread has its own scopes and each asyncio task too. ``jax.jit`` knows of them: a function
    that asks for the policy is traced once for each. In asyncio a ``with`` block can be left for
    another task halfway, and compiled functions must not ask for the policy of such a block;
    decorate them instead, ``policy_scope(policy)(compiled)``.

    A scope changes what ``current_policy`` says and thereby what library code does. It does not
    rewrite anything: that is for ``amp``.

    Args:
      policy: whatever is accepted as a policy.

    Raises:
      PolicyError: the policy is not understood.

    >>> with policy_scope("auto_mixed"):
    ...     print(current_policy())
    auto_mixed
    """
    return PolicyScope(PrecisionPolicy.parse(policy))


def current_policy() -> PrecisionPolicy:
    """The policy in force: that of the innermost scope or ``amp``; ``ALWAYS_F32`` outside of both.

    Raises:
      PolicyError: asked by a function that is being compiled, from a ``with`` block that asyncio
        may have left for another task.

    >>> print(current_policy())
    always_f32
    """
    entry = _own_entry()
    if _HELD.count and not (entry and entry.compilable) and _compat.is_tracing():
        raise PolicyError(
            "A function that is being traced asks for the current policy while an asyncio task "
            "has a `with policy_scope(...)` block open. Tasks take turns, so what is compiled now "
            "could be run under another task's policy. Decorate the compiled function instead: "
            "policy_scope(policy)(jax.jit(f))."
        )
    return entry.policy if entry else PrecisionPolicy.ALWAYS_F32


def in_compute_dtype(method: _F) -> _F:
    """A method of a module, run in the module's own ``compute_dtype`` where it has one.

    The attribute is a dtype, its name or its role; ``None`` leaves the method as it is. Under
    ``amp`` it marks a region that keeps this precision. Elsewhere the module and its arguments are
    cast, and the results have the dtype that the arguments had; so the module must be a pytree,
    such as those of equinox and haliax.

    >>> import equinox as eqx
    >>> class Head(eqx.Module):
    ...     weight: jax.Array
    ...     compute_dtype: str | None = eqx.field(static=True, default=None)
    ...     @in_compute_dtype
    ...     def __call__(self, x):
    ...         return self.weight @ x
    >>> head = Head(jnp.full((1, 1), 1.001), compute_dtype="bf16")
    >>> head(jnp.ones(1))
    Array([1.], dtype=float32)
    """

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run_in(getattr(self, "compute_dtype", None), method, self, *args, **kwargs)

    return run  # type: ignore[return-value]


def run_in(dtypeish: DTypeish | None, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls `fn` in a compute dtype: under ``amp`` as a region, elsewhere on cast arguments.

    Args:
      dtypeish: a dtype, its name or its role; ``None`` just calls `fn`.
      fn: what to call.
      *args: its arguments. Elsewhere than under ``amp``, results are cast to the widest float
        dtype among those after the first, which is the module.
      **kwargs: its keyword arguments, as `args`.

    >>> run_in("bf16", jnp.multiply, 1.001, jnp.ones(1))
    Array([1.], dtype=float32)
    """
    if dtypeish is None:
        return fn(*args, **kwargs)
    precision = _precision(dtypeish, None)
    entry = _own_entry()
    if not (entry and entry.rewrites):
        results = fn(*cast_floating(args, precision), **cast_floating(kwargs, precision))
        return cast_floating(results, _widest((args[1:], kwargs)))
    if precision is SemanticDType.COMPUTE.precision():
        return fn(*args, **kwargs)  # what amp does anyway, with its guards
    with keep_precision(precision):
        return fn(*args, **kwargs)


class PolicyScope(AbstractContextManager[PrecisionPolicy]):
    """A policy to put in force; made by ``policy_scope``. One scope can be entered many times."""

    __slots__ = ("policy",)

    def __init__(self, policy: PrecisionPolicy) -> None:
        self.policy = policy

    def __enter__(self) -> PrecisionPolicy:
        _enter(self.policy, compilable=not _in_async_task())
        return self.policy

    def __exit__(self, *exc_info: object) -> None:
        _leave()

    def __call__(self, fn: _F) -> _F:
        """The function with the policy in force whenever it runs."""
        if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
            raise PolicyError(f"Use `with policy_scope(...)` inside the generator {fn!r}.")
        if inspect.iscoroutinefunction(fn):
            return self._around_coroutine(fn)

        @functools.wraps(fn)
        def scoped(*args: Any, **kwargs: Any) -> Any:
            with _whole(self.policy, rewrites=False):
                return fn(*args, **kwargs)

        return scoped  # type: ignore[return-value]

    def _around_coroutine(self, fn: Callable[..., Any]) -> Any:
        @functools.wraps(fn)
        async def scoped(*args: Any, **kwargs: Any) -> Any:
            with self:
                return await fn(*args, **kwargs)

        return scoped

    def __repr__(self) -> str:
        return f"policy_scope({str(self.policy)!r})"


def amp_scope(policy: PrecisionPolicy) -> AbstractContextManager[None]:
    """The scope in which ``amp`` traces a function: its policy is in force, and it rewrites."""
    return _whole(policy, rewrites=True)


@contextmanager
def _whole(policy: PrecisionPolicy, *, rewrites: bool) -> Iterator[None]:
    """A scope around one ordinary call: no other task comes between, and Ctrl-C ends it too."""
    seen_by_jit = _SEEN_BY_JIT(_number(policy))
    entry = _Entry(policy, threading.get_ident(), True, rewrites, seen_by_jit, _CURRENT.get())
    token = _CURRENT.set(entry)
    try:
        with seen_by_jit:
            yield
    finally:
        _CURRENT.reset(token)


class _Entry(NamedTuple):
    """A scope that was entered."""

    policy: PrecisionPolicy
    thread: int  # where: a copied context must not carry the scope to another thread
    compilable: bool  # whether jax.jit sees this very policy while the scope is innermost
    rewrites: bool  # whether amp is at work
    seen_by_jit: AbstractContextManager[None]
    outer: _Entry | None


class _Held(threading.local):
    """How many scopes of this thread may be left and entered again by asyncio."""

    count = 0
    seen_by_jit: AbstractContextManager[None] = nullcontext()


_CURRENT: ContextVar[_Entry | None] = ContextVar("jaxamp_policy", default=None)
_SEEN_BY_JIT = jax.make_user_context(None)  # part of the key of every compiled function
_NUMBERS = itertools.count()
_HELD = _Held()


@functools.lru_cache(maxsize=1024)
def _number(policy: PrecisionPolicy) -> int:
    """A number that equal policies share: JAX hashes it at every call of a compiled function."""
    return next(_NUMBERS)


def _enter(policy: PrecisionPolicy, *, compilable: bool) -> None:
    if compilable:
        seen_by_jit = _SEEN_BY_JIT(_number(policy))
        seen_by_jit.__enter__()
    else:
        seen_by_jit = nullcontext()
        if _HELD.count == 0:
            _HELD.seen_by_jit = _SEEN_BY_JIT("asyncio")  # no policy: nothing is compiled for it
            _HELD.seen_by_jit.__enter__()
        _HELD.count += 1
    thread = threading.get_ident()
    _CURRENT.set(_Entry(policy, thread, compilable, False, seen_by_jit, _CURRENT.get()))


def _leave() -> None:
    entry = _CURRENT.get()
    assert entry is not None, "scopes are left in the task that entered them"
    _CURRENT.set(entry.outer)
    entry.seen_by_jit.__exit__(None, None, None)
    if not entry.compilable:
        _HELD.count -= 1
        if _HELD.count == 0:
            _HELD.seen_by_jit.__exit__(None, None, None)


def _own_entry() -> _Entry | None:
    entry = _CURRENT.get()
    return entry if entry and entry.thread == threading.get_ident() else None


def _in_async_task() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _precision(dtypeish: DTypeish, policy: Any) -> Precision:
    role = _role(dtypeish)
    if role is not None:
        return role.precision(policy)
    try:
        return Precision.parse(dtypeish)  # type: ignore[arg-type]
    except PolicyError:
        words = [*_ROLES, *(p.short for p in KEEPABLE)]
        raise PolicyError(
            f"{dtypeish!r} is neither a float dtype nor a role. {accepted(dtypeish, words)}"
        ) from None


def _role(word: object) -> SemanticDType | None:
    return _ROLES.get(word.strip().lower()) if isinstance(word, str) else None


_ROLES = {
    **{role.value: role for role in SemanticDType},
    "params": SemanticDType.PARAM,
    "parameter": SemanticDType.PARAM,
}


def _widest(tree: Any) -> np.dtype | None:
    dtypes = [kind for leaf in jax.tree.leaves(tree) if (kind := _float_dtype(leaf)) is not None]
    return jnp.result_type(*dtypes) if dtypes else None


def _float_dtype(leaf: Any) -> np.dtype | None:
    kind = getattr(leaf, "dtype", None)
    return kind if kind is not None and jnp.issubdtype(kind, jnp.floating) else None


def _cast(leaf: Any, dtype: np.dtype) -> Any:
    if _float_dtype(leaf) in (None, dtype):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(dtype=dtype)
    return leaf.astype(dtype)
