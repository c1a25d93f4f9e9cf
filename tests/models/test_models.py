"""A sample of the tier; all of it runs in `make conformance`."""

from __future__ import annotations

import pytest

from tests.conformance import models as jobs
from tests.conformance.jobs import SkipJob
from tests.models import registry

SAMPLE = ("optimistix-newton-auto_mixed_bf16", "optax-contrib-ademamix-auto_mixed_bf16")
LONGER = ("nnx-convolutions-auto_mixed_bf16", "equinox-gru-auto_mixed")


@pytest.mark.parametrize(
    "name", [*SAMPLE, *(pytest.param(name, marks=pytest.mark.long) for name in LONGER)]
)
def test_sample(name: str) -> None:
    """Accurate, learning, low where that pays and untouched where it does not."""
    jobs.run(name)


def test_the_tier_has_enough_of_everything() -> None:
    """More than ten models of more than ten packages; every job names one."""
    packages = {package for needs, _ in registry.MODELS.values() for package in needs}
    assert len(registry.MODELS) > 10
    assert len(packages) > 10
    assert {str(job) for job in jobs.all_jobs()} >= {
        f"models/{name}" for name in (*SAMPLE, *LONGER)
    }


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job is skipped in words where its package is not installed."""
    monkeypatch.setitem(registry.MODELS, "unheard-of", (("unheard_of",), lambda: None))
    with pytest.raises(SkipJob, match="unheard_of"):
        jobs.run("unheard-of-auto_mixed")
