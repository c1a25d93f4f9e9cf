"""Rows of activations that are looked up many times, as messages in a graph are."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp import Precision, amp, plan_of
from jaxamp.rewrite.primitives.narrow_collective import narrow_collective_p
from tests.audit import equations
from tests.programs.registry import Draw

NODES, EDGES, WIDTH = 64, 8192, 32
DRAW = Draw("repeated gathers")
X = DRAW.normal(NODES, WIDTH)
W = DRAW.normal(3, WIDTH, WIDTH, scale=WIDTH**-0.5)
# Half of all edges begin at one node: its cotangent is a sum of four thousand.
HUB = DRAW.integers(2, EDGES) == 0
SOURCE = np.where(HUB, 0, DRAW.integers(NODES, EDGES))
LOW = {"auto_mixed_bf16": Precision.BF16, "auto_mixed": Precision.F16}


def names(jaxpr: Any) -> set[str]:
    """The primitives of a jaxpr; those that are sent narrow by their own names too."""
    found = [*equations(jaxpr)]
    sent = {e.params["how"].collective.name for e in found if e.primitive is narrow_collective_p}
    return sent | {e.primitive.name for e in found}


def hidden(w: jax.Array, x: jax.Array) -> jax.Array:
    h = jnp.tanh(x @ w)
    return h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-5)


def messages(w: jax.Array, x: jax.Array) -> jax.Array:
    sent = jax.nn.relu(hidden(w[0], x)[SOURCE] @ w[1])
    return jnp.mean((sent @ w[2]) ** 2)


def products(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean((jax.nn.relu((x @ w[0])[SOURCE]) @ w[1] @ w[2]) ** 2)


@pytest.mark.product
@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("sent", [messages, products])
def test_the_cotangent_of_a_hub_is_summed_in_float32(
    sent: Callable[..., jax.Array], policy: str, order: str
) -> None:
    """By hand, in bfloat16, a sum stops growing once a summand is less than 1/256 of it."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return sent(w, x)

    grad = jax.grad(amp(loss, policy)) if order == "grad(amp(f))" else amp(jax.grad(loss), policy)
    exact, found = jax.grad(sent)(W, X), grad(W, X)
    for layer in range(len(W)):
        error = jnp.linalg.norm(found[layer] - exact[layer])
        assert error < 0.1 * jnp.linalg.norm(exact[layer])  # rectifiers flip at the hub


@pytest.mark.parametrize("policy", LOW)
def test_what_is_looked_up_many_times_is_stored_narrow(policy: str) -> None:
    """To make a norm for each edge would be dear: the lookup reads it from memory."""
    decisions = [*plan_of(messages, policy)(W, X).decisions()]
    (lookup,) = [d for d in decisions if d.eqn.primitive.name == "gather"]
    (maker,) = [d for d in decisions if lookup.eqn.invars[0] in d.eqn.outvars]
    assert maker.output is LOW[policy]
    assert (lookup.operand, lookup.output) == (Precision.F32, LOW[policy])


def gated(w: jax.Array, x: jax.Array) -> jax.Array:
    sent = hidden(w[0], x)[SOURCE] * jnp.tanh(x @ w[1])[SOURCE]
    return jnp.mean((sent @ w[2]) ** 2)


def test_rows_are_looked_up_again_rather_than_kept() -> None:
    """Each table is smaller than what is looked up in it; the product alone saves its operand."""
    _, pull = jax.eval_shape(lambda w: jax.vjp(lambda w: amp(gated, "mixed_bf16")(w, X), w), W)
    kept = [a.dtype for a in jax.tree.leaves(pull) if a.shape == (EDGES, WIDTH)]
    assert kept == [jnp.bfloat16, jnp.float32]  # and the square of the loss


@pytest.mark.parametrize(
    "order", [lambda f, p: jax.grad(amp(f, p)), lambda f, p: amp(jax.grad(f), p)]
)
def test_a_norm_is_read_where_its_rows_are_looked_up(order: Any) -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        h = hidden(w[0], x)
        sent = h[SOURCE] * jnp.sin(h + 1)[SOURCE]
        return jnp.mean((sent @ w[1]) ** 2) + jnp.mean((jnp.tanh(h) @ w[2]) ** 2)

    program = jax.make_jaxpr(order(loss, "mixed_bf16"))(W, X).jaxpr
    groups = [e.params["jaxpr"] for e in equations(program) if e.primitive.name == "fused_group"]
    made = [names(group) for group in groups]
    assert any("gather" in found for found in made)
    assert not any({"gather", "rsqrt"} <= found for found in made)


def grouped(w: jax.Array, x: jax.Array) -> jax.Array:
    rows = hidden(w[0], x)[SOURCE].reshape(2, -1, WIDTH)
    return jnp.mean((jnp.einsum("nik,kj->nij", rows, w[1]) @ w[2]) ** 2)


def received(w: jax.Array, x: jax.Array) -> jax.Array:
    sent = jnp.tanh(hidden(w[0], x)[SOURCE] @ w[1])
    return jnp.mean((jnp.zeros((NODES, WIDTH)).at[SOURCE].add(sent) @ w[2]) ** 2)


@pytest.mark.parametrize(
    ("fn", "is_again"), [(gated, True), (messages, False), (grouped, False), (received, True)]
)
def test_rows_that_products_alone_read_are_looked_up_once(fn: Any, is_again: bool) -> None:
    """Of what is received the derivative of `tanh` reads rows of the cotangent."""
    program = jax.make_jaxpr(amp(jax.grad(fn), "mixed_bf16"))(W, X).jaxpr
    groups = [e.params["jaxpr"] for e in equations(program) if e.primitive.name == "fused_group"]
    assert any("gather" in names(group) for group in groups) is is_again


def test_what_is_computed_of_rows_alone_is_not_stored() -> None:
    """Tables are smaller than their rows, from which a later kernel computes it again."""

    def summed(w: jax.Array, x: jax.Array) -> jax.Array:
        h = x @ w[0]
        sent = jax.nn.relu(h[SOURCE] * w[1, 0] + h[SOURCE[::-1]] * w[1, 1])
        return jnp.mean((jnp.zeros((NODES, WIDTH)).at[SOURCE].add(sent) @ w[2]) ** 2)

    program = jax.make_jaxpr(amp(jax.grad(summed), "mixed_bf16"))(W, X).jaxpr
    assert not rounded_rows(program)


def test_sums_of_another_kernel_do_not_round_what_a_scatter_reads() -> None:
    """Attention over edges scales what it adds up by softmaxes, of which no scatter has part."""

    def attended(w: jax.Array, x: jax.Array) -> jax.Array:
        h = x @ w[0]
        scores = jnp.sum(jax.nn.leaky_relu(h[SOURCE] + h[SOURCE[::-1]]) * w[1, 0], -1)
        weights = jnp.exp(scores - jnp.zeros(NODES).at[SOURCE].max(scores)[SOURCE])
        sent = weights[:, None] * h[SOURCE]
        return jnp.mean((jnp.zeros((NODES, WIDTH)).at[SOURCE].add(sent) @ w[2]) ** 2)

    program = jax.make_jaxpr(amp(attended, "mixed_bf16"))(W, X).jaxpr
    assert not rounded_rows(program)


def rounded_rows(jaxpr: Any) -> list[Any]:
    """Rounded arrays of a row for each edge that are stored."""
    held = [e for e in equations(jaxpr) if e.primitive.name == "rounding_barrier"]
    return [e for e in held if e.outvars[0].aval.shape == (EDGES, WIDTH)]


@pytest.mark.parametrize(("width", "barriers"), [(2, 0), (32, 1)])
def test_indices_of_short_rows_have_no_barrier(width: int, barriers: int) -> None:
    """They are as large as what is looked up: they would be stored once more."""
    fn = amp(lambda table, places: jnp.sin(table[places]), "mixed_bf16")
    table, places = (jax.ShapeDtypeStruct((2**12, width), jnp.float32), np.zeros(2**17, np.int32))
    jaxpr = jax.make_jaxpr(fn)(table, places).jaxpr
    assert sum(e.primitive.name == "optimization_barrier" for e in equations(jaxpr)) == barriers


@pytest.mark.parametrize(
    ("order", "is_unique", "sums"),
    [
        (lambda x: 1 * jnp.argsort(x), True, 0),
        (jnp.argsort, False, 0),
        (lambda x: jnp.argsort(jnp.argsort(x)), False, 0),
        (lambda x: jnp.argsort(x) // 2, False, 1),
        (lambda x: jnp.sort(jnp.int32(x)), False, 1),
        (lambda x: jnp.argsort(x)[jnp.int32(x)], False, 1),
    ],
)
def test_a_lookup_of_different_rows_is_no_sum(order: Any, is_unique: bool, sums: int) -> None:
    """The program says so, or the rows are those that `argsort` finds."""

    def shuffled(w: jax.Array, x: jax.Array) -> jax.Array:
        rows = hidden(w[0], x).at[order(x[:, 0])].get(unique_indices=is_unique)
        return jnp.mean((rows @ w[1]) ** 2)

    decisions = plan_of(shuffled, "auto_mixed_bf16")(W, X).decisions()
    wide = [d for d in decisions if d.eqn.primitive.name == "gather" and d.operand]
    assert len(wide) == sums


@pytest.mark.parametrize("policy", LOW)
def test_cotangents_of_few_numbers_add_up_as_the_lookup_moves_them(policy: str) -> None:
    """In `grad(amp(f))` they do, and each place has one. Float16 may overflow."""

    def pairs(w: jax.Array, x: jax.Array) -> jax.Array:
        products = (x @ w[0]) @ (x @ w[1]).T
        return jnp.mean((products[np.tril_indices(NODES, -1)].reshape(-1, WIDTH) @ w[2]) ** 2)

    decisions = plan_of(jax.grad(pairs), policy)(W, X).decisions()
    (scatter,) = [d for d in decisions if d.eqn.primitive.name == "scatter-add"]
    narrow = LOW[policy] is Precision.BF16
    assert scatter.operand is (LOW[policy] if narrow else Precision.F32)


def test_rows_come_out_as_they_are_stored() -> None:
    """The cast to float32 and back rounds nothing."""

    def rows(w: jax.Array, x: jax.Array) -> jax.Array:
        return (x @ w)[SOURCE] @ w

    once = jax.lax.reduce_precision(X @ W[0], 8, 7)
    assert np.allclose(amp(rows)(W[0], X), once[SOURCE] @ W[0], rtol=0.02, atol=0.05)
    jaxpr = jax.make_jaxpr(amp(rows))(W[0], X).jaxpr
    (lookup,) = [e for e in equations(jaxpr) if e.primitive is narrow_collective_p]
    assert "gather" in names(jaxpr)
    aval: Any = lookup.outvars[0].aval
    assert aval.dtype == jnp.bfloat16


@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
def test_sizes_may_be_symbolic(order: str) -> None:
    """How many rows there are, and how many are looked up, need not be known."""

    def loss(w: jax.Array, x: jax.Array, rows: jax.Array) -> jax.Array:
        h = x @ w
        return jnp.mean(((h + jax.nn.silu(h - h.mean(0)))[rows] @ w) ** 2)

    grad = jax.grad(amp(loss)) if order == "grad(amp(f))" else amp(jax.grad(loss))
    nodes, edges = jax.export.symbolic_shape("nodes, edges")
    w, x = (jax.ShapeDtypeStruct((size, WIDTH), jnp.float32) for size in (WIDTH, nodes))
    rows = jax.ShapeDtypeStruct((edges,), jnp.int32)
    exported = jax.export.export(jax.jit(grad))(w, x, rows)
    exact, found = jax.grad(loss)(W[0], X, SOURCE), exported.call(W[0], X, SOURCE)
    assert jnp.linalg.norm(found - exact) < 0.02 * jnp.linalg.norm(exact)
