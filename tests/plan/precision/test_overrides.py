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
    return head(jnp.tanh(jnp.arctan(x @ w) @ w), w).sum()


def marked(context):
    """The model with its head in a region, by `with` or by decorator."""

    def region(h, w):
        with keep_precision("f32"):
            return head(h, w)

    inner = region if context else keep_precision("f32")(head)
    return lambda x, w: inner(jnp.tanh(jnp.arctan(x @ w) @ w), w).sum()


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


def _sample(draw):
    return lambda x, w: draw(jax.random.key(0), (2000,))


MISSTATED = {
    "the index of a largest": lambda x, w: jnp.argmax(jnp.arange(5000.0)),
    "positions": lambda x, w: jnp.arange(5000.0) + 3,
    "counts": lambda x, w: jnp.cumsum(jnp.ones(5000)),
    "positions in a product": lambda x, w: jnp.arange(4096.0, 4112.0).reshape(4, 4) @ jnp.eye(4),
    "a mask": lambda x, w: jnp.where(x > 0, 0.0, -1e30) * 2,
    "an epsilon": lambda x, w: 1 / (jnp.zeros(3) + 1e-8),
    "normal": _sample(jax.random.normal),
    "uniform": _sample(jax.random.uniform),
    "gumbel": _sample(jax.random.gumbel),
    "a factorization": lambda x, w: jnp.linalg.inv(jnp.eye(4) * 4),
    "bits": lambda x, w: jnp.nextafter(x, 2.0),
}
"""What a narrow format makes another number of, and no rule may."""


@pytest.mark.product("name")
@pytest.mark.parametrize("base", ["bf16", "f16"])
@pytest.mark.parametrize("low", ["bf16", "f16"])
@pytest.mark.parametrize("name", MISSTATED)
def test_guards_are_asked_before_a_rule_that_lowers(name: str, low: str, base: str) -> None:
    """Integers, infinities and samples stay what they are; the product beside them is lowered."""
    if name == "an epsilon" and low == "bf16":
        pytest.skip("bfloat16 has the number")
    policy = PrecisionPolicy.parse(base).with_rules(Rule(precision=low, scope="*"))

    def program(x, w):
        return MISSTATED[name](x, w), x @ w

    wanted, found = program(X, W)[0], amp(program, policy)(X, W)[0]
    exact = 0 if name != "a mask" else 2.0**-8  # the number itself may be rounded, if it fits
    assert jnp.allclose(found, wanted, rtol=exact, atol=0)
    decisions = [*plan_of(program, policy)(X, W).decisions()]
    assert decisions[-1].operand.short == low


def test_a_rule_that_is_not_followed_is_named_with_the_reason() -> None:
    policy = BF16.with_rules(Rule(precision="bf16", scope="*"))
    plan = plan_of(lambda x, w: jnp.argmax(jnp.arange(5000.0)), policy)(X, W)
    (reason,) = [d.reason for d in plan.decisions() if d.primitive == "argmax"]
    assert reason == "integers of more than 8 bits; not followed: rule: scope=* -> bf16"


def test_a_product_of_a_sample_follows_a_rule() -> None:
    """The sample is drawn in float32 all the same, and rounded as the policy alone would."""

    def noisy(x):
        return x @ jax.random.normal(jax.random.key(0), (4, 4))

    ruled = BF16.with_rules(Rule(precision="bf16", kind="compute"))
    for policy in (BF16, ruled):
        (dot,) = [d for d in plan_of(noisy, policy)(X).decisions() if d.primitive == "dot_general"]
        assert dot.operand.short == "bf16"


def test_a_policy_without_guards_takes_a_rule_to_the_letter() -> None:
    policy = BF16.replace(guards=frozenset()).with_rules(Rule(precision="bf16", scope="*"))
    assert amp(lambda x, w: jnp.argmax(jnp.arange(5000.0)), policy)(X, W) == 4976
