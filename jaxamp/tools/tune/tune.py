"""`tune`: the cheapest policy that keeps an error within a budget."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxamp.errors import TuningError
from jaxamp.numerics.probe import differentiated
from jaxamp.run.amp import static_parameters, without_jit
from jaxamp.tools.tune.problem import Metric, Problem
from jaxamp.tools.tune.search import Search
from jaxamp.tools.tune.sensitivity import predicted
from jaxamp.tools.tune.tuning import Choice, Tuning, Verdict

MOST_RUNS = 30
_MARGIN = 0.8  # of the budget, a choice: other data have other errors


def tune(
    fn: Any,
    args: Sequence[Any],
    budget: float = 1e-2,
    policy: Any = None,
    *,
    error: str | Metric = "output",
    max_runs: int = MOST_RUNS,
    state: str | Path | None = None,
    progress: bool = False,
) -> Tuning:
    """Return the cheapest policy that keeps the error of `fn` within `budget`.

    Operations of one kind, in one function and scope, are a group. One forward and one backward
    pass predict what the roundings of each do to the result; a choice is made by modelled time and
    run; if it misses, its most sensitive groups are raised, by bisection; then
    cheaper choices are tried. The same call gives the same answer.

    Args:
      fn: whatever `amp` takes, or what it returned.
      args: arguments of a typical call, a tuple.
      budget: the largest error.
      policy: as for `amp`; by default that of an amped `fn`, else `mixed_bf16`.
      error: ``"output"``, the relative error of the result (root mean square over its arrays);
        ``"gradient"``, that of the gradient of `fn`, a scalar function, by its first argument; or a
        function of ``(result, result in original precision)`` that returns a number.
      max_runs: how many choices may be run.
      state: a JSON file in which to keep what was found out, so that an interrupted call goes on.
      progress: whether to show a progress bar.

    Returns:
      The ``Tuning``; its ``policy`` is for `amp`.

    Raises:
      TuningError: the budget cannot be kept or understood, or the result is not finite.

    >>> import jax.numpy as jnp
    >>> x = jnp.linspace(0, 1, 64).reshape(8, 8)
    >>> found = tune(lambda x: jnp.tanh(x @ x) @ x, (x,), budget=1e-5)
    >>> found.error <= 1e-5, len(found.policy.rules)
    (True, 2)
    """
    _check(args, budget, error, max_runs)
    plain = without_jit(fn)
    if error == "gradient":
        plain = differentiated(plain, jax.grad)
    metric = error if callable(error) else None
    problem = Problem.of(plain, policy, args, metric, static_parameters(fn))
    with _bar(max_runs, progress) as advance:
        return _search(problem, budget, max_runs, state, advance)


def _search(
    problem: Problem,
    budget: float,
    max_runs: int,
    path: str | Path | None,
    advance: Callable[[str], None],
) -> Tuning:
    state = _State(path, problem.fingerprint())
    if state.matrix is None:
        advance("sensitivities")
        state.matrix = problem.matrix()
        state.write()

    def measure(low: np.ndarray) -> float:
        advance(f"{int(low.sum())} of {len(low)} groups low")
        error = state.errors[low.tobytes()] = problem.error(low)
        state.write()
        return error

    search = Search(
        state.matrix, problem.gains(), _MARGIN * budget, measure, problem.cost,
        max_runs - 1, state.errors,
    )  # fmt: skip
    low, single = search.best(), search.single
    labels = [f"{g}: predicted error {s:.1e}" for g, s in zip(problem.groups, single, strict=True)]
    verdicts = [
        Verdict(group=group, low=bool(is_low), predicted=float(error), saved=float(saved))
        for group, is_low, error, saved in zip(
            problem.groups, low, single, search.gains, strict=True
        )
    ]
    return Tuning(
        policy=problem.policy(low, labels),
        budget=budget,
        error=state.errors.get(low.tobytes(), 0.0),
        cost=problem.cost(low),
        cost_f32=problem.cost(np.zeros(len(low), bool)),
        cost_low=problem.cost(np.ones(len(low), bool)),
        runs=len(state.errors) + 1,
        verdicts=tuple(sorted(verdicts, key=lambda v: -v.predicted)),
        curve=_curve(search),
    )


def _curve(search: Search) -> tuple[Choice, ...]:
    """Return the points of lowering groups one by one, best ratio first, and of all other runs."""
    low, chosen = np.zeros(len(search.gains), bool), {}
    for group in np.argsort(-search.gains / np.maximum(search.single, 1e-30), kind="stable"):
        low[group] = True
        chosen[low.tobytes()] = None
    choices = (
        Choice(
            cost=search.cost_of(choice := np.frombuffer(key, bool)),
            predicted=float(predicted(search.matrix, choice)),
            measured=search.errors.get(key),
        )
        for key in chosen | search.errors
    )
    return tuple(sorted(choices, key=lambda choice: choice.cost))


def _check(args: Any, budget: float, error: Any, max_runs: int) -> None:
    if not isinstance(args, tuple | list):
        raise TuningError(f"args is a tuple of arguments, not {type(args).__name__}: write (x,).")
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args)):
        raise TuningError("tune runs the program: give it arrays rather than shapes.")
    if not (isinstance(budget, Real) and budget > 0):
        raise TuningError(f"The budget is an error above 0, not {budget!r}.")
    if not (callable(error) or error in ("output", "gradient")):
        raise TuningError(f"error is 'output', 'gradient' or a function, not {error!r}.")
    if not (isinstance(max_runs, int) and max_runs >= 2):
        raise TuningError("max_runs is at least 2: the original program, and one choice.")


class _State:
    """The sensitivities and the measured errors of one problem, in a file if a path is given.

    What a file says of a problem of another fingerprint is not used.
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
            "errors": [[list(choice), error] for choice, error in self.errors.items()],
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
            self.errors = {bytes(choice): float(error) for choice, error in data["errors"]}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TuningError(
                f"{path} is not a state of a search that tune has kept ({type(error).__name__}: "
                f"{error}). Remove it, or name another file."
            ) from None


@contextmanager
def _bar(total: int, shown: bool) -> Iterator[Callable[[str], None]]:
    if not shown or importlib.util.find_spec("rich") is None:
        yield lambda _: None
        return
    from rich.progress import Progress

    with Progress() as bar:
        task = bar.add_task("tune", total=total)
        yield lambda text: bar.update(task, advance=1, description=text)
        bar.update(task, completed=total)  # fewer runs than allowed were enough
