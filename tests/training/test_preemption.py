"""A process that is killed in the midst of a step: what goes on from its checkpoint is the run."""

from __future__ import annotations

import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests.training.preempted import BAD_STEP, STEPS, batch, restored, start, train_step

pytestmark = pytest.mark.long

KILLED_IN = 4


def test_a_killed_run_goes_on_bit_by_bit(tmp_path):
    """Parameters, moments, schedule, dropout, loss scale and its counter, a skipped step before."""
    command = [sys.executable, "-m", "tests.training.preempted", str(tmp_path), str(KILLED_IN)]
    assert subprocess.run(command, timeout=240).returncode == -signal.SIGKILL
    straight, losses = [start()], []
    for step in range(STEPS):
        state, loss = train_step(straight[-1], *batch(step))
        straight.append(state)
        losses.append(float(loss))
    step, state = restored(tmp_path)
    assert step == KILLED_IN
    for step in range(KILLED_IN, STEPS):
        jax.tree.map(np.testing.assert_array_equal, state, straight[step])
        state, loss = train_step(state, *batch(step))
        assert float(loss) == losses[step]
    jax.tree.map(np.testing.assert_array_equal, state, straight[-1])
    _, opt_state, scale, _ = state
    assert opt_state.skipped == 1
    _, adam = opt_state.inner_state
    assert adam[0].count == STEPS - 1
    assert np.flatnonzero(np.isnan(losses)).tolist() == [BAD_STEP]
    assert float(scale.loss_scale) == 2.0**12  # halved once, doubled once
