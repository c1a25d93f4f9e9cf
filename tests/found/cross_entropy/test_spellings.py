"""Losses are found in the spellings that people write, with their gradients and without."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxpr_as_fun

from tests.found.attention.corpus import Program, gradient
from tests.found.cross_entropy.finding import ORDERS, agree, replaced
from tests.found.cross_entropy.near_misses import ALONG_EXAMPLES, NEAR_MISSES
from tests.found.cross_entropy.newer_spellings import NEWER
from tests.found.cross_entropy.newer_spellings import NOT_FOUND as NEWER_NOT_FOUND
from tests.found.cross_entropy.ruled import NOT_FOUND as RULED_NOT_FOUND
from tests.found.cross_entropy.ruled import RULED
from tests.found.cross_entropy.spellings import LOSSES, NOT_FOUND, B, T, V, batch
from tests.programs.registry import Draw

ALL = LOSSES | NEWER | RULED
NOWHERE = NOT_FOUND | NEWER_NOT_FOUND | RULED_NOT_FOUND
LATE = ("grpo_with_a_reference", "moco_queue", "padded_by_slicing", "first_word_is_right")
"""Programs with another loss beside, logits joined to others, words cut off, or one alone."""

SHORT = ("optax_smoothed", "log_softmax_indexed_twice", "shifted_and_flattened", "dpo",
         "accuracy_beside", "tied_embedding")  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "name",
    [
        *LOSSES,
        *LATE,
        *RULED,
        *(pytest.param(n, marks=pytest.mark.long) for n in NEWER if n not in LATE),
    ],
)
def test_a_loss_is_found(name, order):
    """Nothing of the size of the logits is left, forward and, with a gradient, backward."""
    _, found, _ = replaced(ALL[name], order)
    refused = [outcome.obstacle for outcome in found.refused]
    if (name, order) in NOWHERE:
        assert refused == [NOWHERE[name, order]] * bool(NOWHERE[name, order])
        assert not found.found
    else:
        assert found.found
        assert not refused
        assert order == "forward" or any(loss.backward for loss in found.found)


@pytest.mark.product("name")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", SHORT)
def test_chunks_compute_what_the_program_does(name, order):
    """Results and gradients are those of the program in float32."""
    agree(*replaced(LOSSES[name], order))


LINEAR = ("maxtext_segments", "mean_inside_of_the_rule", "t5x_weighted", "masked_cotangents")
"""Rules whose cotangents are linear in that of a loss, so that gradients come with it."""


def _ruled(name, rule):
    """A loss of which a function gives the cotangents of logits."""
    plain = optax.softmax_cross_entropy_with_integer_labels
    loss = jax.custom_vjp(lambda logits, labels: plain(logits, labels))
    loss.defvjp(lambda x, y: (loss(x, y), (x, y)), lambda kept, g: (rule(*kept, g), None))

    def mean(x, w, labels):
        return loss(x @ w, labels).mean()

    return Program(name, lambda: (mean, batch(Draw(name))), 1)


def _of_logits(logits, labels):
    return jax.nn.softmax(logits) - jax.nn.one_hot(labels, V)


def _masked(logits, labels, g):
    return jnp.where((labels > 3)[..., None], _of_logits(logits, labels) * g[..., None], 0.0)


HELD = RULED | {
    "ignored_cotangents": _ruled("ignored_cotangents", lambda x, y, g: _of_logits(x, y)),
    "masked_cotangents": _ruled("masked_cotangents", _masked),
}


@pytest.mark.parametrize("name", [*LINEAR, "clipped_cotangents", "another_gradient_added",
    "ignored_cotangents", *(pytest.param(n, marks=pytest.mark.long) for n in RULED
      if n not in LINEAR and (n, "forward") not in NOWHERE)])  # fmt: skip
def test_a_rule_of_derivatives_holds(name):
    """Gradients of chunks are those that the rule says, whether or not they are those of a loss."""
    closed, found, args = replaced(HELD[name], "forward")
    scaled = [
        lambda *xs, jaxpr=jaxpr: [3.0 * y for y in jaxpr_as_fun(jaxpr)(*xs)]
        for jaxpr in (closed, found.jaxpr)
    ]
    runs = [gradient(fn, args) for fn in scaled]
    (want, floats), (got, _) = ((jax.make_jaxpr(step)(*given), given) for step, given in runs)
    agree(want, found._replace(jaxpr=got), floats)
    assert name not in LINEAR or "custom_jvp_call" in {e.primitive.name for e in found.jaxpr.eqns}


def _weighted(losses):
    """Weights of each token, which are no operand of the rule."""
    weights = np.linspace(0, 1, B * T, dtype=np.float32).reshape(B, T)
    return losses, None, lambda _, g: g * weights


def _sum_that_is_saved(losses):
    """A sum with the gradient of half its square, for which no chunk knows the sum."""
    total = losses.sum()
    return total, total, lambda total, g: g * total


def _less_their_mean(losses):
    """Numbers of each token that are saved, and made of all."""
    return losses, losses - losses.mean(), lambda saved, g: g * saved


def _beside_their_sum(losses):
    """Results of which one is of each token, and one of all."""
    return (losses, losses.sum()), None, lambda _, g: g[0] + g[1]


@pytest.mark.parametrize(
    "written", [_weighted, _sum_that_is_saved, _less_their_mean, _beside_their_sum]
)
def test_a_rule_that_is_not_of_each_token_stays(written):
    """A chunk has not all that its results or cotangents are made of."""

    def forward(logits, labels):
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        results, saved, _ = written(losses)
        return results, (logits, labels, saved)

    def backward(saved, g):
        logits, labels, saved = saved
        pulled = written(jnp.zeros_like(labels, logits.dtype))[2](saved, g)
        return _of_logits(logits, labels) * pulled[..., None], None

    rule = jax.custom_vjp(lambda *given: forward(*given)[0])
    rule.defvjp(forward, backward)

    def loss(x, w, labels):
        return sum(result.sum() for result in jax.tree.leaves(rule(x @ w, labels)))

    program = Program(written.__name__, lambda: (loss, batch(Draw("not_of_each_token"))), 1)
    closed, found, _ = replaced(program, "forward")
    assert found.jaxpr is closed
    assert [outcome.obstacle for outcome in found.refused] == [
        "its softmax has a derivative rule that is not of each token"
    ]


def test_losses_alone_take_no_second_pass():
    """Losses that are weighted by how unusual they are: what a mean is needed for is not in it."""

    def standardized(x, w, labels):
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ w, labels)
        return (losses * jax.nn.sigmoid((losses - losses.mean()) / losses.std())).mean()

    program = Program("standardized", lambda: (standardized, batch(Draw("standardized"))), 1)
    agree(*replaced(program, "forward"))


@pytest.mark.parametrize("order", ORDERS)
def test_a_sum_of_the_first_pass_is_added_once(order):
    """To one of the second pass, which is added up chunk by chunk."""

    def surprising(x, w, labels):
        logits = x @ w
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        mean = losses.mean()
        return mean + (jax.nn.softmax(logits) * (losses - mean)[..., None]).sum()

    program = Program("surprising", lambda: (surprising, batch(Draw("surprising"))), 1)
    agree(*replaced(program, order))


@pytest.mark.parametrize("order", ORDERS)
def test_targets_may_be_cut_before_the_loss(order):
    """One-hot labels of one token more, which are computed in chunks, too."""

    def shifted(x, w, labels):
        targets = jax.nn.one_hot(jnp.concatenate([labels[:, :1], labels], 1), V)
        return optax.softmax_cross_entropy(x @ w, targets[:, 1:]).mean()

    program = Program("shifted", lambda: (shifted, batch(Draw("shifted"))), 1)
    agree(*replaced(program, order))


@pytest.mark.parametrize("order", ORDERS)
def test_logits_may_be_cut_before_the_loss(order):
    """Those of the first token are read by nothing, and every chunk begins with another one."""

    def later(x, w, labels):
        each = optax.softmax_cross_entropy_with_integer_labels
        return each((x @ w)[:, 1:], labels[:, 1:]).mean()

    program = Program("later", lambda: (later, batch(Draw("later"))), 1)
    agree(*replaced(program, order))


def _by_token(losses):
    return (losses[0] * losses[1] * losses[2]).mean()


def _means(losses):
    return losses[0].mean() * losses[1].mean() * losses[2].mean()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("combined", [_by_token, _means])
def test_losses_that_are_multiplied(combined, order):
    """The gradient of each reads the others, which are made with gradients that read it."""

    def loss(x, w, labels):
        all_logits = (jnp.roll(x, i, -1) @ w for i in range(3))
        each = optax.softmax_cross_entropy_with_integer_labels
        return combined([each(logits, labels) for logits in all_logits])

    program = Program(combined.__name__, lambda: (loss, batch(Draw("multiplied"))), 1)
    closed, found, args = replaced(program, order)
    assert len(found.found) == (3 if order == "forward" else 5)
    made = [eqn.outvars for eqn in found.jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert not any(v.aval.size == B * T * V for outs in made for v in outs)
    agree(closed, found, args)


@pytest.mark.long
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", [*ALL, *ALONG_EXAMPLES])
def test_all_spellings_compute_what_the_program_does(name, order):
    """The same for every spelling that is found, and for what is found along examples."""
    program = ALL.get(name) or NEAR_MISSES[name]
    closed, found, args = replaced(program, order)
    if found.found:
        agree(closed, found, args)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", [n for n in NEAR_MISSES if n not in ALONG_EXAMPLES])
def test_a_near_miss_is_left_alone(name, order):
    """A program whose logits are needed as they are stays the same object."""
    closed, found, _ = replaced(NEAR_MISSES[name], order)
    assert not found.found
    assert found.jaxpr is closed
