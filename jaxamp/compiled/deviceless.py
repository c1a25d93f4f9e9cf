"""Compile exported programs for a chip that is not there, in its compiler's own environment."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxamp.compiled import compiler
from jaxamp.compiled.environments import ENVIRONMENTS
from jaxamp.compiled.hlo import Module, parse
from jaxamp.compiled.targets import Target


def compile_all(
    target: Target, programs: Sequence[bytes], options: dict[str, Any] | None = None
) -> list[tuple[Module, dict[str, Any]]]:
    """Compile serialized programs for a target, in one process of its compiler's environment.

    Args:
      target: the chip.
      programs: what ``exported`` gave.
      options: the compiler's own flags.

    Returns:
      For each, the optimized program and what the compiler says of it.

    Raises:
      InspectionError: the compiler is not installed, or fails.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        names = [f"program{index}" for index in range(len(programs))]
        for program, data in zip(names, programs, strict=True):
            (folder / f"{program}.bin").write_bytes(data)
        job = {
            "platform": target.platform,
            "topology": target.topology,
            "description": target.description,
            "programs": names,
            "options": options,
        }
        (folder / "job.json").write_text(json.dumps(job))
        ENVIRONMENTS[target.environment].run(compiler.__file__, name, quiet=True)
        return [
            (
                parse((folder / f"{program}.hlo").read_text()),
                json.loads((folder / f"{program}.json").read_text()),
            )
            for program in names
        ]
