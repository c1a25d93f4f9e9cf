"""The first line of a docstring is a sentence in the imperative, or names what a class is."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "jaxamp"

_VERBS = """
Accept Add Advance Annotate Append Apply Assume Average Batch Bind Bound Build Call Cast Check
Choose Classify Clip Collect Compare Compile Complete Compute Contract Convert Copy Count Create
Decide Define Describe Deserialize Detect Differentiate Divide Draw Drop Emit Enter Estimate
Evaluate Exclude Export Find Flatten Fold Follow Format Gather Go Group Hash Import Infer Keep
Leave Let Load Lower Make Map Mark Match Measure Merge Move Multiply Name Normalize Outline Parse
Pause Pick Plan Prepare Print Propagate Put Quantize Raise Read Record Refuse Register Remove
Replace Report Reshape Restore Resume Retrace Return Retype Reverse Rewrite Round Run Scale Scan
Search Select Send Set Show Shrink Skip Slice Sort Split Stack Start Store Subtract Sum Sweep Take
Teach Trace Transpose Try Unfold Update Visit Walk Warn Widen Wrap Write Yield
"""
_FRAGMENTS = ("How", "Of", "That", "Those", "What", "Where", "Whether", "Which", "Whose", "Why")

_PROPERTIES = ("property", "cached_property")


def faults(source: str) -> Iterator[str]:
    """Yield what is documented by a first line of another form; properties are named by nouns."""
    verbs = _VERBS.split()
    for node in _statements(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            continue
        words = (ast.get_docstring(node) or "").split()
        if not words:
            continue
        first = words[0].strip(".,:;")
        is_function = isinstance(node, ast.FunctionDef) and not _is_property(node)
        if first not in verbs if is_function else first in _FRAGMENTS:
            yield f"{getattr(node, 'name', 'module')}: {' '.join(words[:8])}"


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and the statements in it: most of a tree is expressions, which have no words."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield from _statements(child)


def _is_property(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(d).endswith(_PROPERTIES) for d in node.decorator_list)


def test_first_lines_are_sentences() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
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
