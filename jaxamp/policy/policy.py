"""Precision policies: which kind of operation runs in which precision, and what protects it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from jaxamp.core import features
from jaxamp.core.enum_words import chosen
from jaxamp.core.formats import (
    SCALED_FORMATS,
    CastConfig,
    Precision,
    PrecisionLike,
    format_names,
    is_format,
    is_format_name,
)
from jaxamp.core.guards import ALL_GUARDS, Guard
from jaxamp.core.taxonomy import OpKind
from jaxamp.errors import (
    ImmutableError,
    PolicyError,
    UnsupportedPrecisionError,
    accepted,
    counted,
    likely,
    shown,
    teaching,
)
from jaxamp.policy import serialization as policy_json
from jaxamp.policy.jmp_string import ThreeDtypes, parse_grammar
from jaxamp.policy.rules import Rule

_KEPT = frozenset({Precision.F64, Precision.F32})
_COMPUTABLE = _KEPT | {Precision.F16, Precision.BF16}
_JMP_FIELDS = ("param_dtype", "compute_dtype", "output_dtype")


@dataclasses.dataclass(frozen=True, slots=True)
class PrecisionPolicy:
    """An immutable, hashable map from operation kinds to casts, with guards and override rules.

    Most programs need a preset (``PrecisionPolicy.MIXED_BF16``), ``custom`` or ``replace``.

    Attributes:
      name: what reports call it.
      kinds: a cast for each of the five kinds; given as a mapping or as pairs.
      accumulation: precision inside a Reduction; ``None`` for that of the kind.
      rules: overrides, the first that matches wins.
      guards: protections that are on; ``Guard`` or their words.
      param_dtype: format in which parameters are stored, for those who create them.
      output_dtype: format of the float outputs; ``None`` for that of the original function.
      allreduce: format in which devices add up what each stores in float32, above all gradients;
        activations in bfloat16, and rows of a table split by words, are added up as they are.
      features: values of the fields that features add, where they are not the default. Each is an
        attribute as well:
        `scaling`, which dots are quantized, where the cast of Compute is scaled, and how;
        `xla`, the techniques of steering XLA that are on, ``Technique`` or their words, ``()`` for
        the casts alone (`docs/explanation/fusion.md`);
        `fused_attention`, whether attention that is found in a program is lowered to fused kernels,
        where Compute has 16 bits, ``None`` for where the device at hand has one that takes it
        (`docs/explanation/attention.md`);
        `loss_in_chunks`, whether a loss over many words is computed in chunks of tokens, so that
        logits are not stored: wherever that can be (``True``), where memory is saved
        (``"memory"``), or where it costs no time either, ``None`` (`docs/explanation/losses.md`).

    Raises:
      PolicyError: a word is not understood, or a kind is missing.

    >>> policy = PrecisionPolicy.MIXED_F16.replace(guards=["range", "bits"])
    >>> print(policy)
    mixed_f16*
    >>> policy.precision_for("compute")
    <Precision.F16: 'float16'>
    """

    name: str
    kinds: tuple[tuple[OpKind, CastConfig], ...]
    accumulation: Precision | None = None
    rules: tuple[Rule, ...] = ()
    guards: frozenset[Guard] = ALL_GUARDS
    param_dtype: Precision | None = None
    output_dtype: Precision | None = None
    allreduce: Precision = Precision.F32
    features: tuple[tuple[str, Any], ...] = ()

    ALWAYS_F32: ClassVar[PrecisionPolicy]
    ALWAYS_F16: ClassVar[PrecisionPolicy]
    MIXED_BF16: ClassVar[PrecisionPolicy]
    MIXED_F16: ClassVar[PrecisionPolicy]
    MIXED_F16_CONSERVATIVE: ClassVar[PrecisionPolicy]
    AUTO_MIXED_BF16: ClassVar[PrecisionPolicy]
    AUTO_MIXED: ClassVar[PrecisionPolicy]
    AUTO_MIXED_CONSERVATIVE: ClassVar[PrecisionPolicy]
    FP8_CURRENT: ClassVar[PrecisionPolicy]
    FP8_DELAYED: ClassVar[PrecisionPolicy]
    FP8_BLOCK: ClassVar[PrecisionPolicy]
    MXFP8: ClassVar[PrecisionPolicy]
    NVFP4: ClassVar[PrecisionPolicy]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise PolicyError(f"The name of a policy is a text, not {self.name!r}.")
        normal = {
            "kinds": _checked_kinds(self.kinds),
            "accumulation": _optional_precision(self.accumulation),
            "rules": _checked_rules(self.rules),
            "guards": chosen(Guard, self.guards),
            "param_dtype": _optional_precision(self.param_dtype),
            "output_dtype": _optional_precision(self.output_dtype),
            "allreduce": Precision.parse(self.allreduce),
            "features": _checked_features(self.features),
        }
        for field, value in normal.items():
            object.__setattr__(self, field, value)

    def __getattr__(self, name: str) -> Any:
        """Return the value of a field that a feature adds."""
        field = features.fields().get(name)
        if field is None:
            raise AttributeError(
                f"A policy has no {name!r}. {features.lacking(name)}".rstrip(), name=name, obj=self
            )
        return dict(self.features).get(name, field.default)

    @classmethod
    @teaching("Write PrecisionPolicy.custom({'compute': 'bf16', 'reduction': 'f32', ...}).")
    def custom(
        cls,
        kinds: Mapping[Any, CastConfig | PrecisionLike],
        *,
        name: str = "custom",
        **attributes: Any,
    ) -> PrecisionPolicy:
        """Return a policy of your own; kinds that are not named stay F32.

        Args:
          kinds: ``OpKind`` or its name, to ``CastConfig``, ``Precision`` or its name.
          name: what reports call it.
          **attributes: the other attributes of a policy, `accumulation`, which is F32 by default,
            `rules` and `output_dtype` among them.

        Raises:
          PolicyError: no such attribute, or a word is not understood.

        >>> PrecisionPolicy.custom({"compute": "bf16"}).precision_for(OpKind.REDUCTION)
        <Precision.F32: 'float32'>
        """
        f32 = dict.fromkeys(OpKind, CastConfig(Precision.F32))
        pairs = tuple({**f32, **_parsed_kinds(kinds)}.items())
        return cls(name, pairs, Precision.F32).replace(**attributes)

    @classmethod
    def of_dtypes(
        cls, params: PrecisionLike, compute: PrecisionLike, output: PrecisionLike
    ) -> PrecisionPolicy:
        """Return the policy that jmp's three dtypes describe.

        The compute dtype stands for the mixed preset of that dtype; f32 and f64 lower
        nothing.

        >>> PrecisionPolicy.of_dtypes("f32", "bf16", "f32").kinds == (
        ...     PrecisionPolicy.MIXED_BF16.kinds)
        True
        """
        dtypes = ThreeDtypes(*map(Precision.parse, (params, compute, output)))
        kinds = dict.fromkeys(OpKind, CastConfig(dtypes.compute))
        kinds[OpKind.BOUNDARY] = CastConfig(Precision.F32)
        return cls(
            name=str(dtypes),
            kinds=tuple(kinds.items()),
            accumulation=None if dtypes.compute in _KEPT else Precision.F32,
            param_dtype=dtypes.params,
            output_dtype=dtypes.output,
        )

    @classmethod
    def parse(cls, policy: Any) -> PrecisionPolicy:
        """Read whatever is accepted as a policy.

        Args:
          policy: one of

            * a policy, or the name of a preset in any case: ``"mixed_bf16"``, ``"fp8_current"``;
            * a 16-bit dtype or its name, for mixed precision in that format with float32
              parameters and results: ``"bf16"``, ``"half"``, ``jnp.bfloat16``; ``"f32"`` or
              ``"full"`` for no change;
            * ``"auto"`` for what suits the device, see ``auto_policy``;
            * a ``jmp.Policy`` or jmp's grammar with an ``=``, ``"p=f32,c=bf16,o=f32"``, whose
              output dtype is that of the results, as jmp has it.

        Raises:
          PolicyError: none of these.

        >>> PrecisionPolicy.parse("bf16") is PrecisionPolicy.parse(jnp.bfloat16)
        True

        >>> PrecisionPolicy.parse("Mixed-BF16") is PrecisionPolicy.MIXED_BF16
        True
        >>> print(PrecisionPolicy.parse("c=bf16,o=f32"))
        p=f32,c=bf16,o=f32
        """
        if isinstance(policy, cls):
            return policy
        if isinstance(policy, str):
            return _parse_text(policy)
        if is_format(policy):
            return _mixed(Precision.parse(policy))
        if all(hasattr(policy, field) for field in _JMP_FIELDS):
            # A jmp.Policy, known by its attributes: jmp itself is not imported here.
            return cls.of_dtypes(*(getattr(policy, field) for field in _JMP_FIELDS))
        raise PolicyError(
            f"{shown(policy)} is not a policy{_where(policy)}. Give a PrecisionPolicy, a 16-bit "
            "dtype, a jmp.Policy, jmp's grammar ('p=f32,c=bf16,o=f32') or a preset. "
            f"{accepted('', PRESETS)}"
        )

    def cast_for(self, kind: OpKind | str) -> CastConfig:
        """Return the cast for operations of a kind.

        >>> str(PrecisionPolicy.MIXED_F16.cast_for("reduction"))
        'f16'
        """
        return dict(self.kinds)[OpKind.parse(kind)]

    def precision_for(self, kind: OpKind | str) -> Precision:
        """Return the precision of operations of a kind.

        >>> PrecisionPolicy.ALWAYS_F16.precision_for(OpKind.BOUNDARY)
        <Precision.F32: 'float32'>
        """
        return self.cast_for(kind).out_dtype

    @property
    def is_scaled(self) -> bool:
        """Return whether Compute is quantized, its operands having scale factors.

        >>> PrecisionPolicy.FP8_CURRENT.is_scaled, PrecisionPolicy.MIXED_BF16.is_scaled
        (True, False)
        """
        return self.cast_for(OpKind.COMPUTE).is_scaled

    @property
    def base(self) -> Precision:
        """The precision of Compute without scale factors: of what is not quantized, and between.

        >>> PrecisionPolicy.FP8_CURRENT.base, PrecisionPolicy.MIXED_F16.base
        (<Precision.BF16: 'bfloat16'>, <Precision.F16: 'float16'>)
        """
        compute = self.precision_for(OpKind.COMPUTE)
        elementwise = self.precision_for(OpKind.ELEMENTWISE)
        if compute not in SCALED_FORMATS:
            return compute
        return Precision.BF16 if elementwise in _KEPT else elementwise

    @property
    def stateless(self) -> PrecisionPolicy:
        """The policy with every scale taken from the tensor at hand, not from earlier steps.

        >>> PrecisionPolicy.FP8_DELAYED.stateless.scaling == PrecisionPolicy.FP8_CURRENT.scaling
        True
        """
        scaling = dict(self.features).get("scaling")
        if scaling is None or not scaling.history:
            return self
        return self.replace(scaling={"history": 0, "carried": False})

    @property
    def low(self) -> frozenset[Precision]:
        """The precisions below f32 that values can be stored in, rules and outputs included.

        >>> PrecisionPolicy.MIXED_BF16.low
        frozenset({<Precision.BF16: 'bfloat16'>})
        """
        return frozenset(self.base if p in SCALED_FORMATS else p for p in self._produced()) - _KEPT

    @property
    def is_identity(self) -> bool:
        """Return whether the policy leaves every program as it is.

        >>> PrecisionPolicy.ALWAYS_F32.is_identity, PrecisionPolicy.MIXED_F16.is_identity
        (True, False)
        """
        return not self.low and self.output_dtype is None

    def replace(self, **changes: Any) -> PrecisionPolicy:
        """Return the policy with some attributes changed; ``kinds``, ``scaling`` may be partial.

        Args:
          **changes: attributes of a policy, also those of features.

        Raises:
          PolicyError: no such attribute, or a word is not understood.

        >>> PrecisionPolicy.FP8_CURRENT.replace(scaling={"backward": False}).scaling.backward
        False

        >>> policy = PrecisionPolicy.MIXED_BF16.replace(kinds={"reduction": "f32"}, guards=())
        >>> policy.precision_for("reduction"), policy.guards
        (<Precision.F32: 'float32'>, frozenset())
        """
        added = features.fields()
        words = [*(field.name for field in dataclasses.fields(self))][:-1] + [*added]
        for name in changes:
            if name not in words:
                lacking = features.lacking(name)
                raise PolicyError(f"A policy has no {name!r}. {lacking}{accepted(name, words)}")
        if "kinds" in changes:
            changes["kinds"] = {**dict(self.kinds), **_parsed_kinds(changes["kinds"])}
        given = {name: changes.pop(name) for name in added if name in changes}
        read = {name: added[name].read(value, getattr(self, name)) for name, value in given.items()}
        if read:
            changes["features"] = {**dict(self.features), **read}
        return dataclasses.replace(self, **changes)

    def with_rules(self, *rules: Rule) -> PrecisionPolicy:
        """Return the policy with more override rules, asked before those that it has.

        >>> policy = PrecisionPolicy.MIXED_F16.with_rules(Rule(precision="f32", scope="head"))
        >>> [str(rule) for rule in policy.rules]
        ['scope=head -> f32']
        """
        return dataclasses.replace(self, rules=(*rules, *self.rules))

    def validate_for_use(self) -> None:
        """Refuse what can be written down but not yet, or not here, computed.

        Raises:
          UnsupportedPrecisionError: scaling of another kind than Compute or of a format that has
            none, by the table or by a rule, or an f64 output while JAX has no f64.

        >>> PrecisionPolicy.MIXED_F16.validate_for_use()
        """
        for feature in features.features():
            feature.check(self)
        of_compute = {self.precision_for(OpKind.COMPUTE), *(rule.precision for rule in self.rules)}
        added = frozenset[Precision]().union(*(f.formats for f in features.features()))
        for precision in self._produced():
            if precision not in _COMPUTABLE | (of_compute & added):
                words = sorted(p.short for p in _COMPUTABLE)
                lacking = features.lacking(precision.short)
                raise UnsupportedPrecisionError(
                    f"{self!r} names {precision.short}, which amp cannot compute "
                    f"{'here' if lacking else 'yet'}. {lacking}{accepted('', words)}"
                )
        if self.output_dtype is Precision.F64 and jnp.result_type(float) != np.float64:
            raise UnsupportedPrecisionError(
                f"{self!r} asks for f64 outputs, but JAX has no f64 now. Set "
                "jax.config.update('jax_enable_x64', True), or choose another output_dtype."
            )

    def to_json(self) -> str:
        """Return the policy as JSON, which ``from_json`` reads back to an equal one.

        Raises:
          PolicyError: a rule has a predicate: a function has no JSON form.

        >>> policy = PrecisionPolicy.MIXED_BF16
        >>> PrecisionPolicy.from_json(policy.to_json()) == policy
        True
        """
        return policy_json.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> PrecisionPolicy:
        """Read what ``to_json`` wrote.

        Args:
          text: the JSON itself; of a file, ``Path(...).read_text()``.

        Raises:
          PolicyError: not JSON, another version, or a key or word is not understood.
        """
        policy = policy_json.from_json(cls, text)
        return policy.replace(name=SYNONYMS.get(policy.name, policy.name))

    def _produced(self) -> Iterable[Precision]:
        """Return every precision that the policy can produce, most important first."""
        yield from (cast.out_dtype for _, cast in self.kinds)
        yield from (rule.precision for rule in self.rules)
        yield from (p for p in (self.accumulation, self.output_dtype) if p is not None)
        yield self.allreduce

    def __str__(self) -> str:
        preset = PRESETS.get(self.name)
        return self.name if preset in (None, self) else f"{self.name}*"

    def __repr__(self) -> str:
        casts = ", ".join(f"{kind.name.lower()}={cast}" for kind, cast in self.kinds)
        extras = [counted(len(self.rules), "rule")] if self.rules else []
        extras += [f"guards {len(self.guards)} of {len(ALL_GUARDS)}"]
        return f"<PrecisionPolicy {self}: {casts}; {', '.join(extras)}>"


def _refuse_change(policy: PrecisionPolicy, name: str, value: Any = None) -> None:
    raise ImmutableError(
        f"A policy is immutable, so its {name!r} cannot be changed. Use policy.replace(...) or "
        "policy.with_rules(...), which return another policy."
    )


# Not in the class: dataclasses puts its own there, which has no advice and fails beside `slots`.
PrecisionPolicy.__setattr__ = PrecisionPolicy.__delattr__ = _refuse_change


def _parse_text(text: str) -> PrecisionPolicy:
    name = re.sub(r"[-\s]+", "_", text.strip()).lower()
    if name in PRESETS or name in SYNONYMS:
        return PRESETS[SYNONYMS.get(name, name)]
    if name in RESOLVED:
        return RESOLVED[name]()
    word = name.removeprefix("mixed_").removesuffix("_mixed")  # as Keras and Lightning write it
    if is_format_name(word):
        return _mixed(Precision.parse(word))
    if "=" in text:
        dtypes = parse_grammar(text)
        return PrecisionPolicy.of_dtypes(dtypes.params, dtypes.compute, dtypes.output)
    if name.endswith(".json"):
        raise PolicyError(
            f"{text!r} is the name of a file. Read it first: "
            f"PrecisionPolicy.from_json(pathlib.Path({text!r}).read_text())."
        )
    words = [*PRESETS, *SYNONYMS, *RESOLVED, *format_names()]
    advice = features.lacking(name) or likely(name, words)
    raise PolicyError(
        f"Unknown policy {text!r}. {advice}{accepted('', [*PRESETS, *RESOLVED])} "
        "A 16-bit dtype is read too, 'bf16' or 'f16', and jmp's grammar: 'p=f32,c=bf16,o=f32'."
    )


def _where(misplaced: Any) -> str:
    """Return where a function or an argument of it goes, where a policy should be."""
    if callable(misplaced):
        return "; the function comes first, amp(fn, policy), and last in diff(one, other)(fn)"
    if isinstance(misplaced, tuple) or hasattr(misplaced, "shape"):
        return "; arguments of the function go into a second call: report(fn)(*args)"
    return ""


def _mixed(precision: Precision) -> PrecisionPolicy:
    """Return the policy of mixed precision in a format, which leaves the results' dtypes alone."""
    if precision in _MIXED:
        return PRESETS[_MIXED[precision]]
    word = precision.short
    advice = f"In jmp's grammar it is 'p={word},c={word},o={word}'."
    if precision in SCALED_FORMATS:
        advice = "To quantize products use a recipe, such as 'fp8_current'."
    words = [p.short for p in _MIXED]
    raise PolicyError(f"There is no mixed precision in {word}. {advice} {accepted('', words)}")


_MIXED = {Precision.BF16: "mixed_bf16", Precision.F16: "mixed_f16", Precision.F32: "always_f32"}


def _parsed_kinds(kinds: Any) -> dict[OpKind, CastConfig]:
    try:
        pairs = dict(kinds).items()
    except (TypeError, ValueError):
        raise PolicyError(f"Kinds are a map from OpKind to precision, not {kinds!r}.") from None
    return {
        OpKind.parse(kind): cast if isinstance(cast, CastConfig) else CastConfig.plain(cast)
        for kind, cast in pairs
    }


def _checked_kinds(kinds: Any) -> tuple[tuple[OpKind, CastConfig], ...]:
    parsed = _parsed_kinds(kinds)
    missing = [kind.name.lower() for kind in OpKind if kind not in parsed]
    if missing:
        raise PolicyError(
            f"A policy covers all five kinds; {', '.join(missing)} missing. "
            "PrecisionPolicy.custom fills the others with F32."
        )
    return tuple((kind, parsed[kind]) for kind in OpKind)


def _checked_rules(rules: Any) -> tuple[Rule, ...]:
    rules = tuple(rules) if isinstance(rules, Iterable) else (rules,)
    for rule in rules:
        if isinstance(rule, list | tuple):
            raise PolicyError(f"{shown(rule)} is not a Rule: unpack it, with_rules(*rules).")
        if not isinstance(rule, Rule):
            raise PolicyError(
                f"{shown(rule)} is not a Rule: write Rule(precision='f32', scope='head')."
            )
    return rules


def _optional_precision(word: Any) -> Precision | None:
    return None if word is None else Precision.parse(word)


def _checked_features(given: Any) -> tuple[tuple[str, Any], ...]:
    """Return the values of the fields that features add, as far as they are not the default."""
    values, added = dict(given), features.fields()
    read = {n: added[n].read(value, added[n].default) for n, value in sorted(values.items())}
    return tuple((name, value) for name, value in read.items() if value != added[name].default)


PrecisionPolicy.__init__ = teaching(
    "Change a preset, PrecisionPolicy.MIXED_BF16.replace(allreduce='bf16'); make one of your own "
    "by PrecisionPolicy.custom; or give amp a word, amp(fn, 'bf16')."
)(PrecisionPolicy.__init__)

PRESETS: dict[str, PrecisionPolicy] = {}
"""Policies by their names; ``presets`` enters them."""

SYNONYMS = {
    "auto_mixed_bf16": "mixed_bf16",
    "auto_mixed": "mixed_f16",
    "auto_mixed_conservative": "mixed_f16_conservative",
}
"""Other names of presets."""

RESOLVED: dict[str, Callable[[], PrecisionPolicy]] = {}
"""Words for policies that depend on the machine, and what finds them; `jaxamp` enters `auto`."""
