"""In chunks, a loss and its gradients are as accurate as with logits stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxamp
from benchmarks.loss_accuracy import WAYS, errors
from tests.found.attention.corpus import Program, gradient
from tests.found.cross_entropy.ruled import RULED
from tests.found.cross_entropy.spellings import LOSSES

LIMIT = 1.2
"""How much larger the error may be than that of the program whose logits are stored."""

AS_USERS_DO = {"xla_allow_excess_precision": True}
"""Options of the compiler. Not all roundings of logits are kept then, and those that a loss and its
cotangents are computed of have to be the same."""

FLOOR = {"mixed_bf16": 2**-9, "mixed_f16": 2**-12}
"""Relative errors that rounding the results alone makes."""

NAMES = ("optax_integer", "t5x_style", "dpo", "ppo", "tied_embedding", "shifted_and_flattened",
         "linen_dense", "micro_batches_in_a_scan", "maxtext_segments",
         "clipped_cotangents")  # fmt: skip


def _leaves(tree):
    leaves = jax.tree.leaves(tree)
    return [np.asarray(x, np.float64) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]


def _errors(fn, args, policy, order):
    """Error norms of the leaves of value and gradients in chunks, and with logits stored."""
    whole, floats = gradient(fn, args)
    runs = []
    for word in (True, False):
        told = jaxamp.PrecisionPolicy.parse(policy).replace(loss_in_chunks=word)
        step = jaxamp.amp(whole, told)
        if order == "grad(amp(f))":
            step = gradient(jaxamp.amp(fn, told), args)[0]
        runs.append(_leaves(jax.jit(step, compiler_options=AS_USERS_DO)(*floats)))
    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda x: np.float64(x) if np.asarray(x).dtype == np.float32 else x, args
        )
        whole, floats = gradient(fn, wide)
        exact = _leaves(jax.jit(whole)(*floats))
    for got, other, want in zip(*runs, exact, strict=True):
        assert np.isfinite(got).all()
        yield np.linalg.norm(got - want), np.linalg.norm(other - want), np.linalg.norm(want)


def _check(fn, args, policy, order):
    for mine, other, size in _errors(fn, args, policy, order):
        assert mine <= LIMIT * max(other, FLOOR[policy] * size) + 1e-6


@pytest.mark.product(every=4)
@pytest.mark.parametrize("policy", FLOOR)
@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
@pytest.mark.parametrize("name", NAMES)
def test_errors(name, order, policy, request):
    """Of every result and gradient, against float64."""
    if (name, order, policy) == ("linen_dense", "grad(amp(f))", "mixed_f16"):
        reason = (
            "no product is before the head, so that the gradient of its operand is float32 with "
            "logits stored; in chunks it is rounded, as an activation's is: 8.3e-4 off for 4.9e-4"
        )
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    _check(*(LOSSES | RULED)[name].built, policy, order)


@pytest.mark.long
@pytest.mark.parametrize("policy", FLOOR)
@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
@pytest.mark.parametrize(
    ("words", "spread"), [(512, 1.0), (512, 30.0), (32768, 5.0), (262144, 1.0)]
)
def test_large_logits_and_many_words(words, spread, order, policy):
    """Logits of standard deviation 1 to 30, and up to 262,144 words."""
    rng = np.random.default_rng(0)
    x = spread * rng.standard_normal((32, 64)).astype(np.float32)
    w = rng.standard_normal((64, words)).astype(np.float32) / 8

    def loss(x, w, labels):
        logp = jax.nn.log_softmax(x @ w)
        return -jnp.take_along_axis(logp, labels[:, None], -1).mean()

    labels = rng.integers(0, words, 32).astype(np.int32)
    _check(loss, (x, w, labels), policy, order)


@pytest.mark.long
@pytest.mark.parametrize(("words", "spread"), [(512, 30.0), (8192, 10.0), (65536, 1.0)])
def test_where_all_roundings_are_kept(words, spread):
    """Logits are rounded as those of a hand that multiplies in bfloat16."""
    found = errors(words, spread)
    for way in [way for way in WAYS if "chunks" in way]:
        assert np.all(np.array(found[way]) <= LIMIT * np.array(found["by hand"]))


def test_f16_with_a_scaled_loss():
    """A loss that is scaled overflows no more than with logits stored."""
    fn, args = LOSSES["optax_integer"].built
    scaled = Program("scaled", lambda: (lambda *xs: 2.0**12 * fn(*xs), args), 1)
    for order in ("grad(amp(f))", "amp(grad(f))"):
        _check(*scaled.built, "mixed_f16", order)
