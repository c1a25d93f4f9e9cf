"""Serving: parameters cast once, results of amp bit for bit, exported, saved, loaded and run."""

import sys
import zipfile

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import export

from jaxamp import amp, serve
from jaxamp.errors import (
    JaxAmpError,
    NotCallableError,
    OutputError,
    PolicyError,
    ServingError,
)
from jaxamp.tools.serving import load_served, narrow_dtypes, run_narrow

LOW = {"auto_mixed_bf16": jnp.bfloat16, "auto_mixed": jnp.float16}
policies = pytest.mark.parametrize("policy", LOW)


def transformer_params(width=16, words=48, layers=3):
    """Embedding, stacked layers and a head, with shapes that tell them apart."""
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def normal(*shape):
        return jax.random.normal(next(keys), shape) / np.sqrt(shape[-2])

    return {
        "embedding": normal(words, width),
        "layers": {
            "grow": normal(layers, width, 4 * width),
            "shrink": normal(layers, 4 * width, width),
        },
        "norm": jnp.ones(width),
        "head": normal(width, words - 1),
    }


def transformer(params, ids):
    """Scan over layers with remat, a gather, a norm, a nested jit and a custom derivative."""

    @jax.checkpoint
    def layer(x, weights):
        normed = (x - x.mean(-1, keepdims=True)) * params["norm"]
        hidden = jax.nn.relu(jax.jit(jnp.matmul)(normed, weights["grow"]))
        return x + hidden @ weights["shrink"], None

    x, _ = jax.lax.scan(layer, params["embedding"][ids], params["layers"])
    return jax.nn.log_softmax(x @ params["head"])


IDS = jnp.arange(24).reshape(3, 8)


def casts(jaxpr):
    """Shapes of all that is cast in a program and the programs inside it."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "convert_element_type":
            yield eqn.invars[0].aval.shape
        for inner in _inner(eqn):
            yield from casts(inner)


def _inner(eqn):
    for param in eqn.params.values():
        for value in param if isinstance(param, tuple) else (param,):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield inner


@pytest.mark.product
@policies
def test_a_served_transformer_is_amp_bit_for_bit(policy):
    """Weights are stored low and never cast again, the norm's scale stays f32; other shapes too."""
    params = transformer_params()
    served = serve(transformer, params, IDS, policy=policy)
    stored = jax.tree.map(lambda leaf: leaf.dtype, served.params)
    assert set(jax.tree.leaves(stored["layers"])) == {jnp.dtype(LOW[policy])}
    assert stored["embedding"] == stored["head"] == LOW[policy]
    assert stored["norm"] == jnp.float32
    for ids in (IDS, IDS[:2, :5]):
        np.testing.assert_array_equal(served(ids), amp(transformer, policy)(params, ids))
    assert served.stored_bytes < 0.51 * served.original_bytes

    weights = {leaf.shape for leaf in jax.tree.leaves(params) if leaf.ndim > 1}
    weights |= {leaf.shape[1:] for leaf in jax.tree.leaves(params["layers"])}
    before = set(casts(jax.make_jaxpr(amp(transformer, policy))(params, IDS).jaxpr))
    after = set(casts(jax.make_jaxpr(served.apply)(served.arrays, IDS).jaxpr))
    assert before & weights  # what is counted is there to be found
    assert not after & weights


def loops(params, x):
    """A weight in a while loop's body and test, in a branch, and as a constant of a scan."""
    x = jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ params["loop"]), x)
    x = jax.lax.while_loop(lambda y: (y @ params["test"]).sum() > 1e3, lambda y: y / 2, x)
    x = jax.lax.cond(x[0, 0] > 0, lambda y: y @ params["yes"].T, lambda y: y @ params["no"], x)
    x, _ = jax.lax.scan(lambda y, _: (jnp.sin(y @ params["scan"]), None), x, length=2)
    return x + jnp.sum(params["sum"]), params["out"]


def test_serving_through_loops_and_branches():
    """Weights are narrow wherever only products read them, and f32 where anything else does."""
    names = ("loop", "test", "yes", "no", "scan", "sum", "out")
    keys = jax.random.split(jax.random.key(1), len(names) + 1)
    params = {n: jax.random.normal(k, (6, 6)) / 2 for n, k in zip(names, keys, strict=False)}
    x = jax.random.normal(keys[-1], (2, 6))
    served = serve(loops, params, x)
    narrow = {name for name, leaf in served.params.items() if leaf.dtype == jnp.bfloat16}
    assert {"loop", "yes", "no", "scan"} <= narrow
    assert not {"sum", "out"} & narrow
    for ours, amped in zip(served(x), amp(loops)(params, x), strict=True):
        np.testing.assert_array_equal(ours, amped)


def test_narrow_values_are_widened_where_they_are_needed():
    """Every input narrow: what needs f32 gets it, in every kind of inner program."""
    names = ("loop", "test", "yes", "no", "scan", "sum", "out")
    params = {n: jnp.full((6, 6), 0.125 * i) for i, n in enumerate(names)}
    x = jnp.ones((2, 6))
    leaves, treedef = jax.tree.flatten((params, x))
    closed = jax.make_jaxpr(lambda *a: loops(*jax.tree.unflatten(treedef, a)))(*leaves)
    assert narrow_dtypes(closed, len(leaves)) == [None] * len(leaves)
    narrow = [leaf.astype(jnp.bfloat16) for leaf in leaves]  # exact for these numbers
    for ours, wide in zip(
        jax.jit(lambda *a: run_narrow(closed, *a))(*narrow), loops(params, x), strict=True
    ):
        assert ours.dtype == jnp.float32
        np.testing.assert_array_equal(ours, wide)


def test_what_is_added_in_float32_stays():
    """A position table, say."""
    params = {"position": jnp.linspace(0, 1, 32).reshape(8, 4), "w": jnp.eye(4), "b": jnp.ones(4)}

    def f(params, x):
        return jnp.sin(x + params["position"]) @ params["w"] + params["b"]

    assert serve(f, params, jnp.ones((8, 4))).params["position"].dtype == jnp.float32


def equinox_model():
    model = eqx.nn.MLP(4, 3, 32, 2, key=jax.random.key(0))
    return lambda model, x: jax.vmap(model)(x), model


def linen_model():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.relu(linen.BatchNorm(use_running_average=True)(linen.Dense(32)(x)))
            return linen.Dense(3)(x)

    model = Net()
    return model.apply, model.init(jax.random.key(0), jnp.ones((1, 4)))


def nnx_model():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.hidden, self.head = nnx.Linear(4, 32, rngs=rngs), nnx.Linear(32, 3, rngs=rngs)

        def __call__(self, x):
            return self.head(nnx.relu(self.hidden(x)))

    graph, state = nnx.split(Net(nnx.Rngs(0)))
    return lambda state, x: nnx.merge(graph, state)(x), state


@pytest.mark.product("make", every=2)
@pytest.mark.parametrize("make", [equinox_model, linen_model, nnx_model])
def test_every_library_s_model_is_served_saved_and_loaded(make, tmp_path):
    """Batch size symbolic; the loaded program needs no model code, and agrees bit for bit."""
    fn, params = make()
    x = jax.random.normal(jax.random.key(2), (5, 4))
    served = serve(fn, params, x)
    expected = amp(fn)(params, x)
    np.testing.assert_array_equal(served(x), expected)
    matrices = [leaf for leaf in jax.tree.leaves(served.params) if getattr(leaf, "ndim", 0) == 2]
    assert {leaf.dtype for leaf in matrices} == {jnp.dtype("bfloat16")}

    (batch,) = export.symbolic_shape("batch")
    served.save(tmp_path / "model", jax.ShapeDtypeStruct((batch, 4), jnp.float32))
    loaded = load_served(tmp_path / "model")
    np.testing.assert_array_equal(loaded(x), expected)
    assert loaded(x[:2]).shape == (2, 3)
    with pytest.raises(ServingError, match=r"saved for float32\[batch,4\]"):
        loaded(x[:, :3])
    stored = sum(leaf.nbytes for leaf in loaded.params)
    assert repr(loaded).endswith(f": {stored} bytes of parameters>")
    assert stored == served.stored_bytes
    assert (tmp_path / "model").stat().st_size < stored + 20_000


@pytest.mark.parametrize(
    ("args", "called"),
    [
        ((), "no arguments"),
        ((jnp.ones((3, 4)), jnp.ones(4)), r"float32\[3,4\], float32\[4\]"),
        ((jnp.ones((3, 4), jnp.float16),), r"float16\[3,4\]"),
        ((jnp.ones(4),), r"float32\[4\]"),
        (({"x": jnp.ones((3, 4))},), r"\{'x': float32\[3,4\]\}"),
        (("words",), "'words'"),
    ],
)
def test_a_loaded_model_names_what_it_was_called_with(args, called, tmp_path):
    """Symbolic sizes are the advice where a size is all that differs, and not elsewhere."""
    x = jnp.ones((3, 4))
    serve(jnp.dot, jnp.ones((4, 3)), x).save(tmp_path / "model", x)
    loaded = load_served(tmp_path / "model")
    message = r"saved for float32\[3,4\], and called with "
    with pytest.raises(ServingError, match=f"{message}{called}\\.$"):
        loaded(*args)
    with pytest.raises(ServingError, match=rf"{message}float32\[5,4\]\. Save it with jax\.export"):
        loaded(jnp.ones((5, 4)))


def test_a_loaded_model_names_the_platform_that_it_was_saved_for(tmp_path):
    """The arguments are right, so nothing is said of them."""
    x = jnp.ones((3, 4))
    serve(jnp.dot, jnp.ones((4, 3)), x).save(tmp_path / "model", x, platforms=["rocm"])
    with pytest.raises(ServingError, match=r"cannot run here: .*rocm"):
        load_served(tmp_path / "model")(x)


def test_a_model_of_a_later_jax_names_it(monkeypatch, tmp_path):
    """One whose functions are called in a way that this JAX does not know yet."""
    x = jnp.ones((3, 4))
    serve(jnp.dot, jnp.ones((4, 3)), x).save(tmp_path / "model", x)
    monkeypatch.setattr(export, "maximum_supported_calling_convention_version", 8)
    with pytest.raises(ServingError, match=rf"written by JAX {jax.__version__}.* to 8\. Load it"):
        load_served(tmp_path / "model")


def test_writing_a_program_names_the_package_that_jax_needs(monkeypatch, tmp_path):
    """JAX does not install it."""
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    monkeypatch.delitem(sys.modules, "jax._src.export.serialization", raising=False)
    served = serve(lambda w, x: x @ w, jnp.eye(2), jnp.eye(2))
    with pytest.raises(JaxAmpError, match="pip install flatbuffers"):
        served.save(tmp_path / "model", jnp.eye(2))


def test_export_for_other_platforms():
    """The program for a TPU and a GPU is written on a machine that has neither."""
    served = serve(transformer, transformer_params(), IDS)
    exported = served.export(IDS, platforms=["tpu", "cuda"])
    assert exported.platforms == ("tpu", "cuda")
    assert {str(aval.dtype) for aval in exported.in_avals} == {"bfloat16", "float32", "int32"}


def test_an_amped_function_keeps_its_policy():
    """Served as it is, or under another policy on request."""
    fn, params, x = amp(jnp.dot, "auto_mixed"), jnp.ones((4, 4)), jnp.ones((4, 4))
    assert serve(fn, params, x).params.dtype == jnp.float16
    assert serve(fn, params, x, policy="auto_mixed_bf16").params.dtype == jnp.bfloat16
    assert serve(fn, params, x, policy="always_f32").params.dtype == jnp.float32


def test_errors_of_serving(tmp_path):
    """A module without its function, an unknown policy, a file that is no model."""
    model = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    with pytest.raises(NotCallableError, match="function of the parameters"):
        serve(model, model, jnp.ones(2))
    with pytest.raises(PolicyError, match="Unknown policy"):
        serve(jnp.dot, jnp.ones((2, 2)), jnp.ones((2, 2)), policy="half_precise")
    with pytest.raises(OutputError, match="'logits' is not an array"):
        serve(lambda w, x: {"name": "logits", "value": x @ w}, jnp.ones((2, 2)), jnp.ones((2, 2)))
    (tmp_path / "text").write_text("no model")
    with pytest.raises(ServingError, match="is not a served model"):
        load_served(tmp_path / "text")
    with zipfile.ZipFile(tmp_path / "future", "w") as file:
        file.writestr("manifest.json", '{"format": 99}')
    with pytest.raises(ServingError, match="format 99"):
        load_served(tmp_path / "future")
