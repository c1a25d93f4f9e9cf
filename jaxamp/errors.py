"""The errors of jaxamp: each says what was seen, where, and what to do."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import reprlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

_F = TypeVar("_F", bound=Callable[..., Any])
NEWEST_JAX = "0.12"
"""The newest release of JAX that the tests run on."""


class JaxAmpError(Exception):
    """Base of every error that jaxamp raises on purpose.

    >>> issubclass(PolicyError, JaxAmpError)
    True
    """


class PolicyError(JaxAmpError, ValueError):
    """A policy, or a word inside one, is not understood or contradicts itself."""


class ImmutableError(PolicyError, dataclasses.FrozenInstanceError):
    """An attribute of a policy was set or deleted; ``replace`` makes another policy."""


class UnsupportedPrecisionError(PolicyError):
    """A policy names a precision that cannot be computed here or not yet."""


class RuleError(PolicyError):
    """An override rule can never match, or its predicate failed."""


class _EquationError(JaxAmpError):
    """An error about one equation, which names its primitive and the user's source line.

    Args:
      message: what is wrong and what to do.
      primitive: name of the equation's primitive.
      source: the user's source line, e.g. ``"model.py:12 (forward)"``.
    """

    def __init__(self, message: str, *, primitive: str = "", source: str = "") -> None:
        super().__init__(message)
        self.primitive = primitive
        self.source = source

    def __str__(self) -> str:
        lines = [super().__str__()]
        lines += [f"  primitive: {self.primitive}"] if self.primitive else []
        lines += [f"  at: {self.source}"] if self.source else []
        return "\n".join(lines)


class UnknownPrimitiveError(_EquationError):
    """With ``strict=True``: a primitive is in no table; ``register_op_kind`` teaches it.

    >>> print(UnknownPrimitiveError("No kind is known.", primitive="fuse", source="a.py:3 (f)"))
    No kind is known.
      primitive: fuse
      at: a.py:3 (f)
    """


class RewriteError(_EquationError):
    """An equation could not be rewritten; the original program is untouched."""


class NotCallableError(JaxAmpError, TypeError):
    """Something that cannot be called was given where a function is needed."""


class StaticArgumentError(JaxAmpError, ValueError):
    """A static argument cannot be hashed, or the function has no such parameter."""


class ArgumentError(JaxAmpError, TypeError):
    """An argument holds arrays where JAX does not look for them; ``jax.jit`` refuses it too."""


class OutputError(JaxAmpError, TypeError):
    """A function returned something other than arrays, or left it with handlers of a library."""


class TrainingError(JaxAmpError, ValueError):
    """A loss scale, a batch or an optimizer is used in a way that cannot work."""


class ServingError(JaxAmpError, ValueError):
    """A file is not a served model, or one of another format."""


class InspectionError(JaxAmpError, ValueError):
    """A question about a program is not understood, or what it needs is not there."""


class TuningError(JaxAmpError, ValueError):
    """A tuning is asked for in a way that cannot work."""


class KernelError(JaxAmpError, ValueError):
    """A kernel cannot run as it was asked to; nothing was lowered."""


class IdlePolicyWarning(UserWarning):
    """A rule matched nothing, an FP8 policy scaled nothing, or a policy lowered nothing."""


def accepted(word: object, words: Iterable[str]) -> str:
    """Return a sentence that lists the accepted words, and the likely one where there is one.

    >>> accepted("reducton", ["compute", "reduction"])
    "Did you mean 'reduction'? Accepted: compute, reduction."
    """
    words = list(words)
    return f"{likely(word, words)}Accepted: {', '.join(words)}."


def likely(word: object, words: Iterable[str]) -> str:
    """Return a question for the word that was meant; empty where none is near.

    Args:
      word: what was given.
      words: what is accepted; one that begins with what was given is nearer than one spelt alike.

    >>> likely("fp8", ["mixed_bf16", "fp8_current"])
    "Did you mean 'fp8_current'? "
    """
    given, by_lower = str(word).lower(), {w.lower(): w for w in words}
    longer = [w for w in by_lower if w.startswith(f"{given}_")]
    longer += [w for w in by_lower if len(given) > 1 and w.startswith(given)]
    found = longer or difflib.get_close_matches(given, by_lower, n=1)
    return f"Did you mean {by_lower[found[0]]!r}? " if found else ""


def teaching(advice: str, error: type[PolicyError] = PolicyError) -> Callable[[_F], _F]:
    """Make arguments that a function does not have, or misses, our error rather than Python's.

    Args:
      advice: what to write instead.
      error: the error.

    >>> @teaching("Write half(2).")
    ... def half(number):
    ...     return number / 2
    >>> half(dtype=2)
    Traceback (most recent call last):
    jaxamp.errors.PolicyError: half: missing a required argument: 'number'. Write half(2).
    """

    def decorate(fn: _F) -> _F:
        signature = inspect.signature(fn)

        @functools.wraps(fn)
        def checked(*args: Any, **kwargs: Any) -> Any:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as problem:
                name, words = fn.__qualname__.removesuffix(".__init__"), signature.parameters
                meant = [likely(word, words) for word in kwargs if word not in words]
                raise error(f"{name}: {problem}. {''.join(meant)}{advice}") from None
            return fn(*args, **kwargs)

        return cast("_F", checked)

    return decorate


def article(name: str) -> str:
    """Return a name with its indefinite article.

    >>> article("OpKind"), article("Trait")
    ('an OpKind', 'a Trait')
    """
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def counted(number: int, what: str) -> str:
    """Return a number with its noun, in the plural where it is not one.

    >>> counted(1, "rule"), counted(0, "run")
    ('1 rule', '0 runs')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"


class _Short(reprlib.Repr):
    """Texts of values, in which arrays are shapes and what is long is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.maxother = self.maxstring = 120

    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(getattr(x, "shape", None), tuple) and hasattr(x, "dtype"):
            return f"{x.dtype}[{','.join(map(str, x.shape))}]"
        return super().repr_instance(x, level)


_SHORT = _Short()


def shown(value: object) -> str:
    """Return a value as errors show it: an array by its shape, nothing at length.

    >>> import numpy as np
    >>> shown({"w": np.zeros((1000, 10), "float32")})
    "{'w': float32[1000,10]}"
    """
    return _SHORT.repr(value)
