"""The parameters that a step takes first and returns first, with their new values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxamp.errors import TrainingError
from jaxamp.run.runner import NNX
from jaxamp.trace.arguments import Signature

Shapes = Sequence[jax.ShapeDtypeStruct]
_SHOWN = 3  # leaves in a message


def returned_parameters(
    signature: Signature, given: Shapes, returned: Shapes, result: Any
) -> dict[int, int]:
    """Find the new values of a step's first argument among its results.

    Args:
      signature: the call of the step.
      given: its arrays, each an object of its own.
      returned: the arrays that it returns, each an object of its own.
      result: what it returns, made of `returned`.

    Returns:
      For each array of the first argument its position among all arrays, and the position of its
      new value among the results.

    Raises:
      TrainingError: the step does not return first what it takes first.
    """
    *_, args, _ = signature.rest.join(given)
    if not args:
        raise _error("the first argument was passed by name")
    if any(node.__module__.startswith(NNX) for node in signature.layout.nodes):
        raise _error(
            "it takes objects of flax nnx, which are changed in place; nnx.to_pure_dict(state) has "
            "their arrays in a dict, and nnx.replace_by_pure_dict(state, new) puts them back"
        )
    structure = jax.tree.structure(args[0])
    firsts = list(_firsts(result))
    candidates = [new for new in firsts if jax.tree.structure(new) == structure]
    if not candidates:
        raise _error(f"it takes {_leaves(args[0])} first and returns {_leaves(firsts[-1])} first")
    sources, targets = ({id(x): i for i, x in enumerate(xs)} for xs in (given, returned))
    names = signature.names()
    pairs = {}
    for old, new in zip(*map(jax.tree.leaves, (args[0], candidates[0])), strict=True):
        source, target = sources.get(id(old)), targets.get(id(new))
        if source is None and target is None:
            continue  # constants
        if source is None or target is None or _form(old) != _form(new):
            name = "a constant" if source is None else names[source]
            raise _error(f"{name} is {_form(old)}, and {_form(new)} is returned in its place")
        pairs[source] = target
    return pairs


def _firsts(result: Any) -> Iterator[Any]:
    """Yield a result, what is first in it, what is first in that, and so on."""
    yield result
    while isinstance(result, tuple | list) and result:
        result = result[0]
        yield result


def _leaves(tree: Any) -> str:
    """Return the class of a tree and where its first leaves are."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    if paths == [""]:
        return "an array"
    more = ", ..." if len(paths) > _SHOWN else ""
    return f"a {type(tree).__name__} of {len(paths)} ({', '.join(paths[:_SHOWN])}{more})"


def _form(leaf: Any) -> str:
    """Return dtype and shape of an array."""
    is_array = isinstance(leaf, jax.ShapeDtypeStruct)
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" if is_array else repr(leaf)


def _error(found: str) -> TrainingError:
    return TrainingError(
        "With scaling={'carried': True} a step returns its parameters first, as it takes them "
        "first: step(params, ...) -> (params, ...), or a state that holds them, of the same "
        f"structure, shapes and dtypes. Here {found}. Return the new parameters in the place of "
        "the old ones, or leave 'carried' out."
    )
