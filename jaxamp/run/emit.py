"""What a compiled form of a function does when JAX traces it: trace, plan, rewrite."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from jaxamp.core.adapters import adapter
from jaxamp.plan import make_plan
from jaxamp.policy.context import amp_scope
from jaxamp.policy.settings import Settings
from jaxamp.rewrite import run_plan
from jaxamp.trace.arguments import Layout
from jaxamp.trace.captured_arrays import Held, captured
from jaxamp.trace.garbage import paused
from jaxamp.trace.static_arguments import Constants
from jaxamp.trace.trace import Outputs, trace

NNX = "flax.nnx"
_REGION = "jaxamp_region_"  # a compiled function of this name is rewritten already


def nnx_adapter(layout: Layout, leaves: Sequence[Any], keys: Sequence[Hashable]) -> Any:
    """What makes a call that holds flax nnx objects; ``None`` for one that holds none."""
    found = adapter(NNX)
    return found if found is not None and found.is_needed(layout, leaves, keys) else None


def compiled(region: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A ``jax.jit`` of what emits the function of that name, rewritten."""
    region.__name__ = region.__qualname__ = _REGION + name
    return jax.jit(region)


def emit(
    function: Callable[..., Any],
    layout: Layout,
    constants: Constants,
    traced: Sequence[Any],
    settings: Settings,
    name: str,
    borne: list[Held] | None = None,
) -> Any:
    """Emits a call under the current trace.

    Args:
      function: the function, called with owner, bound and given arguments in that order.
      layout: how the call's leaves are treated.
      constants: per leaf ``None`` where it is traced, else what returns the constant.
      traced: the other leaves.
      settings: how it is to be rewritten.
      name: the function's name, for error messages.
      borne: gets the arrays that constants hold and that are captured.

    Returns:
      What the function returns; as a ``Result`` where that is more than arrays.
    """
    with amp_scope(settings.policy):
        jaxpr, outputs = trace(function, layout, constants, traced, name)
        if borne is not None:
            borne += captured(jaxpr, (get() for get in constants if get is not None))
        with paused():
            arrays = _rewrite(jaxpr, traced, settings)
    return outputs.join(arrays) if outputs.is_all_arrays else Result(arrays, outputs)


def _rewrite(jaxpr: ClosedJaxpr, traced: Sequence[Any], settings: Settings) -> list[Any]:
    """What the rewritten program gives; its plan is gone before the collector could walk it."""
    plan = make_plan(jaxpr, settings.policy, strict=settings.strict)
    return run_plan(jaxpr, plan, *traced)


@jax.tree_util.register_pytree_node_class
class Result:
    """What a compiled form gives: arrays, and what the function returned beside them."""

    def __init__(self, arrays: Sequence[Any], outputs: Outputs) -> None:
        self.arrays = arrays
        self.outputs = outputs

    def join(self) -> Any:
        """What the function returned."""
        return self.outputs.join(self.arrays)

    def tree_flatten(self) -> tuple[Sequence[Any], Outputs]:
        """The arrays, and the rest as what is the same for every call of the form."""
        return self.arrays, self.outputs

    @classmethod
    def tree_unflatten(cls, outputs: Outputs, arrays: Sequence[Any]) -> Result:
        """Puts together what JAX has taken apart."""
        return cls(arrays, outputs)


def joined(result: Any) -> Any:
    """What the function returned, from what a compiled form gives."""
    return result.join() if type(result) is Result else result
