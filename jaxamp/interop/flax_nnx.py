"""flax nnx: modules are objects with state; what a call changes in them, it changes under amp too.

A call that has nnx objects among its arguments is made pure: its objects are split into structure
and arrays, put together again inside the trace, and split again after the function has run. The
caller's own objects are then updated in place, new and removed attributes included. Variables of
an outer trace cannot be: a function that leaves them as they are may read them, others are refused.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
from flax import nnx
from flax.errors import TraceContextError

from jaxamp.core import jax_compat
from jaxamp.run.amp import apply
from jaxamp.run.runner import Runner
from jaxamp.run.settings import Settings
from jaxamp.trace.arguments import Call
from jaxamp.trace.target import Target

_OBJECTS = (nnx.Pytree, nnx.Variable)
_NODES: dict[frozenset[type], bool] = {}  # whether these containers are or hold nnx objects
_CLASSES: dict[tuple[type, Settings], type] = {}


def wrap(fn: Any, settings: Settings) -> Any:
    """Wrap an nnx module in mixed precision, sharing its state; ``None`` if `fn` is none.

    The result is an object of a subclass of `fn`'s class with the very same attributes, so state,
    paths, optimizers and checkpoints fit both.

    >>> import jax.numpy as jnp, jaxamp
    >>> linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    >>> amped = jaxamp.amp(linear, "mixed_f16")
    >>> amped.kernel is linear.kernel, amped(jnp.ones((1, 3))).shape
    (True, (1, 2))
    """
    if not isinstance(fn, nnx.Pytree):
        return None
    return _seen_as(_amped_class(type(fn), settings), fn)


def is_needed(call: Call) -> bool:
    """Return whether a call has nnx objects among its arguments, as containers or as constants."""
    nodes = call.layout.nodes
    if nodes not in _NODES:
        _NODES[nodes] = any(issubclass(node, _OBJECTS) for node in nodes)
    pairs = zip(call.leaves, call.keys, strict=True)
    return _NODES[nodes] or any(key is not None and is_object(leaf) for leaf, key in pairs)


@contextmanager
def purified(
    runner: Runner, target: Target, args: Any, kwargs: Any, *, abstract: bool
) -> Iterator[Call]:
    """Split a call on nnx objects as one of trees of arrays; it is finished by updating them."""
    if runner.companion is None:
        runner.companion = _Pure(runner.resolve)
    pure: _Pure = runner.companion
    with nnx.update_context(pure):
        given = target.owner, target.args, target.kwargs, args, kwargs
        *bound, args, kwargs = nnx.to_tree(given, ctxtag=pure)
        trees = Target(pure.function, None, tuple(bound), {}, target.name, bound=target.bound)
        call = runner.split(trees, (args, kwargs), {}, abstract=abstract)
        yield replace(call, finish=functools.partial(pure.finish, given, target.name))


class _Pure:
    """The pure form of a function: trees of arrays in and out, no objects."""

    def __init__(self, resolve: Callable[[], Callable[..., Any]]) -> None:
        def function(*trees: Any) -> Any:
            call = nnx.from_tree(trees, is_inner=True, ctxtag=self)
            objects, variables = _objects(call), _variables(call)
            structure, before = nnx.graphdef(objects), _values(variables)
            owner, bound_args, bound_kwargs, args, kwargs = call
            selves = () if owner is None else (owner,)
            result = resolve()(*selves, *bound_args, *args, **{**bound_kwargs, **kwargs})
            is_new = bool(_objects(result)) or structure != nnx.graphdef(objects)
            now = zip(_values(variables), before, strict=True)
            written = [is_new or new is not old for new, old in now]
            return nnx.to_tree((objects, result), ctxtag=self), written

        self.function = function

    def finish(self, given: Any, name: str, returned: Any) -> Any:
        """Update the caller's objects, and return what the function did."""
        objects_and_result, written = returned
        variables = _variables(given) if jax_compat.is_tracing() else []
        if all(v._can_update for v in variables):
            return nnx.from_tree(objects_and_result, is_inner=False, ctxtag=self)[1]
        changed = list(itertools.compress(variables, written))
        if fixed := [type(v).__name__ for v in changed if not v._can_update]:
            raise _refusal(name, fixed)
        objects, result = nnx.from_tree(objects_and_result)
        values = itertools.compress(_values(_variables(objects)), written)
        for variable, value in zip(changed, values, strict=True):
            variable.set_raw_value(value)
        return result


def is_object(x: Any) -> bool:
    """Return whether `x` is an object of nnx."""
    return isinstance(x, _OBJECTS)


def _objects(tree: Any) -> list[Any]:
    """Return the nnx objects in `tree`, outermost ones only."""
    return [x for x in jax.tree.leaves(tree, is_leaf=is_object) if is_object(x)]


def _variables(tree: Any) -> list[Any]:
    """Return the nnx variables in `tree`, each once."""
    return [v for _, v in nnx.iter_graph(tree) if isinstance(v, nnx.Variable)]


def _values(variables: Sequence[Any]) -> list[Any]:
    return [v.get_raw_value() for v in variables]


def _refusal(name: str, classes: Sequence[str]) -> TraceContextError:
    return TraceContextError(
        f"{name} updates or returns nnx objects, and these were made outside of the function that "
        f"JAX is tracing ({', '.join(dict.fromkeys(classes))}): they cannot be written from here. "
        "Pass them as arguments, through nnx's own transforms: nnx.jit(amp(f))(module, x)."
    )


def _seen_as(cls: type, module: Any) -> Any:
    """Return `module` as an object of another class: the attributes are shared, not copied."""
    view = object.__new__(cls)
    object.__setattr__(view, "__dict__", module.__dict__)
    return view


def _amped_class(cls: type, settings: Settings) -> type:
    """Return the subclass of `cls` whose public methods run in mixed precision."""
    amped = _CLASSES.get((cls, settings))
    if amped is None:
        body: dict[str, Any] = {
            name: _amped_method(cls, name, settings) for name in _public_methods(cls)
        }
        body["__module__"] = cls.__module__
        body["amp_parts"] = lambda self: (_seen_as(cls, self), settings)
        body["__reduce_ex__"] = lambda self, _: (wrap, (_seen_as(cls, self), settings))
        amped = types.new_class(f"Amp{cls.__name__}", (cls,), exec_body=lambda d: d.update(body))
        amped = _CLASSES.setdefault((cls, settings), amped)
    return amped


def _amped_method(cls: type, name: str, settings: Settings) -> Callable[..., Any]:
    method = getattr(cls, name)

    @functools.wraps(method)
    def amped(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Seen as its own class, so that inside the method other methods are plain.
        plain = self if type(self) is cls else _seen_as(cls, self)
        return apply(types.MethodType(method, plain), settings, args, kwargs)

    return amped


def _public_methods(cls: type) -> Iterator[str]:
    """Return the methods that `cls` and its bases define, below nnx's own base classes, by name."""
    for base in cls.__mro__:
        if base.__module__.startswith("flax.nnx.") and base in nnx.Module.__mro__:
            return
        for name, value in vars(base).items():
            if isinstance(value, types.FunctionType) and (name == "__call__" or name[0] != "_"):
                yield name
