"""The split of a call, or of any tree, into arrays that are traced and a static rest.

* jax and numpy arrays, numpy scalars, tracers, keys and Refs are traced;
* Python ``float`` and ``complex`` arguments are traced (weakly typed, as ``jax.jit`` does), so that
  a new learning rate costs no new trace;
* ``bool``, ``int``, ``str``, ``None``, functions and any other object are static, because programs
  use them as switches, sizes and axes;
* inside a container class the container's own convention holds: every number that is no array is
  static in an equinox module, and is traced in any other registered class;
* what is bound beforehand (``functools.partial``, ``self``) keeps its Python numbers static,
  whatever container holds them;
* while JAX stages a program around the call, as in ``jax.jit``, all Python numbers are static: what
  was to be traced is a tracer already;
* an argument that is declared static is one value, whatever containers it is made of.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.extend.core import valid_jaxtype

from jaxamp.errors import ArgumentError, shown
from jaxamp.trace.contents import ARRAY_TYPES, Held, content, is_array, objects_in, place_of
from jaxamp.trace.static_arguments import Constants, constant_key, hold, identity_key, value_of

Numbers = tuple[type, ...]
AS_ARGUMENT: Numbers = (float, complex)
_AS_JIT: Numbers = (bool, int, float, complex)
_STATIC: Numbers = ()
_BUILTIN_NODES = (tuple, list, dict, type(None))


def jit_traces(leaf: Any) -> bool:
    """Return whether ``jax.jit`` traces `leaf`, as an array and not as a Python number."""
    return not isinstance(leaf, _AS_JIT) and valid_jaxtype(leaf) if not is_array(leaf) else True


def is_constant(argument: Any) -> bool:
    """Return whether a whole argument is a constant of the call: a bool, an int, a word."""
    if argument is None or isinstance(argument, (*AS_ARGUMENT, jax.ShapeDtypeStruct)):
        return False
    return jax.tree_util.all_leaves([argument]) and not is_array(argument)


class Static:
    """A tree without its arrays: the static part of a call, or of what a function returns.

    As auxiliary data of a compiled function's output tree, it comes back with the arrays of the
    very form that has run. Compared by identity.
    """

    __slots__ = ("constants", "is_all_arrays", "treedef")

    def __init__(self, treedef: Any, constants: Constants) -> None:
        self.treedef = treedef
        self.constants = constants  # per leaf ``None`` for an array, else what returns the constant
        self.is_all_arrays = all(constant is None for constant in constants)

    def join(self, arrays: Sequence[Any]) -> Any:
        """Build the tree again."""
        if self.is_all_arrays:
            return jax.tree.unflatten(self.treedef, arrays)
        values = iter(arrays)
        leaves = [next(values) if constant is None else constant() for constant in self.constants]
        return jax.tree.unflatten(self.treedef, leaves)

    def paths(self) -> list[str]:
        """Return the path of each array, e.g. ``['w'][0]``; that of a lone one is empty."""
        leaves = [object() if constant is None else None for constant in self.constants]
        tree = jax.tree.unflatten(self.treedef, leaves)
        paths = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)[0]
        return [jax.tree_util.keystr(path) for path, leaf in paths if leaf is not None]


def split(
    tree: Any, *, abstract: bool = False, numbers: Numbers = _STATIC
) -> tuple[list[Any], Static]:
    """Split any tree into its arrays, numbers of some types among them, and the static rest.

    >>> arrays, rest = split({"w": jax.numpy.ones(2), "mode": "relu"})
    >>> rest.join([a + 1 for a in arrays])
    {'mode': 'relu', 'w': Array([2., 2.], dtype=float32)}
    """
    leaves, treedef = jax.tree.flatten(tree)
    traced = [
        type(leaf) in numbers or is_array(leaf) or (abstract and _is_shape(leaf)) for leaf in leaves
    ]
    pairs = list(zip(leaves, traced, strict=True))
    constants = [None if is_traced else value_of(leaf) for leaf, is_traced in pairs]
    return [leaf for leaf, is_traced in pairs if is_traced], Static(treedef, constants)


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Treatment of a call's leaves, for one tree structure. Compared by identity."""

    treedef: Any  # structure of ``(owner, bound args, bound kwargs, args, kwargs)``
    numbers: tuple[Numbers, ...]  # for every leaf the types of Python numbers that are traced there
    owned: bool  # whether the first leaf is an owner that is no container, held by identity
    bound: int  # how many leaves, the first ones, are bound to the function and not given to it
    nodes: frozenset[type]  # the classes of the containers
    # What static fields of the containers hold that has no ``==``, and may change.
    objects: Sequence[Any]

    @classmethod
    def of(cls, treedef: Any, *, staged: bool = False) -> Layout:
        """Return the layout of a call; no number of one that JAX stages is traced."""
        owner, bound_args, bound_kwargs, args, kwargs = treedef.children()
        numbers: list[Numbers] = []
        nodes: set[type] = set()
        fields: list[Any] = []
        for part in (owner, bound_args, bound_kwargs):
            _conventions(part, _STATIC, numbers, nodes, fields)
        bound = len(numbers)
        numbers = [_STATIC] * bound
        for part in (args, kwargs):
            _conventions(part, AS_ARGUMENT, numbers, nodes, fields)
        if staged:
            numbers = [_STATIC] * len(numbers)
        owned, found = owner.node_data() is None, tuple(objects_in(fields))
        return cls(treedef, tuple(numbers), owned, bound, frozenset(nodes), found)

    def contents(self) -> tuple[Hashable, ...]:
        """Return a key of what the objects hold now."""
        return tuple(content(value, captured=True) for value in self.objects)

    def split(
        self, leaves: Sequence[Any], bound: dict[int, Hashable], *, abstract: bool = False
    ) -> tuple[list[Any], tuple[Hashable, ...]]:
        """Split `leaves` into those that are traced, and keys of the others.

        `bound` has keys of what is bound to the function, by identity: they are read once. With
        `abstract`, a ``jax.ShapeDtypeStruct`` stands for an array.

        Returns:
          The traced leaves, and one key per leaf: ``None`` for a traced one, otherwise something
          hashable that equals another call's key exactly when the constant is the same. It is
          ``Held`` for a constant that has none, as it holds arrays.
        """
        if ARRAY_TYPES.issuperset(map(type, leaves)):
            return list(leaves), (None,) * len(leaves)
        given = leaves[self.bound :], self.numbers[self.bound :]
        as_tuple: type[tuple[Hashable, ...]] = tuple
        try:
            keys = _keys(*given, constant_key, abstract)
        except Held:
            as_tuple, keys = _HeldKeys, _keys(*given, _key_or_held, abstract)
        if self.bound:
            of_bound = partial(_bound_key, bound=bound)
            keys = _keys(leaves[: self.bound], self.numbers, of_bound, abstract) + keys
            if self.owned and keys[0] is not None:
                keys[0] = identity_key(leaves[0], keys[0])
        traced = [leaf for leaf, key in zip(leaves, keys, strict=True) if key is None]
        return traced, as_tuple(keys)

    def names(self, function: Callable[..., Any], leaves: Sequence[Any] | None = None) -> list[str]:
        """Return the name of each leaf in the words of `function`, e.g. ``params['w']``.

        `leaves` of a call are for containers that take nothing else.
        """
        parameters = parameters_of(function)
        try:
            call = jax.tree.unflatten(self.treedef, leaves or [object()] * len(self.numbers))
        except Exception:  # a container that insists on arrays; names only serve messages
            return [""] * len(self.numbers)
        before = {1: int(call[0] is not None)}
        before[3] = before[1] + len(call[1])
        paths = jax.tree_util.tree_flatten_with_path(call)[0]
        return [_leaf_name(path, parameters, before) for path, _ in paths]


class _HeldKeys(tuple[Hashable, ...]):
    """Keys of a call, one of which is ``Held``."""

    __slots__ = ()


class Signature(NamedTuple):
    """A call without its arrays: what ``jax.jit`` would call its static part."""

    # Returns the function, which a compiled form holds weakly.
    resolve: Callable[[], Callable[..., Any]]
    layout: Layout  # how the call's leaves are treated
    rest: Static  # the static part of ``(owner, bound args, bound kwargs, args, kwargs)``
    name: str  # the function's name, for messages

    def call(self, arrays: Sequence[Any]) -> Any:
        """Call the function on other arrays."""
        owner, bound_args, bound_kwargs, args, kwargs = self.rest.join(arrays)
        selves = () if owner is None else (owner,)
        return self.resolve()(*selves, *bound_args, *args, **{**bound_kwargs, **kwargs})

    def names(self) -> list[str]:
        """Return the names of the arrays in the words of the function."""
        named = zip(self.layout.names(self.resolve()), self.rest.constants, strict=True)
        return [name for name, constant in named if constant is None]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call taken apart."""

    function: Callable[..., Any]  # takes the owner, bound and given arguments in that order
    name: str
    layout: Layout  # how the leaves are treated
    leaves: Sequence[Any]  # all leaves
    arrays: list[Any]  # the traced ones
    keys: tuple[Hashable, ...]  # per leaf ``None`` where it is traced, else the key of a constant
    # Makes what the caller gets of what the function returns.
    finish: Callable[[Any], Any] = lambda result: result

    def traced_numbers(self, *, all_traced: bool = False) -> list[str]:
        """Return the names of traced numbers; with `all_traced`, as a ``jax.jit`` around would."""
        names = self.layout.names(self.function)
        kinds = (*_AS_JIT, str) if all_traced else _AS_JIT
        traced = [
            name
            for name, leaf, key in zip(names, self.leaves, self.keys, strict=True)
            if (all_traced or key is None) and isinstance(leaf, kinds)
        ]
        return list(dict.fromkeys(re.split(r"[.\[]", name)[0] for name in traced))

    def held(self) -> list[tuple[str, Any, Held]]:
        """Return name and value of each constant that holds arrays, and what it holds."""
        if type(self.keys) is not _HeldKeys:
            return []
        names = self.layout.names(self.function, self.leaves)
        named = zip(names, self.leaves, self.keys, strict=True)
        return [(name, leaf, key) for name, leaf, key in named if type(key) is Held]

    @property
    def key(self) -> tuple[Layout, tuple[Hashable, ...]]:
        """Tells calls apart that need traces of their own, whatever their arrays."""
        return self.layout, self.keys

    def signature(self, dropped: Callable[[Any], None] | None = None) -> Signature:
        """Return the call without its arrays.

        If `dropped` is given, function and constants are held weakly, and it is called when one
        that is known by identity dies.
        """
        function = self.function
        resolve = (lambda: function) if dropped is None else hold(function)
        pairs = zip(self.leaves, self.keys, strict=True)
        constants = [
            None if k is None else value_of(leaf) if dropped is None else hold(leaf, k, dropped)
            for leaf, k in pairs
        ]
        return Signature(resolve, self.layout, Static(self.layout.treedef, constants), self.name)


def _conventions(
    treedef: Any, numbers: Numbers, out: list[Numbers], nodes: set[type], fields: list[Any]
) -> None:
    """Append, for every leaf of `treedef`, the types of numbers that are traced there."""
    data = treedef.node_data()
    if data is None:  # a leaf
        out.append(numbers)
        return
    nodes.add(data[0])
    fields.append(data[1])
    for child in treedef.children():
        _conventions(child, _inside(data[0], numbers), out, nodes, fields)


def _inside(node: type, numbers: Numbers) -> Numbers:
    equinox = sys.modules.get("equinox")
    if equinox is not None and issubclass(node, equinox.Module):
        return _STATIC
    return numbers if issubclass(node, _BUILTIN_NODES) else _AS_JIT


def refuse_held(name: str, held: Sequence[tuple[str, Any, Held]]) -> None:
    """Raise for the first argument, by name, that holds arrays where JAX does not look for them."""
    if not held:
        return
    argument, leaf, (part,) = held[0][0], held[0][1], held[0][2].args
    kind, place = type(leaf).__qualname__, f"{argument}{place_of(part, leaf)}"
    if not is_array(part):
        raise ArgumentError(
            f"The argument {argument} of {name} holds an iterator, {place} of class "
            f"{type(part).__qualname__}. What {name} takes from it would be taken once, when "
            f"{name} is traced, and be the same in all calls. Pass a list of its items."
        )
    library = (
        " With a layer of a library, put amp around what takes its arrays as arguments: net.apply, "
        "model.stateless_call, a train step."
    )
    raise ArgumentError(
        f"The argument {argument} of {name}, of class {kind}, is not a pytree that JAX knows, and "
        f"holds an array: {place}, {shown(part)}. The array would be a constant of the trace, and "
        "another in its place would not be seen. Register the class as a pytree, with "
        "jax.tree_util.register_dataclass or register_pytree_node_class; or pass its arrays as "
        "arguments of their own; or, where they never change, capture the object in a closure, "
        "functools.partial(function, object) or amp(object.method), which are read when they are "
        f"traced.{library if argument == 'self' else ''}"
    )


def _keys(
    leaves: Sequence[Any],
    numbers: Sequence[Numbers],
    key: Callable[[Any], Hashable],
    abstract: bool,
) -> list[Hashable]:
    """Return ``None`` for each leaf that is traced, and the key of each other one."""
    return [
        None
        if (kind := type(leaf)) in ARRAY_TYPES
        or kind in traced
        or is_array(leaf)
        or (abstract and _is_shape(leaf))
        else key(leaf)
        for leaf, traced in zip(leaves, numbers, strict=False)
    ]


def _key_or_held(leaf: Any) -> Hashable:
    try:
        return constant_key(leaf)
    except Held as held:
        return held.with_traceback(None)  # which holds the frames of this call


def _bound_key(leaf: Any, bound: dict[int, Hashable]) -> Hashable:
    """Return the key of what is bound to a function, which is read when that is first called."""
    if id(leaf) not in bound:
        bound[id(leaf)] = constant_key(leaf, captured=True)
    return bound[id(leaf)]


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def parameters_of(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's parameters; none of a builtin that does not tell them."""
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def _leaf_name(path: Any, parameters: Sequence[str], before: Mapping[int, int]) -> str:
    part: int = path[0].idx
    if part == 0:
        return f"self{jax.tree_util.keystr(path[1:])}"
    if part in before:
        place = path[1].idx + before[part]
        name = parameters[place] if place < len(parameters) else f"args[{place}]"
    else:
        name = path[1].key
    return f"{name}{jax.tree_util.keystr(path[2:])}"
