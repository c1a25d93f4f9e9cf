"""Check that a release's tag, version, changelog and citation agree.

python .ci/check_release.py v0.1.0
"""

from __future__ import annotations

import re
import sys
from pathlib import Path


def faults(tag: str, root: Path) -> list[str]:
    """Return what is in the way of a release, a sentence each.

    Args:
      tag: the tag that is to be published, such as ``v0.1.0``.
      root: the tree.
    """
    found = []
    version = tag.removeprefix("v")
    if version == tag:
        found.append(f"The tag of a release begins with v: {tag!r} does not.")
    own = _only(r'^__version__ = "(.+?)"', root / "jaxamp/__init__.py")
    if own != version:
        found.append(f"jaxamp.__version__ is {own}, and the tag {tag}.")
    cited = _only(r"^version: (\S+)", root / "CITATION.cff")
    if cited != version:
        found.append(f"CITATION.cff has version {cited}, and the tag is {tag}.")
    changelog = (root / "CHANGELOG.md").read_text()
    if not re.search(rf"^## {re.escape(version)} \(", changelog, re.M):
        found.append(f"CHANGELOG.md has no heading '## {version} (date)'.")
    unreleased = re.search(r"^## Unreleased\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    if unreleased and unreleased[1].strip():
        found.append("CHANGELOG.md has lines under Unreleased: move them below the new heading.")
    return found


def _only(pattern: str, path: Path) -> str:
    match = re.search(pattern, path.read_text(), re.M)
    return match[1] if match else "missing"


if __name__ == "__main__":
    said = faults(sys.argv[1], Path(__file__).parents[1])
    print("\n".join(said) or f"{sys.argv[1]} can be published.")
    sys.exit(bool(said))
