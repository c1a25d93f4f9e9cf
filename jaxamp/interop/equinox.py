"""equinox: a module in mixed precision is a module."""

from __future__ import annotations

from typing import Any

import equinox as eqx

from jaxamp.run.amp import AmpFunction, apply
from jaxamp.run.settings import Settings


class AmpModule(eqx.Module):
    """A module whose calls run in mixed precision.

    It is a pytree with the leaves of the module it wraps, so that it can be differentiated,
    updated, partitioned and saved as that module can. Attributes are those of the module; its
    methods run in mixed precision as ``__call__`` does.

    Attributes:
      amp_module: the module as it was given.
      amp_settings: policy and options, static.

    >>> import jax, jaxamp
    >>> linear = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    >>> amped = jaxamp.amp(linear, "mixed_f16")
    >>> amped.weight is linear.weight, amped.in_features
    (True, 3)
    """

    amp_module: eqx.Module
    amp_settings: Settings = eqx.field(static=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module in mixed precision."""
        return apply(self.amp_module, self.amp_settings, args, kwargs)

    def amp_parts(self) -> tuple[eqx.Module, Settings]:
        """Return the module as it was given, and how it is rewritten."""
        return self.amp_module, self.amp_settings

    def __getattr__(self, name: str) -> Any:
        if name == "amp_module" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)  # not there yet while the pytree is put together
        value = getattr(self.amp_module, name)
        bound = _is_method_of(self.amp_module, value)
        return AmpFunction(value, self.amp_settings) if bound else value


def wrap(fn: Any, settings: Settings) -> AmpModule | None:
    """Wrap a module in mixed precision; ``None`` if `fn` is no module, or one about a function.

    equinox's transforms and bound methods are modules too, but are used as functions are.
    """
    if not isinstance(fn, eqx.Module) or hasattr(fn, "__wrapped__") or hasattr(fn, "__self__"):
        return None
    return AmpModule(fn, settings)


def _is_method_of(module: eqx.Module, value: Any) -> bool:
    """Return whether `value` is a method bound to `module`, jitted by equinox or not."""
    bound = (getattr(value, "__self__", None), *getattr(value, "args", ())[:1])
    return callable(value) and any(owner is module for owner in bound)
