"""From a call to a program that another process can compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from jaxamp.core import jax_compat
from jaxamp.core.target_gpu import described_gpu
from jaxamp.core.taxonomy import Trait, op_of
from jaxamp.errors import InspectionError
from jaxamp.jaxprs.nested import nested
from jaxamp.trace.arguments import split


def flattened(
    fn: Any, wrap: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., list[Any]], list[jax.ShapeDtypeStruct]]:
    """Flatten a call to a function of its arrays alone, and their types; the rest is built in."""
    arrays, rest = split((fn, args, kwargs), abstract=True)

    def flat(*arrays: Any) -> list[Any]:
        function, positional, named = rest.join(arrays)
        return split(wrap(function)(*positional, **named))[0]

    return flat, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]


def exported(
    fn: Any,
    wrap: Callable[[Any], Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    platform: str,
) -> bytes:
    """Return a call for a platform, serialized: arrays are its inputs, anything else is built in.

    Args:
      fn: the function; the arrays of a module are inputs too.
      wrap: what is done to the function, such as giving it a policy.
      args: arguments, in which ``jax.ShapeDtypeStruct`` may stand for an array.
      kwargs: keyword arguments.
      platform: what JAX calls the kind of device.

    Raises:
      InspectionError: what JAX needs to serialize programs is not installed, or the program calls
        back to the host.
    """
    flat, specs = flattened(fn, wrap, args, kwargs)
    compiled = jax.jit(flat)
    checks = jax_compat.cudnn_checks() if described_gpu() else ()
    jaxpr = compiled.trace(*specs).jaxpr.jaxpr
    try:
        made = jax.export.export(compiled, platforms=[platform], disabled_checks=checks)(*specs)
        return bytes(made.serialize())
    except ModuleNotFoundError as error:
        raise InspectionError(
            f"JAX needs {error.name} to hand a program to another compiler: "
            f"pip install {error.name}"
        ) from None
    except (NotImplementedError, ValueError) as error:
        eqn = next(_callbacks(jaxpr), None)
        if eqn is None:
            raise
        raise InspectionError(
            f"The program calls back to the host: {eqn.primitive.name} at "
            f"{jax_compat.user_line(eqn.source_info)}. JAX compiles that only where it runs. "
            "Leave it out to ask about another chip."
        ) from error


def _callbacks(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        if op_of(eqn.primitive).trait is Trait.CALLBACK:
            yield eqn
        for inner in nested(eqn):
            yield from _callbacks(inner.jaxpr)
