"""Normalizing flows and other densities."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.fields.layers import conv, mlp
from tests.fields.registry import program


def _normal_log(z):
    return -0.5 * (z**2 + jnp.log(2 * jnp.pi)).sum(-1)


@program(
    lambda d: ([d.layers(4, 48, 8, scale=0.7) for _ in range(6)], d.normal(32, 8, scale=2)),
    aux=True,
)
def real_nvp(params, x):
    """Affine couplings of the two halves by turns."""
    a, b = jnp.split(x, 2, -1)
    logdet = jnp.zeros(32)
    for layers in params:
        s, t = jnp.split(mlp(layers, a), 2, -1)
        s = jnp.tanh(s)
        a, b = b * jnp.exp(s) + t, a
        logdet += s.sum(-1)
    z = jnp.concatenate([a, b], -1)
    logp = _normal_log(z) + logdet
    return -logp.mean(), {"z": z, "logdet": logdet, "logp": logp}


@program(
    lambda d: (
        [
            {
                "mix": d.weight(4, 4) + 2 * jnp.eye(4, dtype="f"),
                "scale": d.normal(4, scale=0.1),
                "bias": d.normal(4, scale=0.1),
                "net": [d.kernel(3, 2, 16), d.kernel(3, 16, 4)],
            }
            for _ in range(3)
        ],
        d.uniform(4, 8, 8, 4, high=256),
    ),
    aux=True,
)
def glow(params, pixels):
    """Activation norms, 1x1 convolutions with their determinant, couplings; bits per dimension."""
    x = (pixels + 0.5) / 256.0 - 0.5
    logdet = jnp.full(4, -8 * 8 * 4 * jnp.log(256.0))
    for layer in params:
        x = (x + layer["bias"]) * jnp.exp(layer["scale"])
        logdet += 64 * layer["scale"].sum()
        x = x @ layer["mix"]
        logdet += 64 * jnp.linalg.slogdet(layer["mix"])[1]
        a, b = jnp.split(x, 2, -1)
        s, t = jnp.split(conv(jax.nn.relu(conv(a, layer["net"][0])), layer["net"][1]), 2, -1)
        s = jax.nn.sigmoid(s + 2.0)
        x = jnp.concatenate([a, (b + t) * s], -1)
        logdet += jnp.log(s).sum((1, 2, 3))
    logp = _normal_log(x.reshape(4, -1)) + logdet
    bits = -logp / (256 * jnp.log(2.0))
    return bits.mean(), {"bits": bits, "logdet": logdet}


@program(
    lambda d: (d.layers(2, 64, 50), d.uniform(32, 2, low=-2.5, high=2.5), d.normal(32, 2)), aux=True
)
def spline_flow(params, x, context):
    """Monotone rational-quadratic splines of eight bins, found by a search."""
    out = mlp(params, context).reshape(32, 2, 25)
    w, h, s = out[..., :8], out[..., 8:16], jax.nn.softplus(out[..., 16:]) + 1e-3
    knots = lambda v: jnp.pad(6 * jnp.cumsum(jax.nn.softmax(v), -1), ((0, 0), (0, 0), (1, 0))) - 3
    xs, ys = knots(w), knots(h)
    bin_ = jnp.clip((x[..., None] >= xs[..., 1:-1]).sum(-1), 0, 7)[..., None]
    at = lambda v, i: jnp.take_along_axis(v, i, -1)[..., 0]
    x0, x1, y0, y1 = at(xs, bin_), at(xs, bin_ + 1), at(ys, bin_), at(ys, bin_ + 1)
    d0, d1 = at(s, bin_), at(s, bin_ + 1)
    slope, t = (y1 - y0) / (x1 - x0), (x - x0) / (x1 - x0)
    bottom = slope + (d1 + d0 - 2 * slope) * t * (1 - t)
    z = y0 + (y1 - y0) * (slope * t**2 + d0 * t * (1 - t)) / bottom
    top = slope**2 * (d1 * t**2 + 2 * slope * t * (1 - t) + d0 * (1 - t) ** 2)
    logdet = (jnp.log(top) - 2 * jnp.log(bottom)).sum(-1)
    return -(_normal_log(z) + logdet).mean(), {"z": z, "logdet": logdet}


@program(lambda d: ([(d.weight(8, 64), d.weight(64, 16)) for _ in range(3)], d.normal(32, 8)))
def masked_autoregressive(params, x):
    """MADE: masks make each output depend on earlier inputs alone."""
    degree = jnp.arange(64) % 7
    first = (degree[None] >= jnp.arange(8)[:, None]).astype(jnp.float32)
    second = (jnp.tile(jnp.arange(8), 2)[None] > degree[:, None]).astype(jnp.float32)
    logdet = 0.0
    for w, v in params:
        mu, alpha = jnp.split(jax.nn.relu(x @ (w * first)) @ (v * second), 2, -1)
        x = ((x - mu) * jnp.exp(-alpha))[:, ::-1]
        logdet -= alpha.sum(-1)
    return -(_normal_log(x) + logdet).mean()


@program(lambda d: (d.layers(5, 48, 4), d.normal(16, 4), d.normal(16, 4)), aux=True)
def continuous_flow(params, x, probe):
    """A flow along a vector field; Hutchinson's estimate of its trace by a product with a probe."""

    def field(x, t):
        return mlp(params, jnp.concatenate([x, jnp.full((16, 1), t)], -1), jnp.tanh)

    def step(carry, t):
        x, logdet = carry
        dx, dprobe = jax.jvp(lambda x: field(x, t), (x,), (probe,))
        return (x + 0.1 * dx, logdet + 0.1 * (dprobe * probe).sum(-1)), None

    (z, logdet), _ = lax.scan(step, (x, jnp.zeros(16)), jnp.linspace(0, 0.9, 10))
    return -(_normal_log(z) + logdet).mean(), {"z": z, "logdet": logdet}


@program(
    lambda d: ([d.layers(6, 32, 6, scale=0.5) for _ in range(3)], d.normal(16, 6), d.normal(16, 6))
)
def residual_flow(params, x, probe):
    """Contractive residual blocks; the log determinant by a power series of products."""
    logdet = 0.0
    for layers in params:
        g = lambda x: 0.5 * mlp(layers, x, jnp.tanh)
        y, pull = jax.vjp(g, x)
        v, total = probe, 0.0
        for k in range(1, 5):
            (v,) = pull(v)
            total += (-1) ** (k + 1) / k * (v * probe).sum(-1)
        logdet, x = logdet + total, x + y
    return -(_normal_log(x) + logdet).mean()


@program(
    lambda d: (
        [(d.normal(16), d.normal(16), d.normal(1)) for _ in range(8)],
        d.normal(64, 16),
        d.normal(64, 16),
    )
)
def planar_flow(params, eps, data):
    """Rank-one maps of Gaussian noise fitted to a density by its free energy."""
    z, logdet = eps, 0.0
    for u, w, b in params:
        wu = w @ u
        u = u + (jax.nn.softplus(wu) - 1 - wu) * w / (w @ w)
        a = jnp.tanh(z @ w + b)
        logdet += jnp.log(jnp.abs(1 + (1 - a**2) * (u @ w)))
        z = z + a[:, None] * u
    energy = 0.5 * ((z - data.mean(0)) ** 2).sum(-1)
    return (_normal_log(eps) - logdet + energy).mean()


@program(
    lambda d: (
        d.layers(9, 64, 64, 8),
        d.normal(64, 8),
        d.normal(64, 8, scale=0.3) + 2,
        d.uniform(64, 1),
    )
)
def flow_matching(params, noise, data, t):
    """A velocity field along straight lines from noise to data."""
    x = (1 - t) * noise + t * data
    v = mlp(params, jnp.concatenate([x, t], -1), jax.nn.silu)
    return jnp.mean((v - (data - noise)) ** 2)


@program(lambda d: ([d.layers(9, 48, 2) for _ in range(2)], d.normal(32, 8)), forward=True)
def inverse_by_sampling(params, eps):
    """An autoregressive flow is sampled, one dimension after the other, in a loop."""

    def dimension(i, x):
        one = jnp.broadcast_to(i / 8.0, (32, 1))
        seen = jnp.where(jnp.arange(8) < i, x, 0.0)
        out = mlp(layers, jnp.concatenate([seen, one], -1))
        value = out[:, 0] + jnp.exp(0.3 * jnp.tanh(out[:, 1])) * z[:, i]
        return x.at[:, i].set(value)

    z = eps
    for layers in params:
        z = lax.fori_loop(0, 8, dimension, jnp.zeros_like(z))[:, ::-1]
    return z, _normal_log(z)


@program(
    lambda d: (
        {
            "q": d.weight(12, 12),
            "r": d.normal(2, 12, 12, scale=0.2),
            "b": d.normal(12),
            "enc": d.layers(20, 32, 24),
        },
        d.normal(32, 20),
        d.normal(32, 12),
    ),
    aux=True,
)
def sylvester_flow(params, x, eps):
    """An amortized posterior with an orthogonal flow, by a QR decomposition."""
    mu, logvar = jnp.split(mlp(params["enc"], x), 2, -1)
    z = mu + jnp.exp(0.5 * logvar) * eps
    q, _ = jnp.linalg.qr(params["q"])
    r1, r2 = jnp.triu(params["r"])
    diagonal = jnp.tanh(jnp.diag(r1)) * jnp.tanh(jnp.diag(r2))
    h = jnp.tanh(z @ q @ r2.T + params["b"])
    z = z + h @ r1.T @ q.T
    logdet = jnp.log(jnp.abs(1 + (1 - h**2) * diagonal) + 1e-3).sum(-1)
    kl = _normal_log(eps) - 0.5 * logvar.sum(-1) - logdet - _normal_log(z)
    return kl.mean(), {"kl": kl, "z": z}
