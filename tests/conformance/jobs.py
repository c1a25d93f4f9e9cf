"""What a conformance run is made of: named jobs that pass, fail or are skipped for a reason."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Job:
    """Something to check: `kind` names the module that can run it, `name` says what."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended: `passed`, `failed` or `skipped`, and why in words."""

    status: str
    reason: str = ""


PASSED = Outcome("passed")


class SkipJob(Exception):
    """Raised by a runner when there is nothing to check, with the reason in words."""


def runner(kind: str) -> Callable[[str], None]:
    """The function that runs jobs of this kind: raises `SkipJob`, another error, or nothing."""
    return importlib.import_module(f"tests.conformance.{kind}").run


def run(job: Job) -> Outcome:
    """Runs one job in this process."""
    try:
        runner(job.kind)(job.name)
    except SkipJob as skip:
        return Outcome("skipped", str(skip))
    except Exception as error:
        notes = " ".join(getattr(error, "__notes__", []))  # where hypothesis puts the example
        return Outcome("failed", f"{type(error).__name__}: {str(error).strip()[:600]} {notes}")
    return PASSED
