"""Models of other packages, each under a preset of either format."""

from __future__ import annotations

import warnings

from tests.conformance.jobs import Job, SkipJob
from tests.models import checks, registry, solved, trained  # noqa: F401 - they enter models


def all_jobs() -> list[Job]:
    """Every model under every preset of the checks."""
    names = (f"{name}-{policy}" for name in registry.MODELS for policy in checks.LOW)
    return [Job("models", name) for name in names]


def run(name: str) -> None:
    """Checks the model and policy that are named.

    Raises:
        SkipJob: a package is not installed.
        AssertionError: an expectation of `tests.models.checks` is not met.
    """
    model, _, policy = name.rpartition("-")
    if missing := registry.missing(model):
        raise SkipJob(f"{', '.join(missing)} not installed: pip install '.[models]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of these packages, about their own age
        checks.check(registry.build(model), policy)
