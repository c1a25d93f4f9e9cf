"""Bind the primitives of equations again, with other operands or parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jax._src import source_info_util as _source_info_util
from jax.extend.core import JaxprEqn


@contextmanager
def emitting(eqn: JaxprEqn) -> Iterator[None]:
    """Emit equations that carry the source line, scope and context of ``eqn``."""
    info = eqn.source_info
    scope = _source_info_util.current_name_stack() + info.name_stack
    with _source_info_util.user_context(info.traceback, name_stack=scope), eqn.ctx.manager:
        yield


def bind(eqn: JaxprEqn, operands: Sequence[Any], **changes: Any) -> list[Any]:
    """Bind the primitive of ``eqn`` to other operands, with some of its parameters changed."""
    params = eqn.primitive.get_bind_params({**eqn.params, **changes})
    results = eqn.primitive.bind(*operands, **params)
    return list(results) if eqn.primitive.multiple_results else [results]
