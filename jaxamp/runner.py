"""Running: the compiled forms of a function under a policy, made once and kept as long as it."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import ref

import jax

from jaxamp.calls import Layout, Target
from jaxamp.collector import paused
from jaxamp.constants import Constants, hold
from jaxamp.plan import make_plan
from jaxamp.policy import PrecisionPolicy
from jaxamp.rewrite import run_plan
from jaxamp.semantic import amp_scope
from jaxamp.taxonomy import registry_version
from jaxamp.trace import Outputs, trace

REGION = "jaxamp_region_"  # a compiled function of this name is rewritten already
NNX, NNX_ADAPTER = "flax.nnx", "jaxamp.interop.flax_nnx"
_MANY = 16  # traces of one call, after which it is likely that something changes by mistake


class Settings(NamedTuple):
    """How a function is to be rewritten."""

    policy: PrecisionPolicy
    strict: bool
    force: bool  # go through planner and rewriter even where the policy changes nothing

    @property
    def is_identity(self) -> bool:
        """Whether the function itself is the answer."""
        return self.policy.is_identity and not self.force


_CHANGE: ContextVar[Callable[[PrecisionPolicy], PrecisionPolicy] | None]
_CHANGE = ContextVar("jaxamp_policy_change", default=None)
_SEEN_BY_JIT = jax.make_user_context(None)  # what was compiled without the change is of no use


@contextmanager
def overriding(change: Callable[[PrecisionPolicy], PrecisionPolicy]) -> Iterator[None]:
    """Inside of the block every ``amp`` runs under another policy than it was made with.

    Args:
      change: gives the policy to use instead of one.
    """
    token = _CHANGE.set(change)
    try:
        with _SEEN_BY_JIT(change):
            yield
    finally:
        _CHANGE.reset(token)


def in_force(settings: Settings) -> Settings:
    """The settings, with the policy that is to be used at present."""
    change = _CHANGE.get()
    return settings if change is None else settings._replace(policy=change(settings.policy))


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
        if NNX in sys.modules and not self._pure:
            adapter = importlib.import_module(NNX_ADAPTER)
            if adapter.is_needed(layout, leaves, keys):
                return adapter.call(self, target, args, kwargs)
        try:
            return self.run(layout, leaves, traced, keys, target.name)
        except (TypeError, ValueError) as error:
            concrete = layout.concrete(leaves)
            if concrete is None:
                raise
            # The function may need the value of a Python float, as in `if rate == 0.0`.
            try:
                traced, keys = concrete.split(leaves, abstract=self.abstract)
                result = self.run(concrete, leaves, traced, keys, target.name)
            except Exception:
                raise error from None
        self._layouts[treedef] = concrete
        return result

    def run(
        self,
        layout: Layout,
        leaves: Sequence[Any],
        traced: Sequence[Any],
        keys: Sequence[Hashable],
        name: str,
    ) -> Any:
        """Call the function on `leaves`, parted into `traced` ones and the `keys` of others."""
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
            with paused():
                plan = make_plan(jaxpr, settings.policy, strict=settings.strict)
                return _Result(run_plan(jaxpr, plan, *traced), outputs)

    region.__name__ = region.__qualname__ = REGION + name
    return jax.jit(region)


def _weakly(function: Callable[..., Any]) -> Callable[[], Any]:
    try:
        return ref(function)
    except TypeError:  # such a function's Runner belongs to one AmpFunction, and dies with it
        return lambda: function


class Runners:
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
