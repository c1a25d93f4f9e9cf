"""Small models of many kinds, each with its data, its loss and the metric by which it is judged."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Rng = np.random.Generator


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A model and how it is trained.

    Attributes:
        name: of the model.
        data: what it is trained on.
        metric: what is judged, of the trained parameters.
        init: draws parameters.
        batch: draws a batch.
        loss: a number, of parameters and a batch.
        score: the metric, of trained parameters.
        steps: of Adam.
        rate: its learning rate.
    """

    name: str
    data: str
    metric: str
    init: Callable[[Rng], Any]
    batch: Callable[[Rng], Any]
    loss: Callable[[Any, Any], Array]
    score: Callable[[Any], Array]
    steps: int = 300
    rate: float = 3e-3


RECIPES: dict[str, Callable[[], Recipe]] = {}


def recipe(make: Callable[[], Recipe]) -> Callable[[], Recipe]:
    """Enter what makes a recipe."""
    RECIPES[make.__name__] = make
    return make


def _dense(rng: Rng, *widths: int) -> list[Any]:
    return [
        (_normal(rng, i, o, scale=(2 / i) ** 0.5), np.zeros(o, np.float32))
        for i, o in itertools.pairwise(widths)
    ]


def _normal(rng: Rng, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (scale * rng.standard_normal(shape)).astype(np.float32)


def _kernel(rng: Rng, size: int, i: int, o: int) -> np.ndarray:
    return _normal(rng, size, size, i, o, scale=(2 / (size * size * i)) ** 0.5)


def _mlp(layers: Any, x: Array, act: Any = jax.nn.relu) -> Array:
    for w, b in layers[:-1]:
        x = act(x @ w + b)
    return x @ layers[-1][0] + layers[-1][1]


def _conv(x: Array, w: Array, stride: int = 1) -> Array:
    names = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=names)


def _norm(x: Array) -> Array:
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def _attention(qkv: Array, x: Array, mask: Any = True) -> Array:
    q, k, v = jnp.split(_norm(x) @ qkv, 3, -1)
    logits = jnp.where(mask, q @ k.swapaxes(-1, -2) / jnp.sqrt(q.shape[-1]), -1e9)
    return x + jax.nn.softmax(logits) @ v


def _nll(logits: Array, labels: Array) -> Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()


def _accuracy(logits: Array, labels: Any) -> Array:
    return (logits.argmax(-1) == labels).mean()


@functools.cache
def _split(name: str) -> tuple[np.ndarray, ...]:
    """Data that scikit-learn ships: features, normalized, and targets, three quarters to train."""
    from sklearn import datasets

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order].astype(np.float32), y[order]
    cut = 3 * len(x) // 4
    mean, std = (0.0, 16.0) if name == "digits" else (x[:cut].mean(0), x[:cut].std(0) + 1e-6)
    x = ((x - mean) / std).astype(np.float32)
    y = y.astype(np.int32 if name != "diabetes" else np.float32)
    return x[:cut], y[:cut], x[cut:], y[cut:]


def _rows(name: str, size: int = 64) -> Callable[[Rng], Any]:
    x, y, *_ = _split(name)

    def batch(rng: Rng) -> Any:
        rows = rng.integers(0, len(x), size)
        return x[rows], y[rows]

    return batch


def _classifier(name: str, data: str, init: Any, logits: Any, **options: Any) -> Recipe:
    _, _, x, y = _split(data)
    return Recipe(
        name,
        f"scikit-learn's {data}",
        "accuracy held out",
        init,
        _rows(data),
        lambda p, b: _nll(logits(p, b[0]), b[1]),
        lambda p: _accuracy(logits(p, x), y),
        **options,
    )


@recipe
def mlp() -> Recipe:
    """Dense layers."""
    return _classifier("MLP", "breast_cancer", lambda r: _dense(r, 30, 64, 64, 2), _mlp)


@recipe
def wine() -> Recipe:
    """Dense layers with norms."""

    def logits(p: Any, x: Array) -> Array:
        return _mlp(p[1], _norm(_mlp(p[0], x)), jax.nn.gelu)

    def init(rng: Rng) -> Any:
        return _dense(rng, 13, 64, 64), _dense(rng, 64, 64, 3)

    return _classifier("MLP with norms", "wine", init, logits)


@recipe
def regression() -> Recipe:
    """A regression of a target near 150."""
    _, _, x, y = _split("diabetes")

    def predicted(p: Any, x: Any) -> Array:
        return 150.0 + 75.0 * _mlp(p, x, jnp.tanh)[:, 0]

    return Recipe(
        "regression",
        "scikit-learn's diabetes",
        "R² held out",
        lambda r: _dense(r, 10, 32, 1),
        _rows("diabetes"),
        lambda p, b: jnp.mean(((predicted(p, b[0]) - b[1]) / 75.0) ** 2),
        lambda p: 1 - ((predicted(p, x) - y) ** 2).sum() / ((y - y.mean()) ** 2).sum(),
        rate=1e-3,
    )


@recipe
def cnn() -> Recipe:
    """Two convolutions."""

    def logits(p: Any, x: Any) -> Array:
        h = jax.nn.relu(_conv(x.reshape(-1, 8, 8, 1), p[0]))
        h = jax.nn.relu(_conv(h, p[1], 2))
        return _mlp(p[2], h.reshape(len(h), -1))

    def init(rng: Rng) -> Any:
        return _kernel(rng, 3, 1, 16), _kernel(rng, 3, 16, 32), _dense(rng, 512, 10)

    return _classifier("CNN", "digits", init, logits)


@recipe
def resnet() -> Recipe:
    """Residual blocks with the batch's statistics."""

    def norm(x: Array, p: Any) -> Array:
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        return (x - mean) * lax.rsqrt(var + 1e-5) * p[0] + p[1]

    def logits(p: Any, x: Any) -> Array:
        h = jax.nn.relu(_conv(x.reshape(-1, 8, 8, 1), p["stem"]))
        for a, na, b, nb in p["blocks"]:
            h = jax.nn.relu(h + norm(_conv(jax.nn.relu(norm(_conv(h, a), na)), b), nb))
        return _mlp(p["head"], h.mean((1, 2)))

    def init(rng: Rng) -> Any:
        one = (np.ones(16, np.float32), np.zeros(16, np.float32))
        blocks = [(_kernel(rng, 3, 16, 16), one, _kernel(rng, 3, 16, 16), one) for _ in range(2)]
        return {"stem": _kernel(rng, 3, 1, 16), "blocks": blocks, "head": _dense(rng, 16, 10)}

    return _classifier("ResNet with BatchNorm", "digits", init, logits)


@recipe
def vit() -> Recipe:
    """Patches, attention and a mean."""

    def logits(p: Any, x: Any) -> Array:
        patches = x.reshape(-1, 4, 2, 4, 2).swapaxes(2, 3).reshape(-1, 16, 4)
        h = patches @ p["embed"] + p["place"]
        for qkv, ff in p["blocks"]:
            h = _attention(qkv, h)
            h = h + _mlp(ff, _norm(h), jax.nn.gelu)
        return _mlp(p["head"], _norm(h).mean(1))

    def init(rng: Rng) -> Any:
        blocks = [(_normal(rng, 32, 96, scale=0.18), _dense(rng, 32, 64, 32)) for _ in range(2)]
        embed, place = _normal(rng, 4, 32, scale=0.5), _normal(rng, 16, 32, scale=0.1)
        return {"embed": embed, "place": place, "blocks": blocks, "head": _dense(rng, 32, 10)}

    return _classifier("ViT", "digits", init, logits, steps=400)


def _text() -> np.ndarray:
    """Read the documentation of numpy's functions, which every installation has."""
    text = " ".join(str(getattr(np, name).__doc__) for name in sorted(np.__all__)[:120])
    codes = np.frombuffer(text.encode("ascii", "ignore"), np.uint8)
    return np.clip(codes, 10, 126).astype(np.int32) - 10


@recipe
def char_transformer() -> Recipe:
    """A causal transformer of characters."""
    codes, length = _text(), 48
    cut = 9 * len(codes) // 10

    def windows(rng: Rng, low: int, high: int, count: int) -> np.ndarray:
        return np.stack(
            [codes[i : i + length + 1] for i in rng.integers(low, high - length - 1, count)]
        )

    held = windows(np.random.default_rng(1), cut, len(codes), 64)
    mask = np.tril(np.ones((length, length), bool))

    def loss(p: Any, tokens: Any) -> Array:
        h = p["embed"][tokens[:, :-1]] + p["place"]
        for qkv, ff in p["blocks"]:
            h = _attention(qkv, h, mask)
            h = h + _mlp(ff, _norm(h), jax.nn.gelu)
        return _nll(_norm(h) @ p["embed"].T, jnp.asarray(tokens[:, 1:]))

    def init(rng: Rng) -> Any:
        blocks = [(_normal(rng, 64, 192, scale=0.12), _dense(rng, 64, 128, 64)) for _ in range(2)]
        embed, place = _normal(rng, 117, 64, scale=0.1), _normal(rng, length, 64, scale=0.1)
        return {"embed": embed, "place": place, "blocks": blocks}

    return Recipe(
        "char transformer",
        "numpy's documentation",
        "loss held out",
        init,
        lambda r: windows(r, 0, cut, 16),
        loss,
        lambda p: loss(p, held),
    )


def _lstm(p: Any, x: Array, width: int) -> tuple[Array, Array]:
    def step(state: Any, x: Array) -> Any:
        h, c = state
        i, f, g, o = jnp.split(x @ p[0] + h @ p[1] + p[2], 4, -1)
        c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zero = jnp.zeros((x.shape[1], width))
    (h, _), hs = lax.scan(step, (zero, zero), x)
    return h, hs


@recipe
def lstm() -> Recipe:
    """An LSTM over the rows of an image."""

    def logits(p: Any, x: Any) -> Array:
        return _mlp(p[1], _lstm(p[0], x.reshape(-1, 8, 8).swapaxes(0, 1), 64)[0])

    def init(rng: Rng) -> Any:
        wx, wh = _normal(rng, 8, 256, scale=0.3), _normal(rng, 64, 256, scale=0.12)
        return (wx, wh, np.zeros(256, np.float32)), _dense(rng, 64, 10)

    return _classifier("LSTM", "digits", init, logits)


def _gru(p: Any, h: Array, x: Array) -> Array:
    (r, z, n), (hr, hz, hn) = jnp.split(x @ p[0] + p[2], 3, -1), jnp.split(h @ p[1], 3, -1)
    r, z = jax.nn.sigmoid(r + hr), jax.nn.sigmoid(z + hz)
    return (1 - z) * jnp.tanh(n + r * hn) + z * h


@recipe
def seq2seq() -> Recipe:
    """GRUs that read six symbols and write them in reverse."""

    def logits(p: Any, symbols: Any) -> Array:
        hot = jax.nn.one_hot(symbols, 8).swapaxes(0, 1)
        h, _ = lax.scan(lambda h, x: (_gru(p[0], h, x), None), jnp.zeros((hot.shape[1], 64)), hot)
        shifted = jnp.pad(hot[::-1][:-1], ((1, 0), (0, 0), (0, 0)))
        _, hs = lax.scan(lambda h, x: (h := _gru(p[1], h, x), h), h, shifted)
        return _mlp(p[2], hs).swapaxes(0, 1)

    def cell(rng: Rng) -> Any:
        return (
            _normal(rng, 8, 192, scale=0.3),
            _normal(rng, 64, 192, scale=0.12),
            np.zeros(192, np.float32),
        )

    draw = lambda rng, n=128: rng.integers(0, 8, (n, 6)).astype(np.int32)  # noqa: E731
    held = draw(np.random.default_rng(1), 256)
    return Recipe(
        "GRU seq2seq",
        "reversed symbols",
        "loss held out",
        lambda r: (cell(r), cell(r), _dense(r, 64, 8)),
        draw,
        lambda p, s: _nll(logits(p, s), jnp.asarray(s)[:, ::-1]),
        lambda p: _nll(logits(p, held), jnp.asarray(held[:, ::-1])),
        steps=400,
        rate=5e-3,
    )


@recipe
def vae() -> Recipe:
    """An autoencoder with a Gaussian code."""
    x, _, held, _ = _split("digits")

    def loss(p: Any, batch: Any) -> Array:
        x, eps = batch
        mu, logvar = jnp.split(_mlp(p[0], x), 2, -1)
        out = _mlp(p[1], mu + jnp.exp(0.5 * logvar) * eps)
        kl = 0.5 * (jnp.exp(logvar) + mu**2 - 1 - logvar).sum(-1)
        return (((out - x) ** 2).sum(-1) / 0.05 + kl).mean() / 64

    def batch(rng: Rng) -> Any:
        return x[rng.integers(0, len(x), 64)], _normal(rng, 64, 8)

    eps = _normal(np.random.default_rng(1), len(held), 8)
    return Recipe(
        "VAE",
        "scikit-learn's digits",
        "bound held out",
        lambda r: (_dense(r, 64, 64, 16), _dense(r, 8, 64, 64)),
        batch,
        loss,
        lambda p: loss(p, (held, eps)),
        rate=2e-3,
    )


@recipe
def diffusion() -> Recipe:
    """Noise prediction with a cosine schedule."""
    x, _, held, _ = _split("digits")

    def loss(p: Any, batch: Any) -> Array:
        x, eps, t = batch
        a, b = jnp.cos(t * 1.5), jnp.sin(t * 1.5)
        waves = jnp.concatenate([jnp.sin(k * t) for k in (1, 3, 9, 27)] + [a, b], -1)
        noisy = a * (2 * x - 1) + b * eps
        return jnp.mean((_mlp(p, jnp.concatenate([noisy, waves], -1), jax.nn.silu) - eps) ** 2)

    def draw(rng: Rng, x: np.ndarray) -> Any:
        return x, _normal(rng, len(x), 64), rng.uniform(0.05, 1, (len(x), 1)).astype(np.float32)

    fixed = draw(np.random.default_rng(1), held)
    return Recipe(
        "diffusion",
        "scikit-learn's digits",
        "loss held out",
        lambda r: _dense(r, 70, 128, 128, 64),
        lambda r: draw(r, x[r.integers(0, len(x), 128)]),
        loss,
        lambda p: loss(p, fixed),
    )


@recipe
def gan() -> Recipe:
    """Two adversaries learn a ring in one step, each by its own sign."""

    def loss(p: Any, batch: Any) -> Array:
        real, z = batch
        g, d = p
        stop = lax.stop_gradient
        fake = _mlp(g, z)
        critic = (
            jax.nn.softplus(-_mlp(d, real)).mean() + jax.nn.softplus(_mlp(d, stop(fake))).mean()
        )
        return critic + jax.nn.softplus(-_mlp(stop(d), fake)).mean()

    def batch(rng: Rng) -> Any:
        angle = rng.uniform(0, 2 * np.pi, 128)
        ring = np.stack([np.cos(angle), np.sin(angle)], -1) + 0.05 * rng.standard_normal((128, 2))
        return ring.astype(np.float32), _normal(rng, 128, 4)

    z = _normal(np.random.default_rng(1), 512, 4)

    def score(p: Any) -> Array:
        fake = _mlp(p[0], jnp.asarray(z))
        return jnp.abs(jnp.sqrt((fake**2).sum(-1)) - 1).mean()

    return Recipe(
        "GAN",
        "points on a ring",
        "distance from it",
        lambda r: (_dense(r, 4, 48, 48, 2), _dense(r, 2, 48, 48, 1)),
        batch,
        loss,
        score,
        steps=600,
        rate=1e-3,
    )


@recipe
def graph_network() -> Recipe:
    """Messages between the nearest neighbours of each image, half of the labels hidden."""
    from sklearn import datasets

    x, y = datasets.load_digits(return_X_y=True)
    x, y = (x[:400] / 16.0).astype(np.float32), y[:400].astype(np.int32)
    near = np.argsort(((x[:, None] - x[None]) ** 2).sum(-1), -1)[:, 1:7]
    senders, receivers = near.reshape(-1), np.repeat(np.arange(400), 6)
    seen = np.random.default_rng(0).random(400) < 0.5

    def logits(p: Any, x: Any) -> Array:
        h = jax.nn.relu(_mlp(p[0], x))
        for layer in p[1]:
            m = jax.ops.segment_sum(jnp.asarray(h)[senders], receivers, 400) / 6
            h = jax.nn.relu(_mlp(layer, jnp.concatenate([h, m], -1)))
        return _mlp(p[2], h)

    def loss(p: Any, noise: Any) -> Array:
        logp = jax.nn.log_softmax(logits(p, x + noise))
        return -(logp[jnp.arange(400), y] * seen).sum() / seen.sum()

    return Recipe(
        "graph network",
        "neighbours in scikit-learn's digits",
        "accuracy held out",
        lambda r: (_dense(r, 64, 32), [_dense(r, 64, 32) for _ in range(2)], _dense(r, 32, 10)),
        lambda r: _normal(r, 400, 64, scale=0.1),
        loss,
        lambda p: ((logits(p, x).argmax(-1) == y) * ~seen).sum() / (~seen).sum(),
        steps=200,
    )


@recipe
def flow() -> Recipe:
    """Affine couplings on two moons."""

    def loss(p: Any, x: Any) -> Array:
        a, b, logdet = x[:, :1], x[:, 1:], 0.0
        for layers in p:
            s, t = jnp.split(_mlp(layers, a, jnp.tanh), 2, -1)
            s = jnp.tanh(s)
            a, b, logdet = b * jnp.exp(s) + t, a, logdet + s[:, 0]
        return (0.5 * (a**2 + b**2)[:, 0] + jnp.log(2 * jnp.pi) - logdet).mean()

    def draw(rng: Rng, n: int = 256) -> np.ndarray:
        angle, which = rng.uniform(0, np.pi, n), rng.integers(0, 2, n)
        x = np.where(which, 1 - np.cos(angle), np.cos(angle))
        y = np.where(which, 0.5 - np.sin(angle), np.sin(angle))
        return (np.stack([x, y], -1) + 0.1 * rng.standard_normal((n, 2))).astype(np.float32)

    held = draw(np.random.default_rng(1), 1000)
    return Recipe(
        "normalizing flow",
        "two moons",
        "negative log likelihood",
        lambda r: [jax.tree.map(lambda w: 0.5 * w, _dense(r, 1, 48, 48, 2)) for _ in range(6)],
        draw,
        loss,
        lambda p: loss(p, held),
    )


@recipe
def q_learning() -> Recipe:
    """Fitted Q iteration on a pendulum, with targets of the network itself."""
    torques = np.array([-2.0, 0.0, 2.0], np.float32)

    def move(angle: Any, speed: Any, torque: Any) -> Any:
        speed = jnp.clip(speed + 0.05 * (15.0 * jnp.sin(angle) + 3.0 * torque), -8, 8)
        angle = jnp.mod(angle + 0.05 * speed + jnp.pi, 2 * jnp.pi) - jnp.pi
        return angle, speed

    def q(p: Any, angle: Any, speed: Any) -> Array:
        return _mlp(p, jnp.stack([jnp.cos(angle), jnp.sin(angle), speed / 8], -1))

    def loss(p: Any, batch: Any) -> Array:
        angle, speed, action = batch
        torque = jnp.asarray(torques)[action]
        cost = angle**2 + 0.1 * speed**2 + 0.001 * torque**2
        following = move(angle, speed, torque)
        ahead = 0.9 * q(p, following[0], following[1]).max(-1)
        goal = lax.stop_gradient(-cost / 10 + ahead)
        return jnp.mean((q(p, angle, speed)[jnp.arange(256), action] - goal) ** 2)

    def batch(rng: Rng) -> Any:
        angle = rng.uniform(-np.pi, np.pi, 256).astype(np.float32)
        return (
            angle,
            rng.uniform(-8, 8, 256).astype(np.float32),
            rng.integers(0, 3, 256).astype(np.int32),
        )

    def score(p: Any) -> Array:
        """The mean cost of sixty steps from 64 places, under the greedy policy."""

        def step(state: Any, _: Any) -> Any:
            angle, speed = state
            torque = jnp.asarray(torques)[q(p, angle, speed).argmax(-1)]
            return move(angle, speed, torque), (angle**2 + 0.1 * speed**2).mean()

        start = jnp.linspace(-3.1, 3.1, 64), jnp.zeros(64)
        return lax.scan(step, start, None, length=60)[1].mean()

    return Recipe(
        "Q-learning",
        "a pendulum",
        "cost",
        lambda r: _dense(r, 3, 64, 64, 3),
        batch,
        loss,
        score,
        600,
        2e-3,
    )


@recipe
def neural_ode() -> Recipe:
    """A vector field by diffrax, fitted to a spiral."""
    import diffrax

    times = jnp.linspace(0, 2, 11)

    def path(p: Any, y0: Any) -> Any:
        return diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, p: _mlp(p, y**3, jnp.tanh)),
            diffrax.Heun(), 0.0, 2.0, 0.1, y0, p, saveat=diffrax.SaveAt(ts=times), max_steps=32,
        ).ys  # fmt: skip

    matrix = np.array([[-0.1, 2.0], [-2.0, -0.1]], np.float32)

    def batch(rng: Rng, n: int = 32) -> Any:
        y0 = rng.uniform(0.5, 1.5, (n, 2)).astype(np.float32)
        y: Any = y0
        ys: list[Any] = [y0]
        for _ in range(200):
            mid = y + 0.005 * (y**3) @ matrix
            y = y + 0.01 * (mid**3) @ matrix
            ys.append(y)
        return y0, np.stack(ys[::20]).astype(np.float32)

    def loss(p: Any, batch: Any) -> Array:
        return jnp.mean((path(p, batch[0]) - batch[1]) ** 2)

    held = batch(np.random.default_rng(1))
    return Recipe(
        "neural ODE",
        "a cubic spiral",
        "error held out",
        lambda r: _dense(r, 2, 48, 2),
        batch,
        loss,
        lambda p: loss(p, held),
        steps=200,
    )


@recipe
def equilibrium() -> Recipe:
    """A fixed point of forty turns, differentiated by its last four."""

    def logits(p: Any, x: Any) -> Array:
        f = lambda z: jnp.tanh(z @ p["w"] + x @ p["u"])  # noqa: E731
        z = lax.fori_loop(0, 40, lambda _, z: f(z), jnp.zeros((len(x), 64)))
        z = lax.stop_gradient(z)
        for _ in range(4):
            z = f(z)
        return _mlp(p["head"], z)

    def init(rng: Rng) -> Any:
        w, u = _normal(rng, 64, 64, scale=0.06), _normal(rng, 64, 64, scale=0.15)
        return {"w": w, "u": u, "head": _dense(rng, 64, 10)}

    return _classifier("equilibrium model", "digits", init, logits, rate=1e-3)


@recipe
def word_vectors() -> Recipe:
    """Skip-grams of characters with negative samples."""
    codes = _text()

    def loss(p: Any, batch: Any) -> Array:
        centre, context, negative = batch
        u = p[0][centre] @ p[2]
        good = (u * p[1][context]).sum(-1)
        bad = jnp.einsum("nd,nkd->nk", u, p[1][negative])
        return -(jax.nn.log_sigmoid(good) + jax.nn.log_sigmoid(-bad).sum(-1)).mean()

    def batch(rng: Rng, n: int = 512) -> Any:
        i = rng.integers(2, len(codes) - 2, n)
        near = i + rng.choice([-2, -1, 1, 2], n)
        return codes[i], codes[near], codes[rng.integers(0, len(codes), (n, 5))]

    held = batch(np.random.default_rng(1), 4000)
    return Recipe(
        "character vectors",
        "numpy's documentation",
        "loss held out",
        lambda r: (
            _normal(r, 117, 32, scale=0.1),
            _normal(r, 117, 32, scale=0.1),
            _normal(r, 32, 32, scale=0.18),
        ),
        batch,
        loss,
        lambda p: loss(p, held),
    )
