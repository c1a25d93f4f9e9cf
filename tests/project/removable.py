"""Take features out of a copy of the package, and run the core's tests on what is left.

    python -m tests.project.removable                 each feature, then all of them
    python -m tests.project.removable found all       some of these cases
    python -m tests.project.removable all --short     fewer tests

Prints `NAME removed: N passed` for each, and is unsuccessful if a test failed. With all of them
out, a sample of JAX's own cases of its primitives runs as well.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
FEATURES = {
    "found": ("found",),
    "quantized": ("quantized",),
    "cancellation": ("cancellation",),
    "xla": ("xla",),
    "modules": ("modules",),
    "display": ("display",),
    "inspect": ("inspect",),
    "numerics": ("numerics",),
    "training": ("training",),
    "tools": ("tools",),
    "compiled": ("compiled",),
    "cli": ("cli",),
}
"""The folders of each feature."""
ALL = "all"
SHARED = ("kernels",)  # of several features: out when all are out

SHORT = (
    "tests/rewrite/test_environment.py",
    "tests/rewrite/test_registry.py",
    "tests/plan/test_decision.py",
    "tests/plan/precision/test_choose.py",
    "tests/policy/test_jmp_string.py",
    "tests/project/test_core_alone.py",
)
LONG = (
    *SHORT,
    "tests/run/test_amp.py",
    "tests/rewrite/test_gradients.py",
    "tests/rewrite/test_products.py",
    "tests/rewrite/test_random_programs.py",
    "tests/rewrite/test_refused.py",
    "tests/rewrite/test_scatter.py",
    "tests/rewrite/test_weight_gradients.py",
    "tests/plan/conditioning",
    "tests/plan/precision/test_carries.py",
    "tests/plan/precision/test_many_readers.py",
    "tests/plan/precision/test_overrides.py",
    "tests/plan/test_norm_storage.py",
    "tests/policy/test_rules.py",
    "tests/core",
    "tests/jaxprs/test_interpret.py",
    "tests/jaxprs/test_nested.py",
    "tests/trace",
)
"""Tests of the core. Some among them need a feature: they have the mark `feature`, or say fp8."""
WITHOUT = "not fp8"
SAMPLE = 60


def left_without(names: Iterable[str], folder: Path) -> None:
    """Copy the package and its tests into a folder, without the folders of some features."""
    for name in ("jaxamp", "tests", "benchmarks", "docs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name in names:
        shutil.rmtree(folder / "jaxamp" / name)


def passed(folder: Path, tests: Iterable[str]) -> tuple[str, bool]:
    """Run tests in a copy; return pytest's last line, and whether they passed."""
    words = "-q", "-p", "no:cacheprovider", "-k", WITHOUT, *tests
    return _last_line(folder, "pytest", *words)


def _last_line(folder: Path, module: str, *words: str) -> tuple[str, bool]:
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines() or done.stderr.splitlines() or [""]
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
    return lines[-1], done.returncode == 0


def main(cases: list[str], tests: Iterable[str]) -> int:
    """Run the cases; return how many failed."""
    failed = 0
    for case in cases or [*FEATURES, ALL]:
        chosen = FEATURES.values() if case == ALL else [FEATURES[case]]
        names = [name for folders in chosen for name in folders]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            left_without([*names, *(SHARED if case == ALL else ())], folder)
            line, is_good = passed(folder, tests)
            print(f"{case} removed: {line}", flush=True)
            if case == ALL and tests is LONG:
                sample = "--sample", str(SAMPLE)
                line, is_sampled = _last_line(folder, "tests.conformance", *sample)
                print(f"{case} removed, JAX's cases of its primitives: {line}", flush=True)
                is_good &= is_sampled
        failed += not is_good
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", choices=[[], *FEATURES, ALL], metavar="FEATURE")
    parser.add_argument("--short", action="store_true", help="fewer tests")
    chosen = parser.parse_args()
    sys.exit(main(chosen.cases, SHORT if chosen.short else LONG))
