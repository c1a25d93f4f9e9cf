"""Findings of a search, in a file from which an interrupted search goes on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from jaxamp.errors import TuningError


class State:
    """The sensitivities and the measured errors of one problem.

    Args:
      path: the file; ``None`` to keep nothing.
      fingerprint: of the problem; what a file says of another is not used.

    Raises:
      TuningError: the file is not such a state, or its folder is not there.
    """

    def __init__(self, path: str | Path | None, fingerprint: str) -> None:
        self.path, self.fingerprint = Path(path) if path else None, fingerprint
        self.matrix: np.ndarray | None = None
        self.errors: dict[bytes, float] = {}
        if self.path and not self.path.parent.is_dir():
            raise TuningError(f"The state cannot be kept: there is no folder {self.path.parent}.")
        if self.path and self.path.exists():
            self._read(self.path)

    def write(self) -> None:
        """Store what is known so far; an interrupted call leaves the former file."""
        if self.path is None or self.matrix is None:
            return
        data = {
            "fingerprint": self.fingerprint,
            "matrix": self.matrix.tolist(),
            "errors": {_word(key): error for key, error in self.errors.items()},
        }
        new = self.path.with_name(f"{self.path.name}.new")
        new.write_text(json.dumps(data))
        new.replace(self.path)

    def _read(self, path: Path) -> None:
        try:
            data = json.loads(path.read_text())
            if data["fingerprint"] != self.fingerprint:
                return
            self.matrix = np.array(data["matrix"], np.float64)
            self.errors = {_key(word): float(error) for word, error in data["errors"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TuningError(
                f"{path} is not a state of a search that tune has kept ({type(error).__name__}: "
                f"{error}). Remove it, or name another file."
            ) from None


def _key(word: str) -> bytes:
    return np.array([letter == "1" for letter in word]).tobytes()


def _word(key: bytes) -> str:
    return "".join("1" if low else "0" for low in np.frombuffer(key, bool))
