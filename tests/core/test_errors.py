"""Errors: their family, their text, their copies."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from jaxamp import errors


def _classes():
    return [c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, Exception)]


@pytest.mark.parametrize("cls", _classes())
def test_family_and_documentation(cls):
    """Every error is a JaxAmpError, every warning a UserWarning, and both say when."""
    assert issubclass(cls, UserWarning if issubclass(cls, Warning) else errors.JaxAmpError)
    assert inspect.getdoc(cls)


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.PolicyError, ValueError),
        (errors.UnsupportedPrecisionError, ValueError),
        (errors.RuleError, errors.PolicyError),
        (errors.NotCallableError, TypeError),
        (errors.OutputError, TypeError),
    ],
)
def test_builtin_relatives(cls, builtin):
    """Wrong words are ValueErrors and wrong things TypeErrors, as Python has it."""
    assert issubclass(cls, builtin)


@pytest.mark.parametrize("cls", [errors.RewriteError, errors.UnknownPrimitiveError])
def test_equation_errors_say_where(cls):
    """The text has the primitive and the source line, also after pickle and copy."""
    error = cls("Cannot rewrite.", primitive="dot_general", source="model.py:3 (f)")
    for other in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert str(other) == "Cannot rewrite.\n  primitive: dot_general\n  at: model.py:3 (f)"
        assert (other.primitive, other.source) == ("dot_general", "model.py:3 (f)")
    assert str(cls("Plain.")) == "Plain."


def test_accepted_words():
    """The likely word is named in its own spelling; nothing is guessed from afar."""
    assert errors.accepted("COMPUTTE", ["Compute", "Boundary"]) == (
        "Did you mean 'Compute'? Accepted: Compute, Boundary."
    )
    assert errors.accepted("xyz", ["Compute"]) == "Accepted: Compute."
    assert errors.accepted("fp8", ["mxfp8", "fp8_block"]).startswith("Did you mean 'fp8_block'?")
