"""Trace, plan and rewrite a call, while JAX traces a compiled form of its function."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax

from jaxamp.core import jax_compat
from jaxamp.core.adapters import adapter
from jaxamp.core.formats import Precision
from jaxamp.core.keep_precision import marked
from jaxamp.policy.context import amp_scope
from jaxamp.policy.policy import PrecisionPolicy
from jaxamp.run.settings import Settings, in_force
from jaxamp.trace.arguments import Signature, Static
from jaxamp.trace.trace import run, trace

if TYPE_CHECKING:
    from jaxamp.plan import Plan

NUMPYRO = "numpyro"
_REGION = "jaxamp_region_"  # prefix of the names of functions that are rewritten already


def compiled(signature: Signature, settings: Settings) -> Callable[..., Any]:
    """Compile a call, rewritten, as a function of its arrays; see `function_result`."""

    def region(*arrays: Any) -> Any:
        return emit(signature, arrays, settings)

    return jitted(region, signature.name, signature.resolve())


def jitted(region: Callable[..., Any], name: str, function: Any) -> Callable[..., Any]:
    """Compile a function that emits the rewritten `function`, of that name."""
    region.__name__ = region.__qualname__ = _REGION + name
    return jax.jit(region, **jax_compat.host_placement(function))


def emit(signature: Signature, arrays: Sequence[Any], settings: Settings) -> Any:
    """Emit a call under the current trace, rewritten.

    It returns what the function does; as a ``Result`` where that is more than arrays.
    """
    settings = in_force(settings)
    if settings.is_identity:
        results, outputs = unchanged(run, signature, arrays)
    else:
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            warnings.warn(
                f"Under jax.disable_jit amp plans {signature.name} as a whole, so that prints and "
                "breakpoints in it see tracers, then runs it one operation at a time. To see "
                "numbers, use jax.debug.print and jax.debug.breakpoint, or call it as it is: "
                "amp(fn, 'always_f32').",
                stacklevel=jax_compat.user_level(),
            )
        numpyro = adapter(NUMPYRO)
        alone = numpyro.refusing(signature.name) if numpyro else nullcontext()
        from jaxamp.run.rewriting import rewrite  # loaded by the runner

        with _without_collector():
            with amp_scope(settings.policy), alone:
                has_rules = bool(settings.policy.rules)
                jaxpr, outputs = trace(signature, arrays, is_named=has_rules)
            results = rewrite(jaxpr, arrays, settings, signature.name)
    return outputs.join(results) if outputs.is_all_arrays else Result(results, outputs)


def is_handled() -> bool:
    """Return whether effect handlers of a library wait for what a function states."""
    numpyro = adapter(NUMPYRO)
    return numpyro is not None and numpyro.is_handled()


@contextmanager
def _without_collector() -> Iterator[None]:
    """Pause Python's garbage collector, which costs up to a third of the time and finds nothing.

    A trace and a plan are hundreds of thousands of objects that live until they end. The collector
    takes their number for a sign, and walks all of JAX's objects again and again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def plan_call(
    signature: Signature, arrays: Sequence[Any], settings: Settings
) -> tuple[Plan, Static]:
    """Plan a call, and stop there: return the plan, and what the call returns besides arrays."""
    from jaxamp.plan import plan_program

    with _without_collector():
        with amp_scope(settings.policy):
            jaxpr, outputs = trace(signature, arrays)
        return plan_program(jaxpr, settings.policy, strict=settings.strict), outputs


def unchanged(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `fn` itself, marked so that an outer ``amp`` leaves it unchanged too."""
    with amp_scope(PrecisionPolicy.ALWAYS_F32), marked(Precision.F32):
        return fn(*args, **kwargs)


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["outputs"])
@dataclass(eq=False)
class Result:
    """Result of a compiled form: arrays, and the static rest of what the function returned."""

    arrays: Sequence[Any]
    outputs: Any


def function_result(result: Any) -> Any:
    """Return the result of a function from that of its compiled form."""
    return result.outputs.join(result.arrays) if type(result) is Result else result
