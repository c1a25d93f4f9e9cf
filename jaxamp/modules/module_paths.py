"""Read module paths from the call stack of an equation: ``Transformer/layers/attention``.

flax linen and haiku write the names of modules into name stacks. equinox, nnx and classes of one's
own do not, but the call stack has their methods, and the source has the attribute that was called:
``self.attention(x)``. So nothing is intercepted while a program is traced. The index of a module in
a list is known where the source has it: of ``self.layers[0](x)``, not of a loop; see
`list_items.py`.
"""

from __future__ import annotations

import functools
import os
import re
from typing import Any

from jaxamp.core import jax_compat
from jaxamp.modules.attributes import Calls, called_through, method_of

_NAMED = re.compile(r"[/\\](flax[/\\](linen|core)|haiku[/\\]_src)[/\\]")  # write names themselves
_PLUMBING = re.compile(r"[/\\](jaxlib|jax|equinox|flax|jaxtyping|optax|numpy)[/\\](?!.*\bnn[/\\])")
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]|[/\\]functools\.py$")
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep


def shown_calls(source_info: Any) -> Calls:
    """Return the frames around an equation that count, outermost first."""
    return _calls_of(source_info.traceback)


@functools.lru_cache(maxsize=4096)  # of one program, which is read twice
def _calls_of(traceback: Any) -> Calls:
    calls = jax_compat.calls(traceback)
    return tuple([call for call in calls if _is_shown(call[0].co_filename)])


@functools.cache
def _is_shown(file: str) -> bool:
    """Return whether the frames of a file count: not those of what is between modules."""
    if file.startswith(_OURS):
        return False
    return bool(_NAMED.search(file)) or not (_INSTALLED.search(file) and _PLUMBING.search(file))


@functools.lru_cache(maxsize=65536)
def modules_of(calls: Calls) -> tuple[tuple[str, int], ...]:
    """Return the modules of shown calls, outermost first, each with the frame of its method."""
    found: list[tuple[str, int]] = []
    owner = ""
    for n, (code, _) in enumerate(calls):
        if _NAMED.search(code.co_filename):
            return ()
        cls, method = method_of(code)
        if not cls:
            continue
        called = called_through(calls[:n], method) if n else None
        names = called if called is not None else (cls,) * (cls != owner)
        found += [(name, n) for name in names]
        owner = cls
    return tuple(found)
