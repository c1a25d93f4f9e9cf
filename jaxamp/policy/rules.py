"""Override rules: which equations a rule matches, and the precision that it gives them.

A rule is data plus an optional predicate; all the keys that it names have to match. It sees an
equation only through an ``EquationView``, so rules know nothing of jaxprs.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import re
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import Primitive

from jaxamp.core import features, taxonomy
from jaxamp.core.formats import Precision, PrecisionLike
from jaxamp.core.taxonomy import OpKind
from jaxamp.errors import JaxAmpError, PolicyError, RuleError, accepted, likely, teaching
from jaxamp.jaxprs.contracted import size_of_shape
from jaxamp.jaxprs.name_stack import clean_scope


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EquationView:
    """Facts of an equation that a rule can match; dtypes are those of the original program.

    Attributes:
      primitive: name of the primitive.
      kind: kind of the primitive, as the table has it.
      scope: cleaned scope path, e.g. ``"transformer/layer3/attention"``.
      shapes: shape of every output.
      dtypes: dtype of every output.
      in_shapes: shape of every operand.
      in_dtypes: dtype of every operand.
      functions: gives the names of the user's functions on the call stack, innermost first, then
        those of JAX's own, such as ``softmax``; a function, because walking a stack is slow and
        few rules ask.
    """

    primitive: str
    kind: OpKind
    scope: str = ""
    shapes: tuple[tuple[Any, ...], ...] = ()
    dtypes: tuple[Any, ...] = ()
    in_shapes: tuple[tuple[Any, ...], ...] = ()
    in_dtypes: tuple[Any, ...] = ()
    functions: Callable[[], tuple[str, ...]] = tuple

    @property
    def size(self) -> int:
        """Number of elements of the largest output; an unknown dimension counts as one."""
        return max(map(size_of_shape, self.shapes), default=0)

    @property
    def precision(self) -> Precision | None:
        """Format of the first float output, ``None`` where no output is a float."""
        return next(filter(None, map(Precision.of_dtype, self.dtypes)), None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Gives a precision to the equations that match every key it names.

    A glob (``*``, ``?``, ``[...]``; case counts) over a path matches one or more whole consecutive
    components anywhere in it, ``*`` crosses ``/``, and a leading ``/`` ties the glob to the start:
    ``"attention"`` matches all inside a scope of that name, ``"layer[01]"`` two layers. A trailing
    ``/`` as well leaves out what is further inside: ``"/net/head/"``, and ``"/"`` for no scope.

    Attributes:
      precision: precision of the matching equations; none is computed wider than it is written.
      scope: glob over the cleaned scope path.
      primitive: glob over the primitive's name.
      kind: kind of the primitive.
      function: glob over the names of the functions on the call stack, the user's, those of
        libraries and JAX's own: ``softmax``, or ``jax.nn.softmax``. A method also matches without
        its class, and by its class alone (``LayerNorm``). A leading ``/`` ties it to the user's
        innermost function.
      dtype: format of the first float output in the original program.
      min_size: smallest number of elements of the largest output.
      when: predicate that sees the ``EquationView``; has no JSON form.
      label: name of the rule in reports.

    Raises:
      RuleError: there is no such key, or the rule can never match.

    >>> rule = Rule(precision="f32", scope="head", kind="reduction")
    >>> rule.matches(EquationView(primitive="reduce_sum", kind=OpKind.REDUCTION, scope="net/head"))
    True
    >>> print(rule)
    scope=head kind=Reduction -> f32
    """

    precision: Precision
    scope: str | None = None
    primitive: str | None = None
    kind: OpKind | None = None
    function: str | None = None
    dtype: Precision | None = None
    min_size: int | None = None
    when: Callable[[EquationView], bool] | None = None
    label: str = ""

    if TYPE_CHECKING:  # the attributes are enum members, but their words may be given

        def __init__(
            self,
            *,
            precision: PrecisionLike,
            scope: str | None = None,
            primitive: str | None = None,
            kind: OpKind | str | None = None,
            function: str | None = None,
            dtype: PrecisionLike | None = None,
            min_size: int | None = None,
            when: Callable[[EquationView], bool] | None = None,
            label: str = "",
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", _parsed(Precision.parse, self.precision))
        if self.kind is not None:
            object.__setattr__(self, "kind", _parsed(OpKind.parse, self.kind))
        if self.dtype is not None:
            object.__setattr__(self, "dtype", _parsed(Precision.parse, self.dtype))
        _check_keys(self)
        _check_scope(self.scope)
        _check_primitive(self.primitive, self.kind)

    def matches(self, view: EquationView) -> bool:
        """Return whether every key of the rule matches the equation.

        Raises:
          RuleError: the predicate failed.
        """
        # Cheap keys first: rules are asked about every equation.
        return (
            (self.kind is None or view.kind is self.kind)
            and (self.primitive is None or _name_matches(self.primitive, view.primitive))
            and (self.scope is None or scope_matches(self.scope, view.scope))
            and (self.dtype is None or view.precision is self.dtype)
            and (self.min_size is None or view.size >= self.min_size)
            and (self.function is None or _function_matches(self.function, view.functions()))
            and (self.when is None or self._ask(view))
        )

    def reaches(self, kind: OpKind) -> bool:
        """Return whether a known primitive has the name and kind that the rule asks for.

        >>> Rule(precision="f32", primitive="dot*").reaches(OpKind.REDUCTION)
        False
        """
        if self.kind not in (None, kind):
            return False
        known = {**taxonomy.TABLE, **taxonomy.registered()}
        names = (name for name, op in known.items() if op.kind is kind)
        return self.primitive is None or any(_name_matches(self.primitive, n) for n in names)

    def to_data(self) -> dict[str, Any]:
        """Return the keys as plain words and numbers, from which ``Rule(**data)`` makes the rule.

        Raises:
          PolicyError: the rule has a predicate.

        >>> Rule(precision="f32", kind="compute").to_data()
        {'precision': 'f32', 'kind': 'Compute'}
        """
        if self.when is not None:
            raise PolicyError(
                f"The rule `{self}` has a predicate, and a function has no JSON form. Leave the "
                "rule out and add it with policy.with_rules(...) after reading."
            )
        label = {"label": self.label} if self.label else {}
        return {"precision": self.precision.short, **_keys(self), **label}

    def _ask(self, view: EquationView) -> bool:
        assert self.when is not None
        try:
            return bool(self.when(view))
        except JaxAmpError:
            raise
        except Exception as error:
            raise RuleError(
                f"The predicate of the rule `{self}` failed on {view.primitive} in scope "
                f"{view.scope!r}: {type(error).__name__}: {error}"
            ) from error

    def __str__(self) -> str:
        keys = " ".join(f"{key}={value}" for key, value in _keys(self).items())
        return self.label or f"{keys} -> {self.precision.short}"


Rule.__init__ = teaching(
    "A rule has a precision, and keys that have names: Rule(precision='f32', scope='head'). A "
    "module or a layer is named by scope=, a function by function=, an operation by primitive=.",
    RuleError,
)(Rule.__init__)


def first_match(rules: Sequence[Rule], view: EquationView) -> int | None:
    """Return the index of the first rule that matches, ``None`` if none does.

    >>> rules = [Rule(precision="f32", primitive="exp"), Rule(precision="bf16", primitive="e*")]
    >>> first_match(rules, EquationView(primitive="erf", kind=OpKind.ELEMENTWISE))
    1
    """
    return next((i for i, rule in enumerate(rules) if rule.matches(view)), None)


@functools.lru_cache(maxsize=16384)
def scope_matches(pattern: str, path: str) -> bool:
    """Return whether a scope is one that a `Rule.scope` names.

    >>> scope_matches("decoder/*", "model/decoder/head"), scope_matches("/head", "model/head")
    (True, False)
    """
    anchored, closed = pattern.startswith("/"), pattern.endswith("/")
    pattern = pattern.strip("/")
    if anchored and closed:
        return _name_matches(pattern, path)
    names = path.split("/")
    starts = range(1 if anchored else len(names))
    return any(
        _name_matches(pattern, "/".join(names[start:stop]))
        for start in starts
        for stop in range(start + 1, len(names) + 1)
    )


def _name_matches(pattern: str, name: str) -> bool:
    # Equality first: `layers[0]` is a name as well as a glob.
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


def _function_matches(pattern: str, names: Sequence[str]) -> bool:
    if pattern.startswith("/"):
        pattern, names = pattern[1:], names[:1]
    pattern = pattern.removeprefix(_modules(pattern))
    return any(
        _name_matches(pattern, part)
        for name in names
        for owner, _, own in (name.rpartition("."),)
        for part in (name, owner, own)
    )


@functools.cache
def _modules(pattern: str) -> str:
    """Return the modules before a function's name: ``jax.nn.`` of ``jax.nn.softmax``.

    Names on a call stack have none. A class begins with a capital letter.
    """
    name = _LOWER_NAMES.match(pattern)
    return name[0] if name and not _is_glob(pattern) else ""


_LOWER_NAMES = re.compile(r"(?:[a-z_][a-z0-9_]*\.)+(?=\w)")


def _is_glob(pattern: str) -> bool:
    return any(char in pattern for char in "*?[")


def _parsed(parse: Callable[[Any], Any], word: Any) -> Any:
    try:
        return parse(word)
    except PolicyError as error:
        raise RuleError(str(error)) from None


def _check_keys(rule: Rule) -> None:
    keys = ("scope", "primitive", "kind", "function", "dtype", "min_size", "when")
    if all(getattr(rule, key) is None for key in keys):
        raise RuleError(
            f"A rule needs a key that says which operations it is for. {accepted('', keys)}"
        )
    for key in ("scope", "primitive", "function"):
        glob = getattr(rule, key)
        if glob is None or (key == "scope" and glob == "/"):
            continue
        if callable(glob) or isinstance(glob, Primitive):
            name = getattr(glob, "__name__", getattr(glob, "name", type(glob).__name__))
            raise RuleError(f"{key} is a name, not what has it: write {key}={name!r}.")
        if not (isinstance(glob, str) and glob.strip("/ ")):
            raise RuleError(f"{key}={glob!r} can never match: it has to be a non-empty glob.")
    if rule.min_size is not None and not (type(rule.min_size) is int and rule.min_size > 0):
        raise RuleError(f"min_size={rule.min_size!r} has to be a positive number of elements.")
    if rule.when is not None and not (callable(rule.when) and isinstance(rule.when, Hashable)):
        raise RuleError(f"when={rule.when!r} has to be a hashable function of an EquationView.")


def _check_scope(scope: str | None) -> None:
    if scope is None or clean_scope(scope) == scope.strip("/"):
        return
    raise RuleError(
        f"scope={scope!r} can never match: scopes are compared without transforms, empty names and "
        f"precision markers. Write {clean_scope(scope)!r}."
    )


def _check_primitive(name: str | None, kind: OpKind | None) -> None:
    if name is None or _is_glob(name):
        return
    op = taxonomy.lookup(name)
    if op is None:
        features.works()  # enter their primitives
        op = taxonomy.lookup(name)
    if op is None:
        raise RuleError(
            f"primitive={name!r} can never match: no primitive of this name is known. "
            f"{_as_function(name) or likely(name, taxonomy.TABLE)}"
            "jax.make_jaxpr(fn)(*args) shows the names in a program, and kind='compute' means all "
            "products and convolutions. Teach a primitive of your own with register_op_kind first."
        )
    if kind not in (None, op.kind):
        raise RuleError(
            f"primitive={name!r} with kind={kind.value} can never match: its kind is "
            f"{op.kind.value}. Leave the kind out."
        )


def _as_function(name: str) -> str:
    """Return what to write for the name of a function or a class; empty for any other name."""
    own = name.rpartition(".")[2]
    is_class = own[:1].isupper()
    if not is_class and not any(callable(getattr(m, own, None)) for m in _JAX_MODULES):
        return ""
    return (
        f"{own} is a {'class' if is_class else 'function'}, not a primitive: write "
        f"function={own!r}, which means all that it computes. "
    )


_JAX_MODULES = jax.nn, jax.numpy, jax.lax, jax.numpy.linalg, jax.image, jax.random


def _keys(rule: Rule) -> dict[str, Any]:
    """Return the keys that the rule names, as plain words and numbers."""
    keys = {
        "scope": rule.scope,
        "primitive": rule.primitive,
        "kind": rule.kind and rule.kind.value,
        "function": rule.function,
        "dtype": rule.dtype and rule.dtype.short,
        "min_size": rule.min_size,
        "when": rule.when and getattr(rule.when, "__name__", repr(rule.when)),
    }
    return {key: value for key, value in keys.items() if value is not None}
