"""A short sample of the long runs of `make conformance`, and the proof that they can fail."""

from __future__ import annotations

import pytest

from jaxamp import PrecisionPolicy
from tests.conformance import soak


@pytest.mark.product("kind", every=2)
@pytest.mark.parametrize("kind", ["changing-shapes", "changing-numbers"])
def test_a_short_run_does_not_grow(kind: str) -> None:
    """As in `make conformance`, where it makes 10,000 calls."""
    soak.run(f"{kind}-60")


@pytest.mark.long
def test_a_leak_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that keeps an object or memory at each call fails, and says what it kept."""
    kept = []
    leaks = {
        "object": lambda _: kept.append(PrecisionPolicy.AUTO_MIXED.replace(name="kept")),
        "memory": lambda _: kept.append(b"x" * soak.MIB),
    }
    monkeypatch.setattr(soak, "RUNS", leaks)
    with pytest.raises(AssertionError, match="PrecisionPolicy"):
        soak.run("object-60")
    with pytest.raises(AssertionError, match="MiB more"):
        soak.run("memory-100")
