"""jmp's words for a policy: a dtype each for parameters, computation and output.

Unnamed parameters are f32, unnamed computation follows the parameters, an unnamed output follows
the computation; to jmp a single dtype stands for all three.

See: https://github.com/google-deepmind/jmp
"""

from __future__ import annotations

from typing import NamedTuple

from jaxamp.core.formats import Precision
from jaxamp.errors import PolicyError, accepted

_PARTS = {"p": "params", "c": "compute", "o": "output"}


class ThreeDtypes(NamedTuple):
    """The three dtypes of a jmp policy.

    >>> str(parse_grammar("params=float32,compute=bf16"))
    'p=f32,c=bf16,o=bf16'
    """

    params: Precision
    compute: Precision
    output: Precision

    def __str__(self) -> str:
        return f"p={self.params.short},c={self.compute.short},o={self.output.short}"


def parse_grammar(text: str) -> ThreeDtypes:
    """Read jmp's grammar.

    Raises:
      PolicyError: an unknown part or dtype, or a part named twice.

    >>> parse_grammar("bf16") == parse_grammar("p=bf16")
    True
    """
    if "=" not in text:
        return ThreeDtypes(*[Precision.parse(text)] * 3)
    parts: dict[str, Precision] = {}
    for item in text.split(","):
        key, _, word = (piece.strip() for piece in item.partition("="))
        part = _PARTS.get(key.lower(), key.lower())
        if part not in _PARTS.values():
            words = [*_PARTS, *_PARTS.values()]
            raise PolicyError(f"Unknown part {key!r} in policy {text!r}. {accepted(part, words)}")
        if part in parts:
            raise PolicyError(f"The policy {text!r} names {part} twice.")
        parts[part] = Precision.parse(word)
    params = parts.get("params", Precision.F32)
    compute = parts.get("compute", params)
    return ThreeDtypes(params, compute, parts.get("output", compute))
