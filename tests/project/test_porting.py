"""Names that users of other libraries, or of older versions, look for in ``jaxamp``."""

import pytest

import jaxamp


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("value_and_grad", r"amp\(jax\.value_and_grad\(fn\)\).*training\.scaled_value_and_grad"),
        ("grad", r"jax\.grad\(amp\(fn\)\).*training\.scaled_grad"),
        ("jit", r"jax\.jit\(amp\(fn\)\)"),
        ("filter_value_and_grad", "training.scaled_filter_value_and_grad"),
        ("DynamicLossScale", r"It is jaxamp\.training\.DynamicLossScale"),
        ("scaled_value_and_grad", r"It is jaxamp\.training\.scaled_value_and_grad"),
        ("autocast", r"amp\(train_step, 'bf16'\)"),
        ("GradScaler", "DynamicLossScale"),
        ("Policy", "jaxamp.PrecisionPolicy"),
        ("Precison", "Did you mean 'Precision'"),
    ],
)
def test_a_name_that_is_elsewhere_is_told(name, words):
    """The error says where it is, or what is written instead."""
    with pytest.raises(AttributeError, match=words):
        getattr(jaxamp, name)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("from jaxamp import value_and_grad", r"jax\.value_and_grad\(amp\(fn\)\)"),
        ("from jaxamp import amp, filter_grad", "training.scaled_filter_grad"),
        ("from jaxamp import DynamicLossScale", r"It is jaxamp\.training\.DynamicLossScale"),
        ("from jaxamp import GradScaler", "bfloat16 needs none"),
    ],
)
def test_an_import_of_a_name_that_is_elsewhere_is_told(line, words):
    """Python's own error would say no more than that it cannot be imported."""
    with pytest.raises(ImportError, match=words):
        exec(line)


def test_importing_folders_and_asking_are_what_they_were():
    """A folder is found that is no attribute yet; what lacks a name has not got it."""
    exec("from jaxamp import cli, tools")
    assert not hasattr(jaxamp, "value_and_grad")


def test_asking_for_private_names_is_cheap():
    """Tools ask modules for names with underscores: these are simply not there."""
    with pytest.raises(AttributeError, match=r"no attribute '__wrapped__'\.$"):
        jaxamp.__wrapped__  # noqa: B018
