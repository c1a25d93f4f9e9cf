"""What users read has none of the patterns that CONTRIBUTING.md speaks of."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATTERNS = {
    "a dangling phrase": re.compile(r"Nothing came of|came to nothing"),
    "an inverted clause": re.compile(r", for (it|its|they|there|that) (is|are|has|have)\b"),
    "a noun without a name": re.compile(
        r"\b(the|and|or) those of\b|\bis that of it\b|^Keep that of"
    ),
    "a thing described by what it is not": re.compile(
        r"\bis no (multiple|parameter|pytree|argument)\b|(?<!here) is no (?!longer)"
    ),
    "a clause in the place of a noun": re.compile(
        r"^What (a|an|each|the|is|changes|runs)\b|\bof what is not\b"
    ),
    "a word of the project's own": re.compile(r"(?i)\b(fused region|island edge|Compute is)\b"),
}


def texts(source):
    """The strings of a file that are no docstrings: messages, reasons, warnings."""
    tree = ast.parse(source)
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def faults(source):
    """Strings with a pattern, and which."""
    return [(name, t) for t in texts(source) for name, p in PATTERNS.items() if p.search(t)]


def test_messages_have_none_of_the_patterns():
    files = sorted((ROOT / "jaxamp").rglob("*.py"))
    assert files
    found = {f.name: said for f in files if (said := faults(f.read_text()))}
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "Nothing came of it",
        "counted once, for it has no end",
        "inside a fused region",
        "and those of float16 end there",
        "10 is no multiple of 16",
        " is no position",
        "What a policy does to numbers",
    ],
)
def test_a_pattern_is_found(text):
    assert faults(f"raise ValueError({text!r})")
