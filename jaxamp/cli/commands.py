"""The commands: their options, and what each asks."""

from __future__ import annotations

import argparse
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxamp.cli.specs import load, load_policy, read_args, with_values
from jaxamp.compiled.deviceless import ENVIRONMENTS
from jaxamp.compiled.targets import TARGETS
from jaxamp.errors import InspectionError, shown
from jaxamp.inspect.diff import diff
from jaxamp.inspect.explain import explain
from jaxamp.inspect.report import HERE, report
from jaxamp.numerics.probe import probe
from jaxamp.policy.policy import PrecisionPolicy
from jaxamp.run.amp import DEFAULT_POLICY, under
from jaxamp.tools.estimate import estimate
from jaxamp.tools.tune import tune
from jaxamp.tools.tune.tune import MOST_RUNS

TO_TERMINAL = "-"
FORMAT = argparse.RawDescriptionHelpFormatter  # which keeps line breaks
PROGRAM = """\
A program is package.module:function or path/to/file.py:function. Arguments are shapes (f32[8,128],
i32[4]), numbers, quoted texts, key, lists, tuples and dicts of these, name=... for keywords, or one
package.module:function that builds them: a tuple that it returns is all the arguments. Where
numbers are needed, shapes get normal floats and zeros for everything else.

exit status: 0 all is well, 1 the program or the question failed, 2 the command is not understood
"""


@dataclass(frozen=True, slots=True)
class Request:
    """Arguments of a command: a program, a policy, and the call to look at."""

    fn: Callable[..., Any]
    policy: PrecisionPolicy
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    others: tuple[PrecisionPolicy, ...] = ()

    @classmethod
    def read(cls, options: argparse.Namespace) -> Request:
        """Parse the command line."""
        chosen = None if options.policy is None else load_policy(options.policy)
        others = tuple(map(load_policy, options.others))
        args, kwargs = read_args(options.args)
        fn, policy = under(load(options.program), chosen)
        _check_call(fn, args, kwargs)
        if options.grad:
            fn = jax.value_and_grad(fn, has_aux=options.aux)
        return cls(fn, policy, args, kwargs, others)

    def ask(self, question: Callable[..., Any]) -> Any:
        """Return the answer to a question about the call."""
        return question(*self.args, **self.kwargs)

    def blame(self, error: Exception) -> str:
        """Return what was given for each argument, where an error is about its structure."""
        if not isinstance(error, KeyError | AttributeError | IndexError | TypeError | ValueError):
            return ""
        try:
            given = inspect.signature(self.fn).bind(*self.args, **self.kwargs).arguments
        except (TypeError, ValueError):
            return ""
        texts = [f"{name} = {shown(tree)}" for name, tree in given.items()]
        return f"\n--args gave {', '.join(texts)}" if texts else ""


def _check_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse, before any work, arguments that the program does not take."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return  # what is written in C may have none
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(fn, "__name__", type(fn).__name__)
        raise InspectionError(
            f"{name}{signature}: {error}. Give its arguments with --args, one for each: "
            "--args 'f32[8,128]' rate=0.1"
        ) from None


class _Install(argparse.Action):
    """Installs a compiler as soon as it is named, as ``--help`` helps."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        ENVIRONMENTS[values].install()
        parser.exit()


Ask = Callable[[Request, argparse.Namespace], Any]
Options = dict[str, dict[str, Any]]
"""Words for a parser, by option."""

_OF_ALL: Options = {
    "program": {"help": "package.module:function or path/to/file.py:function"},
    "--args": {"nargs": "+", "default": [], "metavar": "SPEC", "help": "its arguments"},
    "--policy": {
        "help": "a preset, jmp's grammar or a .json file (default: the program's own, "
        f"else {DEFAULT_POLICY})"
    },
    "--grad": {
        "action": "store_true", "help": "the gradient by the first argument, with the value"
    },
    "--aux": {
        "action": "store_true", "help": "with --grad: the program also returns other things"
    },
    "--json": {
        "nargs": "?", "const": TO_TERMINAL, "metavar": "FILE",
        "help": "JSON instead, into a file if one is named",
    },
    "--html": {"metavar": "FILE", "help": "one page that needs no network"},
    "--traceback": {"action": "store_true", "help": "show where the program failed"},
}  # fmt: skip
_COMMANDS: list[tuple[Ask, str, str, Options]] = []


def add_commands(commands: Any) -> None:
    """Add every command to a parser's."""
    for ask, about, example, options in _COMMANDS:
        name = ask.__name__.strip("_")
        text = f"{about}\n\nexample:\n  python -m jaxamp {name} {example}\n\n{PROGRAM}"
        command = commands.add_parser(name, help=about, description=text, formatter_class=FORMAT)
        for option, words in {**_OF_ALL, **options}.items():
            command.add_argument(option, **words)
        command.set_defaults(ask=ask, **({} if "--with" in options else {"others": []}))


def _command(about: str, example: str, options: Options) -> Callable[[Ask], Ask]:
    """Register a command, which has the name of the function that asks, and options of its own."""

    def register(ask: Ask) -> Ask:
        _COMMANDS.append((ask, about, example, options))
        return ask

    return register


@_command(
    "The precision of each operation, the reason, and what it costs and saves",
    "train.py:loss --grad --args 'f32[8,16]' 'f32[4,8]' --html report.html",
    {
        "--all": {"action": "store_true", "help": "all tables, not one screen"},
        "--target": {
            "choices": (HERE, *TARGETS),
            "help": "compile it there, and look for the FP8 products that it claims",
        },
    },
)
def _report(request: Request, options: argparse.Namespace) -> Any:
    found = report(request.fn, request.policy, target=options.target, everything=options.all)
    return request.ask(found)


@_command(
    "The program's own source, annotated line by line",
    "train.py:loss --args 'f32[8,16]' 'f32[4,8]' --where decoder/attention",
    {
        "--where": {"default": "", "metavar": "SCOPE", "help": "only what is inside"},
        "--all": {"action": "store_true", "help": "every line, and operations without floats too"},
    },
)
def _explain(request: Request, options: argparse.Namespace) -> Any:
    where, everything = options.where, options.all
    return request.ask(explain(request.fn, request.policy, where=where, everything=everything))


@_command(
    "How two policies differ on a program",
    "train.py:loss --args 'f32[8,16]' --policy mixed_bf16 --with mixed_f16",
    {
        "--with": {
            "dest": "others", "nargs": 1, "required": True, "metavar": "POLICY",
            "help": "the other",
        }
    },
)  # fmt: skip
def _diff(request: Request, options: argparse.Namespace) -> Any:
    return request.ask(diff(request.policy, *request.others)(request.fn))


@_command(
    "Errors, overflow and the first infinity or NaN of a program under a policy",
    "train.py:loss --grad --args train.py:inputs --policy mixed_f16",
    {},
)
def _probe(request: Request, options: argparse.Namespace) -> Any:
    args, kwargs = with_values((request.args, request.kwargs))
    return probe(request.fn, request.policy)(*args, **kwargs)


@_command(
    "The cheapest policy that keeps an error within a budget",
    "train.py:loss --args train.py:inputs --budget 1e-3 --save mine.json\n"
    "  python -m jaxamp report train.py:loss --args train.py:inputs --policy mine.json",
    {
        "--budget": {"type": float, "default": 1e-2, "help": "the largest error (default: 0.01)"},
        "--error": {
            "choices": ("output", "gradient"), "default": "output",
            "help": "the error of the result, or of its gradient by the first argument",
        },
        "--runs": {"type": int, "default": MOST_RUNS, "help": "how many choices may be run"},
        "--state": {"metavar": "FILE", "help": "go on from here if interrupted"},
        "--save": {"metavar": "FILE", "help": "the policy, which --policy reads"},
        "--picture": {"metavar": "FILE", "help": "the curve of cost against error"},
    },
)  # fmt: skip
def _tune(request: Request, options: argparse.Namespace) -> Any:
    args, kwargs = with_values((request.args, request.kwargs))
    found = tune(
        functools.partial(request.fn, **kwargs) if kwargs else request.fn,
        args,
        options.budget,
        request.policy,
        error=options.error,
        max_runs=options.runs,
        state=options.state,
        progress=sys.stdout.isatty() and not options.json,
    )
    if options.save:
        Path(options.save).write_text(found.policy.to_json() + "\n")
    if options.picture:
        found.picture(options.picture)
    return found


@_command(
    "Memory and time of a program on a chip that is not here",
    "train.py:loss --grad --args 'f32[8,16]' 'f32[4,8]' --target h200\n"
    "  python -m jaxamp estimate --install gpu",
    {
        "--target": {"default": "h200", "choices": TARGETS, "help": "the chip (default: h200)"},
        "--with": {
            "dest": "others", "action": "append", "default": [], "metavar": "POLICY",
            "help": "one more policy to compare with; may be repeated",
        },
        "--install": {
            "action": _Install, "choices": ENVIRONMENTS,
            "help": "install that compiler, once, and leave",
        },
    },
)  # fmt: skip
def _estimate(request: Request, options: argparse.Namespace) -> Any:
    return request.ask(estimate(request.fn, request.policy, options.target, others=request.others))
