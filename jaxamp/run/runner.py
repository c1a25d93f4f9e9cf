"""The compiled forms of a function under a policy, kept for as long as the function lives.

Most calls hold only arrays. ``jax.jit`` flattens these itself, in C++, so the first form that is
tried is compiled as the function is called. It declines, before the user's function is run, if an
argument may be a Python number, and ``jax.jit`` refuses what it cannot trace. Such calls are split
in Python, into arrays and a static rest (``jaxamp.trace.arguments``).
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import jax

from jaxamp.core import features, jax_compat, taxonomy
from jaxamp.core.adapters import adapter
from jaxamp.run.emit import compiled, emit, function_result, is_handled, jitted, plan_call
from jaxamp.run.settings import Settings, in_force
from jaxamp.trace.arguments import Call, Layout, Signature, jit_traces, refuse_held
from jaxamp.trace.static_arguments import Changed, hold
from jaxamp.trace.target import Target

if TYPE_CHECKING:
    from jaxamp.plan import Plan

NNX = "flax.nnx"
_MANY = 16  # traces of one call that differ in constants, before a warning
_NEVER = -1  # no version of the table of kinds


class _Declined(Exception):
    """Leaves a trace in which a call may hold more than arrays, before the function is run.

    Only an exception leaves ``jax.jit`` without a trace of it: a result that says so would be an
    equation without outputs in the jaxpr around it.
    """


class Runner:
    """The compiled forms of one function under one policy. Holds the function weakly.

    One form is kept for each tree structure and set of constants; it is a ``jax.jit`` of the
    rewritten function, whose own cache tells shapes, dtypes, weak types and shardings apart.
    A form is dropped when one of its weakly referenced constants dies.
    """

    def __init__(self, function: Callable[..., Any], settings: Settings) -> None:
        # Before any trace: primitives of core and features are entered in the table of kinds.
        importlib.import_module("jaxamp.run.rewriting")
        features.works()
        self.resolve = hold(function)  # returns the function
        self.settings = settings  # how it is rewritten
        self.companion: Any = None  # an object that an adapter keeps for as long as this lives
        self._layouts: dict[tuple[Any, ...], Layout] = {}
        self._traces: dict[Layout, tuple[int, Sequence[Hashable]]] = {}
        self._forms: dict[Hashable, Callable[..., Any]] = {}
        self._takes_arrays = True  # until a call has others: trying costs more than splitting
        self._fast: tuple[int, Callable[..., Any] | None] = (_NEVER, None)

    def __call__(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function with what `target` binds and the given arguments."""
        # A form for arrays alone has no place for what a target binds, and all share this Runner.
        is_fast = target.is_bare and not is_handled()
        version, form = self._fast if is_fast else (taxonomy.version, None)
        if version != taxonomy.version:
            form = self._renew(target.name)
        if form is not None:
            try:
                return function_result(form(*args, **kwargs))
            except Exception as error:
                if not self._is_declined(error, args, kwargs):
                    if isinstance(error, jax.errors.JaxRuntimeError):
                        self._note_advice(error, self.split(target, args, kwargs))
                    raise
        return self._call(target, args, kwargs)

    @jax_compat.boundary
    def _call(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.prepared(target, args, kwargs) as call:
            try:
                result = function_result(self.form(call)(*call.arrays))
            except Changed:  # the form holds an object that was equal to this call's
                self._forms.pop(_key(call), None)
                result = function_result(self.form(call)(*call.arrays))
            return call.finish(result)

    @contextmanager
    def prepared(
        self, target: Target, args: Any, kwargs: Any, *, abstract: bool = False
    ) -> Iterator[Call]:
        """Split a call; inside of the ``with`` block it can be traced and run."""
        call = self.split(target, args, kwargs, abstract=abstract)
        nnx = self._checked(call)
        try:
            if nnx is None:
                yield call
            else:
                with nnx.purified(self, target, args, kwargs, abstract=abstract) as pure:
                    yield pure
        except (jax.errors.JAXTypeError, ValueError) as error:
            _note_traced_numbers(error, call, call.traced_numbers())
            raise
        except jax.errors.JaxRuntimeError as error:
            self._note_advice(error, call)
            raise

    def advise(self, error: Exception, target: Target, args: Any, kwargs: Any) -> None:
        """Add a note to an error of a call that is looked at ahead of time, as `prepared` does."""
        call = self.split(target, args, kwargs, abstract=True)
        _note_traced_numbers(error, call, call.traced_numbers(all_traced=True))

    def check(self, target: Target, args: Any, kwargs: Any) -> None:
        """Raise for arguments that hold arrays where JAX does not look, before any work."""
        self._checked(self.split(target, args, kwargs, abstract=True))

    def _checked(self, call: Call) -> Any:
        """Return the adapter that a call needs, if it has no arguments that are refused."""
        nnx = _nnx_adapter(call)
        if not jax_compat.is_staging():
            refuse_held(call.name, [h for h in call.held() if not (nnx and nnx.is_object(h[1]))])
        return nnx

    def _note_advice(self, error: Exception, call: Call) -> None:
        """Add what features say to a compiler's error."""

        def plan() -> Plan:
            return plan_call(call.signature(), call.arrays, in_force(self.settings))[0]

        for advise in filter(None, (work.advise for work in features.works())):
            try:
                note = advise(error, plan)
            except Exception:  # the compiler's error is the one to be seen
                continue
            if note:
                error.add_note(note)

    def split(self, target: Target, args: Any, kwargs: Any, *, abstract: bool = False) -> Call:
        """Split a call that holds no objects whose state JAX cannot see. See `prepared`."""
        leaves, treedef = target.flatten(args, kwargs)
        key = treedef, jax_compat.is_staging()
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts.setdefault(key, Layout.of(treedef, staged=key[1]))
        if layout.objects:  # each time that they hold something else, it is another layout
            key = *key, layout.contents()
            layout = self._layouts.setdefault(key, Layout.of(treedef, staged=key[1]))
        arrays, keys = layout.split(leaves, target.bound, abstract=abstract)
        return Call(target.function, target.name, layout, leaves, arrays, keys)

    def clear(self) -> None:
        """Drop everything that is compiled."""
        self._forms.clear()
        self._traces.clear()
        self._fast = _NEVER, None

    def form(self, call: Call) -> Callable[..., Any]:
        """Return the compiled form for a call, to be called with its arrays."""
        if jax_compat.is_staging() and call.held():
            return self.compile(call.signature())  # arrays of the trace around it, this time
        key = _key(call)
        form = self._forms.get(key)
        if form is None:
            self._count(call)
            signature = call.signature(self._dropping(key))
            form = self._forms.setdefault(key, self.compile(signature))
        return form

    def compile(self, signature: Signature) -> Callable[..., Any]:
        """Make a compiled form; subclasses compile something else."""
        return compiled(signature, self.settings)

    def _renew(self, name: str) -> Callable[..., Any] | None:
        """Make the form for calls of arrays alone, for the present table of kinds."""
        if not self._takes_arrays:
            return None
        resolve, settings, version = self.resolve, self.settings, taxonomy.version

        def region(*args: Any, **kwargs: Any) -> Any:
            function = resolve()
            leaves, treedef = jax.tree.flatten((None, (), {}, args, kwargs))
            layout = Layout.of(treedef)
            call = Call(function, name, layout, leaves, leaves, (None,) * len(leaves))
            if layout.objects or any(map(_may_be_number, leaves)) or _nnx_adapter(call):
                raise _Declined
            return emit(call.signature(), leaves, settings)

        form = self._forms.setdefault(version, jitted(region, name, resolve()))  # threads share one
        self._fast = version, form
        return form

    def _is_declined(self, error: Exception, args: Any, kwargs: Any) -> bool:
        """Return whether a call holds more than arrays, so that the function has not been run."""
        leaves = jax.tree.leaves((args, kwargs))
        if all(map(jit_traces, leaves)) and not isinstance(error, _Declined):
            return False
        self._takes_arrays, self._fast = False, (_NEVER, None)
        self._forms.pop(taxonomy.version, None)
        return True

    def _count(self, call: Call) -> None:
        """Warn where the same call is traced again and again for new constants."""
        count, last = self._traces.get(call.layout, (0, call.keys))
        self._traces[call.layout] = count + 1, call.keys
        if count + 1 == _MANY and not jax_compat.is_staging():
            names = call.layout.names(call.function, call.leaves)
            pairs = zip(names, last, call.keys, strict=True)
            changed = ", ".join(name or "an argument" for name, old, new in pairs if old != new)
            changed = changed or "the table of operation kinds"
            warnings.warn(
                f"amp has traced {call.name} {_MANY} times because {changed} keeps changing and is "
                "a constant of the trace. Pass a number that changes as an array "
                "(jnp.asarray(step)), and make a function once, outside of the loop.",
                stacklevel=jax_compat.user_level(),
            )

    def _dropping(self, key: Hashable) -> Callable[[Any], None]:
        """Return a callback that drops a form when a weakly referenced constant of it dies."""
        self_ref = ref(self)

        def dropped(_: Any) -> None:
            runner = self_ref()
            if runner is not None:
                runner._forms.pop(key, None)

        return dropped


def _key(call: Call) -> Hashable:
    """Return the key of a call's form: a kind registered since may change the plan."""
    return *call.key, taxonomy.version, is_handled()


def _note_traced_numbers(error: Exception, call: Call, names: Sequence[str]) -> None:
    """Add a note to an error that may come from a traced Python number: what to declare static."""
    is_of_tracing = isinstance(error, jax.errors.JAXTypeError)
    if not is_of_tracing and not re.search("Non-hashable static|marked as static", str(error)):
        return
    keys = zip(call.layout.names(call.function), call.keys, strict=True)
    traced = {re.split(r"[.\[]", name)[0] for name, key in keys if key is None}
    blamed = re.findall(r"value of the argument (\w+)", str(error))
    is_own = f"function {call.name} at" in str(error)  # and not one that it calls
    named = [n for n in blamed if n in names or (is_own and n not in traced)] or names
    if named:
        several = len(set(named)) > 1
        declared = repr(tuple(named) if several else named[0])
        them, arguments = ("them", "these arguments") if several else ("it", "the argument")
        traces = is_jitted(_innermost(call.function))
        who, alike = ("jax.jit", "") if traces else ("amp", ", as jax.jit does")
        error.add_note(
            f"{who} traces the Python numbers in {', '.join(named)}{alike}. If "
            f"they configure {call.name}, declare {arguments} static: {who}({call.name}, "
            f"static_argnames={declared}), or bind {them} by functools.partial before {who}."
        )


def is_jitted(fn: Any) -> bool:
    """Return whether a function is one of ``jax.jit``, which traces its arguments itself."""
    has = partial(hasattr, fn)
    return has("lower") and has("__wrapped__") and not hasattr(type(fn), "amp_parts")


def _innermost(fn: Any) -> Any:
    """Return the function inside of ``functools.partial``."""
    while isinstance(fn, partial):
        fn = fn.func
    return fn


def _may_be_number(leaf: Any) -> bool:
    """Return whether ``jax.jit`` would give a Python number the same aval."""
    aval = jax.typeof(leaf)
    if getattr(aval, "shape", None) != ():
        return False
    return getattr(aval, "weak_type", False) or aval.dtype == bool


def _nnx_adapter(call: Call) -> Any:
    """Return the adapter for a call that holds flax nnx objects; ``None`` if it holds none."""
    found = adapter(NNX)
    return found if found is not None and found.is_needed(call) else None


class Runners:
    """Runners by the identity of their function; an entry goes when its function dies."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Any, dict[Settings, Runner]]] = {}

    def get(self, function: Callable[..., Any], settings: Settings) -> Runner:
        """Return the Runner of `function`, the same one for as long as `function` lives."""
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
