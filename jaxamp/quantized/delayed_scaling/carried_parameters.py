"""Parameters that a step quantizes where it makes them, for the products of the step after it.

They are those that a step takes first and returns first. The kernel that updates a parameter has it
at hand in float32 and writes its 8 bits as well. They are part of the history; the next step reads
them for its products, and the float32 values only where it updates these. Their scale is that of
the history that the step took, so that nothing has to be found before they are written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxamp.core.formats import CastConfig
from jaxamp.errors import TrainingError, shown
from jaxamp.quantized.delayed_scaling.history import (
    BodyHistory,
    check,
    known_scale,
    largest,
    rounded,
    row_maxima,
    widened,
)
from jaxamp.quantized.lowp import ScaledArray
from jaxamp.quantized.lowp.scaled_array import stored_scale
from jaxamp.run.runner import NNX
from jaxamp.trace.arguments import Signature

VALUES, SCALE = "values", "scale"  # of a parameter in the history; a scale for each slice


@dataclass(frozen=True, slots=True)
class Source:
    """A parameter, or the slice of one that an iteration of a loop reads."""

    array: Any  # held, so that its id stays its own
    argument: int  # the position of the parameter among the arrays of the call
    loops: tuple[int, ...]  # the iterations of the loops that slice it, from the outermost
    held: Mapping[str, Any] | None  # its part of the history, sliced like it

    @property
    def stacks(self) -> Mapping[str, Any] | None:
        """The part held for iterations of one more loop; ``None`` if one scale is for all."""
        is_stack = self.held is not None and jnp.ndim(self.held[SCALE]) > 0
        return self.held if is_stack else None

    def sliced(self, array: Any, length: int, held: Mapping[str, Any] | None) -> Source:
        """Return the slice that an iteration of a loop reads, and what of `stacks` is held."""
        return Source(array, self.argument, (*self.loops, length), held)


class _Reading(NamedTuple):
    """The form in which the products of a program read a parameter."""

    cast: CastConfig
    dtype: np.dtype
    loops: tuple[int, ...]


class CarriedParameters:
    """The parameters of a program in 8 bits: those that it takes, and those of the next step.

    A parameter has one quantization, the first that a product asks for. Others, with another format
    or in other loops, are made of the parameter at hand, as without carrying.
    """

    def __init__(
        self,
        arrays: Sequence[Any],
        parameters: Iterable[int],
        before: Mapping[str, Any] | None,
        columns: BodyHistory,
    ) -> None:
        """Start a step; `before` is the carried part of the history, if there is one."""
        self._arrays, self._before, self._columns = arrays, before, columns
        self._readings: dict[int, tuple[_Reading, int]] = {}  # with the first column of each
        self._sources: dict[int, Source] = {}
        for argument in parameters:
            held = None if before is None else before.get(str(argument))
            check(held is None or _is_of(held, arrays[argument]))
            self.note(Source(arrays[argument], argument, (), held))

    def note(self, source: Source) -> None:
        """Register an array as a parameter or the slice of one."""
        self._sources[id(source.array)] = source

    def source(self, x: Any) -> Source | None:
        """Return of which parameter an array is the whole or a slice."""
        return self._sources.get(id(x))

    def read(self, x: Any, cast: CastConfig, dtype: Any) -> ScaledArray | None:
        """Return a parameter in 8 bits; ``None`` for another array, or in another quantization."""
        source = self.source(x)
        if source is None:
            return None
        reading = _Reading(cast, np.dtype(dtype), source.loops)
        if source.argument not in self._readings:
            first = self._columns.reserve(math.prod(source.loops))
            self._readings[source.argument] = reading, first
        if self._readings[source.argument][0] != reading:
            return None
        if self._before is None:
            return _of_itself(x, reading)
        held = source.held or {}
        check(held.keys() == {VALUES, SCALE})
        values, scale = held[VALUES], held[SCALE]
        check(values.dtype == cast.out_dtype.dtype and scale.ndim == 0)
        return ScaledArray(values, stored_scale(scale, cast), cast, reading.dtype)

    def after(self, new: Mapping[int, Any] | None) -> dict[str, Any]:
        """Return the carried part of the history for the next step, and enter the magnitudes.

        Of `new` parameters, by argument, those that are the very same keep their 8 bits.
        """
        check(self._before is None or self._before.keys() == set(map(str, self._readings)))
        made: dict[str, Any] = {}
        for argument, (reading, first) in self._readings.items():
            old = self._arrays[argument]
            # XLA finds magnitudes in the kernel of an optimizer of what this reads, not of what it
            # makes: JAX 0.10.2, ``python -m benchmarks.fp8_step --target h200``.
            amax = self._columns.enter(first, _rows(old, reading))
            x = old if new is None else new[argument]
            held = self._sources[id(old)].held
            is_kept = new is not None and x is old and held is not None
            made[str(argument)] = held if is_kept else _quantized(x, amax, reading)
        return made


def _rows(x: Any, reading: _Reading) -> jax.Array:
    """Return the maxima of a parameter's rows, or of those of each slice."""
    maxima = row_maxima(widened(x, reading.dtype))
    return maxima.reshape(math.prod(reading.loops), -1)


def _quantized(x: Any, amax: jax.Array, reading: _Reading) -> dict[str, Any]:
    """Return the part of a history for a parameter, given a magnitude for each slice."""
    wide = widened(x, reading.dtype)
    scale = known_scale(amax, reading.cast)
    spread = scale.reshape(reading.loops + (1,) * (x.ndim - len(reading.loops)))
    values = rounded(wide, spread, reading.cast).values
    return {VALUES: values, SCALE: scale.reshape(reading.loops)}


def _of_itself(x: Any, reading: _Reading) -> ScaledArray:
    """Quantize a parameter by its own magnitude, as before the first step."""
    wide = widened(x, reading.dtype)
    amax = largest(row_maxima(wide).reshape(-1))
    made = rounded(wide, known_scale(amax, reading.cast), reading.cast)
    return replace(made, dtype=reading.dtype)


def _is_of(held: Any, parameter: Any) -> bool:
    """Return whether a part of a history has the form of a parameter's."""
    if not isinstance(held, Mapping) or held.keys() != {VALUES, SCALE}:
        return False
    shape, stack = jnp.shape(parameter), jnp.shape(held[SCALE])
    has_dtype = jnp.result_type(held[SCALE]) == np.float32
    return has_dtype and jnp.shape(held[VALUES]) == shape and shape[: len(stack)] == stack


Shapes = Sequence[jax.ShapeDtypeStruct]
_SHOWN = 3  # leaves in a message


def returned_parameters(
    signature: Signature, given: Shapes, returned: Shapes, result: Any
) -> dict[int, int]:
    """Return per array of a step's first argument its position, and that of its new value.

    `given` and `returned` are arrays, objects of their own each; `result` is made of the latter.

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
        if source is None or target is None or shown(old) != shown(new):
            name = "a constant" if source is None else names[source]
            raise _error(f"{name} is {shown(old)}, and {shown(new)} is returned in its place")
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


def _error(found: str) -> TrainingError:
    return TrainingError(
        "With scaling={'carried': True} a step returns its parameters first, as it takes them "
        "first: step(params, ...) -> (params, ...), or a state that holds them, of the same "
        f"structure, shapes and dtypes. Here {found}. Return the new parameters in the place of "
        "the old ones, or leave 'carried' out."
    )
