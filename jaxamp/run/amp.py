"""The transform: `amp` gives a function its mixed-precision form, `plan_of` says what it did."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Sequence
from types import FunctionType, MethodType
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, overload

from jaxamp.core import jax_compat, taxonomy
from jaxamp.core.adapters import adapter
from jaxamp.core.formats import Precision
from jaxamp.core.keep_precision import keep_precision
from jaxamp.errors import NotCallableError, article, shown
from jaxamp.plan import Plan, make_plan
from jaxamp.policy.context import amp_scope
from jaxamp.policy.policy import PrecisionPolicy
from jaxamp.policy.settings import Settings, in_force
from jaxamp.run.emit import NNX, Result
from jaxamp.run.runner import Runner, Runners
from jaxamp.trace.arguments import Layout, Target, is_found
from jaxamp.trace.static_arguments import kept
from jaxamp.trace.trace import Outputs, trace

_P = ParamSpec("_P")
_R = TypeVar("_R")
_F = TypeVar("_F", bound=Callable[..., Any])
DEFAULT_POLICY = "auto_mixed_bf16"

# Libraries whose modules need more than a function does.
_LIBRARIES = "equinox", NNX
_RUNNERS = Runners()
jax_compat.hide_frames(os.path.dirname(os.path.dirname(__file__)))


class AmpFunction(Generic[_P, _R]):
    """A function in mixed precision; what `amp` returns.

    Called eagerly it runs compiled; called under a trace it adds to that trace. It holds the
    function it was made from; what it compiles is shared by all that are made from that function
    under the same policy, and lives as long as the function.
    """

    def __init__(self, fn: Callable[_P, _R], settings: Settings) -> None:
        functools.update_wrapper(
            self, fn, updated=("__dict__",) if isinstance(fn, FunctionType) else ()
        )
        self.__wrapped__ = fn
        self._settings = settings
        self._target = Target.of(fn)
        self._runner = _RUNNERS.get(self._target.function, settings)
        self._is_identity = settings.is_identity
        self._direct = self._runner.direct if self._target.function is fn else None

    @property
    def policy(self) -> PrecisionPolicy:
        """The policy that the function runs under."""
        return self._settings.policy

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Call the function in mixed precision."""
        direct = self._direct
        try:
            if direct and (direct.version == taxonomy.version or direct.renew()):
                try:
                    # For the quickest of calls: no empty dictionary of keywords, no call of ours.
                    form = direct.form
                    result = form(*args, **kwargs) if kwargs else form(*args)
                    return result.join() if type(result) is Result else result
                except Exception as error:
                    if not direct.refuses(error, args, kwargs):
                        raise
            return self._call(args, kwargs)
        except Exception as error:
            jax_compat.leave_out_frame(error)
            raise

    @jax_compat.boundary
    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        settings = in_force(self._settings)
        is_own = settings is self._settings
        if self._is_identity if is_own else settings.is_identity:
            return _unchanged(self.__wrapped__, args, kwargs)
        runner = self._runner if is_own else _RUNNERS.get(self._target.function, settings)
        return runner(self._target, args, kwargs)

    def amp_parts(self) -> tuple[Callable[_P, _R], Settings]:
        """The function as it was given, and how it is rewritten."""
        return self.__wrapped__, self._settings

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        message = f"{type(self).__name__!r} object has no attribute {name!r}"
        owner = None if name.startswith("_") else self._target.owner
        if hasattr(owner, name):  # a linen module, say
            message += (
                f": it is the call of {article(type(owner).__name__)} and no more. Wrap the method "
                f"that is to be in mixed precision, amp(net.{name}); take others from the object "
                "itself."
            )
        raise AttributeError(message, name=name, obj=self)

    def __reduce__(self) -> Any:
        # What a decorator has put in the place of its function is found where the function was.
        return vars(self)["__qualname__"] if is_found(self) else (_amp, self.amp_parts())

    def __repr__(self) -> str:
        return f"<amp of {self.__wrapped__!r}, {self.policy}>"


def apply(fn: Any, settings: Settings, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `fn` once in mixed precision, as ``AmpFunction(fn, settings)(*args, **kwargs)``."""
    settings = in_force(settings)
    if settings.is_identity:
        return _unchanged(fn, args, kwargs)
    target = Target.of(fn)
    return _RUNNERS.get(target.function, settings)(target, args, kwargs)


@overload
def amp(fn: _F, policy: Any = ..., *, strict: bool = ..., _force: bool = ...) -> _F: ...
@overload
def amp(
    fn: None = None, policy: Any = ..., *, strict: bool = ..., _force: bool = ...
) -> Callable[[_F], _F]: ...
def amp(
    fn: Any = None, policy: Any = DEFAULT_POLICY, *, strict: bool = False, _force: bool = False
) -> Any:
    """Give `fn` its mixed-precision form.

    The result is called as `fn` is, and returns what `fn` returns: the same structure, shapes and
    dtypes. Inside, each operation runs in the precision that the policy chooses for it. It can be
    differentiated, mapped, compiled and exported, and can contain any of these, as `fn` can.

    Called eagerly it runs compiled. It is traced once for each structure, shape and dtype of its
    arrays and each value of its constants: arrays and Python floats are traced, as by ``jax.jit``;
    bools, ints, words, functions and other objects are constants (``jaxamp.trace.arguments``).
    As under ``jax.jit``, what `fn` reads apart from its arguments is read when it is traced, and so
    are the attributes of an object that is not a pytree, ``self`` for example. If another array has
    taken the place of one that was read there, or in objects that it holds, `fn` is traced anew; a
    number set anew is not seen.
    Buffers are donated by a ``jax.jit`` around it: that of one inside is ignored, as JAX does. It
    is lowered ahead of time as ``jax.jit(amp(fn)).lower(...)``.

    Args:
      fn: a function, method, ``functools.partial``, callable object, equinox or flax module.
        Left out, a decorator is returned: ``@amp(policy="auto_mixed")``.
      policy: a ``PrecisionPolicy``, a preset's name, a ``jmp.Policy`` or jmp's grammar.
      strict: raise on an operation that jaxamp does not know, instead of leaving it as it is.

    Returns:
      For an equinox or nnx module, such a module; for anything else a callable object with `fn`'s
      name and signature. Of a linen module, give the method: ``amp(net.apply)``. Under
      ``fp8_delayed`` a ``jaxamp.run.delayed.DelayedFunction``, whose first argument and last
      result are magnitudes of earlier steps.

    Raises:
      NotCallableError: `fn` cannot be called.
      PolicyError: the policy is not understood, or cannot be computed here.

    >>> import jax.numpy as jnp
    >>> @amp
    ... def layer(x, w):
    ...     return jnp.tanh(x @ w)
    >>> layer(jnp.ones((2, 3)), jnp.ones((3, 4))).dtype
    dtype('float32')
    """
    _refuse_policy(fn)
    settings = _settings(policy, strict, _force)
    if fn is None:
        return functools.partial(_amp, settings=settings)
    return _amp(fn, settings)


def plan_of(fn: Any, policy: Any = None, *, strict: bool = False) -> Callable[..., Plan]:
    """What `amp` decides for `fn`, without running it.

    Args:
      fn: whatever `amp` takes, or what it returned.
      policy: as for `amp`; left out, that of an amped `fn`, else the default.
      strict: as for `amp`.

    Returns:
      A function of the same arguments as `fn`, in which ``jax.ShapeDtypeStruct`` may stand for an
      array. It returns the ``Plan``; ``str(plan)`` is a table.

    >>> import jax.numpy as jnp
    >>> plan = plan_of(jnp.dot, "auto_mixed")(jnp.ones((2, 3)), jnp.ones((3, 4)))
    """
    ask = answering(fn, policy, _AbstractPlanner, strict=strict)

    @functools.wraps(fn, updated=())
    def plan(*args: Any, **kwargs: Any) -> Plan:
        return ask(*args, **kwargs).plan

    return plan


def answering(
    fn: Any, policy: Any, runner: Callable[..., Runner], *, strict: bool = False
) -> Callable[..., Any]:
    """A function of `fn`'s arguments that returns what a Runner of another kind finds out.

    Args:
      fn: whatever `amp` takes, or what it returned.
      policy: as for `amp`; left out, that of an amped `fn`, else the default.
      runner: makes a Runner, whose ``run`` raises an ``Answer``.
      strict: as for `amp`.
    """
    plain, settings = parts_of(fn)
    if settings is None or policy is not None:
        settings = _settings(DEFAULT_POLICY if policy is None else policy, strict, True)
    target = Target.of(_checked(plain))
    asked = runner(target.function, settings)

    @functools.wraps(fn, updated=())
    def ask(*args: Any, **kwargs: Any) -> Any:
        try:
            asked(target, args, kwargs)
        except Answer as answer:
            return answer.value
        raise AssertionError("a call was made without an answer")

    return ask


def parts_of(fn: Any) -> tuple[Any, Settings | None]:
    """What `amp` was given and how it rewrites that; `fn` and ``None`` where it had no part.

    What is bound to an amped function, and a ``jax.jit`` around it, are seen through.
    """
    if isinstance(fn, MethodType):
        plain, settings = parts_of(fn.__func__)
        return (fn if settings is None else MethodType(plain, fn.__self__)), settings
    if isinstance(fn, functools.partial):
        plain, settings = parts_of(fn.func)
        bound = functools.partial(plain, *fn.args, **fn.keywords)
        return (fn if settings is None else bound), settings
    inner = without_jit(fn)
    parts = getattr(type(inner), "amp_parts", None)
    return (fn, None) if parts is None else parts(inner)


def under(fn: Any, policy: Any) -> tuple[Any, PrecisionPolicy]:
    """What `amp` was given, and what to see it under: `policy`, that of `fn`, or the default."""
    plain, settings = parts_of(fn)
    if policy is None and settings is not None:
        return plain, settings.policy
    return plain, PrecisionPolicy.parse(DEFAULT_POLICY if policy is None else policy)


def without_jit(fn: Any) -> Any:
    """What ``jax.jit`` was put around: compiled functions would hide what is inside."""
    if isinstance(fn, MethodType):
        return MethodType(without_jit(fn.__func__), fn.__self__)
    while hasattr(fn, "lower") and hasattr(fn, "__wrapped__"):
        fn = fn.__wrapped__
    return fn


class Answer(BaseException):
    """What was found out, on its way out of the call; no error handler is to stop it."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class Planned(NamedTuple):
    """A call that was planned: its plan, its flat arguments, and what it returns beside arrays."""

    plan: Plan
    args: list[Any]
    outputs: Outputs


class Planner(Runner):
    """A Runner that stops at the plan, and answers ``Planned``."""

    def run(
        self,
        layout: Layout,
        leaves: Sequence[Any],
        traced: Sequence[Any],
        keys: Sequence[Hashable],
        name: str,
    ) -> Any:
        """Plans the call, and stops."""
        constants = kept(leaves, keys)
        with amp_scope(self.settings.policy):
            jaxpr, outputs = trace(self.resolve(), layout, constants, traced, name)
        plan = make_plan(jaxpr, self.settings.policy, strict=self.settings.strict)
        raise Answer(Planned(plan, list(traced), outputs))


class _AbstractPlanner(Planner):
    """Plans a call whose arrays may be mere shapes."""

    abstract = True


def _unchanged(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `fn` itself, marked so that an ``amp`` around this one leaves it alone too."""
    with amp_scope(PrecisionPolicy.ALWAYS_F32), keep_precision(Precision.F32):
        return fn(*args, **kwargs)


def _settings(policy: Any, strict: bool, force: bool) -> Settings:
    parsed = PrecisionPolicy.parse(policy)
    parsed.validate_for_use()
    return Settings(parsed, bool(strict), bool(force))


def _amp(fn: Any, settings: Settings) -> Any:
    if isinstance(fn, staticmethod | classmethod):  # a decorator below this one made it
        return type(fn)(_amp(fn.__func__, settings))
    _checked(fn)
    if settings.policy.scaling.history and settings.policy.is_scaled:
        return _delayed(fn, settings)
    for found in filter(None, map(adapter, _LIBRARIES)):
        wrapped = found.wrap(fn, settings)
        if wrapped is not None:
            return wrapped
    return AmpFunction(fn, settings)


def _delayed(fn: Any, settings: Settings) -> Any:
    """A function that takes and returns the magnitudes of earlier steps."""
    from jaxamp.run.delayed import DelayedFunction

    amped = AmpFunction(fn, settings._replace(policy=settings.policy.stateless))
    return DelayedFunction(fn, amped, settings)


def _refuse_policy(fn: Any) -> None:
    if isinstance(fn, str | PrecisionPolicy):
        what, word = ("text", repr(fn)) if isinstance(fn, str) else ("policy", str(fn))
        raise NotCallableError(
            f"amp was given the {what} {word} where a function is needed. The function comes "
            f"first, amp(fn, policy); to decorate with a policy, name it: @amp(policy={word})."
        )


def _checked(fn: Any) -> Any:
    _refuse_policy(fn)
    if isinstance(fn, type):
        raise NotCallableError(
            f"amp was given the class {fn.__qualname__}. Give it an object of that class, "
            "or decorate the class's methods."
        )
    if isinstance(fn, property | functools.cached_property):
        kind = type(fn).__name__
        raise NotCallableError(
            f"amp was given a {kind}, which is not called. Decorate the function below it: put "
            f"@{kind} above @amp."
        )
    if not callable(fn):
        raise NotCallableError(
            f"amp needs something to call, and got {shown(fn)} of type {type(fn).__qualname__}. "
            "Give it a function, a method, or a module with __call__."
        )
    return fn
