"""Layout of the operands of a ``scan`` equation."""

from __future__ import annotations

from typing import Any

from jax.extend.core import JaxprEqn

from jaxamp.core.jax_compat.release import JAX


def scan_layout(eqn: JaxprEqn) -> tuple[int, int]:
    """Return the number of loop invariants and of carries of a scan equation."""
    if JAX >= (0, 11):  # 0.11 put trees of the operands in the place of the two counts
        invariants, carries, _ = eqn.params["ft_in"].unpack()
        return len(invariants), len(carries)
    return eqn.params["num_consts"], eqn.params["num_carry"]


def scan_with_invariants(eqn: JaxprEqn, count: int) -> dict[str, Any]:
    """Return the parameters of a scan equation that change with `count` more leading invariants."""
    if not count:
        return {}
    if JAX >= (0, 11):  # trees of the operands since 0.11, as in `scan_layout`
        from jax._src import flattree  # pyright: ignore[reportAttributeAccessIssue]

        invariants, carries, sliced = eqn.params["ft_in"].unpack()
        more = flattree.nones(len(invariants) + count)
        return {"ft_in": flattree.pack((more, carries, sliced))}
    return {"num_consts": eqn.params["num_consts"] + count}
