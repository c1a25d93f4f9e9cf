"""Dynamical systems: learned vector fields, integrators, closures."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.fields.layers import gru, mlp
from tests.fields.registry import program


@program(lambda d: (d.layers(2, 64, 64, 1), d.normal(32, 2), d.normal(32, 2)))
def hamiltonian_network(params, x, dxdt):
    """Time derivatives from the symplectic gradient of a learned energy."""

    def energy(x):
        return mlp(params, x, jnp.tanh)[0]

    dh = jax.vmap(jax.grad(energy))(x)
    field = jnp.stack([dh[:, 1], -dh[:, 0]], -1)
    return jnp.mean((field - dxdt) ** 2)


@program(lambda d: (d.layers(4, 48, 1), d.normal(12, 2), d.normal(12, 2), d.normal(12, 2)))
def lagrangian_network(params, q, qd, qdd):
    """Accelerations from the Euler-Lagrange equations of a learned Lagrangian."""

    def lagrangian(q, qd):
        kinetic = 0.5 * (qd**2).sum()
        return kinetic + 0.3 * mlp(params, jnp.concatenate([q, qd]), jax.nn.softplus)[0]

    def acceleration(q, qd):
        mass = jax.hessian(lagrangian, 1)(q, qd)
        force = jax.grad(lagrangian, 0)(q, qd) - jax.jacfwd(jax.grad(lagrangian, 1), 0)(q, qd) @ qd
        return jnp.linalg.solve(mass + 1e-2 * jnp.eye(2), force)

    return jnp.mean((jax.vmap(acceleration)(q, qd) - qdd) ** 2)


@program(lambda d: (d.layers(3, 64, 3), d.normal(16, 3), d.normal(20, 16, 3)), aux=True)
def neural_ode(params, y0, targets):
    """A vector field integrated by Runge and Kutta's fourth order."""

    def field(y, t):
        return mlp(params, y, jnp.tanh) * jnp.cos(0.1 * t)

    def step(y, t):
        h = 0.1
        k1 = field(y, t)
        k2 = field(y + h / 2 * k1, t + h / 2)
        k3 = field(y + h / 2 * k2, t + h / 2)
        k4 = field(y + h * k3, t + h)
        y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return y, y

    _, ys = lax.scan(step, y0, 0.1 * jnp.arange(20.0))
    return jnp.mean((ys - targets) ** 2), ys


@program(
    lambda d: (
        d.layers(6, 32, 3),
        d.normal(8, 3, scale=100) + 7000,
        d.normal(8, 3, scale=0.5) + 4,
        d.normal(8, 3, scale=100) + 7000,
    ),
    aux=True,
)
def satellite_drag(params, position, velocity, observed):
    """Orbits in kilometres with a learned drag, ten seconds a step, by leapfrog."""
    mu = 398600.4

    def acceleration(r, v):
        radius = jnp.sqrt((r**2).sum(-1, keepdims=True))
        drag = mlp(params, jnp.concatenate([(r - 7000.0) / 100.0, v / 8.0], -1), jnp.tanh)
        return -mu * r / radius**3 + 1e-3 * drag

    def step(state, _):
        r, v = state
        v = v + 5.0 * acceleration(r, v)
        r = r + 10.0 * v
        v = v + 5.0 * acceleration(r, v)
        return (r, v), r

    (r, v), path = lax.scan(step, (position, velocity), None, length=8)
    altitude = jnp.sqrt((r**2).sum(-1)) - 6371.0
    return jnp.mean(((r - observed) / 100.0) ** 2), {"path": path, "altitude": altitude, "v": v}


@program(
    lambda d: (
        (d.layers(5, 48, 4), d.layers(5, 48, 4)),
        d.normal(32, 4),
        d.normal(25, 32, 4),
        d.normal(32, 4),
    ),
    aux=True,
)
def neural_sde(params, x0, noise, target):
    """Euler and Maruyama's method with networks for drift and diffusion."""
    drift, diffusion = params
    dt = 0.02

    def step(carry, eps):
        x, t = carry
        inputs = jnp.concatenate([x, jnp.broadcast_to(t, (32, 1))], -1)
        f = mlp(drift, inputs, jax.nn.silu)
        g = jax.nn.softplus(mlp(diffusion, inputs, jax.nn.silu) - 1)
        return (x + f * dt + g * jnp.sqrt(dt) * eps, t + dt), x

    (x, _), path = lax.scan(step, (x0, 0.0), noise)
    return jnp.mean((x - target) ** 2), path


@program(
    lambda d: (
        (
            (d.weight(3, 48), d.weight(16, 48), d.normal(48, scale=0.1)),
            d.layers(16, 16),
            d.layers(8, 32, 8),
            d.layers(8, 2),
        ),
        d.normal(20, 8, 2),
        d.times(20, step=0.05),
        d.normal(8, 8),
    ),
    aux=True,
)
def latent_ode(params, series, times, noise):
    """A GRU reads a series backwards; its latent state is integrated between the time stamps."""
    cell, head, field, decode = params
    inputs = jnp.concatenate([series, jnp.broadcast_to(times[:, None, None], (20, 8, 1))], -1)
    h, _ = lax.scan(lambda h, x: (gru(cell, h, x), None), jnp.zeros((8, 16)), inputs[::-1])
    mu, logvar = jnp.split(mlp(head, h), 2, -1)
    z = mu + jnp.exp(0.5 * logvar) * noise

    def step(z, dt):
        mid = z + 0.5 * dt * mlp(field, z, jnp.tanh)
        z = z + dt * mlp(field, mid, jnp.tanh)
        return z, mlp(decode, z)

    _, xs = lax.scan(step, z, jnp.diff(times, prepend=0.0))
    kl = 0.5 * (jnp.exp(logvar) + mu**2 - 1 - logvar).sum(-1).mean()
    return jnp.mean((xs - series) ** 2) / 0.1 + 0.01 * kl, {"xs": xs, "kl": kl}


@program(
    lambda d: (
        {"enc": d.layers(2, 32, 16), "dec": d.layers(16, 32, 2), "k": d.weight(16, 16) * 0.5},
        d.normal(9, 16, 2),
    )
)
def koopman(params, xs):
    """An autoencoder whose code moves linearly."""
    z0 = mlp(params["enc"], xs[0], jnp.tanh)
    loss, z = jnp.mean((mlp(params["dec"], z0, jnp.tanh) - xs[0]) ** 2), z0
    for t in range(1, 9):
        z = z + 0.1 * (z @ params["k"])
        loss += jnp.mean((mlp(params["dec"], z, jnp.tanh) - xs[t]) ** 2)
        loss += 0.1 * jnp.mean((z - mlp(params["enc"], xs[t], jnp.tanh)) ** 2)
    return loss / 9


@program(lambda d: (d.normal(10, 3), d.times(3, 50, step=0.3).T * 0.05))
def sparse_identification(coefficients, x):
    """Derivatives by differences against a library of monomials, with a penalty (SINDy)."""
    dt = 0.01
    dx = (x[2:] - x[:-2]) / (2 * dt)
    x = x[1:-1]
    quad = [x[:, i] * x[:, j] for i in range(3) for j in range(i, 3)]
    library = jnp.stack([jnp.ones(48), *x.T, *quad], -1)
    residual = dx - library @ coefficients
    return jnp.mean(residual**2) / 100 + 1e-2 * jnp.abs(coefficients).sum()


@program(
    lambda d: (
        d.layers(6, 64, 2),
        d.uniform(16, 2, low=-3.1, high=3.1),
        d.normal(16, 2),
        d.uniform(16, 2, low=-3.1, high=3.1),
    ),
    aux=True,
)
def double_pendulum(params, angle, rate, target):
    """Angles wrapped to a half turn; the network sees sines and cosines."""
    for _ in range(6):
        x = jnp.concatenate([jnp.sin(angle), jnp.cos(angle), rate], -1)
        rate = rate + 0.05 * 9.81 * mlp(params, x, jnp.tanh)
        angle = angle + 0.05 * rate
        angle = jnp.mod(angle + jnp.pi, 2 * jnp.pi) - jnp.pi
    off = jnp.mod(angle - target + jnp.pi, 2 * jnp.pi) - jnp.pi
    return jnp.mean(off**2), (angle, rate)


@program(
    lambda d: (d.weight(64, 64) * 0.9, d.normal(3, 64), d.normal(120, 3), d.normal(120, 2)),
    forward=True,
)
def echo_state(w, w_in, inputs, targets):
    """A reservoir driven by a signal, and its ridge regression."""

    def step(h, u):
        h = 0.7 * h + 0.3 * jnp.tanh(h @ w + u @ w_in)
        return h, h

    _, states = lax.scan(step, jnp.zeros(64), inputs)
    states = states[20:]
    gram = states.T @ states + 1e-1 * jnp.eye(64)
    readout = jnp.linalg.solve(gram, states.T @ targets[20:])
    return states @ readout


@program(
    lambda d: (d.layers(5, 32, 1), d.normal(8, 40, scale=4) + 2, d.normal(8, 40, scale=4) + 2),
    aux=True,
)
def lorenz96_closure(params, x, target):
    """Lorenz' model of 1996 with a network for the scales that it does not resolve."""

    def tendency(x):
        near = jnp.stack([jnp.roll(x, s, -1) for s in (-2, -1, 0, 1, 2)], -1)
        advection = (jnp.roll(x, -1, -1) - jnp.roll(x, 2, -1)) * jnp.roll(x, 1, -1)
        return advection - x + 8.0 - mlp(params, near / 5.0, jax.nn.silu)[..., 0]

    def step(x, _):
        k1 = tendency(x)
        return x + 0.005 * (k1 + tendency(x + 0.005 * k1)), None

    x, _ = lax.scan(step, x, None, length=10)
    return jnp.mean((x - target) ** 2) / 16.0, x


@program(
    lambda d: (d.layers(12, 64, 12), d.normal(16, 4, 3, scale=50) + 1000, d.normal(16, 4, 3)),
    aux=True,
)
def bodies_with_learned_forces(params, x, v):
    """Four bodies at coordinates near 1,000, moved by forces of a network; energy drift as aux."""
    x0 = x
    for _ in range(5):
        centred = x - x.mean(1, keepdims=True)
        force = mlp(params, centred.reshape(16, 12) / 50.0, jnp.tanh).reshape(16, 4, 3)
        v = v + 0.1 * (force - force.mean(1, keepdims=True))
        x = x + 0.1 * v
    moved = x - x0
    loss = jnp.mean(moved**2) + 0.01 * jnp.mean(v**2)
    return loss, {"x": x, "moved": moved, "kinetic": 0.5 * (v**2).sum((1, 2))}
