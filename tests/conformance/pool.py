"""Runs jobs in a few processes; a job that hangs or kills its process is a failed job."""

from __future__ import annotations

import collections
import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.conformance.jobs import Job, Outcome, run

JOBS_PER_CACHE = 50
JOBS_PER_PROCESS = 1000


def _serve(pipe: Connection) -> None:
    """A worker's life: receives a job, sends its outcome, forgets now and then."""
    import jax

    for count in range(1, JOBS_PER_PROCESS + 1):
        job = pipe.recv()
        if job is None:
            return
        pipe.send(run(job))
        if count % JOBS_PER_CACHE == 0:
            jax.clear_caches()
            gc.collect()


class _Worker:
    """A process and the job that it has now."""

    def __init__(self, context: Any) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.job: Job | None = None
        self.since = 0.0
        self.done = 0

    def give(self, job: Job) -> None:
        self.job, self.since = job, time.monotonic()
        self.pipe.send(job)

    def take(self) -> Outcome:
        """The outcome of the present job; failed if the process died of it."""
        try:
            outcome = self.pipe.recv()
        except EOFError:
            self.process.join()
            outcome = Outcome("failed", f"its process died with code {self.process.exitcode}")
            self.done = JOBS_PER_PROCESS
        self.done += 1
        return outcome

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def run_all(jobs: Sequence[Job], *, workers: int, seconds: float) -> Iterator[tuple[Job, Outcome]]:
    """Runs jobs, each in at most `seconds`; yields outcomes as they come.

    Args:
        jobs: what to run, in order.
        workers: how many processes.
        seconds: after this long a job has failed and its process is ended.
    """
    context = multiprocessing.get_context("spawn")
    waiting = collections.deque(jobs)
    team = [_Worker(context) for _ in range(min(workers, len(jobs)))]
    try:
        for worker in team:
            worker.give(waiting.popleft())
        while busy := [w for w in team if w.job is not None]:
            wait([w.pipe for w in busy], timeout=1.0)
            for worker in busy:
                outcome = _outcome(worker, seconds)
                if outcome is None:
                    continue
                assert worker.job is not None
                yield worker.job, outcome
                team[team.index(worker)] = _next(worker, waiting, lambda: _Worker(context))
    finally:
        for worker in team:
            worker.stop()


def _outcome(worker: _Worker, seconds: float) -> Outcome | None:
    if worker.pipe.poll():
        return worker.take()
    if time.monotonic() - worker.since > seconds:
        worker.done = JOBS_PER_PROCESS
        return Outcome("failed", f"no answer in {seconds:.0f} s")
    return None


def _next(worker: _Worker, waiting: collections.deque[Job], hire: Callable[[], _Worker]) -> _Worker:
    """Gives the worker, or a fresh one in its place, the next job if there is one."""
    worker.job = None
    if not waiting:
        return worker
    if worker.done >= JOBS_PER_PROCESS:
        worker.stop()
        worker = hire()
    worker.give(waiting.popleft())
    return worker
