"""Values while a jaxpr is rewritten, and the casts between their precisions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal, Var
from jax.extend.core.primitives import convert_element_type_p

from jaxamp import _compat
from jaxamp.formats import Precision


class Environment:
    """The values of a jaxpr's variables, each with the casts made of it so far."""

    def __init__(self) -> None:
        self._values: dict[Var, Any] = {}
        self._casts: dict[tuple[Var, Precision], Any] = {}

    def write(
        self,
        variables: Iterable[Var],
        values: Iterable[Any],
        precisions: Iterable[Precision | None] | None = None,
    ) -> None:
        """Stores values, each in its precision where one is given."""
        if precisions is None:
            self._values.update(zip(variables, values, strict=True))
            return
        for var, value, precision in zip(variables, values, precisions, strict=True):
            if not isinstance(var, _compat.DropVar):
                self._values[var] = cast(value, precision)

    def read(
        self,
        atom: Any,
        precision: Precision | None,
        fresh: bool = False,
        copy: Precision | None = None,
    ) -> Any:
        """A value in a precision.

        Args:
          atom: what to read.
          precision: what to read it in; ``None`` as it is.
          fresh: whether the cast must not be shared with other readers.
          copy: precision of the stored copy to read, if it is not the value itself.
        """
        if isinstance(atom, Literal):
            return _cast_literal(atom, precision)
        if copy is not None and copy is not precision:
            return cast(self.read(atom, copy), precision)
        value = self._values[atom]
        if precision is None or _has(value, precision):
            return value
        if fresh:
            return cast(value, precision)
        key = atom, precision
        if key not in self._casts:
            self._casts[key] = cast(value, precision)
        return self._casts[key]

    def read_results(
        self, atoms: Sequence[Any], precisions: Sequence[Precision | None]
    ) -> list[Any]:
        """The results of a jaxpr, with the weak types that it declares."""
        return [
            _as_declared(self.read(a, p), a.aval, p) for a, p in zip(atoms, precisions, strict=True)
        ]


def cast(value: Any, precision: Precision | None) -> Any:
    """The value in a precision; ``None`` and the precision that it has leave it as it is."""
    if precision is None or _has(value, precision):
        return value
    return _convert(value, precision.dtype, weak_type=False)


def _has(value: Any, precision: Precision) -> bool:
    return value.dtype == precision.dtype if hasattr(value, "dtype") else precision is Precision.F32


def _convert(value: Any, dtype: np.dtype, *, weak_type: bool) -> Any:
    return convert_element_type_p.bind(value, new_dtype=dtype, weak_type=weak_type, sharding=None)


def _cast_literal(literal: Any, precision: Precision | None) -> Any:
    value = _compat.literal_value(literal)
    if precision is None or literal.aval.dtype == precision.dtype:
        return value
    return np.asarray(value, precision.dtype)


def _as_declared(value: Any, aval: Any, precision: Precision | None) -> Any:
    """Restores a weak type that a cast has lost."""
    declared = getattr(aval, "weak_type", False)
    if precision is None or precision.dtype != aval.dtype:
        return value
    if jax.typeof(value).weak_type == declared:
        return value
    return _convert(value, aval.dtype, weak_type=declared)
