"""The equations of a level that an attention may be made of, found before any is interpreted."""

from __future__ import annotations

from collections.abc import Container

from jaxamp.attention.levels import Level, Unit

_AFTER = 3  # products on the way from exponentials to a cotangent
_BEFORE = 2  # products on the way to scores: that of queries and keys, and their own


def nearby(level: Level, followed: Container[str]) -> list[Unit]:
    """Return the equations around exponentials of products that products read; often none.

    Args:
      level: where they are.
      followed: names of the primitives that are interpreted.
    """
    units = list(level.equations())
    weights = _weights(units, followed)
    if not any(unit.eqn.primitive.name == "dot_general" for unit in weights):
        return []
    return _with_operands(units, weights, followed)


def _weights(units: list[Unit], followed: Container[str]) -> set[Unit]:
    """Return exponentials of what products have made, and what is computed from them."""
    scored = set[int]()
    passed: dict[int, int] = {}  # per value: products since an exponential
    found = set[Unit]()
    for unit in units:
        name = unit.eqn.primitive.name
        read = [a for a in unit.ins if isinstance(a, int)]
        made = [a for a in unit.outs if isinstance(a, int)]
        counts = [passed[a] for a in read if a in passed]
        if name == "dot_general" or not scored.isdisjoint(read):
            scored.update(made)
        if name in ("exp", "exp2") and not scored.isdisjoint(read):
            counts.append(0)
        if not counts or name not in followed:
            continue
        count = min(counts) + (name == "dot_general")
        if count <= _AFTER:
            found.add(unit)
            passed.update(dict.fromkeys(made, count))
    return found


def _with_operands(units: list[Unit], found: set[Unit], followed: Container[str]) -> list[Unit]:
    """Return equations with those that make their operands, in order."""
    left: dict[int, int] = {}  # per value: how many products may be on the way to it
    kept: list[Unit] = []
    for unit in reversed(units):
        name = unit.eqn.primitive.name
        budget = max((left.get(a, -1) for a in unit.outs if isinstance(a, int)), default=-1)
        budget = _BEFORE if unit in found else budget - (name == "dot_general")
        if budget < 0 or name not in followed:
            continue
        kept.append(unit)
        for atom in unit.ins:
            if isinstance(atom, int):
                left[atom] = max(left.get(atom, -1), budget)
    return kept[::-1]
