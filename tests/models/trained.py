"""Networks of other packages, as their authors wrote them, at small sizes.

transformers' T5 is not here: it calls `jnp.clip` by a name that JAX 0.10 no longer has.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.models.registry import Trained, model

KEY = jax.random.key(0)


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _labels(count: int, classes: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, classes, count)


def _classified(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@model("linen-lstm", "flax")
def linen_lstm() -> Trained:
    """flax.linen: an LSTM over a sequence, bidirectional."""
    import flax.linen as nn

    rnn = nn.Bidirectional(nn.RNN(nn.OptimizedLSTMCell(16)), nn.RNN(nn.OptimizedLSTMCell(16)))
    x, y = _normal(0, 8, 12, 6), _normal(1, 8, 12, 32) / 4
    params = rnn.init(KEY, x)
    return Trained(lambda p, b: jnp.mean((rnn.apply(p, b[0]) - b[1]) ** 2), params, (x, y))


@model("linen-attention", "flax")
def linen_attention() -> Trained:
    """flax.linen: attention, norms and dense layers in a Sequential."""
    import flax.linen as nn

    net = nn.Sequential(
        [nn.Dense(32), nn.SelfAttention(4), nn.LayerNorm(), nn.Dense(64), nn.gelu, nn.Dense(5)]
    )
    x, y = _normal(0, 4, 10, 8), _labels(40, 5).reshape(4, 10)
    params = net.init(KEY, x)
    return Trained(lambda p, b: _classified(net.apply(p, b[0]), b[1]), params, (x, y))


@model("nnx-convolutions", "flax")
def nnx_convolutions() -> Trained:
    """flax.nnx: convolutions and group norms in a Sequential, differentiated by its state."""
    from flax import nnx

    rngs = nnx.Rngs(0)
    net = nnx.Sequential(
        nnx.Conv(3, 16, (3, 3), rngs=rngs),
        nnx.GroupNorm(16, num_groups=4, rngs=rngs),
        nnx.relu,
        nnx.Conv(16, 16, (3, 3), strides=2, rngs=rngs),
        nnx.relu,
        lambda x: x.mean((1, 2)),
        nnx.Linear(16, 4, rngs=rngs),
    )
    graph, params = nnx.split(net)
    batch = _normal(0, 8, 8, 8, 3), _labels(8, 4)
    return Trained(lambda p, b: _classified(nnx.merge(graph, p)(b[0]), b[1]), params, batch)


@model("equinox-mlp-attention", "equinox")
def equinox_attention() -> Trained:
    """equinox.nn: attention, a norm and an MLP."""
    import equinox as eqx

    a, b = jax.random.split(KEY)
    net = (
        eqx.nn.MultiheadAttention(4, 16, key=a),
        eqx.nn.LayerNorm(16),
        eqx.nn.MLP(16, 5, 32, 2, key=b),
    )
    params, static = eqx.partition(net, eqx.is_array)

    def loss(params: Any, batch: Any) -> Any:
        attention, norm, mlp = eqx.combine(params, static)
        x = jax.vmap(lambda x: attention(x, x, x))(batch[0])
        return _classified(jax.vmap(jax.vmap(lambda x: mlp(norm(x))))(x), batch[1])

    return Trained(loss, params, (_normal(0, 4, 10, 16), _labels(40, 5).reshape(4, 10)))


@model("equinox-gru", "equinox")
def equinox_gru() -> Trained:
    """equinox.nn: a GRU cell scanned over a sequence."""
    import equinox as eqx

    cell = eqx.nn.GRUCell(6, 16, key=KEY)
    params, static = eqx.partition(cell, eqx.is_array)

    def loss(params: Any, batch: Any) -> Any:
        cell = eqx.combine(params, static)

        def run(x: Any) -> Any:
            return jax.lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(16), x)[0]

        return jnp.mean((jax.vmap(run)(batch[0]) - batch[1]) ** 2)

    return Trained(loss, params, (_normal(0, 8, 12, 6), np.tanh(_normal(1, 8, 16))))


@model("haliax-attention", "haliax", "equinox")
def haliax_attention() -> Trained:
    """haliax.nn: attention over named axes and an MLP."""
    import equinox as eqx
    import haliax as hax

    batch, position, key_position, width = hax.make_axes(batch=4, position=8, keys=8, width=16)
    mlp = hax.nn.MLP.init(width, hax.Axis("classes", 5), 32, 2, key=KEY)
    params, static = eqx.partition(mlp, eqx.is_array)

    def loss(params: Any, data: Any) -> Any:
        x = hax.named(data[0], (batch, position, width))
        keys = x.rename({position.name: key_position.name})
        x = hax.nn.attention.dot_product_attention(key_position, width, x, keys, keys)
        logits = eqx.combine(params, static)(x)
        return _classified(logits.rearrange((batch, position, "classes")).array, data[1])

    return Trained(loss, params, (_normal(0, 4, 8, 16), _labels(32, 5).reshape(4, 8)))


def _transformers(net: Any, logits: Any) -> Any:
    """A loss of a FlaxPreTrainedModel."""
    return lambda p, b: _classified(logits(net(params=p, train=False, **b[0])), b[1])


@model("transformers-gpt2", "transformers", "flax")
def gpt2() -> Trained:
    """transformers: FlaxGPT2LMHeadModel, two layers."""
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    config = GPT2Config(vocab_size=96, n_positions=16, n_embd=32, n_layer=2, n_head=4)
    net = FlaxGPT2LMHeadModel(config, seed=0)
    ids = _labels(4 * 12, 96).reshape(4, 12)
    batch = {"input_ids": ids}, np.roll(ids, -1, 1)
    return Trained(_transformers(net, lambda out: out.logits), net.params, batch)


@model("transformers-bert", "transformers", "flax")
def bert() -> Trained:
    """transformers: FlaxBertForSequenceClassification with a padding mask."""
    from transformers import BertConfig, FlaxBertForSequenceClassification

    config = BertConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=16, num_labels=3,
    )  # fmt: skip
    net = FlaxBertForSequenceClassification(config, seed=0, input_shape=(1, 12))
    ids = _labels(4 * 12, 96).reshape(4, 12)
    mask = (np.arange(12) < np.array([[12], [7], [3], [9]])).astype(np.int32)
    batch = {"input_ids": ids, "attention_mask": mask}, _labels(4, 3)
    return Trained(_transformers(net, lambda out: out.logits), net.params, batch, rate=3e-3)


@model("transformers-vit", "transformers", "flax")
def vit() -> Trained:
    """transformers: FlaxViTForImageClassification."""
    from transformers import FlaxViTForImageClassification, ViTConfig

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        image_size=16, patch_size=4, num_labels=3,
    )  # fmt: skip
    net = FlaxViTForImageClassification(config, seed=0, input_shape=(1, 16, 16, 3))
    batch = {"pixel_values": _normal(0, 4, 3, 16, 16)}, _labels(4, 3)
    return Trained(_transformers(net, lambda out: out.logits), net.params, batch, rate=3e-3)


@model("haiku-resnet18", "haiku")
def haiku_resnet() -> Trained:
    """haiku: hk.nets.ResNet18 in training, batch statistics included."""
    import haiku as hk

    net = hk.transform_with_state(lambda x: hk.nets.ResNet18(4)(x, is_training=True))
    images, labels = _normal(0, 8, 32, 32, 3), _labels(8, 4)
    params, state = net.init(KEY, images)

    def loss(params: Any, batch: Any) -> Any:
        return _classified(net.apply(params, state, None, batch[0])[0], batch[1])

    return Trained(loss, params, (images, labels), rate=3e-3)


@model("haiku-lstm", "haiku")
def haiku_lstm() -> Trained:
    """haiku: a deep LSTM with skip connections, unrolled by hk.dynamic_unroll."""
    import haiku as hk

    def run(x: Any) -> Any:
        core = hk.deep_rnn_with_skip_connections([hk.LSTM(16), hk.LSTM(16)])
        outputs, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))
        return hk.Linear(3)(outputs)

    net = hk.without_apply_rng(hk.transform(run))
    x, y = _normal(0, 10, 4, 6), np.tanh(_normal(1, 10, 4, 3))
    params = net.init(KEY, x)
    return Trained(lambda p, b: jnp.mean((net.apply(p, b[0]) - b[1]) ** 2), params, (x, y))


@model("jraph-interaction-network", "jraph", "haiku")
def graph_network() -> Trained:
    """jraph: an interaction network whose updates are haiku MLPs."""
    import haiku as hk
    import jraph

    nodes, edges = 12, 40
    rng = np.random.default_rng(0)
    senders, receivers = rng.integers(0, nodes, (2, edges))
    graph = jraph.GraphsTuple(
        nodes=_normal(0, nodes, 8), edges=_normal(1, edges, 4), senders=senders,
        receivers=receivers, n_node=np.array([nodes]), n_edge=np.array([edges]), globals=None,
    )  # fmt: skip

    def run(graph: Any) -> Any:
        def update_edge(edges: Any, sent: Any, received: Any) -> Any:
            return hk.nets.MLP([16, 8])(jnp.concatenate([edges, sent, received], 1))

        def update_node(nodes: Any, received: Any) -> Any:
            return hk.nets.MLP([16, 8])(jnp.concatenate([nodes, received], 1))

        network = jraph.InteractionNetwork(update_edge, update_node)
        return network(graph._replace(nodes=hk.Linear(8)(graph.nodes))).nodes

    net = hk.without_apply_rng(hk.transform(run))
    params, targets = net.init(KEY, graph), np.tanh(_normal(2, nodes, 8))
    return Trained(lambda p, b: jnp.mean((net.apply(p, graph) - b) ** 2), params, targets)
