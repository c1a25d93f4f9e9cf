"""Scopes of losses: the names of what is in chunks, and words of the policy for some scopes."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxamp
from jaxamp.errors import PolicyError
from jaxamp.found.cross_entropy.losses import chunk_losses
from jaxamp.jaxprs.name_stack import clean_scope, is_backward, joined_scope
from jaxamp.jaxprs.nested import nested

X, W = jax.ShapeDtypeStruct((512, 16), jnp.float32), jax.ShapeDtypeStruct((16, 256), jnp.float32)
LABELS = jax.ShapeDtypeStruct((512,), jnp.int32)


def _two(x, w, labels):
    def loss(x):
        return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()

    with jax.named_scope("student"):
        mine = loss(x)
    with jax.named_scope("draft"):
        return mine + loss(2 * x)


def _scopes(words):
    policy = jaxamp.PrecisionPolicy.MIXED_BF16.replace(loss_in_chunks=words)
    policy = jaxamp.PrecisionPolicy.from_json(policy.to_json())
    plan = jaxamp.plan_of(jax.grad(_two, (0, 1)), policy)(X, W, LABELS)
    found = [loss.scope for loss in plan.found if loss.kind == "loss"]
    return found, [refused.obstacle for refused in plan.refused if refused.kind == "loss"]


def test_the_first_scope_that_matches_decides():
    """Also of a policy that was written as JSON and read again."""
    found, reasons = _scopes({"draft": False, "*": True})
    assert found == ["student"]
    assert reasons == ["loss_in_chunks is False here"]
    assert _scopes({"draft": True})[0] == ["draft"]


def test_where_memory_is_saved():
    """What is too small for it says so."""
    found, reasons = _scopes({"draft": True, "student": "memory"})
    assert found == ["draft"]
    assert any("too few tokens" in reason for reason in reasons)


@pytest.mark.parametrize("given", [{"draft": 3}, {"": True}, {}, "words"])
def test_what_is_not_understood_is_refused(given):
    """With what is."""
    with pytest.raises(PolicyError):
        jaxamp.PrecisionPolicy.MIXED_BF16.replace(loss_in_chunks=given)


@pytest.mark.parametrize("call", [jax.jit, lambda f: f], ids=["jit", "no call"])
def test_products_in_chunks_have_their_own_names(call):
    """The forward product is none of the backward pass, whose loop it is in."""

    @jax.named_scope("net")
    @call
    def loss(x, w, labels):
        with jax.named_scope("head"):
            logits = x @ w
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def names(jaxpr, around=""):
        for eqn in jaxpr.eqns:
            scope = joined_scope(around, eqn)
            if eqn.primitive.name == "dot_general":
                yield clean_scope(scope), is_backward(scope)
            for inner in nested(eqn):
                yield from names(inner.jaxpr, scope)

    closed = jax.make_jaxpr(jax.grad(loss, (0, 1)))(X, W, LABELS)
    policy = jaxamp.PrecisionPolicy.MIXED_BF16.replace(loss_in_chunks=True)
    found = chunk_losses(closed, policy)
    assert len(found.found) == 1
    (chunks,) = [eqn for eqn in found.jaxpr.eqns if eqn.primitive.name == "scan"]
    inside = names(nested(chunks)[0].jaxpr, joined_scope("", chunks))
    want = [("net/head", False), ("net/head", True), ("net/head", True)]
    assert sorted(names(closed.jaxpr)) == sorted(inside) == want
