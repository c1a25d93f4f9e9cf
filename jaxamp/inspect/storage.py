"""What the rewriter's environment holds, without the values: precisions, and the casts made.

Mirrors ``rewrite/environment.py``; a test compares the casts counted here with the program's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import Literal

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision, is_narrow
from jaxamp.plan import Forms


@dataclass(slots=True)
class Casts:
    """Casts of one equation: made, found made already, and not needed."""

    inserted: int = 0
    shared: int = 0
    cancelled: int = 0


@dataclass(slots=True)
class Storage:
    """The precision of every float of a jaxpr, and the casts made of it so far."""

    stored: dict[Any, Precision | None] = field(default_factory=dict)
    _casts: set[tuple[Any, Precision]] = field(default_factory=set)
    _copies: set[tuple[Any, Precision]] = field(default_factory=set)
    _arrived: set[tuple[Any, Precision]] = field(default_factory=set)

    def enter(self, variables: Sequence[Any], precisions: Sequence[Precision | None]) -> None:
        """The inputs of a jaxpr, in the precisions in which they arrive."""
        for var, precision in zip(variables, precisions, strict=True):
            self.stored[var] = precision or of(var.aval)

    def take(self, forms: Forms) -> None:
        """Casts of inputs that arrive with them."""
        self._casts.update((var, form.precision) for var, form in forms if form.precision)

    def arrive(self, casts: Casts, var: Any, precision: Precision) -> None:
        """A result that was rounded to be sent, and is wide in name only."""
        self._count(casts, self._casts, (var, precision))
        self._arrived.add((var, precision))

    def accompany(self, var: Any, precision: Precision) -> None:
        """A rounding that was made beside a value, of a rounding."""
        self._casts.add((var, precision))
        self._arrived.add((var, precision))

    def source(
        self, atom: Any, copy: Precision | None, precision: Precision | None
    ) -> Precision | None:
        """The precision in which memory holds what a reader is given, who takes it in another."""
        if isinstance(atom, Literal):
            return of(atom.aval)
        if precision is not None and (atom, precision) in self._arrived:
            return precision
        return copy or self.stored[atom]

    def read(
        self,
        casts: Casts,
        atom: Any,
        precision: Precision | None,
        fresh: bool = False,
        copy: Precision | None = None,
    ) -> Precision | None:
        """Counts the casts of one read, and says in which precision the value then is."""
        if isinstance(atom, Literal):
            return precision or of(atom.aval)
        stored = self.stored[atom]
        if copy is not None and copy is not precision:
            if stored is not copy:
                self._count(casts, self._copies, (atom, copy))
            casts.inserted += precision is not None
            return precision or copy
        if precision is None or stored is precision:
            casts.cancelled += is_narrow(precision)
            return stored
        if fresh:
            casts.inserted += 1
        else:
            self._count(casts, self._casts, (atom, precision))
        return precision

    def write(
        self,
        casts: Casts,
        var: Any,
        made: Precision | None,
        precision: Precision | None,
    ) -> None:
        """Counts the cast of one result, which is made in one precision and stored in another."""
        self.stored[var] = precision or of(var.aval)
        if precision is not None and made is not precision:
            casts.inserted += not isinstance(var, jax_compat.DropVar)

    def _count(self, casts: Casts, done: set[Any], key: tuple[Any, Precision]) -> None:
        casts.shared += key in done
        casts.inserted += key not in done
        done.add(key)


def of(aval: Any) -> Precision | None:
    """The float format of a type; ``None`` where it has none of jaxamp's."""
    return Precision.of_dtype(getattr(aval, "dtype", None))
