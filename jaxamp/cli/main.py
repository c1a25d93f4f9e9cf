"""Running a command: read what was typed, ask, show, and leave with a status."""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxamp.cli.commands import FORMAT, PROGRAM, TO_TERMINAL, Request, add_commands
from jaxamp.display.lines import near_file
from jaxamp.errors import InspectionError, JaxAmpError

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130
_MORE = "(add --traceback for the full traceback)"
_WIDTH = 120  # where the output goes to no terminal
_ABOUT = f"""\
Look at what a precision policy does to a JAX program, without changing the program.

examples:
  python -m jaxamp report models.vit:loss --args models.vit:inputs
  python -m jaxamp report train.py:loss --grad --args "{{'w': f32[8,16]}}" "f32[4,8]" --html out.html
  python -m jaxamp explain train.py:loss --policy mixed_f16 --where attention --args f32[8,16]

{PROGRAM}"""  # noqa: E501


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was typed after ``python -m jaxamp``, and return the exit status."""
    options, request = parser().parse_args(argv), None
    try:
        try:
            request = Request.read(options)
        except JaxAmpError as error:
            return _complain(error, MISUSED)
        _check_files(options)
        show(options.ask(request, options), options)
    except JaxAmpError as error:
        return _complain(error, FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        if options.traceback:
            traceback.print_exc()
            return FAILED
        kind = type(error).__name__
        given = request.blame(error) if request else ""
        return _complain(f"{_last_line(error)}{kind}: {error}{given}\n{_MORE}", FAILED)
    return OK


def parser() -> argparse.ArgumentParser:
    """Return the commands and their options."""
    top = argparse.ArgumentParser("python -m jaxamp", description=_ABOUT, formatter_class=FORMAT)
    version = sys.modules["jaxamp"].__version__  # the distribution has another name
    top.add_argument("--version", action="version", version=f"jaxamp {version}")
    add_commands(top.add_subparsers(title="commands", required=True, metavar="COMMAND"))
    return top


def show(result: Any, options: argparse.Namespace) -> None:
    """Write what was asked for: a file, JSON, or the picture at the terminal."""
    if options.html:
        Path(options.html).write_text(result.to_html())
    if options.json and options.json != TO_TERMINAL:
        Path(options.json).write_text(result.to_json() + "\n")
    if options.json == TO_TERMINAL:
        print(result.to_json())
    elif not (options.html or options.json):
        _print(result)


def _print(result: Any) -> None:
    try:
        from rich.console import Console
    except ModuleNotFoundError:  # first screens need no rich, and others say what to install
        print(result)
        return
    console = Console(highlight=False)
    # Where nothing says how wide it is, rich would take 80 columns.
    wide = console.is_terminal or "COLUMNS" in os.environ
    (console if wide else Console(highlight=False, width=_WIDTH)).print(result)


def _check_files(options: argparse.Namespace) -> None:
    """Raise an error, before any work, where a file that is to be written cannot be."""
    for option in ("html", "json", "save", "picture", "state"):
        name = getattr(options, option, None)
        if not name or name == TO_TERMINAL:
            continue
        if not Path(name).parent.is_dir():
            raise InspectionError(f"--{option} {name}: there is no folder {Path(name).parent}.")
        if Path(name).is_dir():
            raise InspectionError(f"--{option} {name}: this is a folder; name a file in it.")


def _complain(message: object, status: int) -> int:
    print(f"jaxamp: {message}", file=sys.stderr)
    return status


def _last_line(error: BaseException) -> str:
    """Return the line of the user's program that failed, as the start of a message."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    hidden = ("site-packages", ours, sysconfig.get_path("stdlib"), "<frozen")
    own = [f for f in frames if not any(word in f.filename for word in hidden)]
    return f"{near_file(own[-1].filename)}:{own[-1].lineno}: " if own else ""
