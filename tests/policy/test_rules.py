"""Override rules: what they match, what they refuse, and the scope paths that they see."""

from __future__ import annotations

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxamp.core.formats import Precision
from jaxamp.core.taxonomy import OpKind, register_op_kind
from jaxamp.errors import PolicyError, RuleError
from jaxamp.jaxprs.name_stack import clean_scope
from jaxamp.policy.policy import PrecisionPolicy
from jaxamp.policy.rules import EquationView, Rule, first_match
from tests.scopes import equations_of

DOT = EquationView(
    primitive="dot_general",
    kind=OpKind.COMPUTE,
    scope="transformer/block/layer3/attention",
    shapes=((8, 16),),
    dtypes=(np.dtype("float32"),),
    functions=lambda: ("einsum", "Attention.__call__", "loss_fn"),
)


@pytest.mark.parametrize(
    ("glob", "matches"),
    [
        ("attention", True),
        ("transformer", True),
        ("block/layer3", True),
        ("transformer/*/attention", True),
        ("layer?", True),
        ("layer[0-4]", True),
        ("*attent*", True),
        ("*/attention", True),
        ("*", True),
        ("/transformer", True),
        ("/transformer/block", True),
        ("transformer/block/layer3/attention", True),
        ("transformer/", True),
        ("attent", False),
        ("Attention", False),
        ("layer[4-9]", False),
        ("block/attention", False),
        ("/attention", False),
        ("attention/*", False),
        ("layer", False),
    ],
)
def test_scope_globs(glob, matches):
    """A scope glob matches whole consecutive components anywhere, from the start after a ``/``."""
    assert Rule(precision="f32", scope=glob).matches(DOT) is matches


def test_scope_globs_outside_of_any_scope():
    """Only a bare star matches an equation without a scope."""
    view = EquationView(primitive="exp", kind=OpKind.ELEMENTWISE)
    assert Rule(precision="f32", scope="*").matches(view)
    assert not Rule(precision="f32", scope="?*").matches(view)


def test_brackets_of_names_match_themselves():
    """A scope called ``layers[0]`` is matched by its own name."""
    view = EquationView(primitive="exp", kind=OpKind.ELEMENTWISE, scope="net/layers[0]")
    assert Rule(precision="f32", scope="layers[0]").matches(view)


@pytest.mark.parametrize(
    ("keys", "matches"),
    [
        ({"primitive": "dot_general"}, True),
        ({"primitive": "dot*"}, True),
        ({"primitive": "exp"}, False),
        ({"kind": "compute"}, True),
        ({"kind": OpKind.REDUCTION}, False),
        ({"function": "loss_fn"}, True),
        ({"function": "Attention.*"}, True),
        ({"function": "__call__"}, True),
        ({"function": "Attention"}, True),
        ({"dtype": "f32"}, True),
        ({"dtype": jnp.bfloat16}, False),
        ({"min_size": 128}, True),
        ({"min_size": 129}, False),
        ({"when": lambda view: view.shapes == ((8, 16),)}, True),
        ({"when": lambda view: view.size > 1000}, False),
        ({"scope": "attention", "primitive": "dot*", "function": "einsum"}, True),
        ({"scope": "attention", "primitive": "dot*", "function": "matmul"}, False),
    ],
)
def test_keys(keys, matches):
    """A rule matches when every key that it names does."""
    assert Rule(precision="f32", **keys).matches(DOT) is matches


def test_view_sizes_and_formats():
    """The size is that of the largest output and the format that of the first float output."""
    view = EquationView(
        primitive="sort",
        kind=OpKind.REDUCTION,
        shapes=((3,), (2, 5), ()),
        dtypes=(np.dtype("int32"), np.dtype("bfloat16"), np.dtype("float32")),
    )
    assert view.size == 10
    assert view.precision is Precision.BF16
    empty = EquationView(primitive="token", kind=OpKind.BOUNDARY)
    assert empty.size == 0
    assert empty.precision is None


def test_lazy_keys_come_last():
    """Functions and predicates are asked only where the cheap keys match."""

    def never():
        raise AssertionError("asked too early")

    view = EquationView(primitive="exp", kind=OpKind.ELEMENTWISE, functions=never)
    rule = Rule(precision="f32", scope="head", function="f", when=lambda view: never())
    assert not rule.matches(view)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "needs a key"),
        ({"label": "mine"}, "needs a key"),
        ({"scope": ""}, "non-empty glob"),
        ({"scope": "//"}, "non-empty glob"),
        ({"function": " "}, "non-empty glob"),
        ({"primitive": 3}, "non-empty glob"),
        ({"function": test_keys}, "write function='test_keys'"),
        ({"primitive": jax.lax.exp_p}, "write primitive='exp'"),
        ({"primitive": "softmax"}, "is a function, not a primitive: write function='softmax'"),
        ({"primitive": "jax.nn.logsumexp"}, "write function='logsumexp'"),
        ({"primitive": "LayerNorm"}, "is a class, not a primitive: write function='LayerNorm'"),
        ({"module": "attention"}, "argument 'module'.*scope="),
        ({"scpe": "attention"}, "argument 'scpe'. Did you mean 'scope'"),
        ({"primitive": "dot_genral"}, "Did you mean 'dot_general'.*register_op_kind"),
        ({"primitive": "dot"}, "function='dot'.*kind='compute'"),
        ({"primitive": "dot_general", "kind": "reduction"}, "its kind is Compute"),
        ({"kind": "computing"}, "Did you mean 'compute'"),
        ({"dtype": "int32"}, "Unknown precision 'int32'"),
        ({"dtype": np.int8}, "not a float format"),
        ({"min_size": 0}, "positive number"),
        ({"min_size": True}, "positive number"),
        ({"min_size": 1.5}, "positive number"),
        ({"when": "always"}, "function of an EquationView"),
        ({"scope": "transpose(jvp(head))"}, "Write 'head'"),
        ({"scope": "head/keep_precision[f32]"}, "Write 'head'"),
        ({"scope": "net//head"}, "Write 'net/head'"),
    ],
)
def test_rules_that_can_never_match(keys, message):
    """A rule that cannot match anything is refused where it is written."""
    with pytest.raises(RuleError, match=message):
        Rule(precision="f32", **keys)


def test_rules_without_what_they_need():
    """Values without a key, and a rule that gives nothing, are our errors."""
    with pytest.raises(RuleError, match=r"too many positional.*have names"):
        Rule("f32", scope="head")  # pyright: ignore
    with pytest.raises(RuleError, match=r"missing.*'precision'"):
        Rule(scope="head")  # pyright: ignore


def test_unknown_precision_is_a_rule_error():
    """A wrong precision is reported as an error of the rule, with a hint."""
    with pytest.raises(RuleError, match="Did you mean 'f32'"):
        Rule(precision="f23", scope="a")


def test_unhashable_predicate_is_refused():
    """A predicate without a hash would make the policy useless as a cache key."""

    class Predicate:
        __hash__ = None  # pyright: ignore[reportAssignmentType]

        def __call__(self, view):
            return True

    with pytest.raises(RuleError, match="hashable"):
        Rule(precision="f32", when=Predicate())


def test_registered_primitives_can_be_named():
    """After ``register_op_kind`` a rule may name the primitive."""
    register_op_kind("test_rules_own_primitive", OpKind.ELEMENTWISE)
    assert Rule(precision="f32", primitive="test_rules_own_primitive").primitive


def test_failing_predicate_is_explained():
    """An exception inside a predicate becomes a RuleError that names rule and equation."""
    rule = Rule(precision="f32", when=lambda view: 1 / 0 > 1, label="wide")
    with pytest.raises(RuleError, match=r"`wide`.*dot_general.*attention.*ZeroDivisionError"):
        rule.matches(DOT)


def test_first_match_wins():
    """The first rule that matches decides, and none is an answer too."""
    rules = [Rule(precision="f16", scope="mlp"), Rule(precision="bf16", primitive="dot*")]
    rules += [Rule(precision="f32", scope="attention")]
    assert first_match(rules, DOT) == 1
    assert first_match(rules[:1], DOT) is None
    assert first_match([], DOT) is None


def test_copies_are_equal():
    """Pickle and deepcopy give an equal rule with the same hash; predicates are kept by name."""
    rule = Rule(precision="f32", scope="head", kind="compute", when=bool, label="x")  # pyright: ignore
    for other in (pickle.loads(pickle.dumps(rule)), copy.deepcopy(rule)):
        assert other == rule
        assert hash(other) == hash(rule)


def test_data_form_gives_the_rule_back():
    """``Rule(**rule.to_data())`` is the rule."""
    rule = Rule(precision="f32", scope="head", kind="compute", dtype="bf16", min_size=3, label="x")
    assert Rule(**rule.to_data()) == rule
    with pytest.raises(PolicyError, match="no JSON form"):
        Rule(precision="f32", when=bool).to_data()


def test_text_form_names_the_keys():
    """The text of a rule is its label, or its keys."""
    rule = Rule(precision="bf16", primitive="exp", min_size=4)
    assert str(rule) == "primitive=exp min_size=4 -> bf16"
    assert str(Rule(precision="bf16", scope="a", label="mine")) == "mine"


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("", ""),
        ("jvp()", ""),
        ("transpose(jvp())/mul", "mul"),
        ("transpose(jvp(transformer))/jvp(layer3)/attention", "transformer/layer3/attention"),
        ("vmap(jvp(vmap(transpose(jvp(a)))))/b", "a/b"),
        ("jvp(a)//rematted_computation/b", "a/b"),
        ("a/keep_precision[f32]/b", "a/b"),
        ("jvp(keep_precision[bf16])", ""),
        ("keep_precision[huge]", "keep_precision[huge]"),
        ("attn(heads=2)/vmap(mlp(x))", "attn(heads=2)/mlp(x)"),
        ("jvp(a/b)/c", "a/b/c"),
        ("my_jvp(a)", "my_jvp(a)"),
        ("a)b(c", "a)b(c"),
    ],
)
def test_clean_scope(raw, clean):
    """Transforms, markers and JAX's own names go; what the user wrote stays."""
    assert clean_scope(raw) == clean


@given(st.text("abjvp()/[]", max_size=30))
def test_clean_scope_is_idempotent_on_paths_without_transforms(text):
    """Cleaning never fails, and leaves no empty name."""
    clean = clean_scope(text)
    assert "" not in clean.split("/") or clean == ""
    assert len(clean) <= len(text)


TRANSFORMS = {
    "plain": lambda f: f,
    "grad": jax.grad,
    "vmap of grad": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, x])),
    "hessian": jax.hessian,
    "grad of remat": lambda f: jax.grad(jax.checkpoint(f)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_clean_scope_on_real_name_stacks(transform):
    """Under every transform the equations of a scope have the path that the user wrote."""

    def f(x):
        with jax.named_scope("net"), jax.named_scope("attn(2)"):
            x = jnp.sin(x)
        return jnp.sum(x)

    found = equations_of(TRANSFORMS[transform](f), jnp.ones(3))
    paths = {clean_scope(path) for eqn, path in found if eqn.primitive.name in ("sin", "cos")}
    assert paths == {"net/attn(2)"}
    assert {clean_scope(path) for _, path in found} <= {"", "net", "net/attn(2)"}


def test_policy_rules_are_hashable_with_predicates():
    """A policy with a predicate can be a cache key; the same function gives an equal policy."""

    def wide(view):
        return view.size > 10

    make = lambda: PrecisionPolicy.MIXED_F16.with_rules(Rule(precision="f32", when=wide))  # noqa: E731
    assert make() == make()
    assert hash(make()) == hash(make())
