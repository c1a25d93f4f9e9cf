"""The transform: `amp` gives a function its mixed-precision form, `plan_of` says what it did."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Hashable, Sequence
from types import FunctionType, MethodType
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, overload
from weakref import ref

import jax

from jaxamp import _compat
from jaxamp.errors import NotCallableError
from jaxamp.formats import Precision
from jaxamp.plan import Plan, make_plan
from jaxamp.policy import PrecisionPolicy
from jaxamp.regions import keep_precision
from jaxamp.rewrite import run_plan
from jaxamp.semantic import amp_scope
from jaxamp.taxonomy import registry_version
from jaxamp.trace import Layout, Outputs, Target, hold, trace

_P = ParamSpec("_P")
_R = TypeVar("_R")
_F = TypeVar("_F", bound=Callable[..., Any])
Constants = Sequence[Callable[[], Any] | None]
DEFAULT_POLICY = "auto_mixed_bf16"
_compat.hide_frames(os.path.dirname(__file__))
REGION = "jaxamp_region_"  # a compiled function of this name is rewritten already

_MANY = 16  # traces of one call, after which it is likely that something changes by mistake

# Libraries whose objects need more than a function does, and who takes care of them.
_NNX = "flax.nnx"
_ADAPTERS = {"equinox": "jaxamp.interop.equinox", _NNX: "jaxamp.interop.flax_nnx"}


class Settings(NamedTuple):
    """How a function is to be rewritten."""

    policy: PrecisionPolicy
    strict: bool
    force: bool  # go through planner and rewriter even where the policy changes nothing

    @property
    def is_identity(self) -> bool:
        """Whether the function itself is the answer."""
        return self.policy.is_identity and not self.force


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

    @property
    def policy(self) -> PrecisionPolicy:
        """The policy that the function runs under."""
        return self._settings.policy

    @_compat.boundary
    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Call the function in mixed precision."""
        if self._settings.is_identity:
            return _unchanged(self.__wrapped__, args, kwargs)
        return self._runner(self._target, args, kwargs)

    def amp_parts(self) -> tuple[Callable[_P, _R], Settings]:
        """The function as it was given, and how it is rewritten."""
        return self.__wrapped__, self._settings

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> Any:
        return _amp, self.amp_parts()

    def __repr__(self) -> str:
        return f"<amp of {self.__wrapped__!r}, {self.policy}>"


class Runner:
    """The compiled forms of one function under one policy. Holds the function weakly.

    One form is kept for each tree structure and set of constants; it is a ``jax.jit`` of the
    rewritten function, whose own cache tells shapes, dtypes, weak types and shardings apart.
    A form goes when one of its weakly held constants dies.

    Attributes:
      abstract: whether ``jax.ShapeDtypeStruct`` may stand for an array.
    """

    abstract = False

    def __init__(
        self, function: Callable[..., Any], settings: Settings, *, pure: bool = False
    ) -> None:
        self.resolve = _weakly(function)
        self.settings = settings
        self._pure = pure  # no call needs an adapter
        self.companion: Any = None  # what an adapter keeps for as long as this lives
        self._layouts: dict[Any, Layout] = {}
        self._traces: dict[Layout, tuple[int, Sequence[Hashable]]] = {}
        self._forms: dict[Hashable, Callable[..., _Result]] = {}

    def __call__(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function with what `target` binds and the given arguments."""
        leaves, treedef = target.flatten(args, kwargs)
        layout = self._layouts.get(treedef)
        if layout is None:
            layout = self._layouts.setdefault(treedef, Layout.of(treedef))
        traced, keys = layout.split(leaves, abstract=self.abstract)
        if _NNX in sys.modules and not self._pure:
            adapter = importlib.import_module(_ADAPTERS[_NNX])
            if adapter.is_needed(layout, leaves, keys):
                return adapter.call(self, target, args, kwargs)
        try:
            return self._run(layout, leaves, traced, keys, target.name)
        except (TypeError, ValueError) as error:
            concrete = layout.concrete(leaves)
            if concrete is None:
                raise
            # The function may need the value of a Python float, as in `if rate == 0.0`.
            try:
                traced, keys = concrete.split(leaves, abstract=self.abstract)
                result = self._run(concrete, leaves, traced, keys, target.name)
            except Exception:
                raise error from None
        self._layouts[treedef] = concrete
        return result

    def _run(
        self,
        layout: Layout,
        leaves: Sequence[Any],
        traced: Sequence[Any],
        keys: Sequence[Hashable],
        name: str,
    ) -> Any:
        key = (layout, keys, registry_version())  # a kind registered since may change the plan
        form = self._forms.get(key)
        if form is None:
            self._count(layout, keys, name)
            constants = self._hold(leaves, key)
            compiled = _compiled(self.resolve, layout, constants, self.settings, name)
            form = self._forms.setdefault(key, compiled)
        return form(*traced).join()

    def _count(self, layout: Layout, keys: Sequence[Hashable], name: str) -> None:
        """Warn where the same call is traced again and again for new constants."""
        count, last = self._traces.get(layout, (0, keys))
        self._traces[layout] = count + 1, keys
        if count + 1 == _MANY:
            pairs = zip(layout.names(self.resolve()), last, keys, strict=True)
            changed = ", ".join(name for name, old, new in pairs if old != new)
            warnings.warn(
                f"amp has traced {name} {_MANY} times because {changed} keeps changing and is a "
                "constant of the trace. Pass a number that changes as an array "
                "(jnp.asarray(step)), and make a function once, outside of the loop.",
                stacklevel=6,
            )

    def _hold(
        self, leaves: Sequence[Any], key: tuple[Layout, Sequence[Hashable], int]
    ) -> Constants:
        """What returns the constants among `leaves`; a form goes with the first that dies."""
        self_ref = ref(self)

        def dropped(_: Any) -> None:
            runner = self_ref()
            if runner is not None:
                runner._forms.pop(key, None)

        pairs = zip(leaves, key[1], strict=True)
        return [None if k is None else hold(leaf, k, dropped) for leaf, k in pairs]


@jax.tree_util.register_pytree_node_class
class _Result:
    """A compiled form's result: its arrays, and what came beside them."""

    def __init__(self, arrays: Sequence[Any], outputs: Outputs) -> None:
        self.arrays = arrays
        self.outputs = outputs

    def join(self) -> Any:
        return self.outputs.join(self.arrays)

    def tree_flatten(self) -> tuple[Sequence[Any], Outputs]:
        return self.arrays, self.outputs

    @classmethod
    def tree_unflatten(cls, outputs: Outputs, arrays: Sequence[Any]) -> _Result:
        return cls(arrays, outputs)


def _compiled(
    function: Callable[[], Any],
    layout: Layout,
    constants: Constants,
    settings: Settings,
    name: str,
) -> Callable[..., _Result]:
    """One form of a function: trace, plan, rewrite, compile."""

    def region(*traced: Any) -> _Result:
        with amp_scope(settings.policy):
            jaxpr, outputs = trace(function(), layout, constants, traced, name)
            plan = make_plan(jaxpr, settings.policy, strict=settings.strict)
            return _Result(run_plan(jaxpr, plan, *traced), outputs)

    region.__name__ = region.__qualname__ = REGION + name
    return jax.jit(region)


def _weakly(function: Callable[..., Any]) -> Callable[[], Any]:
    try:
        return ref(function)
    except TypeError:  # such a function's Runner belongs to one AmpFunction, and dies with it
        return lambda: function


class _Runners:
    """Runners by the identity of their function; an entry goes when its function dies."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Any, dict[Settings, Runner]]] = {}

    def get(self, function: Callable[..., Any], settings: Settings) -> Runner:
        """The Runner of `function`, the same one for as long as `function` lives."""
        entry = self._entries.get(id(function))
        if entry is None:
            entry = self._enter(function)
        runners = entry[1]
        return runners.get(settings) or runners.setdefault(settings, Runner(function, settings))

    def _enter(self, function: Callable[..., Any]) -> tuple[Any, dict[Settings, Runner]]:
        address, entries = id(function), self._entries
        try:
            alive = ref(function, lambda _: entries.pop(address, None))
        except TypeError:
            return None, {}
        return entries.setdefault(address, (alive, {}))


_RUNNERS = _Runners()


def apply(fn: Any, settings: Settings, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `fn` once in mixed precision, as ``AmpFunction(fn, settings)(*args, **kwargs)``."""
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
    bools, ints, words, functions and other objects are constants; ``jaxamp.trace`` has the details.
    As under ``jax.jit``, what `fn` reads apart from its arguments is read when it is traced.

    Args:
      fn: a function, method, ``functools.partial``, callable object, equinox or flax module.
        Left out, a decorator is returned: ``@amp(policy="auto_mixed")``.
      policy: a ``PrecisionPolicy``, a preset's name, a ``jmp.Policy`` or jmp's grammar.
      strict: raise on an operation that jaxamp does not know, instead of leaving it as it is.

    Returns:
      For a module, a module; for anything else a callable object with `fn`'s name and signature.

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
    amped = getattr(type(fn), "amp_parts", None)
    plain, settings = (fn, None) if amped is None else amped(fn)
    if settings is None or policy is not None:
        settings = _settings(DEFAULT_POLICY if policy is None else policy, strict, True)
    target = Target.of(_checked(plain))
    planner = _Planner(target.function, settings)

    @functools.wraps(fn, updated=())
    def plan(*args: Any, **kwargs: Any) -> Plan:
        try:
            planner(target, args, kwargs)
        except _Planned as result:
            return result.plan
        raise AssertionError("a call was planned without a plan")

    return plan


class _Planned(BaseException):
    """A plan, on its way out of the call that it is for; no error handler is to stop it."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan


class _Planner(Runner):
    """A Runner that stops at the plan."""

    abstract = True

    def _run(
        self,
        layout: Layout,
        leaves: Sequence[Any],
        traced: Sequence[Any],
        keys: Sequence[Hashable],
        name: str,
    ) -> Any:
        pairs = zip(leaves, keys, strict=True)
        constants = [None if k is None else lambda x=x: x for x, k in pairs]
        with amp_scope(self.settings.policy):
            jaxpr, _ = trace(self.resolve(), layout, constants, traced, name)
        raise _Planned(make_plan(jaxpr, self.settings.policy, strict=self.settings.strict))


def _unchanged(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `fn` itself, marked so that an ``amp`` around this one leaves it alone too."""
    with amp_scope(PrecisionPolicy.ALWAYS_F32), keep_precision(Precision.F32):
        return fn(*args, **kwargs)


def _settings(policy: Any, strict: bool, force: bool) -> Settings:
    parsed = PrecisionPolicy.parse(policy)
    parsed.validate_for_use()
    return Settings(parsed, bool(strict), bool(force))


def _amp(fn: Any, settings: Settings) -> Any:
    _checked(fn)
    for library, adapter in _ADAPTERS.items():
        if library in sys.modules:  # never import a library that the user does not
            wrapped = importlib.import_module(adapter).wrap(fn, settings)
            if wrapped is not None:
                return wrapped
    return AmpFunction(fn, settings)


def _checked(fn: Any) -> Any:
    if isinstance(fn, str):
        raise NotCallableError(
            f"amp was given the text {fn!r} where a function is needed. "
            f"To decorate with a policy, name it: @amp(policy={fn!r})."
        )
    if isinstance(fn, type):
        raise NotCallableError(
            f"amp was given the class {fn.__qualname__}. Give it an object of that class, "
            "or decorate the class's methods."
        )
    if not callable(fn):
        raise NotCallableError(
            f"amp needs something to call, and got {fn!r} of type {type(fn).__qualname__}. "
            "Give it a function, a method, or a module with __call__."
        )
    return fn
