"""The command that switches analyses off, one at a time."""

from __future__ import annotations

import importlib
import pathlib

import pytest

import jaxamp
from tests.plan import ablation
from tests.plan.ablation import ANALYSES, CORPORA

PACKAGE = pathlib.Path(jaxamp.__path__[0])
ROOMS = ("plan/conditioning", "cancellation")


def test_every_analysis_is_switched_off_in_turn() -> None:
    # What several analyses read, or which runs them.
    shared = {"__init__", "arrays", "hazards", "feature", "cancelled_products"}
    files = {path.stem for room in ROOMS for path in (PACKAGE / room).glob("*.py")} - shared
    assert files <= ANALYSES.keys()


@pytest.mark.parametrize("analysis", ANALYSES)
def test_what_is_switched_off_is_called(analysis: str) -> None:
    """The function in its place is called while it is off, and gone afterwards."""
    where, attribute = ANALYSES[analysis][0].rsplit(".", 1)
    module, program = importlib.import_module(where), next(CORPORA["hostile"]())
    called = getattr(module, attribute)
    with ablation.without(analysis):
        assert getattr(module, attribute) is not called
        assert ablation.fingerprint(program)
    assert getattr(module, attribute) is called


def test_a_program_that_breaks_is_noticed() -> None:
    """Temperatures near 300 are rounded where they are joined, if nothing objects."""
    program = next(p for p in CORPORA["hostile"]() if p.run == "temperatures_joined bf16")
    (row,) = ablation.effects(program, ["amplification"], runs=True)
    assert row["wrong"]
    assert program.wrong is not None
    assert not program.wrong()
