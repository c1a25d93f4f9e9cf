"""Losses over the devices of a mesh: right, and with no gather that the program had not."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxamp
from benchmarks.collectives.count import collectives
from jaxamp.compiled import hlo
from jaxamp.compiled.deviceless import ENVIRONMENTS
from jaxamp.compiled.targets import TARGETS
from tests.found.cross_entropy import absent
from tests.found.cross_entropy.ruled import by_logits

POLICY = jaxamp.PrecisionPolicy.MIXED_BF16.replace(loss_in_chunks=True)
STORED = POLICY.replace(loss_in_chunks=False)
B, T, D, V = 8, 32, 16, 512


def _loss(x, w, labels):
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()


def _ruled(x, w, labels):
    return by_logits(x @ w, labels).mean()


def _losses(plan):
    return [region for region in plan.found if region.kind == "loss"]


def _refused(plan):
    return [region for region in plan.refused if region.kind == "loss"]


def _operands():
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(keys[0], (B, T, D)), jax.random.normal(keys[1], (D, V)) / 4
    return x, w, jax.random.randint(keys[2], (B, T), 0, V)


def _gathered(text):
    """Bytes that devices gather, in each round of a loop."""
    sent = collectives(hlo.parse(text))
    return sum(count for (kind, _), count in sent.items() if kind == "all-gather")


def _close(got, want):
    for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.max(np.abs(mine - other)) <= 0.03 * np.max(np.abs(other))


@pytest.mark.product("tokens", "words")
@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
@pytest.mark.parametrize(
    ("tokens", "words"),
    [(P("data"), P()), (P("data"), P(None, "model")), (P(None, "data"), P(None, "model")),
     (P("data"), P("data", "model"))],
)  # fmt: skip
def test_auto_meshes(tokens, words, order):
    """Examples, words of the text and words of the vocabulary, divided in the usual ways."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    operands = _operands()
    exact = jax.value_and_grad(_loss, (0, 1))(*operands)
    specs = (tokens, words, P(*tokens[:2]))
    placed = [
        jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(operands, specs, strict=True)
    ]
    texts = []
    for policy in (POLICY, STORED):
        step = jaxamp.amp(jax.value_and_grad(_loss, (0, 1)), policy)
        if order == "grad(amp(f))":
            step = jax.value_and_grad(jaxamp.amp(_loss, policy), (0, 1))
        compiled = jax.jit(step).lower(*placed).compile()
        _close(compiled(*placed), exact)
        texts.append(compiled.as_text())
    assert "while" in texts[0]
    assert _gathered(texts[0]) <= _gathered(texts[1])


def test_a_constraint_that_cannot_divide_a_chunk():
    """Six tokens of a chunk lie on eight devices."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x, w, labels = _operands()
    operands = x[0, :24], w, labels[0, :24]

    def loss(x, w, labels):
        logits = jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("data")))
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    assert _losses(jaxamp.plan_of(loss, POLICY)(*operands))[0].chunks == 4
    _close(jax.jit(jaxamp.amp(loss, POLICY))(*operands), _loss(*operands))


@pytest.mark.product("loss")
@pytest.mark.parametrize(
    ("order", "is_checked", "loss"),
    [("grad(amp(f))", True, _loss), ("grad(amp(f))", False, _loss), ("amp(grad(f))", True, _loss),
     ("amp(grad(f))", False, _loss), ("grad(amp(f))", True, _ruled)],
)  # fmt: skip
def test_in_a_shard_map(order, is_checked, loss):
    """Each device has chunks of its own tokens."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    operands, specs = _operands(), (P("data"), P(), P("data"))
    exact = jax.value_and_grad(_loss, (0, 1))(*operands)
    step = jaxamp.amp(jax.value_and_grad(loss, (0, 1)), POLICY)
    if order == "grad(amp(f))":
        step = jax.value_and_grad(jaxamp.amp(loss, POLICY), (0, 1))

    def each(x, w, labels):
        w = jax.lax.pcast(w, "data", to="varying")
        value, (dx, dw) = step(x, w, labels)
        return jax.lax.pmean(value, "data"), (dx / 8, jax.lax.pmean(dw, "data"))

    with jax.set_mesh(mesh):
        shards = [NamedSharding(mesh, spec) for spec in specs]
        placed = [jax.device_put(x, at) for x, at in zip(operands, shards, strict=True)]
        mapped = jax.shard_map(
            each, mesh=mesh, in_specs=specs, out_specs=(P(), (P("data"), P())), check_vma=is_checked
        )
        _close(jax.jit(mapped)(*placed), exact)
        assert "while" in jax.jit(mapped).lower(*placed).as_text()


def _one_hot(x, w, labels):
    logits = jax.nn.log_softmax(x @ w)
    return -(logits * jax.nn.one_hot(labels, w.shape[-1])).sum(-1).mean()


def _fully_divided(x, w, labels):
    return _loss(x, jax.sharding.reshard(w, P()), labels)


def _told(x, w, labels):
    logits = jnp.matmul(x, w, out_sharding=P("data", None, "model"))
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, V)).mean()


def _shifted(x, w, labels):
    return _loss(x[:, :-1], w, labels[:, 1:])


def _looked_up(x, w, labels):
    at = jnp.arange(B)[:, None], jnp.arange(T)[None]
    logits = x @ w
    chosen = logits.at[*at, labels].get(out_sharding=P("data"))
    return (jax.nn.logsumexp(logits, -1) - chosen).mean()


@pytest.mark.product("loss", "tokens", "words")
@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
@pytest.mark.parametrize(
    ("loss", "tokens", "words"),
    [
        (_loss, P("data"), P()),
        (_one_hot, P("data"), P(None, "model")),
        (_told, P("data"), P("data", "model")),
        pytest.param(_fully_divided, P("data"), P("data"), marks=pytest.mark.long),
        pytest.param(_loss, P("data", "model"), P(), marks=pytest.mark.long),
        pytest.param(_shifted, P("data"), P(), marks=pytest.mark.long),
        pytest.param(_one_hot, P(None, "data"), P(None, "model"), marks=pytest.mark.long),
        (_looked_up, P("data"), P(None, "model")),
        (_ruled, P("data"), P()),
    ],
)
def test_explicit_meshes(loss, tokens, words, order):
    """Results have the types of the program's, and no more is gathered than there."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    exact = jax.value_and_grad(_loss if loss is not _shifted else _shifted, (0, 1))(*_operands())
    with jax.set_mesh(mesh):
        places = [NamedSharding(mesh, spec) for spec in (tokens, words, tokens)]
        placed = [jax.device_put(x, at) for x, at in zip(_operands(), places, strict=True)]
        step = jaxamp.amp(jax.value_and_grad(loss, (0, 1)), POLICY)
        plan = jaxamp.plan_of(jax.value_and_grad(loss, (0, 1)), POLICY)(*placed)
        if order == "grad(amp(f))":
            step = jax.value_and_grad(jaxamp.amp(loss, POLICY), (0, 1))
            plan = jaxamp.plan_of(loss, POLICY)(*placed)
        compiled = jax.jit(step).lower(*placed).compile()
        got = compiled(*placed)
        stored = jax.jit(jaxamp.amp(jax.value_and_grad(loss, (0, 1)), STORED))
        assert _gathered(compiled.as_text()) <= _gathered(stored.lower(*placed).compile().as_text())
        types = jax.eval_shape(jax.value_and_grad(loss, (0, 1)), *placed)
    _close(got, exact)
    assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, types)
    assert _losses(plan)
    assert not _refused(plan)


@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
def test_a_mesh_in_part_manual_and_in_part_explicit(order):
    """Logits are stored, with the reason: JAX differentiates no loop over chunks there."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Explicit))

    @jax.shard_map(in_specs=(P("data"), P(), P("data")), out_specs=P(), axis_names={"data"})
    def loss(x, w, labels):
        logits = x @ w
        label = jnp.where(jnp.arange(V) == labels[..., None], logits, 0).sum(-1)
        return jax.lax.pmean((jax.nn.logsumexp(logits, -1) - label).mean(), "data")

    exact = jax.value_and_grad(_loss, (0, 1))(*_operands())
    with jax.set_mesh(mesh):
        x, w, labels = _operands()
        placed = x, jax.device_put(w, NamedSharding(mesh, P(None, "model"))), labels
        step = jaxamp.amp(jax.value_and_grad(loss, (0, 1)), POLICY)
        if order == "grad(amp(f))":
            step = jax.value_and_grad(jaxamp.amp(loss, POLICY), (0, 1))
        plan = jaxamp.plan_of(loss, POLICY)(*placed)
        _close(jax.jit(step)(*placed), exact)
    assert "explicit mesh" in _refused(plan)[0].obstacle


def test_tokens_that_a_chunk_cannot_divide():
    """Chunks of nine tokens have no equal parts on the four devices of an explicit mesh."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    x, w, labels = _operands()
    operands = x.reshape(1, -1, D)[:, :36], w, labels.reshape(1, -1)[:, :36]
    exact = jax.grad(_loss)(*operands)
    with jax.set_mesh(mesh):
        specs = P(None, "data"), P(), P(None, "data")
        placed = [
            jax.device_put(x, NamedSharding(mesh, at))
            for x, at in zip(operands, specs, strict=True)
        ]
        step = jaxamp.amp(jax.grad(_loss), POLICY)
        assert _losses(jaxamp.plan_of(step)(*placed))
        got = jax.jit(step)(*placed)
    _close(got, exact)
    assert jax.typeof(got).sharding.spec == P(None, "data", None)


@pytest.mark.parametrize(
    ("tokens", "backend", "said"),
    [
        (8192, "cpu", "a CPU would add up over them in each chunk"),
        (8192, "gpu", "too few tokens: 1024 × 65536 words on each of 8 devices"),
    ],
)
def test_several_devices_by_default(tokens, backend, said, monkeypatch):
    """Each has a part of the tokens; XLA adds up once on a GPU, and in each chunk on a CPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    x, w = (
        jax.ShapeDtypeStruct((tokens, 64), jnp.float32),
        jax.ShapeDtypeStruct((64, 65536), jnp.float32),
    )
    labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    plan = jaxamp.plan_of(jax.grad(_loss, (0, 1)), "mixed_bf16")(x, w, labels)
    assert not _losses(plan)
    assert said in _refused(plan)[0].obstacle


@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
def test_the_default_takes_the_loss_of_a_language_model_on_eight_devices(axes, order, monkeypatch):
    """Sixteen layers of 4,096 and 128,256 words, of 32 texts: data is divided, and so are words."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axes,) * 2)

    def loss(params, x, labels):
        def layer(x, w):
            return x + jax.nn.silu(x @ w[0]) @ w[1].T, None

        x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
        return optax.softmax_cross_entropy(
            x @ params["head"], jax.nn.one_hot(labels, 128256)
        ).mean()

    def placed(shape, spec, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        head = placed((4096, 128256), P(None, "model"))
        params = {"layers": placed((16, 2, 4096, 14336), P()), "head": head}
        args = params, placed((32, 4096, 4096), P("data")), placed((32, 4096), P("data"), jnp.int32)
        plan = jaxamp.plan_of(loss if order == "grad(amp(f))" else jax.grad(loss), "mixed_bf16")(
            *args
        )
    assert not _refused(plan)
    (found,) = _losses(plan)
    tokens = 32 * 4096 // 8  # of a device
    assert tokens // found.chunks >= 1024
    assert found.chunks >= 4
    assert 1 < found.slower < 1.03
    each = 2 * tokens * 128256
    assert found.saved == each - each // found.chunks


@pytest.mark.deviceless
@pytest.mark.parametrize(("target", "most"), [("h200", 1.01), ("v5e", 1.15)])
def test_eight_absent_chips_send_no_more(target, most, tmp_path, monkeypatch):
    """Divided by data, by FSDP, and by both that and words, in less memory.

    A TPU's compiler sends what it gathers and scatters round a ring in some of these programs: then
    a device's own part, one of four, is not counted.
    """
    environment = ENVIRONMENTS[TARGETS[target].environment]
    monkeypatch.setenv("PYTHONPATH", str(Path(jaxamp.__file__).parents[1]))
    monkeypatch.delenv("XLA_FLAGS")  # those of the tests' own process, with eight devices
    environment.run("-m", absent.__name__, target, str(tmp_path / "sent"), quiet=True)
    for row in map(json.loads, (tmp_path / "sent").read_text().splitlines()):
        assert row["chunks"]["sent"] <= most * row["stored"]["sent"], row
        assert row["chunks"]["memory"] < 0.95 * row["stored"]["memory"], row
