"""Programs over meshes in both orders and three formats: the whole product as jobs."""

from __future__ import annotations

from tests.conformance.jobs import Job
from tests.meshes import checks


def all_jobs() -> list[Job]:
    """One job for each case of the product."""
    return [Job("meshes", str(case)) for case in checks.every_case()]


def run(name: str) -> None:
    """Checks one case.

    Raises:
        AssertionError: if the case is wrong.
    """
    checks.check(checks.MeshCase(*name.split("-")))
