"""The transform: `amp` gives a function its mixed-precision form, `plan_of` its plan."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

import jax

from jaxamp.core import features, jax_compat
from jaxamp.core.adapters import adapter
from jaxamp.core.formats import Precision, is_format
from jaxamp.errors import NotCallableError, article, shown, teaching
from jaxamp.policy.policy import PrecisionPolicy
from jaxamp.run.emit import plan_call, unchanged
from jaxamp.run.runner import NNX, Runner, Runners, is_jitted
from jaxamp.run.settings import Settings, in_force
from jaxamp.trace.arguments import Call, is_constant
from jaxamp.trace.target import Statics, Target, is_found

if TYPE_CHECKING:
    from jaxamp.plan import Plan

_P = ParamSpec("_P")
_R = TypeVar("_R")
_F = TypeVar("_F", bound=Callable[..., Any])
DEFAULT_POLICY = "mixed_bf16"

# Libraries whose modules need more than a function does.
_LIBRARIES = "equinox", NNX
_UNBOUND = "CallCompactUnboundModuleError", "ScopeParamNotFoundError"
_RUNNERS = Runners()
jax_compat.hide_frames(os.path.dirname(os.path.dirname(__file__)))


class AmpFunction(Generic[_P, _R]):
    """A function in mixed precision, as `amp` returns it.

    Called eagerly it runs compiled; called under a trace it adds to that trace. It holds the
    function it was made from; what it compiles is shared by all that are made from that function
    under the same policy, and lives as long as the function.

    Attributes:
      settings: settings under which the function is rewritten.
      runner: its compiled forms.
    """

    _leading = 0  # arguments that it takes before those of the function

    def __init__(
        self,
        fn: Callable[_P, _R],
        settings: Settings,
        runner: Callable[[Callable[..., Any], Settings], Runner] | None = None,
    ) -> None:
        functools.update_wrapper(
            self, fn, updated=("__dict__",) if isinstance(fn, FunctionType) else ()
        )
        self.__wrapped__ = fn
        self.settings = settings
        self._target = Target.of(fn, settings.statics)
        function = self._target.function
        self.runner = (
            _RUNNERS.get(function, settings) if runner is None else runner(function, settings)
        )
        self._is_identity = settings.is_identity

    @property
    def policy(self) -> PrecisionPolicy:
        """The policy that the function runs under."""
        return self.settings.policy

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Call the function in mixed precision."""
        if self._is_identity and in_force(self.settings).is_identity:
            return unchanged(self.__wrapped__, *args, **kwargs)
        try:
            return self.runner(self._target, args, kwargs)
        except Exception as error:
            jax_compat.drop_frames(error, 2)  # this one and that of the Runner
            _refuse_unbound(self._target.owner, error)
            jax_compat.note_release(error)
            raise

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lower a call ahead of time, as ``jax.jit(fn).lower`` does.

        Args:
          *args: positional arguments, in which ``jax.ShapeDtypeStruct`` may stand for an array.
          **kwargs: keyword arguments, likewise.

        Returns:
          What compiles; what is compiled is called without the static arguments.
        """
        with self._jitted(args, kwargs) as jitted:
            return jitted.lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Trace a call ahead of time, as ``jax.jit(fn).trace`` does; arguments as for `lower`."""
        with self._jitted(args, kwargs) as jitted:
            return jitted.trace(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Return shapes and dtypes of a call's results; arguments as for `lower`."""
        with self._jitted(args, kwargs) as jitted:
            return jitted.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Drop what is compiled for the function under this policy."""
        self.runner.clear()

    @contextmanager
    def _jitted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
        """Make a ``jax.jit`` whose static arguments are those that a call of this one has."""
        own = args[self._leading :]
        self.runner.check(self._target, own, kwargs)
        declared = self.settings.statics | static_parameters(self.__wrapped__)
        declared = declared.shifted(self._leading)
        positions = {n for n, arg in enumerate(args) if is_constant(arg)} | declared.positions
        names = {name for name, arg in kwargs.items() if is_constant(arg)} | declared.names
        try:
            yield jax.jit(
                self,
                static_argnums=sorted(n for n in positions if n < len(args)),
                static_argnames=sorted(name for name in names if name in kwargs),
                **jax_compat.host_placement(self.__wrapped__),
            )
        except (TypeError, ValueError) as error:
            self.runner.advise(error, self._target, own, kwargs)
            raise

    def prepared(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, abstract: bool = True
    ) -> AbstractContextManager[Call]:
        """Split a call, to look at it or to run it inside of a ``with`` block."""
        return self.runner.prepared(self._target, args, kwargs, abstract=abstract)

    def amp_parts(self) -> tuple[Callable[_P, _R], Settings]:
        """Return the function as it was given, and the settings under which it is rewritten."""
        return self.__wrapped__, self.settings

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
    if settings.is_identity and in_force(settings).is_identity:
        return unchanged(fn, *args, **kwargs)
    target = Target.of(fn, settings.statics)
    return _RUNNERS.get(target.function, settings)(target, args, kwargs)


@overload
def amp(
    fn: _F,
    policy: Any = ...,
    *,
    strict: bool = ...,
    static_argnums: int | Sequence[int] | None = ...,
    static_argnames: str | Iterable[str] | None = ...,
) -> _F: ...
@overload
def amp(
    fn: None = None,
    policy: Any = ...,
    *,
    strict: bool = ...,
    static_argnums: int | Sequence[int] | None = ...,
    static_argnames: str | Iterable[str] | None = ...,
) -> Callable[[_F], _F]: ...
@teaching("The precision is the second argument: amp(fn, 'bf16'), or amp(fn, policy='bf16').")
def amp(
    fn: Any = None,
    policy: Any = DEFAULT_POLICY,
    *,
    strict: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
) -> Any:
    """Wrap `fn`, so that it runs in mixed precision.

    The result takes the arguments of `fn` and returns its results, with the same structure, shapes
    and dtypes; inside, each operation runs in the precision that the policy chooses for it. It can
    be differentiated, mapped, compiled and exported, and can contain any of these, as `fn` can.

    Called eagerly it runs compiled. It is traced once for each structure, shape and dtype of its
    arrays and each value of its constants. Arrays and Python floats are traced, as by ``jax.jit``;
    bools, ints, words, functions and other objects are static, and read anew at each call. An
    object that holds arrays, and that JAX does not know as a pytree, is refused. Inside of a
    ``jax.jit`` all Python numbers are static. Declare a float whose value the function needs, or a
    container of numbers that configures it, in `static_argnums` or `static_argnames`.

    As under ``jax.jit``, arrays that `fn` captures are constants of the trace, and so are the
    attributes of the object in ``amp(obj.method)``: pass arrays that change as arguments, or
    register the object's class with JAX. A ``jax.jit`` around `amp` donates buffers, and JAX
    ignores the donation of one inside.

    Args:
      fn: a function, method, ``functools.partial``, callable object, equinox or flax module.
        Left out, a decorator is returned: ``@amp(policy="mixed_f16")``.
      policy: a ``PrecisionPolicy``, a preset's name, a ``jmp.Policy`` or jmp's grammar.
      strict: raise on an operation that jaxamp does not know, instead of leaving it as it is.
      static_argnums: positions of static arguments, as for ``jax.jit``; they are hashable.
      static_argnames: names of static arguments.

    Returns:
      For an equinox or nnx module, such a module; for anything else a callable object with `fn`'s
      name and signature. Of a linen module, give the method: ``amp(net.apply)``. Under
      ``fp8_delayed`` a ``DelayedFunction``, whose first argument and last result are the history
      of earlier steps.

    Raises:
      NotCallableError: `fn` cannot be called.
      ArgumentError: an argument of a call holds arrays, and is not a pytree.
      PolicyError: the policy is not understood, or cannot be computed here.
      StaticArgumentError: `fn` has no such parameter, or a call's static argument has no hash.

    >>> import jax.numpy as jnp
    >>> @amp
    ... def layer(x, w):
    ...     return jnp.tanh(x @ w)
    >>> layer(jnp.ones((2, 3)), jnp.ones((3, 4))).dtype
    dtype('float32')
    """
    _refuse_policy(fn)
    settings = _settings(policy, strict, force=False)

    def made(fn: Any) -> Any:
        statics = Statics.of(fn, static_argnums, static_argnames)
        return _amp(fn, settings._replace(statics=statics))

    return made if fn is None else made(fn)


def plan_of(fn: Any, policy: Any = None, *, strict: bool = False) -> Callable[..., Plan]:
    """Return the decisions of `amp` for `fn`, without running it.

    Args:
      fn: whatever `amp` takes, or what it returned.
      policy: as for `amp`; by default that of an amped `fn`, else `mixed_bf16`.
      strict: as for `amp`.

    Returns:
      A function of the same arguments as `fn`, in which ``jax.ShapeDtypeStruct`` may stand for an
      array. It returns the ``Plan``; ``str(plan)`` is a table.

    >>> import jax.numpy as jnp
    >>> plan = plan_of(jnp.dot, "mixed_f16")(jnp.ones((2, 3)), jnp.ones((3, 4)))
    """
    amped = inspected(fn, policy, strict=strict)

    @functools.wraps(fn, updated=())
    def plan(*args: Any, **kwargs: Any) -> Plan:
        try:
            with amped.prepared(args, kwargs) as call:
                return plan_call(call.signature(), call.arrays, amped.settings)[0]
        except Exception as error:
            _refuse_unbound(fn, error)
            jax_compat.note_release(error)
            raise

    return plan


def inspected(
    fn: Any,
    policy: Any,
    *,
    strict: bool = False,
    statics: Statics = Statics(),  # noqa: B008
    runner: type[Runner] | None = None,
) -> AmpFunction[..., Any]:
    """Return the amped function whose calls are looked at; policy and strict are as for `plan_of`.

    It has more static parameters, and another kind of Runner if it is to compile something else.
    """
    plain, settings = parts_of(fn)
    if settings is None or policy is not None:
        statics |= Statics() if settings is None else settings.statics
        settings = _settings(DEFAULT_POLICY if policy is None else policy, strict, force=True)
    settings = settings._replace(statics=settings.statics | statics)
    return AmpFunction(_checked(plain), settings, runner)


def parts_of(fn: Any) -> tuple[Any, Settings | None]:
    """Return the function that `amp` was given and its settings; `fn` and ``None`` without `amp`.

    What is bound to an amped function, and a ``jax.jit`` around it, are seen through.
    """
    if isinstance(fn, MethodType):
        plain, settings = parts_of(fn.__func__)
        return (
            (fn, None) if settings is None else (MethodType(plain, fn.__self__), settings.bound(1))
        )
    if isinstance(fn, functools.partial):
        plain, settings = parts_of(fn.func)
        if settings is None:
            return fn, None
        bound = functools.partial(plain, *fn.args, **fn.keywords)
        return bound, settings.bound(len(fn.args))
    inner = without_jit(fn)
    parts = getattr(type(inner), "amp_parts", None)
    if parts is None:
        return fn, None
    plain, settings = parts(inner)
    return plain, settings._replace(statics=settings.statics | static_parameters(fn))


def static_parameters(fn: Any) -> Statics:
    """Return the static parameters that a ``jax.jit`` around a function declares."""
    if isinstance(fn, MethodType):
        return static_parameters(fn.__func__).shifted(-1)
    return Statics(*jax_compat.static_parameters(fn))


def under(fn: Any, policy: Any) -> tuple[Any, PrecisionPolicy]:
    """Return the function that `amp` was given, and `policy`, that of `fn`, or the default."""
    plain, settings = parts_of(fn)
    if policy is None and settings is not None:
        return plain, settings.policy
    return plain, PrecisionPolicy.parse(DEFAULT_POLICY if policy is None else policy)


def without_jit(fn: Any) -> Any:
    """Return the function inside of ``jax.jit``, which would hide what is inside."""
    if isinstance(fn, MethodType):
        return MethodType(without_jit(fn.__func__), fn.__self__)
    while is_jitted(fn):
        fn = fn.__wrapped__
    return fn


def _settings(policy: Any, strict: bool, *, force: bool) -> Settings:
    parsed = PrecisionPolicy.parse(policy)
    parsed.validate_for_use()
    return Settings(parsed, bool(strict), force)


def _amp(fn: Any, settings: Settings) -> Any:
    if isinstance(fn, staticmethod | classmethod):  # a decorator below this one made it
        return type(fn)(_amp(fn.__func__, settings))
    _checked(fn)
    adapters = [found.wrap for found in map(adapter, _LIBRARIES) if found is not None]
    for wrap in (*(feature.wrap for feature in features.features()), *adapters):
        wrapped = wrap(fn, settings)
        if wrapped is not None:
            return wrapped
    return AmpFunction(fn, settings)


def _refuse_policy(fn: Any) -> None:
    if isinstance(fn, str | PrecisionPolicy) or is_format(fn):
        what, word = ("text", repr(fn)) if isinstance(fn, str) else ("policy", str(fn))
        word = word if not is_format(fn) else repr(Precision.parse(fn).short)
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
            f"{_instead_of(fn)}"
        )
    return fn


def _refuse_unbound(owner: Any, error: Exception) -> None:
    """Raise what says how to call a linen module that has no parameters."""
    if type(error).__name__ in _UNBOUND and type(error).__module__ == "flax.errors":
        name = type(owner).__name__
        raise NotCallableError(
            f"The {name} that amp was given is a flax.linen module, which has no parameters of its "
            f"own and cannot be called here. Wrap the function that takes them: "
            f"amp(net.apply)(variables, x), with variables = net.init(key, x)."
        ) from error


def _instead_of(fn: Any) -> str:
    """Return what to give `amp` instead of something that cannot be called."""
    if isinstance(fn, ModuleType):
        return f"Give it a function of that file: amp({fn.__name__}.loss)."
    if isinstance(fn, tuple):  # haiku's and optax's functions come in named tuples
        if hasattr(fn, "apply"):
            return "Give it the function that computes: amp(net.apply)."
        return "Put amp around the function that uses it: amp(train_step)."
    return "Give it a function, a method, or a module with __call__."
