"""Policies: presets, words, guards, JSON, and what is refused."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import FrozenInstanceError

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params

from jaxamp import amp
from jaxamp.core.enum_words import chosen
from jaxamp.core.formats import CastConfig, Precision
from jaxamp.core.guards import ALL_GUARDS, Guard
from jaxamp.core.taxonomy import OpKind
from jaxamp.errors import PolicyError, UnsupportedPrecisionError
from jaxamp.policy.policy import PRESETS, SYNONYMS, PrecisionPolicy
from jaxamp.policy.rules import Rule

F32, F16, BF16 = Precision.F32, Precision.F16, Precision.BF16
E4M3, E2M1 = Precision.F8_E4M3, Precision.F4_E2M1

# Compute, Reduction, Elementwise, DataMovement, Boundary; inside a Reduction; guards on
TABLE = {
    "always_f32": ((F32, F32, F32, F32, F32), None, True),
    "always_f16": ((F16, F16, F16, F16, F32), None, False),
    "mixed_f16_conservative": ((F16, F32, F16, F16, F32), F32, True),
    "mixed_f16": ((F16, F16, F16, F16, F32), F32, True),
    "mixed_bf16": ((BF16, BF16, BF16, BF16, F32), F32, True),
    "fp8_current": ((E4M3, BF16, BF16, BF16, F32), F32, True),
    "fp8_delayed": ((E4M3, BF16, BF16, BF16, F32), F32, True),
    "fp8_block": ((E4M3, BF16, BF16, BF16, F32), F32, True),
    "mxfp8": ((E4M3, BF16, BF16, BF16, F32), F32, True),
    "nvfp4": ((E2M1, BF16, BF16, BF16, F32), F32, True),
}


@pytest.mark.parametrize(
    ("word", "low"),
    [
        ("bf16", jnp.bfloat16),
        ("bfloat16", jnp.bfloat16),
        (jnp.bfloat16, jnp.bfloat16),
        (jnp.dtype("bfloat16"), jnp.bfloat16),
        (Precision.BF16, jnp.bfloat16),
        ("mixed_bf16", jnp.bfloat16),
        ("Mixed-F16", jnp.float16),
        ("mixed_bfloat16", jnp.bfloat16),  # Keras
        ("bf16-mixed", jnp.bfloat16),  # Lightning
        ("auto_mixed_bf16", jnp.bfloat16),
        ("AUTO_MIXED", jnp.float16),
        ("f16", jnp.float16),
        ("float16", jnp.float16),
        (np.float16, jnp.float16),
        ("half", Precision.parse("half").dtype),
        ("full", jnp.float32),
        (jnp.float32, jnp.float32),
    ],
)
def test_a_dtype_means_mixed_precision(word, low):
    """Products run in that dtype; parameters come, and results leave, as they are."""
    program = jax.make_jaxpr(amp(lambda x, w: x @ w, word))(jnp.ones((2, 3)), jnp.ones((3, 4)))
    operands = [dot.invars[0].aval.dtype for dot in _dots(program.jaxpr)]
    assert operands == [low]
    assert [aval.dtype for aval in (*program.in_avals, *program.out_avals)] == [jnp.float32] * 3


def _dots(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("dot_general", "accumulate"):
            yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from _dots(inner)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("f64", "p=f64,c=f64,o=f64"),
        (jnp.float8_e4m3fn, "fp8_current"),
        ("f8_e5m2", "fp8_current"),
        (jnp.int8, "is not a policy"),
        (float, "is not a policy"),
    ],
)
def test_other_dtypes_are_no_mixed_precision(word, message):
    """What is no 16-bit float is refused, with what to write instead."""
    with pytest.raises(PolicyError, match=message):
        PrecisionPolicy.parse(word)


@pytest.mark.parametrize("name", TABLE)
def test_preset_table(name):
    """Every preset has the precisions, accumulation and guards of the documented table."""
    precisions, accumulation, guarded = TABLE[name]
    policy = getattr(PrecisionPolicy, name.upper())
    assert tuple(policy.precision_for(kind) for kind in OpKind) == precisions
    assert policy.accumulation is accumulation
    assert policy.guards == (ALL_GUARDS if guarded else frozenset())
    assert (policy.rules, policy.param_dtype, policy.output_dtype) == ((), None, None)


def test_presets_are_the_table():
    """No preset is missing from the table or from the class."""
    assert set(PRESETS) == set(TABLE)
    assert all(getattr(PrecisionPolicy, name.upper()) is PRESETS[name] for name in PRESETS)


@pytest.mark.parametrize("name", TABLE)
def test_preset_words(name):
    """A preset is found by its name in any case, with dashes, blanks or underscores."""
    for word in (name, name.upper(), name.replace("_", "-"), f" {name.replace('_', ' ').title()} "):
        assert PrecisionPolicy.parse(word) is PRESETS[name]


def test_older_names_are_the_same_presets():
    """Programs and JSON that have an older name of a preset mean the preset."""
    for old, new in SYNONYMS.items():
        assert PrecisionPolicy.parse(old) is PRESETS[new] is getattr(PrecisionPolicy, old.upper())
        text = PRESETS[new].to_json().replace(f'"{new}"', f'"{old}"')
        assert PrecisionPolicy.from_json(text) == PRESETS[new]


@pytest.mark.parametrize("policy", [*PRESETS, "bf16", "half"])
def test_no_preset_changes_what_is_returned(policy):
    """Results have the dtypes of the original, but where jmp's words name another."""
    if PrecisionPolicy.parse(policy).scaling.history:
        policy = PrecisionPolicy.parse(policy).stateless
    x = jnp.ones((4, 4))
    assert jax.eval_shape(amp(jnp.dot, policy), x, x).dtype == jnp.float32


@pytest.mark.parametrize("name", ["name", "compute", "compute_dtype"])
def test_a_policy_is_not_changed_in_place(name):
    """Whether it has such an attribute or not, the error says how another policy is made."""
    policy = PrecisionPolicy.MIXED_F16
    with pytest.raises(PolicyError, match=rf"'{name}'.*policy\.replace\(\.\.\.\) or") as info:
        setattr(policy, name, "f32")
    assert isinstance(info.value, FrozenInstanceError)
    with pytest.raises(FrozenInstanceError, match=r"policy\.replace"):
        delattr(policy, name)
    assert policy.name == "mixed_f16"


def test_guard_words():
    """The nine guards have the words of the reports."""
    words = "reduction-island no-gain loop-carry range exact-integer sensitive bits no-kernel"
    assert {guard.value for guard in Guard} == {*words.split(), "callbacks"}


def test_guards_are_read_from_words():
    """Guards come as members or words, alone or together, with dashes or underscores."""
    assert chosen(Guard, ["range", Guard.BITS, "NO_GAIN"]) == {
        Guard.RANGE,
        Guard.BITS,
        Guard.NO_GAIN,
    }
    assert chosen(Guard, "range") == chosen(Guard, Guard.RANGE) == {Guard.RANGE}
    assert chosen(Guard, "all") == ALL_GUARDS
    assert chosen(Guard, ()) == frozenset()


def test_identity_and_low():
    """Identity means that nothing at all is lowered, by kind, rule or output."""
    base = PrecisionPolicy.ALWAYS_F32
    assert base.is_identity
    assert base.low == frozenset()
    assert PrecisionPolicy.MIXED_F16_CONSERVATIVE.low == {F16}
    ruled = base.with_rules(Rule(precision="bf16", scope="mlp"))
    assert not ruled.is_identity
    assert ruled.low == {BF16}
    assert not base.replace(output_dtype="bf16").is_identity
    assert not base.replace(output_dtype="f32").is_identity  # an output in bf16 would be cast
    assert base.replace(param_dtype="bf16").is_identity  # says how parameters are stored, no more
    assert PrecisionPolicy.custom({"compute": "f64"}).is_identity


def test_custom_fills_with_f32():
    """Kinds that ``custom`` does not name stay F32; words, members and casts are read alike."""
    cast = CastConfig("bf16")
    policy = PrecisionPolicy.custom(
        {OpKind.COMPUTE: cast, "data-movement": "bf16", "Elementwise": Precision.F16}
    )
    assert [policy.precision_for(k) for k in OpKind] == [BF16, F32, F16, BF16, F32]
    assert policy.cast_for("compute") is cast
    assert policy.name == "custom"
    assert policy.guards == ALL_GUARDS
    assert policy.accumulation is F32


def test_order_of_kinds_does_not_matter():
    """Policies that say the same are equal and hash alike."""
    kinds = {"compute": "bf16", "reduction": "f16"}
    policy = PrecisionPolicy.custom(kinds)
    other = PrecisionPolicy.custom(dict(reversed(kinds.items())))
    assert policy == other
    assert hash(policy) == hash(other)
    assert [kind for kind, _ in policy.kinds] == list(OpKind)


def test_replace_reads_words():
    """``replace`` parses what it is given and leaves the original alone."""
    policy = PrecisionPolicy.MIXED_BF16
    changed = policy.replace(
        kinds={"reduction": "f32"}, guards=["range"], output_dtype="full", accumulation=None
    )
    assert changed.precision_for("reduction") is F32
    assert changed.precision_for("compute") is BF16
    assert changed.guards == {Guard.RANGE}
    assert changed.output_dtype is F32
    assert changed.accumulation is None
    assert policy == PRESETS["mixed_bf16"]
    assert policy.guards == ALL_GUARDS


def test_new_rules_are_asked_first():
    """``with_rules`` puts its rules before those that are there, in the order given."""
    a, b, c = (Rule(precision="f32", scope=s) for s in "abc")
    assert PrecisionPolicy.MIXED_F16.with_rules(c).with_rules(a, b).rules == (a, b, c)


def test_text_forms_are_short_and_honest():
    """A changed preset does not pass for the preset."""
    policy = PrecisionPolicy.MIXED_F16
    assert str(policy) == "mixed_f16"
    assert str(policy.replace(guards=())) == "mixed_f16*"
    assert str(policy.replace(guards=(), name="mine")) == "mine"
    assert "compute=f16" in repr(policy)
    assert len(repr(policy)) < 160


def test_lists_are_made_hashable():
    """A policy built by hand from lists and dicts is normalised, so that it can be a cache key."""
    policy = PrecisionPolicy(
        name="by hand",
        kinds=dict.fromkeys(OpKind, "bf16"),  # pyright: ignore[reportArgumentType]
        rules=[Rule(precision="f32", scope="a")],  # pyright: ignore[reportArgumentType]
        guards=["range"],  # pyright: ignore[reportArgumentType]
    )
    assert isinstance(hash(policy), int)
    assert policy.precision_for("boundary") is BF16


def _rules() -> st.SearchStrategy[Rule]:
    words = st.text(st.characters(codec="utf-8", exclude_characters="()/* \0"), min_size=1)
    optional = lambda values: st.none() | values  # noqa: E731
    return st.builds(
        Rule,
        precision=st.sampled_from(Precision),
        scope=words.filter(lambda w: w != "rematted_computation"),
        primitive=optional(st.sampled_from(["exp*", "dot_general"])),
        kind=optional(st.just(OpKind.COMPUTE)),
        function=optional(words),
        dtype=optional(st.sampled_from([F32, BF16])),
        min_size=optional(st.integers(1, 10**9)),
        label=st.text(),
    )


def _policies() -> st.SearchStrategy[PrecisionPolicy]:
    plain = st.sampled_from(Precision).map(CastConfig)
    scaled = st.builds(
        CastConfig,
        st.sampled_from(Precision),
        st.tuples(st.integers(1, 256), st.integers(1, 256)),
        st.booleans(),
    )
    precision = st.none() | st.sampled_from(Precision)
    return st.builds(
        PrecisionPolicy.custom,
        st.dictionaries(st.sampled_from(OpKind), plain | scaled),
        name=st.text(),
        accumulation=precision,
        rules=st.lists(_rules(), max_size=3),
        guards=st.frozensets(st.sampled_from(Guard)),
        param_dtype=precision,
        output_dtype=precision,
        allreduce=st.sampled_from(Precision),
    )


@given(_policies())
@settings(max_examples=100, deadline=None)
def test_json_pickle_and_copies_round_trip(policy):
    """Every part of a policy survives JSON, pickle and deepcopy, and the hash with it."""
    copies = (
        PrecisionPolicy.from_json(policy.to_json()),
        pickle.loads(pickle.dumps(policy)),
        copy.deepcopy(policy),
    )
    for other in copies:
        assert other == policy
        assert hash(other) == hash(policy)
    assert copies[0].to_json() == policy.to_json()


def test_json_refuses_predicates():
    """A rule with a function cannot be written down, and the message names the rule."""
    policy = PrecisionPolicy.MIXED_F16.with_rules(
        Rule(precision="f32", when=lambda view: True, label="my rule")
    )
    with pytest.raises(PolicyError, match=r"my rule.*no JSON form.*with_rules"):
        policy.to_json()


def _edited(**changes):
    data = {**json.loads(PrecisionPolicy.MIXED_F16.to_json()), **changes}
    return json.dumps({key: value for key, value in data.items() if value != "DROP"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON text"),
        ("mine.json", r"not JSON text.*from_json\(Path\(\.\.\.\)\.read_text\(\)\)"),
        ("[]", "no version.*to_json"),
        ('"mixed_bf16"', r"amp\(fn, 'mixed_bf16'\)"),
        ("null", "no version"),
        (_edited(version=99), "version 99"),
        (_edited(kinds="DROP"), "has no kinds"),
        (_edited(kinds={"Compute": "bf16"}), "all five kinds"),
        (_edited(kinds=[]), r"its kinds is \[\]"),
        (_edited(kinds={}), "all five kinds"),
        (_edited(rules=[{"precision": "f32", "scpe": "a"}]), "scpe"),
        (_edited(guards=["rnge"]), "Did you mean 'range'"),
        (_edited(output_dtype="f23"), "Did you mean"),
        (_edited(rules=3), "its rules is 3"),
        (_edited(scaling={"hstory": 3}), "not a policy of jaxamp"),
        (_edited(rule=[]), "no 'rule'. Did you mean 'rules'"),
    ],
)
def test_json_that_is_no_policy(text, message):
    """Foreign or damaged JSON is refused in words."""
    with pytest.raises(PolicyError, match=message):
        PrecisionPolicy.from_json(text)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PrecisionPolicy.parse("mixd_bf16"), "Did you mean 'mixed_bf16'"),
        (lambda: PrecisionPolicy.parse(""), "Accepted: always_f32"),
        (lambda: PrecisionPolicy.parse("fp_16"), "Did you mean 'fp16'"),
        (lambda: PrecisionPolicy.parse("bfloat"), "Did you mean 'bfloat16'"),
        (lambda: PrecisionPolicy.parse("fp8"), "Did you mean 'fp8_current'"),
        (lambda: PrecisionPolicy.parse("auto_mixd"), "Did you mean 'auto_mixed'"),
        (lambda: PrecisionPolicy.parse((jnp.ones(2),)), r"report\(fn\)\(\*args\)"),
        (lambda: PrecisionPolicy.parse(jnp.ones(2)), r"report\(fn\)\(\*args\)"),
        (lambda: PrecisionPolicy.parse(jnp.dot), r"amp\(fn, policy\)"),
        (lambda: PrecisionPolicy.MIXED_BF16.with_rules([]), r"with_rules\(\*rules\)"),  # pyright: ignore
        (lambda: PrecisionPolicy.parse(3), "not a policy"),
        (lambda: PrecisionPolicy.parse(None), "not a policy"),
        (lambda: PrecisionPolicy.custom({"compte": "bf16"}), "Did you mean 'compute'"),
        (lambda: PrecisionPolicy.custom({"compute": "bf61"}), "Did you mean 'bf16'"),
        (lambda: PrecisionPolicy.custom(["compute"]), "map from OpKind"),  # pyright: ignore
        (lambda: PrecisionPolicy.custom({}, guards=["sensitiv"]), "Did you mean 'sensitive'"),
        (lambda: PrecisionPolicy.custom({}, guards=3), "Guards are words"),  # pyright: ignore
        (lambda: PrecisionPolicy.custom({}, rules=["f32"]), "not a Rule"),  # pyright: ignore
        (lambda: PrecisionPolicy.custom({}, rules=Rule), "not a Rule"),  # pyright: ignore
        (lambda: PrecisionPolicy("x", ()), "compute, reduction, elementwise"),
        (lambda: PrecisionPolicy.MIXED_F16.replace(guard=()), "Did you mean 'guards'"),
        (lambda: PrecisionPolicy.MIXED_F16.precision_for("dots"), "'dots' is not an OpKind"),
        (lambda: PrecisionPolicy.custom({}, name=3), "name"),  # pyright: ignore
    ],
)
def test_wrong_words_teach(make, message):
    """Each wrong word raises a PolicyError that says what would be right."""
    with pytest.raises(PolicyError, match=message):
        make()


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (PrecisionPolicy.custom({"compute": CastConfig("bf16", (1, 128))}), "blocked scaling"),
        (PrecisionPolicy.custom({"compute": "f8_e8m0"}), "f8_e8m0"),
        (PrecisionPolicy.custom({"reduction": "f8_e4m3"}), "it scales Compute"),
        (PrecisionPolicy.custom({"elementwise": "f4_e2m1"}), "f4_e2m1"),
        (PrecisionPolicy.parse("c=f8_e4m3,o=f32"), "as the preset 'fp8_current'"),
        (PrecisionPolicy.custom({}, accumulation="f8_e5m2"), "f8_e5m2"),
        (PrecisionPolicy.custom({}, output_dtype="f8_e5m2"), "f8_e5m2"),
        (PrecisionPolicy.custom({}, rules=[Rule(precision="f8_e8m0", scope="a")]), "f8_e8m0"),
        (PrecisionPolicy.custom({}, output_dtype="f64"), "jax_enable_x64"),
        *(
            (PrecisionPolicy.custom({}, rules=[Rule(precision="f8_e4m3", **key)]), "convolutions")
            for key in ({"primitive": "tanh"}, {"primitive": "reduce_*"}, {"kind": "elementwise"})
        ),
    ],
)
def test_uncomputable_policies_are_refused_for_use(policy, message):
    """What can be written but not computed is refused by ``validate_for_use``, with a way out."""
    with pytest.raises(UnsupportedPrecisionError, match=message):
        policy.validate_for_use()


def test_computable_policies_pass():
    """Presets, 16-bit and scaled Compute are accepted, and f64 outputs where JAX has f64."""
    for policy in PRESETS.values():
        policy.validate_for_use()
    PrecisionPolicy.custom({"compute": CastConfig("f8_e5m2", (1, 64))}).validate_for_use()
    for key in ({"scope": "a"}, {"primitive": "dot*"}, {"kind": "compute"}):
        PrecisionPolicy.custom({}, rules=[Rule(precision="f8_e4m3", **key)]).validate_for_use()
    with jax.enable_x64(True):
        PrecisionPolicy.custom({"compute": "bf16"}, output_dtype="f64").validate_for_use()


def test_policy_is_frozen():
    """A policy cannot be changed in place."""
    with pytest.raises(AttributeError):
        PrecisionPolicy.MIXED_F16.guards = frozenset()  # pyright: ignore


def test_parse_keeps_policies_and_reads_jmp():
    """``parse`` returns a policy as it is and reads a jmp policy by its three dtypes."""
    policy = PrecisionPolicy.custom({"compute": "bf16"})
    assert PrecisionPolicy.parse(policy) is policy
    read = PrecisionPolicy.parse(jmp.get_policy("p=f32,c=bf16,o=f32"))
    assert read.kinds == PrecisionPolicy.MIXED_BF16.kinds


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PrecisionPolicy(), "missing a required argument: 'name'.*MIXED_BF16.replace"),
        (lambda: PrecisionPolicy("mixed_bf16"), "'kinds'.*MIXED_BF16.replace"),
        (lambda: PrecisionPolicy.custom(dtype="bf16"), r"'kinds'.*custom\(\{'compute'"),
        (lambda: amp(jnp.dot, dtype="bf16"), r"argument 'dtype'.*amp\(fn, 'bf16'\)"),
        (lambda: amp(dtype="bf16"), r"argument 'dtype'.*amp\(fn, policy='bf16'\)"),
    ],
)
def test_arguments_that_do_not_exist_say_what_to_write(call, message):
    """Ours, rather than Python's bare TypeError."""
    with pytest.raises(PolicyError, match=message):
        call()


def test_words_of_other_libraries_are_read():
    """PyTorch's users write fp16."""
    assert PrecisionPolicy.parse("fp16") is PrecisionPolicy.MIXED_F16
    assert PrecisionPolicy.parse("mixed-fp16") is PrecisionPolicy.MIXED_F16
    assert PrecisionPolicy.parse("fp32") is PrecisionPolicy.ALWAYS_F32
