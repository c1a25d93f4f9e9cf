"""Tuning: the cheapest policy that keeps an error within a budget."""

from jaxamp.tune.tune import tune
from jaxamp.tune.tuning import Choice, Tuning, Verdict

__all__ = ["Choice", "Tuning", "Verdict", "tune"]
