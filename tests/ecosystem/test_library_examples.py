"""The training loops for equinox, flax nnx and linen: they learn, and exchange checkpoints."""

import importlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

POLICIES = ("always_f32", "auto_mixed_bf16", "auto_mixed")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("equinox", marks=pytest.mark.long),
        "nnx",
        pytest.param("linen", marks=pytest.mark.long),
    ],
)
def example(request):
    """The program, imported where it is run: scikit-learn takes seconds."""
    return importlib.import_module(f"examples.{request.param}_cnn")


@pytest.fixture(scope="module")
def runs(example, tmp_path_factory):
    """Two epochs under each policy from the same weights, and the checkpoints they wrote."""
    folder = tmp_path_factory.mktemp("checkpoints")
    runs = {}
    for policy in POLICIES:
        trained, losses, accuracy = example.train(policy, epochs=2)
        example.save(folder / policy, *trained)
        runs[policy] = trained, np.array(losses), accuracy
    return runs, folder


def float_leaves(tree):
    """The float arrays of a tree or of objects, random keys left out."""
    leaves = (jnp.asarray(x) for x in jax.tree.leaves(tree) if hasattr(x, "dtype"))
    return [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]


def test_training_learns_as_in_f32(runs):
    """The loss falls under every policy, and the curves part only by roundings."""
    runs, _ = runs
    _, reference, _ = runs["always_f32"]
    assert np.mean(reference[-10:]) < 0.3 * reference[0]
    for policy in POLICIES[1:]:
        _, losses, accuracy = runs[policy]
        assert 0 < np.abs(losses - reference).max() < 0.1
        assert abs(accuracy - runs["always_f32"][2]) < 0.03


def test_everything_that_is_kept_is_f32(runs):
    """Parameters, batch statistics and moments have no narrow leaf."""
    for trained, _, _ in runs[0].values():
        leaves = float_leaves(trained)
        assert len(leaves) > 20
        assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ("auto_mixed_bf16", "always_f32"),
        pytest.param("always_f32", "auto_mixed_bf16", marks=pytest.mark.long),
    ],
)
def test_checkpoints_are_restored_into_either_world(example, runs, saved, resumed):
    """Training goes on under another policy as it would have under the same."""
    _, folder = runs
    _, same, _ = example.train(saved, epochs=1, checkpoint=folder / saved)
    _, other, _ = example.train(resumed, epochs=1, checkpoint=folder / saved)
    assert other[0] == pytest.approx(same[0], rel=0.03, abs=0.003)
    assert np.abs(np.subtract(other, same)).max() < 0.1
    assert other[0] < 0.5 * runs[0][saved][1][0]  # not from scratch


def test_a_restored_state_is_the_saved_one(example, runs):
    """Bit for bit, moments and statistics included."""
    runs, folder = runs
    trained = runs["auto_mixed_bf16"][0]
    if example.__name__ == "examples.nnx_cnn":
        restored = example.make(seed=1)
        example.restore(folder / "auto_mixed_bf16", *restored)
    else:
        restored = example.restore(folder / "auto_mixed_bf16")
    pairs = zip(float_leaves(restored), float_leaves(trained), strict=True)
    for ours, theirs in pairs:
        np.testing.assert_array_equal(ours, theirs)


def test_one_line_is_changed_from_the_float32_program(example, runs, monkeypatch):
    """Without that line, and nothing else of jaxamp, it is float32's training bit by bit."""
    with open(example.__file__) as file:
        source = file.read()
    for line in ("    @amp(policy=policy)\n", "from jaxamp import amp\n"):
        assert source.count(line) == 1
        source = source.replace(line, "")
    for word in ("amp(", "float16", "Precision", "dtype", "cast"):
        assert word not in source.split('"""', 2)[2]
    plain = types.ModuleType("plain_example")
    monkeypatch.setitem(sys.modules, plain.__name__, plain)
    exec(compile(source, example.__file__, "exec"), vars(plain))
    _, losses, _ = plain.train(policy=None, epochs=1)
    np.testing.assert_array_equal(losses, runs[0]["always_f32"][1][: len(losses)])
