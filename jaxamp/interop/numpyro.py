"""numpyro: statements of a model are refused in a function whose handlers are outside of it.

A handler gets the values of the first trace, and nothing from a call that is not traced again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numpyro import primitives

from jaxamp.errors import OutputError


def is_handled() -> bool:
    """Return whether effect handlers are around this place of the program."""
    return bool(primitives._PYRO_STACK)


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """Raise for statements of a function that are not handled inside of the block.

    Raises:
      OutputError: a statement reaches the handlers around the block.
    """
    if not is_handled():
        yield
        return
    with _Refusing(None, name):
        yield


class _Refusing(primitives.Messenger):
    def __init__(self, fn: Any, name: str) -> None:
        super().__init__(fn)
        self._name = name

    def process_message(self, msg: dict[str, Any]) -> None:
        what = " ".join(filter(None, (msg["type"], repr(msg["name"]) if msg.get("name") else "")))
        raise OutputError(
            f"{self._name} runs under amp and states numpyro's {what}, while the handlers are "
            "outside of amp: they would get nothing from later calls, which are not traced again. "
            "Wrap what is one level up (amp(svi.update), or the function that runs MCMC), or the "
            "network inside of the model."
        )
