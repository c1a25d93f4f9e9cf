"""Settings under which a function is rewritten: its own, and those of scopes around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import jax

from jaxamp.policy.policy import PrecisionPolicy
from jaxamp.trace.target import Statics


class Settings(NamedTuple):
    """Settings under which a function is rewritten, and its static parameters."""

    policy: PrecisionPolicy
    strict: bool
    force: bool  # go through planner and rewriter even where the policy changes nothing
    statics: Statics = Statics()

    @property
    def is_identity(self) -> bool:
        """Return whether the function is called as it is."""
        return self.policy.is_identity and not self.force

    def bound(self, count: int) -> Settings:
        """Return the settings of a function whose first `count` arguments are bound."""
        return self._replace(statics=self.statics.shifted(-count))


_CHANGE: ContextVar[Callable[[PrecisionPolicy], PrecisionPolicy] | None]
_CHANGE = ContextVar("jaxamp_policy_change", default=None)
_SEEN_BY_JIT = jax.make_user_context(None)  # part of the key of jax.jit's cache


@contextmanager
def overriding(change: Callable[[PrecisionPolicy], PrecisionPolicy]) -> Iterator[None]:
    """Run every ``amp`` inside the block under the policy that `change` gives for its own."""
    token = _CHANGE.set(change)
    try:
        with _SEEN_BY_JIT(object()):  # not the change itself, which the cache would keep alive
            yield
    finally:
        _CHANGE.reset(token)


def is_trial() -> bool:
    """Return whether another policy than the user's is in force, of which no warning speaks."""
    return _CHANGE.get() is not None


def in_force(settings: Settings) -> Settings:
    """Return the settings, with the policy that is to be used at present."""
    change = _CHANGE.get()
    return settings if change is None else settings._replace(policy=change(settings.policy))
