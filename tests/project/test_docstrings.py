"""The first line of a docstring is a sentence in the imperative, or names what a class is."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "jaxamp"

DONE = (
    "kernels/gpu",
    "lowp",
    "plan",
    "plan/conditioning",
    "plan/dataflow",
    "plan/graph",
    "plan/precision",
)
"""Folders that keep to it, without those inside of them."""

_VERBS = """
Add Append Apply Assume Average Batch Bind Bound Build Call Cast Check Choose Classify Clip Collect
Compare Compile Compute Contract Convert Copy Count Create Decide Define Describe Deserialize
Detect Differentiate Divide Draw Emit Enter Estimate Evaluate Export Find Flatten Fold Follow
Format Go Hash Import Infer Leave Let Load Make Mark Match Measure Merge Move Multiply Normalize
Outline Parse Pick Plan Prepare Print Propagate Put Quantize Raise Read Record Refuse Register
Replace Reshape Restore Retrace Return Reverse Round Run Scale Scan Search Select Send Set
Shrink Skip Slice Sort Split Start Store Sum Sweep Take Teach Trace Transpose Try Unfold Update
Visit Walk Warn Wrap Write Yield
"""
_FRAGMENTS = ("Of", "That", "Those", "What", "Where", "Whether", "Which", "Whose", "Why")

_PROPERTIES = ("property", "cached_property")


def faults(source: str) -> Iterator[str]:
    """Yield what is documented by a first line of another form; properties are named by nouns."""
    verbs = _VERBS.split()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            continue
        words = (ast.get_docstring(node) or "").split()
        if not words:
            continue
        first = words[0].strip(".,:;")
        is_function = isinstance(node, ast.FunctionDef) and not _is_property(node)
        if first not in verbs if is_function else first in _FRAGMENTS:
            yield f"{getattr(node, 'name', 'module')}: {' '.join(words[:8])}"


def _is_property(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(d).endswith(_PROPERTIES) for d in node.decorator_list)


@pytest.mark.parametrize("folder", DONE)
def test_first_lines_are_sentences(folder: str) -> None:
    files = sorted((PACKAGE / folder).glob("*.py"))
    assert files
    found = [f"{f.name}: {fault}" for f in files for fault in faults(f.read_text())]
    assert not found


def test_fragments_are_found() -> None:
    def documented(kind: str, line: str) -> list[str]:
        return list(faults(f'{kind}:\n    """{line}"""\n'))

    assert documented("def f()", "Whether it is.")
    assert documented("def f()", "Returns it.")
    assert documented("class C", "Those of all.")
    assert not documented("def f()", "Return whether it is.")
    assert not documented("class C", "A value.")
    assert not documented("@property\ndef f(self)", "The value.")
