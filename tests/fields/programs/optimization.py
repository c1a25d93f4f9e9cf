"""Optimization inside of models: inner loops, implicit layers, transport."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.fields.layers import lstm, mlp, nll
from tests.fields.registry import program


@program(
    lambda d: (
        (d.weight(2, 64), d.weight(16, 64), d.normal(64, scale=0.1), d.weight(16, 1)),
        d.normal(10, 10, scale=0.4),
        d.normal(10),
        d.normal(10),
    ),
    aux=True,
)
def learned_optimizer(params, a, b, start):
    """An LSTM per coordinate minimizes a quadratic for ten steps."""
    *cell, head = params
    f = lambda x: 0.5 * ((a @ x - b) ** 2).sum()
    x, h, c, losses = start, jnp.zeros((10, 16)), jnp.zeros((10, 16)), []
    for _ in range(10):
        g = lax.stop_gradient(jax.grad(f)(x))
        size = jnp.log(jnp.abs(g) + 1e-8) / 10.0
        h, c = lstm(cell, (h, c), jnp.stack([size, jnp.sign(g)], -1))
        x = x + 0.1 * (h @ head)[:, 0]
        losses.append(f(x))
    return jnp.stack(losses).mean(), {"losses": jnp.stack(losses), "x": x}


@program(
    lambda d: (
        d.layers(1, 40, 40, 1),
        d.uniform(6, 10, 1, low=-5, high=5),
        d.normal(6, 10, 1),
        d.uniform(6, 10, 1, low=-5, high=5),
        d.normal(6, 10, 1),
    )
)
def meta_learning(params, xs, ys, xq, yq):
    """Two inner steps of gradient descent for each task; the outer derivative goes through them."""
    loss = lambda p, x, y: jnp.mean((mlp(p, x) - y) ** 2)

    def task(xs, ys, xq, yq):
        fast = params
        for _ in range(2):
            fast = jax.tree.map(lambda p, g: p - 0.01 * g, fast, jax.grad(loss)(fast, xs, ys))
        return loss(fast, xq, yq)

    return jax.vmap(task)(xs, ys, xq, yq).mean()


@program(lambda d: (d.layers(12, 32, 14), d.normal(16, 12), d.normal(16, 6)), aux=True)
def quadratic_layer(params, x, target):
    """A quadratic program with equalities, by its optimality conditions."""
    out = mlp(params, x)
    scale, linear, rhs = jax.nn.softplus(out[:, :6]) + 0.5, out[:, 6:12], out[:, 12:]
    a = jnp.stack([jnp.ones(6), jnp.arange(6.0) - 2.5])

    def solve(q, p, b):
        kkt = jnp.block([[jnp.diag(q), a.T], [a, jnp.zeros((2, 2))]])
        return jnp.linalg.solve(kkt, jnp.concatenate([-p, b]))[:6]

    z = jax.vmap(solve)(scale, linear, rhs)
    return jnp.mean((z - target) ** 2), {"z": z, "violation": z @ a.T - rhs}


@program(lambda d: (d.layers(8, 32, 8), d.normal(32, 8), d.normal(32, 8)), aux=True)
def entropic_transport(params, x, y):
    """Sinkhorn's algorithm on kernels, with costs by squares and a product."""
    z = mlp(params, x, jnp.tanh)
    cost = (z**2).sum(-1)[:, None] + (y**2).sum(-1) - 2 * z @ y.T
    kernel = jnp.exp(-cost / cost.max() / 0.05)
    u = jnp.ones(32) / 32
    for _ in range(20):
        v = (1 / 32) / (kernel.T @ u)
        u = (1 / 32) / (kernel @ v)
    plan = u[:, None] * kernel * v
    return (plan * cost).sum(), {"plan": plan, "marginal": plan.sum(1)}


@program(
    lambda d: (
        (d.normal(8, scale=0.3), d.layers(16, 16, scale=0.3)),
        d.weight(40, 16),
        d.normal(24, 40),
    )
)
def unrolled_admm(params, a, b):
    """Alternating directions for a sparse regression, with a learned denoiser."""
    logs, denoise = params
    gram = a.T @ a + jnp.eye(16)
    x = z = u = jnp.zeros((24, 16))
    for k in range(8):
        x = jnp.linalg.solve(gram, (b @ a + z - u).T).T
        t = 0.1 * jnp.exp(logs[k])
        z = jnp.sign(x + u) * jnp.maximum(jnp.abs(x + u) - t, 0.0) + 0.1 * jnp.tanh(mlp(denoise, x))
        u = u + x - z
    return jnp.mean((x @ a.T - b) ** 2) + 0.1 * jnp.abs(z).mean()


@program(lambda d: (d.layers(10, 32, 1), d.normal(20, 10), d.normal(20)), aux=True)
def soft_ranks(params, x, target):
    """Ranks by sums of sigmoids, their correlation with the target's ranks."""
    s = mlp(params, x)[:, 0]
    rank = jax.nn.sigmoid((s[:, None] - s[None]) / 0.1).sum(-1) + 0.5
    goal = jnp.argsort(jnp.argsort(target)).astype(jnp.float32) + 1
    a, b = rank - rank.mean(), goal - goal.mean()
    spearman = (a * b).sum() / jnp.sqrt((a**2).sum() * (b**2).sum())
    return 1 - spearman, {"rank": rank}


@program(
    lambda d: (
        (d.layers(12, 32, 8), d.normal(1)),
        d.normal(40, 12),
        d.normal(40),
        d.normal(20, 12),
        d.normal(20),
    ),
    aux=True,
)
def hyperparameters(params, x, y, xv, yv):
    """A ridge penalty and features, by the derivative of the validation loss through a solve."""
    net, log_penalty = params
    f, fv = jnp.tanh(mlp(net, x)), jnp.tanh(mlp(net, xv))
    w = jnp.linalg.solve(f.T @ f + jnp.exp(log_penalty) * jnp.eye(8), f.T @ y)
    error = fv @ w - yv
    return jnp.mean(error**2), {"w": w, "train": jnp.mean((f @ w - y) ** 2)}


@program(lambda d: (d.layers(16, 48, 6), d.normal(32, 16), d.integers(6, 32)))
def sharpness_aware(params, x, labels):
    """The loss at the worst place near the weights."""
    loss = lambda p: nll(mlp(p, x), labels)
    g = jax.grad(loss)(params)
    norm = jnp.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(g)))
    worse = jax.tree.map(lambda p, g: p + 0.05 * lax.stop_gradient(g / (norm + 1e-12)), params, g)
    return loss(worse)


@program(
    lambda d: (
        d.normal(24, 16),
        d.normal(24, 16, scale=1e-2),
        d.positive_definite(24),
        d.positive_definite(16),
    ),
    forward=True,
)
def shampoo_update(w, g, left, right):
    """Preconditioners to the power -1/4 by eigenvalues, an update of given weights."""

    def root(m):
        values, vectors = jnp.linalg.eigh(m)
        return (vectors * jnp.maximum(values, 1e-6) ** -0.25) @ vectors.T

    left, right = 0.95 * left + g @ g.T, 0.95 * right + g.T @ g
    update = root(left) @ g @ root(right)
    graft = update * jnp.linalg.norm(g) / jnp.linalg.norm(update)
    return w - 0.1 * graft, left, right
