"""jmp policies and their grammar, read and written."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import jmp
import pytest

from jaxamp.core.formats import Precision
from jaxamp.core.guards import ALL_GUARDS
from jaxamp.core.taxonomy import OpKind
from jaxamp.errors import PolicyError
from jaxamp.interop.jmp import to_jmp
from jaxamp.policy.jmp_string import parse_grammar
from jaxamp.policy.policy import PrecisionPolicy

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64)
TEXTS = [
    "p=f32,c=bf16,o=f32",
    "params=float32,compute=float16,output=full",
    "c=f16",
    "p=f16",
    "p=f16,c=bf16",
    "o=f32,c=bf16",
    "c=half",
    "half",
    "full",
    "bf16",
    "float64",
    "f32",
]


def _read(text: str) -> PrecisionPolicy:
    """Read a word as jmp does, to which it says parameters and results as well."""
    return PrecisionPolicy.of_dtypes(*parse_grammar(text))


def _dtypes(policy: PrecisionPolicy):
    return policy.param_dtype, policy.precision_for("compute"), policy.output_dtype


@pytest.mark.parametrize("text", TEXTS)
def test_strings_mean_what_jmp_says(text):
    """Every string gives the dtypes that jmp itself reads from it, and the same policy."""
    theirs = jmp.get_policy(text)
    expected = (theirs.param_dtype, theirs.compute_dtype, theirs.output_dtype)
    assert _dtypes(_read(text)) == tuple(map(Precision.parse, expected))
    assert _read(text) == PrecisionPolicy.parse(theirs)


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, repeat=3)))
def test_policies_survive_both_ways(dtypes):
    """A jmp policy comes back equal from a precision policy and from its text."""
    theirs = jmp.Policy(*dtypes)
    ours = PrecisionPolicy.parse(theirs)
    assert to_jmp(ours) == theirs
    assert _read(str(theirs)) == ours
    assert str(to_jmp(ours)) == str(theirs)


@pytest.mark.parametrize(
    ("compute", "preset"),
    [("bf16", PrecisionPolicy.MIXED_BF16), ("f16", PrecisionPolicy.MIXED_F16)],
)
def test_low_compute_is_the_auto_mixed_preset(compute, preset):
    """A low compute dtype gives kinds, guards and accumulation of the preset of that dtype."""
    policy = _read(f"p=f32,c={compute},o=f32")
    assert (policy.kinds, policy.guards, policy.accumulation) == (
        preset.kinds,
        ALL_GUARDS,
        Precision.F32,
    )


@pytest.mark.parametrize("text", ["full", "f32", "p=f32,c=f32,o=f32", "c=f64"])
def test_full_compute_lowers_nothing(text):
    """f32 and f64 computation lower nothing."""
    policy = _read(text)
    assert policy.low == frozenset()
    assert policy.precision_for(OpKind.BOUNDARY) is Precision.F32


def test_name_is_the_canonical_text():
    """A policy that came from jmp shows and re-reads as jmp's text."""
    policy = PrecisionPolicy.parse("params = float32, compute = bfloat16")
    assert str(policy) == "p=f32,c=bf16,o=bf16"
    assert PrecisionPolicy.parse(str(policy)) == policy


@pytest.mark.parametrize(
    ("preset", "text"),
    [
        ("mixed_bf16", "p=f32,c=bf16,o=f32"),
        ("always_f16", "p=f32,c=f16,o=f32"),
        ("always_f32", "p=f32,c=f32,o=f32"),
    ],
)
def test_presets_have_a_jmp_text(preset, text):
    """Presets are written with f32 parameters and outputs."""
    assert to_jmp(preset) == jmp.get_policy(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q=f32", "Unknown part 'q'.*Accepted: p, c, o, params"),
        ("comput=f32", "Did you mean 'compute'"),
        ("p=f32,c=bf61", "Did you mean 'bf16'"),
        ("p=f32,params=f16", "names params twice"),
        ("p=f32,,c=f16", "Unknown part ''"),
        ("p=", "Unknown precision ''"),
        ("p=f32,c=f16=o", "Unknown precision 'f16=o'"),
        ("hlaf", "Unknown precision 'hlaf'"),
    ],
)
def test_wrong_grammar_teaches(text, message):
    """A text that jmp would not read is refused in words."""
    with pytest.raises(PolicyError, match=message):
        _read(text)
