"""Search for the operation that made the first number that is not finite."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxamp.core import jax_compat
from jaxamp.errors import InspectionError
from jaxamp.numerics.nonfinite import Nonfinite, Program, find_nonfinite
from jaxamp.run.amp import parts_of
from jaxamp.trace.arguments import AS_ARGUMENT, parameters_of, split


def explain_nonfinite(fun: Callable[..., Any]) -> Callable[..., Nonfinite | None]:
    """Find the operation of `fun` that made the first infinity or NaN to reach a result.

    Runs `fun` once more, with a mark beside each value: ask when a flag was `False`.

    Args:
      fun: any function of arrays: what ``scaled_value_and_grad`` returned, a loss, a train step.

    Returns:
      A function of `fun`'s arguments, which returns ``None`` if all results are finite.

    Raises:
      InspectionError: called inside of ``jax.jit`` or another transformation.

    >>> import jaxamp
    >>> def loss_fn(w, x):
    ...     return jnp.sum((x @ w) * 3.0)
    >>> step = jaxamp.training.scaled_value_and_grad(loss_fn, policy="mixed_f16", loss_scale=None)
    >>> found = explain_nonfinite(step)(jnp.full((2, 2), 300.0), jnp.full((2, 2), jnp.inf))
    >>> found.kind, found.primitive
    ('infinity', 'input')
    >>> found = explain_nonfinite(lambda x: {"y": jnp.log(x - 1)})(jnp.ones(3))
    >>> found.output, found.kind, found.primitive, found.largest
    ("['y']", 'infinity', 'log', 0.0)
    """

    @functools.wraps(fun, updated=())
    def explain(*args: Any, **kwargs: Any) -> Nonfinite | None:
        if jax_compat.is_tracing():
            raise InspectionError(
                "explain_nonfinite and debug_step look at numbers, and inside of jax.jit or "
                "another transformation there are none yet. Call them outside, on the function "
                "that is transformed."
            )
        given, rest = _as_traced(fun, args, kwargs)
        outputs: Any = None

        def flat(*arrays: Any) -> list[Any]:
            nonlocal outputs
            call_args, call_kwargs = rest.join(arrays)
            results, outputs = split(fun(*call_args, **call_kwargs))
            return results

        jaxpr = jax.make_jaxpr(flat)(*given)
        program = Program.of(jaxpr, None, _in_words_of(fun, rest.paths()), outputs.paths())
        return find_nonfinite(program, [jnp.asarray(array) for array in given])

    return explain


def named_arguments(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[list[str], Any]:
    """Return the names of the arrays that a call of a function is given, and the arrays."""
    given, rest = _as_traced(fun, args, kwargs)
    return _in_words_of(fun, rest.paths()), given


def _as_traced(fun: Callable[..., Any], args: Any, kwargs: Any) -> tuple[list[Any], Any]:
    """Return the arrays of a call, and the rest of it, as the function would trace them."""
    settings = parts_of(fun)[1]
    if settings is None:
        return split((args, kwargs))
    return split(settings.statics.mark(args, kwargs, 0), numbers=AS_ARGUMENT)


def _in_words_of(function: Callable[..., Any], paths: Sequence[str]) -> list[str]:
    """Return paths of ``(args, kwargs)`` in the words of a function.

    >>> _in_words_of(lambda params, x: x, ["[0][0]['w']", "[0][1]", "[1]['x'][0]"])
    ["params['w']", 'x', 'x[0]']
    """
    parameters = parameters_of(function)

    def worded(path: str) -> str:
        found = re.fullmatch(r"\[(.)\]\[(.*?)\](.*)", path)
        assert found is not None, path
        part, first, rest = found.groups()
        if part == "1":
            return first[1:-1] + rest
        place = int(first)
        return f"{parameters[place] if place < len(parameters) else f'args[{place}]'}{rest}"

    return list(map(worded, paths))
