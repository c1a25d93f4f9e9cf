"""Settings that must be in place before JAX starts."""

import gc
import os

import pytest

from tests import flags, libraries, selection

QUICK = "--xla_backend_optimization_level=0"
"""Programs are small: to compile them is most of the work, and a third of that is to optimise what
they run. Other targets of the Makefile compile as users do."""

if os.environ["JAX_PLATFORMS"] == "cpu":
    flags.add(QUICK)


def pytest_configure(config: pytest.Config) -> None:
    """Hooks of this folder that concern the package's doctests too."""
    for hooks in (libraries, selection):
        config.pluginmanager.register(hooks)


def pytest_collection_finish() -> None:
    """Spare Python's collector a sixth of the time: it walks modules and jaxprs that stay alive."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
