"""What a search has found out, in a file: an interrupted search goes on from there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np


class State:
    """The sensitivities and the measured errors of one problem.

    Args:
      path: the file; ``None`` to keep nothing.
      fingerprint: of the problem; what a file says of another is not used.
    """

    def __init__(self, path: str | Path | None, fingerprint: str) -> None:
        self.path, self.fingerprint = Path(path) if path else None, fingerprint
        self.matrix: np.ndarray | None = None
        self.errors: dict[bytes, float] = {}
        if self.path and self.path.exists():
            self._read(json.loads(self.path.read_text()))

    def write(self) -> None:
        """Stores what is known so far."""
        if self.path is None or self.matrix is None:
            return
        data = {
            "fingerprint": self.fingerprint,
            "matrix": self.matrix.tolist(),
            "errors": {_word(key): error for key, error in self.errors.items()},
        }
        self.path.write_text(json.dumps(data))

    def _read(self, data: dict[str, object]) -> None:
        if data.get("fingerprint") != self.fingerprint:
            return
        self.matrix = np.array(data["matrix"], np.float64)
        errors = data["errors"]
        assert isinstance(errors, dict)
        self.errors = {np.array([c == "1" for c in w]).tobytes(): e for w, e in errors.items()}


def _word(key: bytes) -> str:
    return "".join("1" if low else "0" for low in np.frombuffer(key, bool))
