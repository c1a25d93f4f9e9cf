"""Two processes on one machine train as one does, and agree on what is finite."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests.conftest import QUICK
from tests.ecosystem.two_processes import BAD_STEP, SPLITS

pytestmark = pytest.mark.long  # test_devices.py divides steps within one process

SECONDS = 240
NEAR = 1e-4  # sums of one batch are added in another order


def run(processes):
    """What each process of a run reports."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={8 // processes} {' '.join(QUICK)}"
    command = [sys.executable, "-m", "tests.ecosystem.two_processes"]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(processes), str(port)],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
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


@pytest.fixture(scope="module")
def reports():
    """Of one process with eight devices, and of two with four each."""
    return [*run(1), *run(2)]


def test_all_have_eight_devices(reports):
    """Two processes see each other's devices."""
    assert [report["devices"] for report in reports] == [8, 8, 8]


@pytest.mark.parametrize("way", SPLITS)
def test_two_processes_train_as_one(reports, way):
    """Split in any way: the same losses, flags and loss scales; the bad step is left out by all."""
    alone, first, second = (report["ways"][way] for report in reports)
    for step, (one, ours, theirs) in enumerate(zip(alone, first, second, strict=True)):
        for key in ("scale", "finite", "unmoved", "norm"):
            assert ours[key] == theirs[key], (step, key)
            np.testing.assert_allclose(ours[key], one[key], rtol=NEAR)
        assert ours["finite"] == (step != BAD_STEP)
        assert ours["unmoved"] == (step == BAD_STEP)
        assert ours["scale"] == 2.0 ** (15 if step < BAD_STEP else 14)
        if step != BAD_STEP:
            assert ours["loss"] == theirs["loss"]
            np.testing.assert_allclose(ours["loss"], one["loss"], rtol=NEAR)
    assert first[-1]["loss"] < 0.8 * first[0]["loss"]


LOWERED = """
import jax
from benchmarks import trace_cost
from jaxamp import amp

loss, args = trace_cost.MODELS[f"{trace_cost.SCANNED} layers, scanned"]()
for step in (amp(jax.grad(loss)), jax.grad(amp(loss))):
    print(jax.jit(step).lower(*args).as_text())
"""


def test_a_program_is_the_same_in_every_process():
    """Whatever the order of sets: processes run one program, and a compilation cache has it."""
    texts = [
        subprocess.run(
            [sys.executable, "-c", LOWERED],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert len(texts[0]) > 10_000
    assert texts[0] == texts[1]
