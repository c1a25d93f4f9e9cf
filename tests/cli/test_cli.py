"""The command line, as a person types it: in a shell, in the folder of their program."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import jaxamp
from jaxamp import PrecisionPolicy
from jaxamp.cli.main import main
from jaxamp.compiled import deviceless

PROGRAM = '''
"""A model that somebody has."""

import jax
import jax.numpy as jnp
import jaxamp

def loss(params, x, y):
    with jax.named_scope("hidden"):
        hidden = jax.nn.relu(x @ params["w1"])
    return jnp.mean((hidden @ params["w2"] - y) ** 2)


def inputs():
    params = {"w1": jnp.ones((8, 16)), "w2": jnp.ones((16, 1))}
    return params, jnp.ones((4, 8)), jnp.ones((4, 1))


def scale(x, *, rate):
    return rate * (x @ x.T)


def broken(x):
    return x @ x


@jax.jit
@jaxamp.amp(policy="mixed_f16")
def amped(x):
    return x @ x.T


LIMIT = 3
'''
PARAMS = "\"{'w1': f32[8,16], 'w2': f32[16,1]}\""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with one module."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "model.py").write_text(PROGRAM)
    (folder / "broken.py").write_text("def loss(:\n")
    return folder


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def typed(folder, monkeypatch, capsys):
    """Runs a line in this process: `python` starts only where the start is what is tested."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "120")

    def run(line: str) -> Done:
        try:
            status = main(shlex.split(line)[3:])
        except SystemExit as left:
            status = left.code
        return Done(int(status or 0), *capsys.readouterr())

    return run


def in_a_shell(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    """Runs a line as it is typed."""
    line = line.replace("python", sys.executable, 1)
    wide = {**os.environ, "COLUMNS": "120"}
    return subprocess.run(line, shell=True, cwd=folder, capture_output=True, text=True, env=wide)


def test_report_with_shapes(folder):
    """Shapes as they are typed, a table on the screen."""
    line = f"python -m jaxamp report model:loss --args {PARAMS} f32[4,8] f32[4,1] --all"
    done = in_a_shell(folder, line)
    assert done.returncode == 0, done.stderr
    assert "loss under mixed_bf16" in done.stdout
    assert "bf16[4,8] × bf16[8,16]" in done.stdout
    assert "model.py:10" in done.stdout
    assert done.stderr == ""


def test_report_of_the_gradient_as_json(typed):
    """Inputs from a function, the gradient, another policy, JSON that a program reads."""
    line = "python -m jaxamp report model:loss --grad --policy mixed_f16 --args model:inputs --json"
    done = typed(line)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["policy"] == "mixed_f16"
    assert data["dots"] == {"f16": 4, "f32": 1}  # one is an outer product, which is elementwise


def test_dtypes_have_their_long_names_too(typed):
    """As numpy and the report write them."""
    short, long = "f32[4,8] f32[4,1]", "float32[4,8] float32[4,1]"
    both = [typed(f"python -m jaxamp report model:loss --args {PARAMS} {a}") for a in (short, long)]
    assert both[0].returncode == both[1].returncode == 0, both[1].stderr
    assert both[0].stdout == both[1].stdout


def test_report_into_a_file_from_a_path(folder, typed):
    """A file in the place of a module, keyword arguments, JSON into a file."""
    line = "python -m jaxamp report ./model.py:scale --args f32[4,8] rate=0.5 --json out.json"
    done = typed(line)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert json.loads((folder / "out.json").read_text())["dots"] == {"bf16": 1}


def test_report_as_a_page(folder, typed):
    """One file, and nothing on the screen."""
    done = typed("python -m jaxamp report model:loss --args model:inputs --html report.html")
    assert (done.returncode, done.stdout) == (0, "")
    assert "<!doctype html>" in (folder / "report.html").read_text()


def test_a_program_that_has_a_policy_is_seen_under_it(typed):
    """What was amped in the file, unless another policy is asked for."""
    line = "python -m jaxamp report model:amped --args f32[4,8]"
    assert "amped under mixed_f16:" in typed(line).stdout
    assert "amped under always_f32:" in typed(f"{line} --policy always_f32").stdout


def test_report_of_what_a_compiler_makes_of_fp8(typed):
    """Claimed beside found, in the program that is compiled for the machine at hand."""
    line = "python -m jaxamp report model:scale --args f32[2048,2048] rate=0.5 --policy fp8_current"
    assert "1 dots in FP8 are planned; with target=" in typed(line).stdout
    done = typed(f"{line} --target here --json")
    assert done.returncode == 0, done.stderr
    (fp8,) = json.loads(done.stdout)["fp8"]
    assert (fp8["claimed"], fp8["found"]) == (1, 0)  # a CPU has no such products
    assert "1 FP8 products claimed, 0 found" in typed(f"{line} --target here").stdout


@pytest.mark.parametrize(
    "line",
    ["explain --where hidden", "diff --with mixed_f16", "probe", "tune --budget 1"],
    ids=lambda line: line.split()[0],
)
def test_every_answer_is_a_page_too(folder, typed, line: str):
    """What the terminal shows, in one file that names no other place."""
    command, _, more = line.partition(" ")
    typed_line = f"python -m jaxamp {command} model:loss --args model:inputs --html page.html"
    done = typed(f"{typed_line} {more}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    page = (folder / "page.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "mixed_bf16" in page or command == "tune"
    assert "://" not in page


@pytest.mark.deviceless
@pytest.mark.parametrize("target", ["h200", "v5e"])
def test_estimate(typed, monkeypatch, target: str):
    """Facts and the model at the terminal, and both as JSON."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # those of the tests' own process
    line = f"python -m jaxamp estimate model:loss --grad --args model:inputs --target {target}"
    done = typed(f"{line} --with mixed_f16")
    assert done.returncode == 0, done.stderr
    assert done.stdout.index("compiled: facts") < done.stdout.index("roofline: a model")
    more = ["mixed_f16", "always_f16"]
    line += "".join(f" --with {policy}" for policy in more)
    compiled = json.loads(typed(f"{line} --json").stdout)["compiled"]
    assert [row["policy"] for row in compiled] == ["always_f32", "mixed_bf16", *more]
    assert all(row["kernels"] > 0 and row["time"]["seconds"] > 0 for row in compiled)


def test_explain_one_scope(typed):
    """The source with its notes, only what is inside."""
    done = typed("python -m jaxamp explain model:loss --args model:inputs --where hidden")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    at = next(i for i, text in enumerate(lines) if "relu" in text)
    assert "bf16 product" in lines[at + 1]
    assert "reduce_sum" not in done.stdout


def test_diff(typed):
    """Two policies side by side."""
    line = (
        "python -m jaxamp diff model:loss --args model:inputs --policy always_f32 --with mixed_f16"
    )
    done = typed(line)
    assert done.returncode == 0, done.stderr
    assert "loss: always_f32 → mixed_f16" in done.stdout
    assert "f32 → f16" in done.stdout


def test_probe(typed):
    """Shapes get numbers; the table names the operations that lose most."""
    line = "python -m jaxamp probe model:scale --args f32[4,8] rate=0.5 --policy mixed_f16"
    done = typed(line)
    assert done.returncode == 0, done.stderr
    assert "dot_general" in done.stdout
    as_json = typed(f"{line} --json")
    assert json.loads(as_json.stdout)


def test_tune(folder, typed):
    """A policy within the budget, into a file that `report` reads."""
    line = (
        "python -m jaxamp tune model:scale --args f32[8,8] rate=0.5 --budget 1e-6 --save best.json"
    )
    done = typed(line)
    assert done.returncode == 0, done.stderr
    line = "python -m jaxamp report model:scale --args f32[8,8] rate=0.5 --policy best.json --json"
    assert json.loads(typed(line).stdout)["dots"] == {"f32": 1}


def test_a_policy_from_a_file(folder, typed):
    """What `to_json` wrote is a policy."""
    (folder / "mine.json").write_text(PrecisionPolicy.MIXED_F16.to_json())
    line = "python -m jaxamp report model:loss --policy mine.json --args model:inputs --json"
    assert json.loads(typed(line).stdout)["dots"] == {"f16": 2}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("report model:los --args f32[4]", "model has no 'los'. Did you mean 'loss'?"),
        ("report modle:loss", "There is no module 'modle'"),
        ("report model", "'model' names no function"),
        ("report other.py:loss", "There is no file other.py"),
        ("report model:LIMIT", "is int, and cannot be called"),
        ("report model:loss --args q32[4]", "names no dtype"),
        ("report model:loss", "loss(params, x, y): missing a required argument: 'params'. Give"),
        ("tune model:loss --args f32[4]", "'x'. Give its arguments with --args"),
        ("report model:amped --args f32[4,4] f32[4]", "amped(x): too many positional arguments"),
        ("report model:scale --args f32[4,4] f32[1]", "too many positional arguments"),
        ("report model:loss --args f32[-4]", "is not a list of sizes"),
        ("report model:loss --args 'f32[4'", "is not an argument"),
        ("report model:scale --args rate=1.0 f32[4,4]", "comes after a named argument"),
        ("report model:loss --policy mixd_f16 --args model:inputs", "Did you mean 'mixed_f16'?"),
        ("report model:loss --policy mine.jsn.json", "There is no file mine.jsn.json"),
        ("diff model:loss --args model:inputs", "required: --with"),
        ("diff model:loss --args model:inputs --with f17", "Unknown policy 'f17'"),
        ("estimate model:loss --target h300", "invalid choice: 'h300'"),
        ("tune model:loss --args model:inputs --budget small", "invalid float value: 'small'"),
        ("estimate --install npu", "invalid choice: 'npu'"),
        ("report", "the following arguments are required: program"),
        ("reprot model:loss", "invalid choice: 'reprot'"),
        ("", "the following arguments are required: COMMAND"),
    ],
)
def test_what_is_not_understood(typed, line: str, says: str):
    """Status 2, one message that says what to do, nothing on the screen, no traceback."""
    done = typed(f"python -m jaxamp {line}")
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("report model:broken --args f32[4,8]", "model.py:24: TypeError"),
        ("report model:broken --args f32[4,8]", "(add --traceback for the full traceback)"),
        ("tune model:scale --args f32[4,4] rate=0.5 --budget -1", "budget"),
        ("report broken:loss --args f32[4,8]", "SyntaxError: invalid syntax (broken.py, line 1)"),
        ("report model:loss --args model:inputs --json no/such/file", "is no folder no/such"),
        ("report model:loss --args model:inputs --html .", "--html .: this is a folder"),
        ("tune model:loss --args model:inputs --save no/such/file", "is no folder no/such"),
        ("tune model:loss --args model:inputs --state model.py", "is not a state of a search"),
        ("probe model:broken --args f32[4,8]", "model.py:24: TypeError"),
        ("explain model:loss --args model:inputs --where hiden", "Did you mean 'hidden'?"),
    ],
)
def test_what_fails(typed, line: str, says: str):
    """Status 1, and the user's own line or none."""
    done = typed(f"python -m jaxamp {line}")
    assert done.returncode == 1
    assert says in done.stderr
    assert not re.search(r"Traceback|/lib/python", done.stderr)


def test_version(typed):
    """The version of what is imported, installed or not."""
    done = typed("python -m jaxamp --version")
    assert (done.returncode, done.stdout) == (0, f"jaxamp {jaxamp.__version__}\n")


def test_traceback_on_request(folder):
    """The whole way to the failure is one option away."""
    done = in_a_shell(folder, "python -m jaxamp report model:broken --args f32[4,8] --traceback")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


@pytest.mark.parametrize("command", ["", "report", "explain", "diff", "probe", "tune", "estimate"])
def test_help_has_an_example(typed, command: str):
    """Help exits with 0 and shows a whole command."""
    done = typed(f"python -m jaxamp {command} --help")
    assert done.returncode == 0
    assert "example" in done.stdout
    assert f"python -m jaxamp {command}" in done.stdout


@pytest.mark.parametrize(("target", "name"), [("h200", "gpu"), ("v5e", "tpu")])
def test_a_compiler_that_is_missing(folder, typed, monkeypatch, target: str, name: str):
    """The error says what to install, how large it is and where it goes."""
    monkeypatch.setattr(deviceless, "ROOT", folder / "nothing")
    done = typed(f"python -m jaxamp estimate model:loss --args model:inputs --target {target}")
    assert done.returncode == 1
    assert f"`python -m jaxamp estimate --install {name}`" in done.stderr
    assert "GB" in done.stderr


def test_a_reader_that_leaves_early(folder):
    """`| head -1` ends the command without noise."""
    line = "python -m jaxamp report model:loss --grad --args model:inputs --json | head -1"
    done = in_a_shell(folder, line)
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_what_lies_beside_a_file_is_imported(typed, tmp_path, monkeypatch):
    """A program in another folder finds the modules beside it, as when Python runs the file."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "layer_beside.py").write_text("def dense(x, w):\n    return x @ w\n")
    (tmp_path / "program_beside.py").write_text(
        "from layer_beside import dense\n\ndef loss(x, w):\n    return dense(x, w).sum()\n"
    )
    line = f"python -m jaxamp report {tmp_path}/program_beside.py:loss --args f32[4,4] f32[4,4]"
    assert "bf16" in typed(line).stdout


@pytest.mark.parametrize(
    ("body", "args", "words"),
    [
        ("x @ params['b']", "{'w':f32[4,4]}", "gave params = {'w': float32[4,4]}"),
        ("x @ params.w", "{'w':f32[4,4]}", "gave params = {'w': float32[4,4]}, x = float32[2,4]"),
        ("x @ params['w']", "f32[4,4]", "gave params = float32[4,4], x = float32[2,4]"),
    ],
)
def test_a_wrong_tree_of_arguments_is_shown(typed, tmp_path, monkeypatch, body, args, words):
    """The message says what --args gave for each argument."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "wrong_tree.py").write_text(f"def loss(params, x):\n    return ({body}).sum()\n")
    done = typed(f'python -m jaxamp report {tmp_path}/wrong_tree.py:loss --args "{args}" f32[2,4]')
    assert done.returncode == 1
    assert words in done.stderr
