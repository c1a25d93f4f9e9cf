"""What the compilers for absent chips make of scaled dots; run by `make test-long`."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from benchmarks import fp8_step
from benchmarks.deviceless.models import transformer
from jaxamp import CastConfig, PrecisionPolicy, amp, plan_of
from jaxamp.compiled import traffic
from jaxamp.compiled.deviceless import compile_all, exported
from jaxamp.compiled.targets import TARGETS
from jaxamp.quantized.fp8_products import verify_lowering
from jaxamp.quantized.scaling import Scaling

pytestmark = pytest.mark.deviceless("h200")

CONFIG = transformer.Config(layers=4, width=4096, heads=32, length=2048, batch=4, vocabulary=32000)
PARAMS = jax.eval_shape(partial(transformer.unrolled, CONFIG), jax.random.key(0))
TOKENS = jax.ShapeDtypeStruct((CONFIG.batch, CONFIG.length + 1), jnp.int32)


@pytest.fixture(autouse=True)
def _flags_of_users(monkeypatch):
    """The compiler's process would inherit those of tests, under which XLA keeps all roundings."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)


def loss(params, tokens):
    return transformer.loss(CONFIG, False, params, tokens)[0]


@pytest.mark.parametrize("order", ["grad(amp)", "amp(grad)"])
def test_every_scaled_dot_of_a_transformer_is_an_fp8_product(order):
    """Four products a layer, and two in the backward pass for each of them."""
    if order == "amp(grad)":
        fn = amp(jax.grad(loss), "fp8_current")
        plan = plan_of(jax.grad(loss), "fp8_current")(PARAMS, TOKENS)
        planned = sum(d.plan.form is not None for d in plan.decisions())
    else:
        fn = jax.grad(amp(loss, "fp8_current"))
        plan = plan_of(loss, "fp8_current")(PARAMS, TOKENS)
        planned = 3 * sum(d.plan.form is not None for d in plan.decisions())
    got = verify_lowering(fn, target="h200")(PARAMS, TOKENS)
    assert (got.found, got.claimed, planned) == (48, 48, 48)
    assert got.complete
    assert not got.missing


ROWS = [
    PrecisionPolicy.custom(
        {"compute": CastConfig("f8_e4m3", (1, 4096), round_sf)}, scaling=Scaling(small=())
    )
    for round_sf in (True, False)
]
TENSOR = PrecisionPolicy.custom({"compute": CastConfig("f8_e4m3")}, scaling=Scaling(small=()))


@pytest.mark.parametrize("target", ["h200", "b200"])
@pytest.mark.parametrize(
    "policy", ["fp8_current", TENSOR, *ROWS], ids=["fp8_current", "any scale", "pow2 rows", "rows"]
)
def test_one_scale_for_a_tensor_or_a_row_gives_fp8_products(policy, target):
    """As users compile: the product and both gradients, by cuBLASLt's kernels."""
    module = compiled(policy, target)
    called = [kernel.instruction.target for kernel in traffic.kernels(module)]
    assert called.count("__cublas$lt$matmul$f8") == 3
    assert sum(_operands(module).values()) == 3
    assert all(word.count("f8") == 2 for word in _operands(module))
    fn, args = gradient(policy)
    assert verify_lowering(fn, target=target)(*args).complete


def layer(x, w):
    return jnp.tanh(x @ w)


def scanned(layer, x, weights):
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0]


TRANSFORMED = {
    "scan": partial(scanned, layer),
    "checkpoint": partial(scanned, jax.checkpoint(layer)),
    "vmap": lambda x, weights: jax.vmap(layer, (0, None))(jnp.stack([x, 2 * x]), weights[0]),
}


@pytest.mark.parametrize("target", ["h200", "b200"])
@pytest.mark.parametrize("policy", ["fp8_current", "fp8_delayed"])
def test_products_are_fp8_under_transformations(policy, target):
    """Of two layers: the products and their gradients, the forward ones again if recomputed."""
    x, weights = jax.ShapeDtypeStruct((2048, 2048), jnp.float32), (2, 2048, 2048)
    args = x, jax.ShapeDtypeStruct(weights, jnp.float32)
    chip = TARGETS[target]
    programs = []
    for transformed in TRANSFORMED.values():
        step = amp(jax.grad(lambda *args, f=transformed: jnp.sum(f(*args)), (0, 1)), policy)
        history = (jax.eval_shape(step.init, *args),) if policy == "fp8_delayed" else ()
        with chip.described():
            programs.append(exported(step, lambda f: f, (*history, *args), {}, chip.platform))
    found = [_operands(module) for module, _ in compile_all(chip, programs)]
    assert dict(zip(TRANSFORMED, found, strict=True)) == {
        "scan": {"f8e4m3fn×f8e4m3fn": 2, "f8e5m2×f8e4m3fn": 4},
        "checkpoint": {"f8e4m3fn×f8e4m3fn": 4, "f8e5m2×f8e4m3fn": 4},
        "vmap": {"f8e4m3fn×f8e4m3fn": 1, "f8e5m2×f8e4m3fn": 2},
    }


def test_what_did_not_become_an_fp8_product_is_named():
    """An A100 has no products of 8 bits: the report says which dots run in 16."""
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    with_name = jax.named_scope("dense")(jnp.dot)
    got = verify_lowering(with_name, "fp8_current", "a100")(x, x)
    assert (got.claimed, got.found) == (1, 0)
    assert len(got.missing) == 1
    assert "dense" in got.missing[0]


BLOCKS = ["mxfp8", "fp8_block"]


def gradient(policy):
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    return jax.grad(lambda x, w: jnp.sum(jnp.tanh(amp(jnp.dot, policy)(x, w))), (0, 1)), (x, x)


def compiled(policy, target):
    """A product and its gradients, compiled."""
    fn, args = gradient(policy)
    chip = TARGETS[target]
    with chip.described():
        program = exported(fn, lambda f: f, args, {}, chip.platform)
    ((module, _),) = compile_all(chip, [program])
    return module


def _operands(module):
    """The products by the dtypes of their operands."""
    found = Counter()
    for kernel in traffic.kernels(module):
        for contraction in kernel.contractions(module):
            found["×".join(contraction.operands)] += kernel.runs
    return found


@pytest.mark.parametrize("chip", ["h200", "b200"])
@pytest.mark.parametrize("policy", BLOCKS)
def test_blocks_are_widened(policy, chip):
    """On a chip that multiplies some blocks, too."""
    assert _operands(compiled(policy, chip)) == {"bf16×bf16": 3}


def kept(policy):
    """Bytes of activations that a backward pass keeps: all, and those of quantized arrays."""

    def residuals(params, tokens):
        return jax.vjp(lambda p: amp(loss, policy)(p, tokens), params)[1]

    weights = {a.shape for a in jax.tree.leaves(PARAMS)}
    weights |= {shape[::-1] for shape in weights}
    leaves = jax.tree.leaves(jax.eval_shape(residuals, PARAMS, TOKENS))
    activations = [a for a in leaves if a.shape not in weights]
    sizes = {a: a.size * a.dtype.itemsize for a in activations}
    return (
        sum(sizes[a] for a in activations),
        sum(sizes[a] for a in activations if "float8" in str(a.dtype)),
    )


@pytest.mark.parametrize(
    ("recipe", "share", "of_all"),
    [("fp8_current", 0.50, 0.94), ("fp8_block", 0.504, 0.94), ("mxfp8", 0.531, 0.94)],
)
def test_what_the_backward_pass_keeps(recipe, share, of_all):
    """Quantized operands take half of what they take in bf16; attention's weights stay bf16."""
    base, _ = kept("auto_mixed_bf16")
    total, quantized = kept(recipe)
    replaced = base - (total - quantized)
    assert quantized / replaced == pytest.approx(share, abs=0.002)
    assert total / base == pytest.approx(of_all, abs=0.01)


@pytest.mark.parametrize(
    ("target", "shares", "copies", "once", "speed"),
    [
        ("b200", (0.84, 0.78, 0.80, 0.74), 0, 5 / 6, 1.5),
        ("h200", (0.87, 0.85, 0.83, 0.81), 0.06, 7 / 6, 1.55),
    ],
)
def test_a_step_moves_fewer_bytes_than_in_bf16(target, shares, copies, once, speed):
    """Half of what products read, and results in bf16; an operand is written once in 8 bits.

    One kernel makes both cotangents of the gated MLP, another joins the rotary halves. Hopper sums
    over the last axis of each operand in 8 bits: those of backward products are copied.
    """
    policies = ("auto_mixed_bf16", *fp8_step.DELAYED)
    config = fp8_step.Config()
    plain, *rows = fp8_step.compare(TARGETS[target], config, ["step"], policies, None)
    assert {row.found for row in rows} == {fp8_step.ELIGIBLE}
    for row, share in zip(rows, shares, strict=True):
        assert row.bytes < share * plain.bytes
        assert row.kernels < 1.35 * plain.kernels
        assert row.causes.get("layouts", 0) <= copies * plain.bytes
        assert plain.seconds / row.seconds > speed
    weights = [row.causes.get("weights", 0) / plain.causes["weights"] for row in rows]
    assert max(weights[:2]) < once + 0.001  # one read of each in float32, one write in 8 bits
    # The optimizer writes the 8 bits, which products read: nothing is left but Hopper's copies.
    assert max(weights[2:]) < once - 5 / 6 + 0.001
