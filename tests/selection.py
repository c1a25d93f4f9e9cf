"""What `make test` runs of a product of parameters: one case for each value of some of them.

    @pytest.mark.product("name")
    @pytest.mark.parametrize("policy", ["auto_mixed", "auto_mixed_bf16"])
    @pytest.mark.parametrize("name", PROGRAMS)

runs each program once, with the policies in turn: the first program with the first policy, the next
with the second. All other cases get the mark `long`, and run in `make test-long`. With `every=3`
only every third program is run.

What has no test to run is not imported either, as each worker would: helpers, and files that say
`pytestmark = pytest.mark.long`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent

_every = 1


def pytest_configure(config: pytest.Config) -> None:
    """Remember `--every` for `drawn`, which files call as they are imported."""
    global _every
    _every = config.getoption("every")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of `tests` without a test, and those that the marks leave out as a whole."""
    if collection_path.suffix != ".py" or TESTS not in collection_path.parents:
        return None
    if not collection_path.name.startswith("test_"):
        return True  # for `--doctest-modules`; examples are in the package
    mark = re.search(r"^pytestmark = pytest\.mark\.(\w+)", collection_path.read_text(), re.M)
    return True if mark and f"not {mark[1]}" in config.getoption("markexpr") else None


@pytest.hookimpl(tryfirst=True)  # before `-m` reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `long` what the mark `product` leaves out."""
    groups: dict[str, dict[Any, list[pytest.Item]]] = {}
    every: dict[str, int] = {}
    for item in items:
        mark = item.get_closest_marker("product")
        if mark is not None and item.get_closest_marker("long") is None:
            cases = groups.setdefault(_function(item), {})
            cases.setdefault(_key(item, mark.args), []).append(item)
            every[_function(item)] = mark.kwargs.get("every", 1)
    for function, cases in groups.items():
        for turn, of_one_value in enumerate(cases.values()):
            number, is_left_out = divmod(turn, every[function])
            if not is_left_out:
                del of_one_value[number % len(of_one_value)]
            for item in of_one_value:
                item.add_marker("long")


def one_in(cases: Sequence[pytest.Item], every: int, first: int = 0) -> list[pytest.Item]:
    """Choose one case in so many of each test function, and one at least.

    Tests that take minutes each, as they say by that mark, are chosen from as one function's.

    Raises:
        ValueError: `every` is not positive, or `first` is not below it.
    """
    if every < 1:
        raise ValueError(f"--every is the distance between tests that run, at least 1, not {every}")
    if not 0 <= first < every:
        raise ValueError(f"--first is below --every, {every}, and not negative; it is {first}")
    functions: dict[str, list[pytest.Item]] = {}
    for case in cases:
        takes_minutes = case.get_closest_marker("minutes") is not None
        functions.setdefault("" if takes_minutes else _function(case), []).append(case)
    kept = {case for of_one in functions.values() for case in of_one[first % len(of_one) :: every]}
    return [case for case in cases if case in kept]


def drawn(count: int) -> int:
    """Return how many of so many random programs a long test draws: one in `--every`, or 5."""
    return max(count // _every, min(count, 5))


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _key(item: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """Read the parameters that the mark names; `case.program` is an attribute of one."""
    parameters = item.callspec.params
    return tuple(
        str(operator.attrgetter(rest)(parameters[name]) if rest else parameters[name])
        for name, _, rest in (dotted.partition(".") for dotted in names)
    )


def pytest_runtest_setup(item: Any) -> None:
    """Skip what is compiled for a chip, named by the mark or by `target`, without its compiler."""
    for mark in item.iter_markers("deviceless"):
        from jaxamp.compiled.deviceless import ENVIRONMENTS  # after conftest.py has set JAX's flags
        from jaxamp.compiled.targets import TARGETS

        target = mark.args[0] if mark.args else item.callspec.params["target"]
        environment = ENVIRONMENTS[TARGETS[target].environment]
        if not environment.ready:
            pytest.skip(f"no compiler: python -m jaxamp estimate --install {environment.name}")


def of_present_features(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Leave out what a feature does that has been taken out of the package."""
    package = TESTS.parent / "jaxamp"
    marks = ([n for mark in item.iter_markers("feature") for n in mark.args] for item in items)
    pairs = zip(items, marks, strict=True)
    return [item for item, names in pairs if all((package / name).is_dir() for name in names)]
