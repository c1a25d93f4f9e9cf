"""``checkify`` and Taylor mode, for primitives that JAX does not know."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from jax._src import ad_checkpoint as _ad_checkpoint
from jax._src import checkify as _checkify
from jax._src import core as _core
from jax.experimental import jet as _jet
from jax.extend.core import Jaxpr, Primitive


def check_nans(primitive: Primitive, named: Callable[[dict[str, Any]], str]) -> None:
    """Has ``checkify`` look for NaNs in what a primitive of ours gives.

    Args:
      primitive: of one result.
      named: gives what errors call an equation of it, by its parameters.
    """

    def check(*args: Any, **params: Any) -> Any:
        called = SimpleNamespace(
            name=named(params), bind=primitive.bind, multiple_results=primitive.multiple_results
        )
        return _checkify.nan_error_check(called, *args, **params)

    _checkify.error_checks[primitive] = check


def check_like(primitive: Primitive, original: Primitive) -> None:
    """Has ``checkify`` look at a primitive of ours, of two operands, as at one of JAX's.

    Args:
      primitive: gives what `original` gives.
      original: is emitted too; nothing reads its result, and XLA drops it.
    """

    def check(*args: Any, **params: Any) -> Any:
        error, _ = _checkify.error_checks[original](*args, **params)
        return error, primitive.bind(*args[-2:], **params)

    _checkify.error_checks[primitive] = check


def complete_jet() -> None:
    """Teaches ``jax.experimental.jet`` checkpoints and the names in them, which JAX leaves out."""

    def checkpoint(primals: Any, series: Any, *, jaxpr: Jaxpr, **_: Any) -> Any:
        def run(*args: Any) -> list[Any]:
            return _core.eval_jaxpr(jaxpr, (), *args)

        return _jet.jet(run, primals, series, factorial_scaled=False)

    def name(primals: Any, series: Any, **_: Any) -> Any:
        return primals[0], series[0]

    _jet.jet_rules.setdefault(_ad_checkpoint.remat_p, checkpoint)
    _jet.jet_rules.setdefault(_ad_checkpoint.name_p, name)
