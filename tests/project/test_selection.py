"""What `make test` leaves out of a product, and that the table of mutations is up to date."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import mutations, selection

PACKAGE = Path(__file__).parents[2] / "jaxamp"


class Item:
    """A case of a test, as far as the selection looks at it."""

    def __init__(self, marks: list[pytest.Mark], called: str = "", **params: Any) -> None:
        self.nodeid = called or f"tests/test_it.py::test_it[{params}]"
        self.callspec = SimpleNamespace(params=params)
        self.marks = {mark.name: mark for mark in marks}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)

    def add_marker(self, name: str) -> None:
        self.marks[name] = getattr(pytest.mark, name).mark


def _kept(items: list[Item]) -> list[Item]:
    selection.pytest_collection_modifyitems(items)
    return [item for item in items if "long" not in item.marks]


def test_each_value_keeps_one_case_and_the_others_take_turns() -> None:
    """Six programs, under two policies and in two orders."""
    mark = pytest.mark.product("name").mark
    values = itertools.product("abcdef", ["bf16", "f16"], ["inside", "outside"])
    items = [Item([mark], name=n, policy=p, order=o) for n, p, o in values]
    kept = [item.callspec.params for item in _kept(items)]
    assert [case["name"] for case in kept] == list("abcdef")
    assert set(Counter((case["policy"], case["order"]) for case in kept).values()) == {1, 2}


def test_every_leaves_out_values_and_the_others_take_turns() -> None:
    """Six programs under two policies, of which every third program is run."""
    mark = pytest.mark.product("name", every=3).mark
    values = itertools.product("abcdef", ["bf16", "f16"])
    items = [Item([mark], name=n, policy=p) for n, p in values]
    kept = [item.callspec.params for item in _kept(items)]
    assert kept == [{"name": "a", "policy": "bf16"}, {"name": "d", "policy": "f16"}]


def test_one_test_in_so_many_of_each_function() -> None:
    """A function with fewer tests has one, another one where the first is another."""
    names = "long[a]", "long[b]", "long[c]", "long[d]", "short", "two[a]", "two[b]"
    cases: list[Any] = [Item([], called=name) for name in names]

    def chosen(every: int, first: int = 0) -> list[str]:
        return [case.nodeid for case in selection.one_in(cases, every, first)]

    assert chosen(3) == ["long[a]", "long[d]", "short", "two[a]"]
    assert chosen(3, 1) == ["long[b]", "short", "two[b]"]
    assert chosen(1) == [*names]
    with pytest.raises(ValueError, match="at least 1, not 0"):
        chosen(0)
    with pytest.raises(ValueError, match="below --every, 3"):
        chosen(3, 3)


@pytest.mark.parametrize(("every", "count", "drawn"), [(1, 200, 200), (40, 200, 5), (2, 4, 4)])
def test_a_sample_draws_fewer_random_programs(every, count, drawn, monkeypatch):
    monkeypatch.setattr(selection, "_every", 1)  # and put back what it is
    selection.pytest_configure(SimpleNamespace(getoption={"every": every}.get))
    assert selection.drawn(count) == drawn


def test_those_that_take_minutes_are_as_one_function() -> None:
    mark = pytest.mark.minutes.mark
    cases: list[Any] = [Item([mark] * (name != "c"), called=name) for name in "abcd"]
    assert [case.nodeid for case in selection.one_in(cases, 3)] == ["a", "c"]
    assert [case.nodeid for case in selection.one_in(cases, 3, 1)] == ["b", "c"]


def test_attributes_tell_values_apart() -> None:
    """`case.program` is an attribute of a parameter."""
    mark = pytest.mark.product("case.program").mark
    items = [Item([mark], case=SimpleNamespace(program=n, turn=t)) for n in "ab" for t in range(3)]
    kept = [item.callspec.params["case"] for item in _kept(items)]
    assert [(case.program, case.turn) for case in kept] == [("a", 0), ("b", 1)]


def test_long_cases_and_other_tests_are_left_alone() -> None:
    """A case that is long anyway is not the one that is kept."""
    mark = pytest.mark.product("name").mark
    items = [Item([mark, pytest.mark.long.mark], name="a", turn=0), Item([mark], name="a", turn=1)]
    assert _kept([*items, other := Item([])]) == [items[1], other]


@pytest.mark.parametrize(
    ("path", "markexpr", "is_left_out"),
    [
        ("training/test_preemption.py", "not long and not deviceless", True),
        ("training/test_preemption.py", "long or deviceless", False),
        ("training/test_preemption.py", "", False),
        ("training/preempted.py", "", True),
        ("rewrite/test_products.py", "not long", False),
    ],
)
def test_files_without_a_test_to_run_are_not_imported(
    path: str, markexpr: str, is_left_out: bool
) -> None:
    """Helpers never, files that are long as a whole where long tests are left out."""
    config: Any = SimpleNamespace(getoption={"markexpr": markexpr}.get)
    left_out = selection.pytest_ignore_collect(selection.TESTS / path, config)
    assert left_out is (True if is_left_out else None)
    assert selection.pytest_ignore_collect(PACKAGE / "core/formats.py", config) is None


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda m: m.file)
def test_mutations_change_what_is_there(mutation: mutations.Mutation) -> None:
    """The text to replace occurs once; if it has moved, tests/mutations.py follows it."""
    assert mutations.missing(mutation) is None


def test_every_folder_is_broken_somewhere() -> None:
    """At least thirty places, and one in each folder that holds modules."""
    broken = {str(Path(m.file).parent) for m in mutations.MUTATIONS}
    folders = {
        str(path.parent.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }
    assert len(mutations.MUTATIONS) >= 30
    assert folders - broken == {"."}
