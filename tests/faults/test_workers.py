"""Data loaders in other processes: forked beside a running JAX, and spawned with their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SECONDS = 120


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_a_training_loop_fed_by_workers(method: str) -> None:
    """Every batch arrives once, and training gives what it gives without workers."""
    command = [sys.executable, "-m", "tests.faults.loader", method]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["fed"] == report["alone"]
    assert report["fed"][-1] < report["fed"][0]
    assert report["workers"]
    assert report["parent"] not in report["workers"]
