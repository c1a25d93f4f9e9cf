"""Settings that must be in place before JAX starts."""

import gc
import os

import psutil
import pytest

from tests import flags, libraries, selection

QUICK = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
    *(["--xla_cpu_use_fusion_emitters=false"] if flags.HAS_OLDER_EMITTERS else ()),
)
"""Programs are small, and to compile them is most of the work: with these flags a third of it (JAX
0.10.2; the older emitters alone are three times as quick). Other targets of the Makefile compile as
users do: they set the first of these flags, and then none is added."""

if os.environ["JAX_PLATFORMS"] == "cpu" and QUICK[0].partition("=")[0] not in flags.given():
    flags.add(*QUICK)


def pytest_addoption(parser: pytest.Parser) -> None:
    """One test in so many, for a machine that has no hours; other ones from another first one."""
    parser.addoption(
        "--every", type=int, default=1, help="run one of so many tests of each function"
    )
    parser.addoption("--first", type=int, default=0, help="how many to leave out before that")


@pytest.hookimpl(trylast=True)  # after `-m` has chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `--every` leaves out, and what features do that are not here."""
    every, first = config.getoption("every"), config.getoption("first")
    kept = selection.one_in(selection.of_present_features(items), every, first)
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept


def pytest_configure(config: pytest.Config) -> None:
    """Hooks of this folder that concern the package's doctests too."""
    for hooks in (libraries, selection):
        config.pluginmanager.register(hooks)


MOST, MORE = 2 * 2**30, 2**28
"""Bytes that a worker may hold before it forgets what it has compiled, and how many more until it
does so again: not all that is forgotten goes back to the system, and forgetting takes a second."""

_limit = MOST


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Forget compiled programs between files, once they have piled up."""
    global _limit
    process = psutil.Process()
    leaves = nextitem is not None and nextitem.path != item.path
    if leaves and process.memory_info().rss > _limit:
        import jax

        jax.clear_caches()
        gc.collect()
        _limit = max(MOST, process.memory_info().rss + MORE)


# Spares Python's collector a sixth of the time: it walks modules and jaxprs that stay alive.
gc.set_threshold(100_000, 20, 100)


def pytest_collection_finish() -> None:
    """Let the collector not walk what has been imported."""
    gc.freeze()
