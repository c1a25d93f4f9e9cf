"""Plugin of pytest that switches one analysis off: the tests that fail are those that need it.

python -m pytest -p tests.plan.ablated --without singularities tests/plan tests/numerics
"""

from __future__ import annotations

from unittest import mock

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the analysis."""
    parser.addoption("--without", metavar="ANALYSIS", help="of tests.plan.ablation.ANALYSES")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Switch the analysis off once all tests are imported."""
    from tests.plan.ablation import ANALYSES

    if name := session.config.getoption("--without"):
        patched = mock.patch(*ANALYSES[name])
        patched.start()
        session.config.add_cleanup(patched.stop)
