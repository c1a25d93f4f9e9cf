"""Rules and kept regions in a program that runs: they hold under every transform."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from jaxamp import PrecisionPolicy, Rule, amp, keep_precision, plan_of
from jaxamp.policy.rules import EquationView
from tests import audit

BF16 = PrecisionPolicy.MIXED_BF16
X, W = jnp.linspace(-1, 1, 16).reshape(4, 4), jnp.linspace(1, 2, 16).reshape(4, 4)


def head(h, w):
    """The part that is spoken of: two products, of (5, 4) and of (4, 5)."""
    with jax.named_scope("net/head"):
        pad = jnp.concatenate([h, h[:1]])
        return (pad @ w) @ jnp.concatenate([w, w[:, :1]], axis=1)


def model(x, w):
    """Two products of which nobody speaks, and a head."""
    return head(jnp.tanh(jnp.sin(x @ w) @ w), w).sum()


def marked(context):
    """The model with its head in a region, by `with` or by decorator."""

    def region(h, w):
        with keep_precision("f32"):
            return head(h, w)

    inner = region if context else keep_precision("f32")(head)
    return lambda x, w: inner(jnp.tanh(jnp.sin(x @ w) @ w), w).sum()


def scanned(fn):
    """`fn` in the body of a loop."""
    return lambda x, w: jax.lax.scan(lambda c, _: (c + fn(x, w), None), 0.0, None, length=3)[0]


TRANSFORMS = {
    "plain": (lambda fn, wrap: wrap(fn), (2, 2)),
    "jit inside": (lambda fn, wrap: wrap(jax.jit(fn)), (2, 2)),
    "vmap inside": (lambda fn, wrap: wrap(_mapped(fn)), (2, 2)),
    "vmap outside": (lambda fn, wrap: _mapped(wrap(fn)), (2, 2)),
    "scan inside": (lambda fn, wrap: wrap(scanned(fn)), (2, 2)),
    "jvp outside": (lambda fn, wrap: lambda x, w: jax.jvp(wrap(fn), (x, w), (x, w)), (6, 6)),
    "grad outside": (lambda fn, wrap: jax.grad(wrap(fn), (0, 1)), (6, 6)),
    "grad inside": (lambda fn, wrap: wrap(jax.grad(fn, (0, 1))), (6, 6)),
    "grad of scan": (lambda fn, wrap: wrap(jax.grad(scanned(fn), (0, 1))), (6, 6)),
    "grad of remat": (lambda fn, wrap: wrap(jax.grad(jax.checkpoint(fn), (0, 1))), None),
    "vmap of grad": (lambda fn, wrap: wrap(_mapped(jax.grad(fn, (0, 1)))), (6, 6)),
}
"""What is done to the model, and how many products then run in f32 and in bf16."""


def _mapped(fn):
    return lambda x, w: jax.vmap(fn, (0, None))(jnp.stack([x, x]), w)


OVERRIDES = {
    "region": (marked(True), BF16),
    "decorator": (marked(False), BF16),
    "scope": (model, BF16.with_rules(Rule(precision="f32", scope="net/head"))),
    "function": (model, BF16.with_rules(Rule(precision="f32", function="head"))),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("override", OVERRIDES)
def test_an_override_holds_under_every_transform(override, transform):
    """The head's products multiply float32, forward and backward; all others bfloat16."""
    fn, policy = OVERRIDES[override]
    build, expected = TRANSFORMS[transform]
    f32, bf16 = _products(build(fn, lambda f: amp(f, policy)))
    assert _products(build(fn, amp)) == ((0, f32 + bf16) if fn is model else (f32, bf16))
    if expected is not None:
        assert (f32, bf16) == expected
    assert min(f32, bf16) >= 2


def _products(fn):
    """How many products run in f32 and in bf16; there are no others."""
    found = Counter(p.operands for p in audit.products(jax.make_jaxpr(fn)(X, W).jaxpr))
    f32, bf16 = (found.pop((jnp.dtype(d),) * 2, 0) for d in (jnp.float32, jnp.bfloat16))
    assert not found
    return f32, bf16


def _is_padded(view: EquationView) -> bool:
    return view.in_shapes[:1] == ((5, 4),)


@pytest.mark.parametrize(
    ("keys", "f32"),
    [
        ({"primitive": "dot_general"}, 4),
        ({"kind": "compute"}, 4),
        ({"kind": "compute", "min_size": 17}, 2),
        ({"dtype": "f32"}, 4),
        ({"dtype": "bf16"}, 0),
        ({"when": _is_padded}, 2),
        ({"scope": "net", "when": _is_padded}, 2),
        ({"scope": "net", "primitive": "tanh"}, 0),
        ({"function": "/head"}, 2),
        ({"function": "model", "kind": "compute"}, 4),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else str(value),
)
def test_every_key_decides_what_runs(keys, f32):
    """A rule by any key changes the products that it matches, and is reported where it matched."""
    policy = BF16.with_rules(Rule(precision="f32", **keys))
    assert _products(amp(model, policy)) == (f32, 4 - f32)
    unmatched = keys in ({"dtype": "bf16"}, {"scope": "net", "primitive": "tanh"})
    assert plan_of(model, policy)(X, W).unmatched_rules == (policy.rules if unmatched else ())


def test_the_first_rule_that_matches_wins():
    """Of two that match, the first decides; one that others left nothing to is reported."""
    narrow, wide = Rule(precision="bf16", scope="head"), Rule(precision="f32", primitive="*")
    assert _products(amp(model, BF16.with_rules(narrow, wide))) == (2, 2)
    turned = BF16.with_rules(wide, narrow)
    assert _products(amp(model, turned)) == (4, 0)
    assert plan_of(model, turned)(X, W).unmatched_rules == (narrow,)


def test_a_region_wins_over_a_rule():
    """What the program itself says stands."""
    policy = BF16.with_rules(Rule(precision="bf16", scope="head"))
    assert _products(amp(marked(True), policy)) == (2, 2)
    assert plan_of(marked(True), policy)(X, W).unmatched_rules == policy.rules
