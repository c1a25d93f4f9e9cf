"""Running: the compiled forms of a function under a policy, made once and kept as long as it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple
from weakref import ref

from jaxamp.core import taxonomy
from jaxamp.policy.settings import Settings
from jaxamp.run.emit import compiled, emit, joined, nnx_adapter
from jaxamp.run.fast_path import Direct
from jaxamp.trace.arguments import Layout, Target
from jaxamp.trace.captured_arrays import Held, are_held
from jaxamp.trace.static_arguments import Constants, hold

_MANY = 16  # traces of one call, after which it is likely that something changes by mistake


class _Form(NamedTuple):
    """A compiled form.

    Attributes:
      call: what to call with the traced leaves.
      borne: arrays that constants hold and that it has captured.
    """

    call: Callable[..., Any]
    borne: list[Held]

    def is_stale(self, leaves: Sequence[Any], keys: Sequence[Hashable]) -> bool:
        """Whether constants hold other arrays by now."""
        owners = (x for x, key in zip(leaves, keys, strict=True) if key is not None)
        return not are_held(self.borne, owners)


class Runner:
    """The compiled forms of one function under one policy. Holds the function weakly.

    One form is kept for each tree structure and set of constants; it is a ``jax.jit`` of the
    rewritten function, whose own cache tells shapes, dtypes, weak types and shardings apart.
    A form goes when one of its weakly held constants dies.

    Attributes:
      abstract: whether ``jax.ShapeDtypeStruct`` may stand for an array.
      direct: the form for calls of arrays alone, which need no Runner.
    """

    abstract = False

    def __init__(
        self, function: Callable[..., Any], settings: Settings, *, pure: bool = False
    ) -> None:
        self.resolve = _weakly(function)
        self.settings = settings
        self.direct = Direct(self.resolve, settings)
        self._pure = pure  # no call needs an adapter
        self.companion: Any = None  # what an adapter keeps for as long as this lives
        self._layouts: dict[Any, Layout] = {}
        self._traces: dict[Layout, tuple[int, Sequence[Hashable]]] = {}
        self._forms: dict[Hashable, _Form] = {}

    def __call__(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function with what `target` binds and the given arguments."""
        leaves, treedef = target.flatten(args, kwargs)
        layout = self._layouts.get(treedef)
        if layout is None:
            layout = self._layouts.setdefault(treedef, Layout.of(treedef))
        traced, keys = layout.split(leaves, abstract=self.abstract)
        if not self._pure and (adapter := nnx_adapter(layout, leaves, keys)):
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
        key = (layout, keys, taxonomy.version)  # a kind registered since may change the plan
        form = self._forms.get(key)
        if form is not None and form.is_stale(leaves, keys):
            self._forms.pop(key, None)
            form = None
        if form is None:
            self._count(layout, keys, name)
            constants = self._hold(leaves, key)
            form = self._forms.setdefault(key, self._form(layout, constants, name))
        return joined(form.call(*traced))

    def _form(self, layout: Layout, constants: Constants, name: str) -> _Form:
        resolve, settings = self.resolve, self.settings
        borne: list[Held] = []

        def region(*traced: Any) -> Any:
            return emit(resolve(), layout, constants, traced, settings, name, borne)

        return _Form(compiled(region, name), borne)

    def _count(self, layout: Layout, keys: Sequence[Hashable], name: str) -> None:
        """Warn where the same call is traced again and again for new constants."""
        count, last = self._traces.get(layout, (0, keys))
        self._traces[layout] = count + 1, keys
        if count + 1 == _MANY:
            pairs = zip(layout.names(self.resolve()), last, keys, strict=True)
            changed = ", ".join(name for name, old, new in pairs if old != new)
            changed = changed or "an array that an object holds"
            warnings.warn(
                f"amp has traced {name} {_MANY} times because {changed} keeps changing and is a "
                "constant of the trace. Pass a number that changes as an array "
                "(jnp.asarray(step)), and make a function once, outside of the loop. Arrays that "
                "an object holds are constants too: pass them as arguments, or register its class "
                "as a pytree.",
                stacklevel=7,
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
