"""Two processes on one machine train as one does, and agree on what is finite."""

import json
import os
import socket
import subprocess
import sys

import numpy as np

BAD_STEP = 3  # as in two_processes
SECONDS = 240
NEAR = 1e-4  # sums of one batch are added in another order


def run(processes):
    """What each process of a run reports."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={8 // processes}",
    }
    command = [sys.executable, "-m", "tests.ecosystem.two_processes"]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(processes), str(port)],
            env={**os.environ, **flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    reports = []
    try:
        for process in running:
            output, errors = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, errors[-2000:]
            reports.append(json.loads(output.splitlines()[-1]))
    finally:
        for process in running:
            process.kill()
    return reports


def test_two_processes_train_as_one():
    """Eight devices in one process or two: the same losses, flags and loss scales."""
    (alone,) = run(1)
    first, second = run(2)
    assert first["devices"] == second["devices"] == alone["devices"] == 8
    assert first["steps"][:BAD_STEP] == second["steps"][:BAD_STEP]
    for step, (ours, theirs, one) in enumerate(
        zip(first["steps"], second["steps"], alone["steps"], strict=True)
    ):
        for key in ("scale", "finite", "unmoved", "norm"):
            assert ours[key] == theirs[key], (step, key)
            np.testing.assert_allclose(ours[key], one[key], rtol=NEAR)
        assert ours["finite"] == (step != BAD_STEP)
        assert ours["unmoved"] == (step == BAD_STEP)
        assert ours["scale"] == 2.0 ** (15 if step < BAD_STEP else 14)
        if step != BAD_STEP:
            assert ours["loss"] == theirs["loss"]
            np.testing.assert_allclose(ours["loss"], one["loss"], rtol=NEAR)
    assert first["steps"][-1]["loss"] < 0.8 * first["steps"][0]["loss"]
