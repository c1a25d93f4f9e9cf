"""Emit what a plan hints at: here as if there were no hint, by plain casts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxamp.core import features, jax_compat
from jaxamp.plan import CotangentRounding, Fusion
from jaxamp.policy.policy import PrecisionPolicy


class Emitter:
    """Emission of hints, which follows none; the feature that gives hints has its own."""

    def rounded(self, value: Any, *, of_sum: bool) -> Any:
        """Return a value, a sum or another, whose rounding a compiler is not to undo."""
        return value

    def copied(self, value: Any) -> Any:
        """Return the narrow copy of a value that is fused away."""
        return value

    def residual(self, value: Any) -> Any:
        """Return a value that a fused group saves for its backward pass."""
        return value

    def rule(self, closed: ClosedJaxpr, *, saves: bool) -> ClosedJaxpr:
        """Return the derivative rule, as it is emitted, of a function that `saves` residuals."""
        return closed

    def unbarriered(self, value: Any) -> Any:
        """Return what float32 arithmetic reads of a value that was rounded before, f32[...]."""
        return value

    def fused(self, function: Callable[..., list[Any]], group: Fusion) -> Callable[..., list[Any]]:
        """Return the function that emits a fused group as one unit."""
        return function

    def add(self, eqn: JaxprEqn, operands: Sequence[Any], of: CotangentRounding) -> Any:
        """Add, subtract or multiply, where the cotangent is to be rounded for both operands."""
        return jax_compat.bind(eqn, operands)[0]

    def gather(self, table: Any, indices: Any, params: dict[str, Any]) -> Any:
        """Return a gather in a form of its own; ``None`` for a gather like any other."""
        return None

    def places(self, indices: Any, table: Any, found: Any) -> Any:
        """Return the indices of a gather that has no form of its own."""
        return indices

    def scatter(self, target: Any, indices: Any, numbers: Any, params: dict[str, Any]) -> Any:
        """Return a hinted scatter in a form of its own; ``None`` for one like any other."""
        return None


def emitter_of(policy: PrecisionPolicy) -> Emitter:
    """Return what emits the hints of plans under a policy."""
    made = (work.emitter for work in features.works() if work.emitter)
    return next((make(policy) for make in made), PLAIN)


PLAIN = Emitter()
