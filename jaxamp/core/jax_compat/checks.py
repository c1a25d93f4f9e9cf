"""Rules of ``checkify`` for jaxamp's primitives."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from jax._src import checkify as _checkify
from jax.extend.core import Primitive


def check_nans(primitive: Primitive, named: Callable[[dict[str, Any]], str]) -> None:
    """Register a ``checkify`` rule that checks a primitive's one result for NaNs.

    Of the parameters of an equation, `named` returns its name in errors.
    """

    def check(*args: Any, **params: Any) -> Any:
        called = SimpleNamespace(
            name=named(params), bind=primitive.bind, multiple_results=primitive.multiple_results
        )
        return _checkify.nan_error_check(called, *args, **params)

    _checkify.error_checks[primitive] = check


def check_like(primitive: Primitive, original: Primitive) -> None:
    """Register the ``checkify`` rule of one of JAX's primitives, of two operands, for another.

    The `original` is emitted too; nothing reads its result, and XLA drops it.
    """

    def check(*args: Any, **params: Any) -> Any:
        error, _ = _checkify.error_checks[original](*args, **params)
        return error, primitive.bind(*args[-2:], **params)

    _checkify.error_checks[primitive] = check
