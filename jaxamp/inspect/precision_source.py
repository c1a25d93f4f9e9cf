"""Find what sets the precision of a product: a call that names it, or JAX's configuration."""

from __future__ import annotations

import ast
import re
from typing import Any

from jax.extend.core import JaxprEqn

from jaxamp.core import jax_compat
from jaxamp.jaxprs.call_sites import call_at

_KEY = "precision"
_INSIDE_JAX = re.compile(r"[/\\]jax[/\\]_src[/\\]")


def precision_source(eqn: JaxprEqn) -> str:
    """Return what sets the explicit precision of a product, in one phrase."""
    word = _word(eqn.params.get(_KEY))
    found = [
        (value, f"{code.co_filename.replace(chr(92), '/').rpartition('/')[2]}:{value.lineno}")
        for code, at in jax_compat.calls(eqn.source_info.traceback)
        if not _INSIDE_JAX.search(code.co_filename)
        and (call := call_at(code, at)) is not None
        and (value := _value(call)) is not None
    ]
    named = [place for value, place in found if not _is_passed_on(value)]
    places = named[-1:] or [place for _, place in found[:1]]
    by = f"in {places[0]}" if places else "by jax.default_matmul_precision, or by a library"
    return f"precision={word!r} is asked for {by}"


def _value(call: ast.Call) -> ast.expr | None:
    """Return the `precision` argument of a call, or of the call of its function."""
    calls = [call, *(node for node in ast.walk(call.func) if isinstance(node, ast.Call))]
    return next((k.value for c in calls for k in c.keywords if k.arg == _KEY), None)


def _is_passed_on(value: ast.expr) -> bool:
    """Return whether a value is that of a variable, or of an attribute of ``self``."""
    if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
        return value.value.id == "self"
    return isinstance(value, ast.Name)


def _word(precision: Any) -> str:
    first = precision[0] if isinstance(precision, tuple) else precision
    return str(getattr(first, "name", first)).lower()
