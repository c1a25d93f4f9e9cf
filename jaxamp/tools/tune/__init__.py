"""Tuning: the cheapest policy that keeps an error within a budget."""

from jaxamp.tools.tune.tune import tune
from jaxamp.tools.tune.tuning import Choice, Tuning, Verdict

__all__ = ["Choice", "Tuning", "Verdict", "tune"]
