"""A file's name says what is in it, so no two files of the package share one.

The file in which a feature registers is called `feature.py`, as Python's own have their names.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "jaxamp"

_GIVEN = ("__init__.py", "__main__.py", "feature.py")  # the name has its meaning


def shared(files: Iterable[Path]) -> list[str]:
    """Names that several files have."""
    counts = Counter(file.name for file in files if file.name not in _GIVEN)
    return sorted(name for name, count in counts.items() if count > 1)


def test_no_two_files_share_a_name() -> None:
    files = list(PACKAGE.rglob("*.py"))
    assert files
    assert not shared(files)


def test_a_shared_name_is_found() -> None:
    files = map(Path, ["a/__init__.py", "b/__init__.py", "a/masks.py", "b/masks.py", "b/dots.py"])
    assert shared(files) == ["masks.py"]
