"""Attention as primitives: values and derivatives, in every transform, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.extend.core import Var
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxamp.found.attention.kernels import composed
from jaxamp.found.attention.kernels.platforms import everywhere, refusal
from jaxamp.found.attention.kernels.spec import AttentionSpec, Operands
from tests.audit import equations
from tests.found.attention.kernels.calls import attention, attention_forward
from tests.tolerances import bound, moved

CASES = {
    "plain": ((2, 6, 2, 8), (2, 6, 2, 8), None, {}),
    "causal": ((2, 6, 2, 8), (2, 6, 2, 8), None, {"causal": True}),
    "window": ((1, 8, 2, 8), (1, 8, 2, 8), None, {"causal": True, "window": 3}),
    "cross": ((2, 4, 2, 8), (2, 7, 2, 8), None, {}),
    "grouped": ((2, 6, 6, 8), (2, 6, 2, 8), None, {"causal": True}),
    "one key head": ((2, 6, 3, 8), (2, 6, 1, 8), None, {}),
    "bias": ((2, 6, 4, 8), (2, 6, 2, 8), (2, 4, 6, 6), {"causal": True}),
    "bias of heads": ((2, 4, 4, 8), (2, 6, 2, 8), (1, 4, 4, 6), {}),
    "bias of keys": ((2, 4, 4, 8), (2, 6, 4, 8), (2, 1, 1, 6), {}),
    "no batch": ((6, 2, 8), (6, 2, 8), None, {}),
    "two batch axes": ((2, 3, 4, 2, 8), (2, 3, 4, 2, 8), (1, 3, 1, 4, 4), {"causal": True}),
}


def _problem(case, dtype=jnp.bfloat16, spread=1.0):
    """The operands, the specification, and the operands in float32."""
    query, key, bias, words = CASES[case]
    draw = np.random.default_rng(0)
    shapes = [query, key, key] + ([bias] if bias else [])
    arrays = [jnp.asarray(draw.standard_normal(s) * spread, dtype) for s in shapes[:3]]
    arrays += [jnp.asarray(draw.standard_normal(s), jnp.float32) for s in shapes[3:]]
    spec = AttentionSpec(scale=query[-1] ** -0.5, **words)
    return arrays, spec, [x.astype(jnp.float32) for x in arrays]


def _plain(spec, q, k, v, bias=None):
    """Attention as anybody writes it."""
    k, v = (jnp.repeat(x, q.shape[-2] // x.shape[-2], axis=-2) for x in (k, v))
    scores = jnp.einsum("...tnh,...snh->...nts", q, k) * spec.scale
    scores = scores if bias is None else scores + bias
    if spec.causal:
        past = np.subtract.outer(np.arange(q.shape[-3]), np.arange(k.shape[-3]))
        seen = (past >= 0) & (past < (spec.window or np.inf))
        scores = jnp.where(seen, scores, -jnp.inf)
    return jnp.einsum("...nts,...snh->...tnh", jax.nn.softmax(scores), v)


def _fused(spec, q, k, v, bias=None):
    return attention(q, k, v, bias, spec)


def _loss(form, spec, *operands):
    out = form(spec, *operands)
    wide = out.astype(jnp.promote_types(out.dtype, jnp.float32))
    return jnp.sum(wide * jnp.cos(jnp.arange(out.size, dtype=wide.dtype)).reshape(out.shape))


def _check(transform, case, dtype, order, spread=1.0):
    """Compare `transform(form, spec)` of the fused form with the plain one in float64."""
    operands, spec, wide = _problem(case, dtype, spread)
    with jax.enable_x64(True):
        exact = transform(_plain, spec)
        reference, nudged = (
            jax.tree.map(np.asarray, jax.jit(exact)(*[np.asarray(x, np.float64) for x in args]))
            for args in (wide, moved(wide, jnp.dtype(dtype).name))
        )
    found = transform(_fused, spec)(*operands)
    leaves = map(jax.tree.leaves, (found, reference, nudged))
    for got, want, near in zip(*leaves, strict=True):
        assert got.shape == want.shape
        allowed = bound("dot", order, jnp.dtype(dtype).name, want, near)
        assert np.abs(np.asarray(got, np.float64) - want).max() <= allowed


def _value(form, spec):
    return functools.partial(form, spec)


def _gradients(form, spec):
    def run(*operands):
        loss = functools.partial(_loss, form, spec)
        return jax.grad(loss, tuple(range(len(operands))))(*operands)

    return run


def _forward_mode(form, spec):
    def run(*operands):
        return jax.jvp(
            functools.partial(form, spec),
            operands,
            operands[:1] + tuple(jnp.cos(x) for x in operands[1:]),
        )[1]

    return run


def _linearized(form, spec):
    def run(*operands):
        _, linear = jax.linearize(functools.partial(form, spec), *operands)
        return linear(*operands)

    return run


def _rematerialised(form, spec):
    return _gradients(lambda spec, *x: jax.checkpoint(functools.partial(form, spec))(*x), spec)


def _second(form, spec):
    """The gradient of a number made of all gradients: every derivative rule twice."""

    def run(*operands):
        def size(*xs):
            found = _gradients(form, spec)(*xs)
            return sum(
                jnp.sum(jnp.sin(g.astype(jnp.promote_types(g.dtype, jnp.float32)))) for g in found
            )

        return jax.grad(size, tuple(range(len(operands))))(*operands)

    return run


def _forward_over_reverse(form, spec):
    def run(*operands):
        return jax.jvp(_gradients(form, spec), operands, operands)[1]

    return run


def _reverse_over_forward(form, spec):
    def run(*operands):
        def size(*xs):
            out = _forward_mode(form, spec)(*xs)
            return jnp.sum(jnp.sin(out.astype(jnp.promote_types(out.dtype, jnp.float32))))

        return jax.grad(size, tuple(range(len(operands))))(*operands)

    return run


@pytest.mark.product("case", every=2)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case, dtype):
    """The two formats, grouped heads, biases, masks, cross attention."""
    _check(_value, case, dtype, 0)
    _check(lambda *a: jax.jit(_gradients(*a)), case, dtype, 1)


@pytest.mark.product("transform")
@pytest.mark.parametrize("case", ["window", "grouped", "bias of heads", "two batch axes"])
@pytest.mark.parametrize("transform", [_forward_mode, _linearized, _rematerialised])
def test_first_derivatives(transform, case):
    """Forward mode, linearization and rematerialisation."""
    _check(transform, case, jnp.bfloat16, 1)
    _check(lambda *a: jax.jit(transform(*a)), case, jnp.bfloat16, 1)


@pytest.mark.product("transform", every=2)
@pytest.mark.parametrize(
    "case",
    [
        "bias of heads",
        *(pytest.param(case, marks=pytest.mark.long) for case in ("causal", "grouped")),
    ],
)
@pytest.mark.parametrize("transform", [_second, _forward_over_reverse, _reverse_over_forward])
def test_second_derivatives(transform, case):
    """All orders of forward and reverse mode."""
    _check(lambda *a: jax.jit(transform(*a)), case, jnp.bfloat16, 2)


def test_the_logarithms_of_sums():
    """The second result, which the backward pass reads and nobody differentiates."""
    operands, spec, wide = _problem("bias")
    with jax.enable_x64(True):
        q, k, _, bias = (np.asarray(x, np.float64) for x in wide)
        scores = jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, 2, axis=-2)) * spec.scale + bias
        scores = jnp.where(np.tri(6, dtype=bool), scores, -jnp.inf)
        want = np.asarray(jax.nn.logsumexp(scores, -1))
    found = functools.partial(attention_forward, spec=spec)
    assert np.abs(found(*operands)[1] - want).max() < 1e-5
    still = jax.grad(lambda q: found(q, *operands[1:])[1].sum())(operands[0])
    assert not still.any()


def test_without_a_kernel_scores_are_stored_as_in_the_program_as_it_was():
    """Rounded; and weights are computed alike going forward and backward, so that XLA does once."""
    (q, k, v), spec, _ = _problem("causal")
    out, lse = attention_forward(q, k, v, None, spec)
    backward = functools.partial(composed.backward, spec=spec, bias_grad=False)
    jaxpr = jax.make_jaxpr(backward)(q, k, v, None, out, lse, out).jaxpr
    forward = jax.make_jaxpr(functools.partial(composed.forward, spec=spec))(q, k, v, None).jaxpr
    read = {v for eqn in equations(jaxpr) for v in eqn.invars if isinstance(v, Var)}
    assert jaxpr.invars[4] not in read, (
        "sums of exponentials, which would be computed before weights"
    )
    rounded = [
        [e.invars[0].aval.shape for e in equations(j) if e.params.get("new_dtype") == q.dtype]
        for j in (forward, jaxpr)
    ]
    size = (2, 2, 1, 6, 6)
    assert [shapes.count(size) for shapes in rounded] == [2, 4], rounded


def test_on_one_device_rows_of_scores_lie_along_memory():
    """The product that makes scores has keys as its last axis, so that a softmax is one kernel."""
    spec = AttentionSpec(scale=1.0)
    q, k = jnp.ones((2, 6, 4, 8)), jnp.ones((2, 7, 2, 8))
    forward = functools.partial(composed.forward, spec=spec, along=True)
    scores, _ = (
        e
        for e in equations(jax.make_jaxpr(forward)(q, k, k).jaxpr)
        if e.primitive.name == "dot_general"
    )
    assert scores.outvars[0].aval.shape[-1] == k.shape[1]


def test_backward_transposes_to_the_tangent():
    """The transpose of the transposed derivative is the derivative."""
    operands, spec, _ = _problem("bias of heads")
    fused = functools.partial(_fused, spec)
    out, vjp = jax.vjp(fused, *operands)
    (again,) = jax.linear_transpose(vjp, out)(tuple(operands))
    want = jax.jvp(fused, tuple(operands), tuple(operands))[1]
    np.testing.assert_array_equal(again, want)


AXES = {
    "all": (0, 0, 0, 0),
    "queries": (0, None, None, None),
    "keys and values": (None, 1, 2, None),
    "bias": (None, None, None, 0),
    "values, at the end": (None, None, 3, 1),
}


@pytest.mark.product("axes", every=2)
@pytest.mark.parametrize("axes", AXES)
def test_vmap_is_a_loop(axes):
    """Of value and gradients, with every operand batched or not."""
    operands, spec, _ = _problem("bias of heads")
    axes = AXES[axes]
    scaled = [
        x if a is None else jnp.stack([x, 2 * x, -x], a)
        for x, a in zip(operands, axes, strict=True)
    ]

    def run(*xs):
        return _fused(spec, *xs), _gradients(_fused, spec)(*xs), _forward_mode(_fused, spec)(*xs)

    found = jax.jit(jax.vmap(run, axes))(*scaled)
    for i in range(3):
        one = [x if a is None else jnp.take(x, i, a) for x, a in zip(scaled, axes, strict=True)]
        for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(run(*one)), strict=True):
            size = np.abs(np.asarray(want, np.float32)).max()
            assert np.abs((got[i] - want).astype(jnp.float32)).max() <= 2**-7 * size


def test_scan_over_layers():
    """In a loop with rematerialisation, the gradient of the whole."""
    (q, k, v), spec, _ = _problem("causal")

    def run(q, k, v):
        step = jax.checkpoint(lambda x, _: (_fused(spec, x, k, v), None))
        return jnp.sum(jax.lax.scan(step, q, length=3)[0].astype(jnp.float32))

    def unrolled(q, k, v):
        for _ in range(3):
            q = _fused(spec, q, k, v)
        return jnp.sum(q.astype(jnp.float32))

    for got, want in zip(
        jax.jit(jax.grad(run, (0, 1, 2)))(q, k, v),
        jax.jit(jax.grad(unrolled, (0, 1, 2)))(q, k, v),
        strict=True,
    ):
        size = np.abs(np.asarray(want, np.float32)).max()
        assert np.abs((got - want).astype(jnp.float32)).max() <= 2**-6 * size


def _mesh(kind, shape=(2, 2)):
    devices = np.array(jax.devices()[:4]).reshape(shape)
    return Mesh(devices, ("data", "heads"), axis_types=(kind,) * 2)


def test_shard_map_sums_what_is_shared():
    """Manual axes: keys that every device has get the sum of all cotangents."""
    (q, k, v, bias), spec, _ = _problem("bias of heads")
    shared = (k[:1], v[:1])
    mesh = _mesh(AxisType.Auto)

    def loss(q, k, v, bias):
        wide = [jnp.broadcast_to(x, (q.shape[0], *x.shape[1:])) for x in (k, v)]
        return jnp.sum(jnp.sin(_fused(spec, q, *wide, bias).astype(jnp.float32)), (1, 2, 3))

    specs = (P("data"), P(), P(), P())
    divided = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P("data"))
    operands = (q, *shared, bias)
    grads = [
        jax.jit(jax.grad(lambda *x, f=f: jnp.sum(f(*x)), (0, 1, 2, 3)))(*operands)
        for f in (divided, loss)
    ]
    for got, want in zip(*grads, strict=True):
        size = np.abs(np.asarray(want, np.float32)).max()
        assert np.abs((got - want).astype(jnp.float32)).max() <= 2**-6 * size


def test_shard_map_of_queries_alone():
    """Manual axes: queries vary, keys and values do not."""
    (q, k, v), spec, _ = _problem("plain")
    mesh = _mesh(AxisType.Auto)

    def loss(q, k, v):
        return jnp.sum(jnp.sin(_fused(spec, q, k, v).astype(jnp.float32)), (0, 2, 3))

    specs = (P(None, "data"), P(), P())
    divided = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P("data"))
    for got, want in zip(
        *(
            jax.jit(jax.grad(lambda *x, f=f: jnp.sum(f(*x)), (0, 1, 2)))(q, k, v)
            for f in (divided, loss)
        ),
        strict=True,
    ):
        size = np.abs(np.asarray(want, np.float32)).max()
        assert np.abs((got - want).astype(jnp.float32)).max() <= 2**-6 * size


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_divided_among_devices(kind):
    """Batch and heads on a mesh: the same gradients, divided as the operands are."""
    operands, spec, _ = _problem("grouped")
    mesh = _mesh(kind)
    place = NamedSharding(mesh, P("data", None, "heads", None))
    with jax.set_mesh(mesh):
        divided = [jax.device_put(x, place) for x in operands]

        def run(*xs):
            out, vjp = jax.vjp(functools.partial(_fused, spec), *xs)
            return out, vjp(jnp.cos(out))

        out, found = jax.jit(run)(*divided)
    plain_out, vjp = jax.vjp(functools.partial(_fused, spec), *operands)
    for got, ref in zip((out, *found), (plain_out, *vjp(jnp.cos(plain_out))), strict=True):
        np.testing.assert_allclose(
            np.asarray(got, np.float32), np.asarray(ref, np.float32), atol=0.05
        )
    assert out.sharding.spec[0] == "data"


def test_checkify_finds_nan():
    """A row that sees no key is NaN, as with any softmax, and is found."""
    (q, k, v, bias), spec, _ = _problem("bias of heads")
    run = checkify.checkify(functools.partial(_fused, spec), errors=checkify.nan_checks)
    assert run(q, k, v, bias)[0].get() is None
    error, _ = run(q, k, v, jnp.full_like(bias, -jnp.inf))
    assert "nan generated by primitive: attention_forward" in error.get()


@pytest.mark.parametrize(
    ("words", "dtype", "head", "length", "bias"),
    [
        (None, "bfloat16", 64, 16, True),
        (None, "float16", 256, 17, False),
        (
            "cuDNN: The head dim must be <= 256 and a multiple of 8, but got 300",
            "bfloat16",
            300,
            16,
            False,
        ),
        ("but got 20", "bfloat16", 20, 16, False),
        ("operands are float32", "float32", 64, 16, False),
        (None, "bfloat16", 64, 17, False),
        ("Unsupported sequence length", "bfloat16", 64, 17, True),  # in its backward pass
    ],
)
def test_refusals_are_words(words, dtype, head, length, bias):
    """What no kernel takes is known from shapes and dtypes."""
    x = jax.ShapeDtypeStruct((2, length, 4, head), dtype)
    added = jax.ShapeDtypeStruct((1, 4, length, length), "float32") if bias else None
    found = refusal(Operands(x, x, x, added), AttentionSpec(1.0), everywhere())
    assert found is None if words is None else words in found
