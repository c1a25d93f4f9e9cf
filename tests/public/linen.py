"""Flax linen: after its examples, in our own words."""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.public.data import STEPS, images, points, rng, sentences
from tests.public.registry import Losses, Places, public


class TrainState(train_state.TrainState):
    """The usual state, with statistics of batch norms and a key."""

    batch_stats: Any = None
    key: Any = None


def cross_entropy(logits: Any, labels: Any) -> Any:
    """The mean over a batch."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class ConvNet(nn.Module):
    """Two convolutions with batch norm, and dropout."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        for features in (8, 16):
            x = nn.Conv(features, (3, 3), strides=2, use_bias=False, dtype=self.dtype)(x)
            x = nn.relu(nn.BatchNorm(not train, momentum=0.9, dtype=self.dtype)(x))
        x = nn.Dropout(0.2, deterministic=not train)(x.mean((1, 2)))
        return nn.Dense(4, dtype=self.dtype)(x)


@public(dtype=True)
def image_classification(at: Places, dtype: Any = None) -> Losses:
    """Batch statistics that change, dropout, momentum; the state is donated."""
    net = ConvNet(dtype)
    x, y = images(16)
    variables = net.init(jax.random.key(0), x, train=False)
    apply = at.model(partial(net.apply, mutable=["batch_stats"], train=True))

    def loss_fn(params: Any, stats: Any, x: Any, y: Any, key: Any) -> Any:
        variables = {"params": params, "batch_stats": stats}
        logits, changed = apply(variables, x, rngs={"dropout": key})
        return cross_entropy(logits, y), changed["batch_stats"]

    loss_fn = at.loss(loss_fn)

    def train_step(state: TrainState, x: Any, y: Any) -> tuple[TrainState, Any]:
        key = jax.random.fold_in(state.key, state.step)
        gradient = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, stats), grads = gradient(state.params, state.batch_stats, x, y, key)
        return state.apply_gradients(grads=grads, batch_stats=stats), loss

    step = at.step(train_step, donate_argnums=0)
    state = TrainState.create(
        apply_fn=net.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optax.sgd(0.1, 0.9, nesterov=True),
        key=jax.random.key(1),
    )
    losses = []
    for _ in range(STEPS):
        state, loss = step(state, x, y)
        losses.append(loss)
    return losses


class Autoencoder(nn.Module):
    """A variational autoencoder of flat images."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any, key: Any) -> Any:
        dense = partial(nn.Dense, dtype=self.dtype)
        hidden = nn.relu(dense(32)(x))
        mean, logvar = dense(4, name="mean")(hidden), dense(4, name="logvar")(hidden)
        z = mean + jnp.exp(0.5 * logvar) * jax.random.normal(key, mean.shape)
        return dense(x.shape[-1])(nn.relu(dense(32)(z))), mean, logvar


@public(dtype=True)
def vae(at: Places, dtype: Any = None) -> Losses:
    """Sampling by reparametrization; a Bernoulli likelihood and a Kullback-Leibler term."""
    net = Autoencoder(dtype)
    x = (images(16)[0].reshape(16, -1) > 0).astype(np.float32)
    params = net.init(jax.random.key(0), x, jax.random.key(0))["params"]
    apply = at.model(net.apply)

    @at.loss
    def loss_fn(params: Any, x: Any, key: Any) -> Any:
        logits, mean, logvar = apply({"params": params}, x, key)
        likelihood = -optax.sigmoid_binary_cross_entropy(logits, x).sum(-1)
        divergence = -0.5 * jnp.sum(1 + logvar - mean**2 - jnp.exp(logvar), axis=-1)
        return (divergence - likelihood).mean()

    tx = optax.adam(1e-3)

    def train_step(params: Any, opt_state: Any, x: Any, key: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, x, key)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    return _loop(at.step(train_step), params, tx.init(params), x)


def _loop(step: Any, params: Any, opt_state: Any, *batch: Any) -> Losses:
    """Train on one batch with a new key in each step."""
    losses = []
    for n in range(STEPS):
        params, opt_state, loss = step(params, opt_state, *batch, jax.random.key(n))
        losses.append(loss)
    return losses


class Seq2seq(nn.Module):
    """An encoder's last carry starts the decoder."""

    words: int

    @nn.compact
    def __call__(self, question: Any, answer: Any) -> Any:
        embed = nn.Embed(self.words, 16)
        carry, _ = nn.RNN(nn.LSTMCell(32), return_carry=True)(embed(question))
        return nn.Dense(self.words)(nn.RNN(nn.LSTMCell(32))(embed(answer), initial_carry=carry))


@public()
def sequence_to_sequence(at: Places) -> Losses:
    """Two LSTMs and a loss that is masked at the padding."""
    net, rows = Seq2seq(32), sentences()
    question, answer = rows[:, :6], rows[:, 6:]
    params = net.init(jax.random.key(0), question, answer)
    apply, tx = at.model(net.apply), optax.adam(3e-3)

    @at.loss
    def loss_fn(params: Any, question: Any, answer: Any) -> Any:
        logits = apply(params, question, answer[:, :-1])
        errors = optax.softmax_cross_entropy(logits, jax.nn.one_hot(answer[:, 1:], 32))
        mask = answer[:, 1:] != 1
        return jnp.sum(errors * mask) / jnp.sum(mask)

    def train_step(params: Any, opt_state: Any, question: Any, answer: Any, _: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, question, answer)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    return _loop(at.step(train_step), params, tx.init(params), question, answer)


class Reader(nn.Module):
    """An LSTM both ways, attention over its states, dropout of words."""

    @nn.compact
    def __call__(self, rows: Any, lengths: Any, train: bool) -> Any:
        x = nn.Dropout(0.1, broadcast_dims=(2,), deterministic=not train)(nn.Embed(32, 16)(rows))
        both = nn.Bidirectional(nn.RNN(nn.LSTMCell(16)), nn.RNN(nn.LSTMCell(16)))
        states = both(x, seq_lengths=lengths)
        scores = nn.Dense(1)(jnp.tanh(nn.Dense(16)(states)))[..., 0]
        mask = jnp.arange(rows.shape[1]) < lengths[:, None]
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        return nn.Dense(1)(jnp.einsum("bt,btd->bd", weights, states))[..., 0]


@public()
def text_classification(at: Places) -> Losses:
    """Rows of several lengths, and metrics beside the loss."""
    net, rows = Reader(), sentences()
    lengths, labels = rng().integers(4, 12, 8), (rows[:, 0] % 2).astype(np.float32)
    params = net.init(jax.random.key(0), rows, lengths, False)
    apply, tx = at.model(partial(net.apply, train=True)), optax.sgd(0.3, 0.9)

    @at.loss
    def loss_fn(params: Any, key: Any) -> Any:
        logits = apply(params, rows, lengths, rngs={"dropout": key})
        loss = optax.sigmoid_binary_cross_entropy(logits, labels).mean()
        return loss, {"accuracy": jnp.mean((logits > 0) == (labels > 0.5))}

    def train_step(params: Any, opt_state: Any, key: Any) -> Any:
        (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, key)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss + 0 * metrics["accuracy"]

    return _loop(at.step(train_step), params, tx.init(params))


class Block(nn.Module):
    """A layer of a transformer, with attention to another sequence if there is one."""

    dtype: Any = None
    dropout: float = 0.1

    @nn.compact
    def __call__(self, x: Any, mask: Any, memory: Any = None, *, train: bool = True) -> Any:
        attend = partial(nn.MultiHeadDotProductAttention, 2, dtype=self.dtype)
        norm = partial(nn.LayerNorm, dtype=self.dtype)
        drop = nn.Dropout(self.dropout, deterministic=not train)
        x = x + drop(attend(name="itself")(norm()(x), mask=mask))
        if memory is not None:
            x = x + drop(attend(name="other")(norm()(x), memory))
        hidden = nn.gelu(nn.Dense(64, dtype=self.dtype)(norm()(x)))
        return x + drop(nn.Dense(x.shape[-1], dtype=self.dtype)(hidden))


class Translator(nn.Module):
    """Encoder and decoder, with one table of words that is the head too."""

    dtype: Any = None

    @nn.compact
    def __call__(self, source: Any, target: Any, train: bool = True) -> Any:
        embed = nn.Embed(32, 32, dtype=self.dtype)
        places = self.param("places", nn.initializers.normal(0.02), (12, 32))

        def place(rows):
            return embed(rows) + places[: rows.shape[1]]

        memory = Block(self.dtype)(
            place(source), nn.make_attention_mask(source > 0, source > 0), train=train
        )
        x = Block(self.dtype)(place(target), nn.make_causal_mask(target), memory, train=train)
        return embed.attend(nn.LayerNorm(dtype=self.dtype)(x))


@public(dtype=True)
def translation(at: Places, dtype: Any = None) -> Losses:
    """Smoothed labels, a warm-up, a clip of the gradient's norm."""
    net, rows = Translator(dtype), sentences()
    source, target = rows[:, :6], rows[:, 6:]
    params = net.init(jax.random.key(0), source, target, False)["params"]
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 2, 10)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98))
    apply = at.model(net.apply)

    @at.loss
    def loss_fn(params: Any, key: Any) -> Any:
        logits = apply({"params": params}, source, target[:, :-1], rngs={"dropout": key})
        smooth = optax.smooth_labels(jax.nn.one_hot(target[:, 1:], 32), 0.1)
        return optax.softmax_cross_entropy(logits, smooth).mean()

    def train_step(params: Any, opt_state: Any, key: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, key)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return _loop(at.step(train_step, donate_argnums=(0, 1)), params, tx.init(params))


class LanguageModel(nn.Module):
    """Layers of a decoder under a scan and a checkpoint, with axes that have names."""

    dtype: Any = None

    @nn.compact
    def __call__(self, rows: Any) -> Any:
        named = partial(nn.with_partitioning, nn.initializers.normal(0.1))
        x = nn.Embed(32, 32, embedding_init=named(("model", None)), dtype=self.dtype)(rows)
        mask = nn.make_causal_mask(rows)

        def layer(block: Any, x: Any, _: Any) -> Any:
            return block(x, mask, train=False), None

        layers = nn.scan(
            nn.remat(layer),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
            metadata_params={nn.PARTITION_NAME: None},
        )
        x, _ = layers(Block(self.dtype, 0.0), x, None)
        head = nn.Dense(32, kernel_init=named((None, "model")), dtype=self.dtype)
        return head(nn.LayerNorm(dtype=self.dtype)(x))


@public(dtype=True)
def language_model_with_sharding(at: Places, dtype: Any = None) -> Losses:
    """Batch over one axis of a mesh, table and head over the other; shardings in and out."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    net, rows = LanguageModel(dtype), sentences()
    boxed = jax.eval_shape(net.init, jax.random.key(0), rows)
    split = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh)
    params = nn.unbox(jax.jit(net.init)(jax.random.key(0), rows))
    params = jax.device_put(params, split)
    batch = jax.device_put(rows, NamedSharding(mesh, P("data")))
    apply, tx = at.model(net.apply), optax.sgd(0.5)

    @at.loss
    def loss_fn(params: Any, rows: Any) -> Any:
        return cross_entropy(apply(params, rows[:, :-1]), rows[:, 1:])

    def train_step(params: Any, rows: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, rows)
        updates, _ = tx.update(grads, tx.init(params))
        return optax.apply_updates(params, updates), loss

    whole = NamedSharding(mesh, P())
    step = at.step(train_step, in_shardings=(split, batch.sharding), out_shardings=(split, whole))
    losses = []
    for _ in range(STEPS):
        params, loss = step(params, batch)
        losses.append(loss)
    same = jax.tree.map(lambda p, s: p.sharding.is_equivalent_to(s, p.ndim), params, split)
    assert all(jax.tree.leaves(same))
    return losses


class ActorCritic(nn.Module):
    """A policy and a value with a shared body."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.tanh(nn.Dense(32, dtype=self.dtype)(x))
        policy = nn.log_softmax(nn.Dense(3, dtype=self.dtype)(x))
        return policy, nn.Dense(1, dtype=self.dtype)(x)[..., 0]


def _advantages(rewards: Any, values: Any, discount: float = 0.95) -> Any:
    """Generalized advantages, by a reversed scan."""

    def back(total: Any, pair: Any) -> Any:
        reward, value, following = pair
        total = reward + discount * following - value + discount * 0.9 * total
        return total, total

    following = jnp.append(values[1:], 0.0)
    return jax.lax.scan(back, 0.0, (rewards, values, following), reverse=True)[1]


@public(dtype=True)
def ppo(at: Places, dtype: Any = None) -> Losses:
    """A clipped ratio, advantages and an entropy, on one rollout."""
    net, (seen, _) = ActorCritic(dtype), points(64, 6)
    params = net.init(jax.random.key(0), seen)
    old = nn.log_softmax(0.1 * rng(3).normal(size=(64, 3))).astype(np.float32)
    taken, rewards = rng(4).integers(0, 3, 64), np.sin(seen[:, 0]).astype(np.float32)
    apply, tx = at.model(net.apply), optax.adam(1e-2)

    @at.loss
    def loss_fn(params: Any, seen: Any, taken: Any, old: Any, rewards: Any) -> Any:
        chances, values = apply(params, seen)
        advantages = jax.lax.stop_gradient(_advantages(rewards, values))
        returns = advantages + jax.lax.stop_gradient(values)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

        def pick(rows):
            return jnp.take_along_axis(rows, taken[:, None], 1)[:, 0]

        ratio = jnp.exp(pick(chances) - pick(old))
        clipped = jnp.clip(ratio, 0.9, 1.1)
        gain = jnp.minimum(ratio * advantages, clipped * advantages).mean()
        entropy = -jnp.sum(jnp.exp(chances) * chances, -1).mean()
        return 0.5 * jnp.mean((returns - values) ** 2) - gain - 0.01 * entropy

    def train_step(params: Any, opt_state: Any, *batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch[:-1])
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    batch = seen, taken, old, rewards
    return _loop(at.step(train_step), params, tx.init(params), *batch)


class GraphNet(nn.Module):
    """Two steps of messages along edges, and a sum over each graph."""

    @nn.compact
    def __call__(self, nodes: Any, edges: Any, ends: Any, graph_of: Any) -> Any:
        senders, receivers = ends
        nodes = nn.Dense(16)(nodes)
        for _ in range(2):
            both = jnp.concatenate([nodes[senders], nodes[receivers], edges], -1)
            messages = nn.relu(nn.Dense(16)(both))
            arrived = jax.ops.segment_sum(messages, receivers, len(nodes))
            nodes = nodes + nn.relu(nn.Dense(16)(jnp.concatenate([nodes, arrived], -1)))
        return nn.Dense(1)(jax.ops.segment_sum(nodes, graph_of, 4))[..., 0]


@public()
def graph_network(at: Places) -> Losses:
    """Rings of several sizes in one batch, with edges both ways."""
    draw, sizes = rng(5), (3, 4, 5, 6)
    rings = [(np.arange(n), (np.arange(n) + 1) % n) for n in sizes]
    starts = np.cumsum((0, *sizes[:-1]))
    ends = np.concatenate(
        [np.array(ring) + start for ring, start in zip(rings, starts, strict=True)], 1
    )
    ends = np.concatenate([ends, ends[::-1]], 1)
    graph_of = np.repeat(np.arange(4), sizes)
    nodes = draw.normal(size=(sum(sizes), 4)).astype(np.float32)
    edges = draw.normal(size=(ends.shape[1], 2)).astype(np.float32)
    labels = np.array([1, 0, 1, 0], np.float32)
    net = GraphNet()
    params = net.init(jax.random.key(0), nodes, edges, ends, graph_of)
    apply, tx = at.model(net.apply), optax.adam(5e-3)

    @at.loss
    def loss_fn(params: Any, *graph: Any) -> Any:
        return optax.sigmoid_binary_cross_entropy(apply(params, *graph), labels).mean()

    def train_step(params: Any, opt_state: Any, *graph: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, *graph[:-1])
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    return _loop(at.step(train_step), params, tx.init(params), nodes, edges, ends, graph_of)


class Watched(nn.Module):
    """A network that shows what is inside of it."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for width in (16, 16):
            x = nn.relu(nn.Dense(width)(x))
            self.sow("intermediates", "activity", jnp.mean(jnp.abs(x)))
        return nn.Dense(1)(x)


@public()
def sown_intermediates(at: Places) -> Losses:
    """A penalty of what is sown, and all intermediates captured."""
    net, (x, y) = Watched(), points()
    params = net.init(jax.random.key(0), x)["params"]
    apply = at.model(partial(net.apply, mutable=["intermediates"], capture_intermediates=True))
    tx = optax.adam(1e-2)

    @at.loss
    def loss_fn(params: Any, x: Any, y: Any) -> Any:
        found, changed = apply({"params": params}, x)
        inside = changed["intermediates"]
        assert set(inside) == {"Dense_0", "Dense_1", "Dense_2", "activity", "__call__"}
        assert {leaf.dtype for leaf in jax.tree.leaves(inside)} == {jnp.dtype("float32")}
        return jnp.mean((found - y) ** 2) + 0.01 * sum(inside["activity"])

    def train_step(params: Any, opt_state: Any, x: Any, y: Any, _: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    return _loop(at.step(train_step), params, tx.init(params), x, y)
