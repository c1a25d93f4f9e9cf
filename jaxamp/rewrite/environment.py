"""The values of a jaxpr that is rewritten, and casts between their precisions.

JAX adds up the cotangents of a value's readers in the value's own dtype, and so does the transpose
of a loop for what is the same in every iteration. In bfloat16 such a sum is rounded at each step,
and stagnates once a step adds less than 1/256 of it: `differentiated_as` has it added in float32.

See: https://github.com/jax-ml/jax/issues/18931 for dtypes of cotangents; Higham, "The accuracy of
floating point summation", SIAM J. Sci. Comput. 14, 1993.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import repeat
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal, Var

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision
from jaxamp.plan import OperandRead, Reading
from jaxamp.rewrite.emitter import PLAIN, Emitter


@jax.custom_jvp
def differentiated_as(narrow: Any, wide: Any) -> Any:
    """Return a value as it is stored; its tangent is that of the same in f32, which is not read."""
    return narrow


@differentiated_as.defjvp
def _jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    narrow, _ = primals
    return narrow, jax_compat.convert(tangents[1], narrow.dtype)


class Environment:
    """The values of a jaxpr's variables, each with the casts made of it so far."""

    def __init__(self, emitter: Emitter = PLAIN) -> None:
        self.emitter = emitter
        self._values: dict[Var, Any] = {}
        self._casts: dict[tuple[Var, Precision | None], Any] = {}
        self._copies: dict[tuple[Var, Precision], Any] = {}
        self._widened: dict[tuple[Var, Any], Any] = {}

    def write(
        self,
        variables: Iterable[Var],
        values: Iterable[Any],
        precisions: Iterable[Precision | None],
        barriers: Iterable[bool] = repeat(False),
        residuals: Iterable[bool] = repeat(False),
        *,
        are_sums: bool = True,
    ) -> None:
        """Store values in precisions.

        Per value, `barriers` say whether an optimization barrier keeps its rounding, `residuals`
        whether it is marked as a residual of a fused group; `are_sums`, whether a sum made them.
        """
        columns = zip(variables, values, precisions, barriers, residuals, strict=False)
        for var, value, precision, has_barrier, is_residual in columns:
            if not isinstance(var, jax_compat.DropVar):
                stored = cast(value, precision)
                stored = self.emitter.rounded(stored, of_sum=are_sums) if has_barrier else stored
                self._values[var] = self.emitter.residual(stored) if is_residual else stored

    def enter_read(self, readings: Iterable[Reading], values: Iterable[Any]) -> None:
        """Store values that arrive in the forms in which they are read."""
        for (var, precision, is_copy), value in zip(readings, values, strict=True):
            if precision is None:
                self._values[var] = value
            elif is_copy:
                self._copies[var, precision] = value
            else:
                self._casts[var, precision] = value

    def read_all(self, readings: Iterable[Reading]) -> list[Any]:
        """Return values in the forms in which they are read."""
        return [
            self._copy(var, precision) if is_copy and precision else self.read(var, precision)
            for var, precision, is_copy in readings
        ]

    def enter(self, variables: Iterable[Var], values: Iterable[Any]) -> None:
        """Store the inputs of a jaxpr as they arrive."""
        self._values.update(zip(variables, values, strict=True))

    def forget(self, variables: Collection[Var]) -> None:
        """Drop values that nothing reads any more, and the casts made of them."""
        for var in variables:
            del self._values[var]
        held: list[dict[Any, Any]] = [self._casts, self._copies, self._widened]
        for casts in held:
            for key in [key for key in casts if key[0] in variables]:
                del casts[key]

    def enter_casts(self, variables: Iterable[Var], casts: Iterable[Any]) -> None:
        """Store casts of variables that arrive beside their values."""
        for var, value in zip(variables, casts, strict=False):
            self._casts[var, Precision.parse(value.dtype)] = value

    def enter_form(self, var: Var, precision: Precision, form: Any) -> None:
        """Store another form of a value: a cast, or in f32 what its cotangents are added up for."""
        if precision is not Precision.F32:
            self._casts[var, precision] = form
            return
        narrow = self._values[var]
        self._widened[var, narrow.dtype] = form
        self._values[var] = differentiated_as(narrow, form)

    def read_form(self, atom: Any, precision: Precision) -> Any:
        """Return a form of a value to enter for the body of a loop."""
        wide = None
        if precision is Precision.F32 and isinstance(atom, Var):
            wide = self._widened.get((atom, self._values[atom].dtype))
        return self.read(atom, precision) if wide is None else wide

    def read_operand(self, atom: Any, read: OperandRead) -> Any:
        """Return an operand as an equation reads it."""
        value = self._read_operand(atom, read)
        return self._summed_wide(atom, value) if read.sums_wide else value

    def _read_operand(self, atom: Any, read: OperandRead) -> Any:
        precision, copy = read.precision, read.copy
        if isinstance(atom, Literal):
            return _cast_literal(atom, precision)
        if copy is not None:
            return cast(self._copy(atom, copy), precision)
        return self.read(atom, precision, own_cast=read.own_cast)

    def read(self, atom: Any, precision: Precision | None, *, own_cast: bool = False) -> Any:
        """Return a variable or literal in a precision; ``None`` for the one it is stored in.

        With `own_cast` the cast is not shared with other readers.
        """
        if isinstance(atom, Literal):
            return _cast_literal(atom, precision)
        key = atom, precision
        if not own_cast and key in self._casts:
            return self._casts[key]
        value = self._values[atom]
        result = cast(value, precision)
        if not own_cast and result is not value:
            self._casts[key] = result
        return result

    def read_unbarriered(self, atom: Any, read: OperandRead) -> Any:
        """Return an operand as an equation reads it, from before its rounding barrier."""
        value = self.read_operand(atom, read)
        stored = self._values.get(atom) if isinstance(atom, Var) else None
        is_wide = stored is None or read.precision is None or _has(stored, Precision.F32)
        # A copy may be made by a kernel that gives nothing else of its value.
        return value if is_wide or read.copy is not None else self.emitter.unbarriered(value)

    def _summed_wide(self, var: Var, value: Any) -> Any:
        """Return a form of a narrow value for one of its readers, whose cotangents meet in f32."""
        key = var, value.dtype
        if key not in self._widened:
            self._widened[key] = cast(value, Precision.F32)
        return differentiated_as(value, self._widened[key])

    def _copy(self, var: Var, precision: Precision) -> Any:
        key = var, precision
        if key not in self._copies:
            self._copies[key] = self.emitter.copied(self.read(var, precision))
        return self._copies[key]

    def read_results(
        self, atoms: Sequence[Any], precisions: Sequence[Precision | None]
    ) -> list[Any]:
        """Return the results of a jaxpr, with the weak types that it declares."""
        return [
            _as_declared(self.read(a, p), a.aval, p) for a, p in zip(atoms, precisions, strict=True)
        ]


def cast(value: Any, precision: Precision | None) -> Any:
    """Cast a value; ``None`` and the precision that it has leave it as it is."""
    if precision is None or _has(value, precision):
        return value
    return jax_compat.convert(value, precision.dtype)


def _has(value: Any, precision: Precision) -> bool:
    return value.dtype == precision.dtype if hasattr(value, "dtype") else precision is Precision.F32


def _cast_literal(literal: Any, precision: Precision | None) -> Any:
    value = jax_compat.literal_value(literal)
    if precision is None or literal.aval.dtype == precision.dtype:
        return value
    with np.errstate(over="ignore"):  # as JAX does; a policy's guards keep such literals in f32
        return np.asarray(value, precision.dtype)


def _as_declared(value: Any, aval: Any, precision: Precision | None) -> Any:
    """Restore a weak type that a cast has lost."""
    declared = getattr(aval, "weak_type", False)
    if precision is None or precision.dtype != aval.dtype:
        return value
    if jax.typeof(value).weak_type == declared:
        return value
    return jax_compat.convert(value, aval.dtype, weak_type=declared)
