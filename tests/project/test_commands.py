"""The commands that README and docs print: they exist, are understood, and print what is shown."""

import argparse
import importlib.util
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from jaxamp.cli import main as cli
from jaxamp.compiled.deviceless import Environment
from tests.pages import FENCE, PAGES, ROOT

PYTHON = {"python", ".venv/bin/python"}


def typed(text: str) -> Iterator[list[str]]:
    """The words of each command in a page: inline, or in a block for a shell."""
    spans = re.findall(r"`([^`]+)`", FENCE.sub("", text))
    shells = [block for language, block in FENCE.findall(text) if language == "console"]
    for line in spans + [line for block in shells for line in block.splitlines()]:
        for part in line.removeprefix("$ ").split("&&"):
            if re.match(r"\s*(make|pip|python|\.venv/bin/\w+) ", part):
                yield shlex.split(part, comments=True)


COMMANDS = {
    (str(page.relative_to(ROOT)), shlex.join(words)): words
    for page in PAGES
    for words in typed(page.read_text())
}


def commands(program: str) -> list[object]:
    """Those of one program as parameters of a test, without its name."""
    programs = PYTHON if program == "python" else {program, f".venv/bin/{program}"}
    return [
        pytest.param(words[1:], id=f"{page}: {line}")
        for (page, line), words in COMMANDS.items()
        if words[0] in programs
    ]


@pytest.mark.parametrize("words", commands("make"))
def test_make_has_the_target(words):
    """What follows `make`, but for variables that are set, is a target."""
    targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {word for word in words if "=" not in word} <= set(targets)


@pytest.mark.parametrize("words", commands("pip"))
def test_pip_installs_the_checkout(words):
    """Never jaxamp by its name, which is another package's; the extras exist."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    places = [word for word in words[1:] if not word.startswith("-")]
    assert "jaxamp" not in {place.partition("[")[0] for place in places}
    extras = {extra for place in places for extra in re.findall(r"^\.\[(.*)\]", place)}
    assert extras <= project["optional-dependencies"].keys()


class UnderstoodError(Exception):
    """A program has read its options."""


@pytest.fixture
def understands(monkeypatch):
    """Whether a program, stopped as soon as it has read its options, takes those given."""
    parse = argparse.ArgumentParser.parse_args

    def parse_args(self, args=None, namespace=None):
        parse(self, args, namespace)
        raise UnderstoodError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(Environment, "install", lambda self: None)  # it is installed when parsed
    monkeypatch.chdir(ROOT)

    def asked(source: Path, options: list[str]) -> bool:
        assert "parse_args" in source.read_text() or source.parent.name == "jaxamp"
        monkeypatch.setattr("sys.argv", [str(source), *options])
        try:
            runpy.run_path(str(source), run_name="__main__")
        except UnderstoodError:
            return True
        except SystemExit as left:
            return left.code == 0
        raise AssertionError(f"{source} has read no options")

    return asked


def source_of(words: list[str]) -> tuple[Path, list[str]]:
    """The file that Python would run, and what is left for it."""
    if words[0] != "-m":
        return ROOT / words[0], words[1:]
    spec = importlib.util.find_spec(words[1])
    if spec is not None and spec.submodule_search_locations:
        spec = importlib.util.find_spec(f"{words[1]}.__main__")
    assert spec is not None, f"there is no module {words[1]}"
    return Path(str(spec.origin)), words[2:]


@pytest.mark.parametrize("words", commands("python"))
def test_python_understands_the_options(words, understands):
    """The module or file is there; if it is ours, it takes what is printed after its name."""
    source, options = source_of(words)
    assert source.exists()
    if options and source.is_relative_to(ROOT) and "site-packages" not in source.parts:
        assert understands(source, options)


@pytest.mark.parametrize(
    "words", ["-m jaxamp reprot x:y", "-m benchmarks.probe fault", "examples/digits.py --fast"]
)
def test_what_is_misspelt_is_not_understood(words, understands):
    """The check above can fail."""
    assert not understands(*source_of(words.split()))


def shown() -> Iterator[tuple[list[str], str]]:
    """The commands of jaxamp that a page shows with what they print, and those lines."""
    text = (ROOT / "docs/insight.md").read_text()
    for language, block in FENCE.findall(text):
        command, _, printed = block.partition("\n$ ")[0].partition("\n")
        if language == "console":
            yield shlex.split(command.removeprefix("$ python -m jaxamp ")), printed


def quick() -> Iterator[object]:
    """Those that look at a program without running it."""
    for words, printed in shown():
        compiles = "estimate" in words or "--target" in words
        marks = [pytest.mark.deviceless("h200")] if compiles else []
        if words[0] != "tune":
            yield pytest.param(words, printed, marks=marks, id=" ".join(words[:2]))


@pytest.mark.parametrize(("words", "printed"), list(quick()))
def test_commands_print_what_is_shown(words, printed, monkeypatch, capsys):
    """Line by line; three dots stand for anything."""
    if not jax.__version__.startswith("0.10."):
        pytest.skip("pages show what is counted on JAX 0.10")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "140")
    assert cli.main(words) == 0
    lines = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    for part in printed.strip("…\n").split("…"):
        assert part.strip("\n") in lines


@pytest.mark.long
def test_tune_prints_what_is_shown(tmp_path):
    """In a process of its own: the flags of the tests change the errors that it measures."""
    ((words, printed),) = [(words, printed) for words, printed in shown() if words[0] == "tune"]
    words = [str(tmp_path / word) if word.endswith(".json") else word for word in words]
    environment = {**os.environ, "COLUMNS": "140", "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "jaxamp", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert printed.strip() in "\n".join(line.rstrip() for line in done.stdout.splitlines())
