"""Flags of finiteness, names of what is not finite, and selection by a flag."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxamp import training
from jaxamp.errors import TrainingError
from jaxamp.training.trees import global_norm

BAD = (jnp.inf, -jnp.inf, jnp.nan)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16, jnp.complex64])
def test_all_finite_finds_one_bad_number(bad, dtype):
    """One infinity or NaN among many numbers, in any leaf, whatever its dtype."""
    good = jnp.ones((4, 5), dtype)
    for tree in (
        {"a": good, "b": good.at[2, 3].set(bad)},
        {"a": good.at[0, 0].set(bad), "b": good},
    ):
        assert not training.all_finite(tree)
        assert not jax.jit(training.all_finite)(tree)
    assert training.all_finite({"a": good, "b": good})


def test_all_finite_of_what_is_no_float():
    """Nothing, integers, keys, empty arrays and functions are finite."""
    for tree in (None, {}, {"n": jnp.arange(3)}, jax.random.key(0), jnp.zeros((0, 3)), [jnp.sin]):
        flag = training.all_finite(tree)
        assert flag
        assert flag.dtype == bool


def test_largest_numbers_are_finite():
    """The check adds nothing up, so it overflows nowhere."""
    assert training.all_finite(jnp.full(1000, jnp.finfo(jnp.float32).max))
    assert training.all_finite(jnp.full(1000, jnp.finfo(jnp.float16).max, jnp.float16))


def test_all_finite_of_a_sharded_array():
    """Under jit one bad number in one shard makes one flag for all."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    x = jax.device_put(jnp.ones(16), NamedSharding(mesh, PartitionSpec("data")))
    assert jax.jit(training.all_finite)(x)
    assert not jax.jit(training.all_finite)(x.at[13].set(jnp.nan))


def test_all_finite_over_a_mapped_axis():
    """Shards that were fine learn of the one that was not."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    x = jnp.ones(16).at[13].set(jnp.nan)

    def flags(axis_name):
        check = functools.partial(training.all_finite, axis_name=axis_name)
        spec = PartitionSpec("data")
        mapped = jax.shard_map(lambda x: check(x)[None], mesh=mesh, in_specs=spec, out_specs=spec)
        return mapped(x).tolist()

    assert flags(None) == [True, True, True, False]
    assert flags("data") == [False] * 4


@pytest.mark.parametrize("bad", BAD)
def test_first_nonfinite_names_the_leaf(bad):
    """The first bad leaf in order, by its path; also for modules."""
    tree = {
        "layers": [{"w": jnp.ones(2), "n": 3}, {"w": jnp.array([0.0, bad])}],
        "z": jnp.array(bad),
    }
    assert training.first_nonfinite(tree) == "['layers'][1]['w']"
    mlp = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    mlp = eqx.tree_at(lambda m: m.layers[1].bias, mlp, jnp.array([1.0, bad]))
    assert training.first_nonfinite(mlp) == ".layers[1].bias"
    assert training.first_nonfinite(jnp.array(bad)) == ""


def test_first_nonfinite_of_finite_trees():
    """No name where there is nothing to name."""
    assert training.first_nonfinite({"w": jnp.ones(3)}) is None
    assert training.first_nonfinite({}) is None


def test_the_index_from_a_compiled_step_finds_the_name():
    """Inside jit an index is computed; outside it becomes a name. Asking inside is refused."""
    grads = {"a": jnp.ones(2), "b": {"c": jnp.array(jnp.nan), "d": jnp.array(jnp.inf)}}
    index = jax.jit(training.nonfinite_index)(grads)
    assert training.first_nonfinite(grads, index) == "['b']['c']"
    with pytest.raises(TrainingError, match="nonfinite_index"):
        jax.jit(training.first_nonfinite)(grads)


@pytest.mark.parametrize("flag", [True, False])
def test_select_tree_selects_bit_by_bit(flag):
    """Every leaf comes from one of the two trees, NaN and minus zero included."""
    a = {"x": jnp.array([1.0, -0.0]), "n": jnp.int32(1), "k": jax.random.key(1)}
    b = {"x": jnp.array([jnp.nan, 0.0]), "n": jnp.int32(2), "k": jax.random.key(2)}
    chosen, other = training.select_tree(jnp.bool_(flag), a, b), a if flag else b
    np.testing.assert_array_equal(
        np.asarray(chosen["x"]).view(np.uint32), np.asarray(other["x"]).view(np.uint32)
    )
    assert chosen["n"] == other["n"]
    assert chosen["n"].dtype == jnp.int32
    assert (jax.random.key_data(chosen["k"]) == jax.random.key_data(other["k"])).all()


def test_select_tree_of_modules_and_of_nothing():
    """Leaves that are no arrays, such as activations, do not hinder."""
    a, b = (eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(seed)) for seed in (0, 1))
    chosen = training.select_tree(jnp.bool_(False), a, b)
    assert eqx.tree_equal(eqx.filter(chosen, eqx.is_array), eqx.filter(b, eqx.is_array))
    assert chosen.activation is a.activation
    assert training.select_tree(jnp.bool_(True), None, None) is None


def test_select_tree_wants_a_boolean_scalar():
    """jmp asserts this; here it is an error with advice."""
    with pytest.raises(TrainingError, match="boolean scalar"):
        training.select_tree(jnp.ones([1]), None, None)


def test_global_norm_is_computed_in_float32():
    """Squares of float16 gradients do not overflow."""
    assert float(global_norm([jnp.full(4, 3e4, jnp.float16)])) == 6e4
    assert float(global_norm([])) == 0.0
