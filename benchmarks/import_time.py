"""How long ``import jaxamp`` takes beside ``import jax``: ``python -m benchmarks.import_time``.

Processor time, in processes of their own that take turns, so that a busy machine disturbs both
alike. The first pair writes bytecode and is left out. The minimum of each is compared.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

_CODE = "import time; s = time.process_time(); import {}; print(time.process_time() - s)"
_ROOT = Path(__file__).parents[1]


def _seconds(module: str, bytecode: str) -> float:
    """Processor time of one import, in seconds."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment = {**kept, "PYTHONPYCACHEPREFIX": bytecode, "PYTHONPATH": str(_ROOT)}
    command = [sys.executable, "-c", _CODE.format(module)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def measure(runs: int = 7) -> tuple[float, float]:
    """Seconds of processor time that importing JAX and jaxamp take.

    Args:
      runs: of each; they take turns.
    """
    with tempfile.TemporaryDirectory() as bytecode:
        pairs = [(_seconds("jax", bytecode), _seconds("jaxamp", bytecode)) for _ in range(runs + 1)]
    of_jax, of_jaxamp = zip(*pairs[1:], strict=True)
    return min(of_jax), min(of_jaxamp)


if __name__ == "__main__":
    of_jax, of_jaxamp = measure()
    print(f"import jax {of_jax:.3f} s, import jaxamp {of_jaxamp:.3f} s of processor time")
    print(f"ratio {of_jaxamp / of_jax:.2f}")
