"""Chemistry: molecules, reactions, spectra."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.fields.layers import gru, mlp
from tests.fields.registry import program


@program(
    lambda d: (
        {
            "embed": d.normal(10, 32),
            "filter": [d.layers(20, 32, 32) for _ in range(2)],
            "dense": [d.layers(32, 32, 32) for _ in range(2)],
            "out": d.layers(32, 16, 1),
        },
        d.uniform(4, 8, 3, high=4),
        d.integers(10, 4, 8),
        d.normal(4, scale=30) - 1500,
        d.normal(4, 8, 3),
    ),
    aux=True,
)
def schnet(params, places, species, energies, forces):
    """Continuous filters of distances; energies near -1,500 with a reference, and forces."""
    centres = jnp.linspace(0.0, 5.0, 20)

    def energy(places, species):
        off = places[:, None] - places[None]
        distance = jnp.sqrt((off**2).sum(-1) + 1e-6)
        basis = jnp.exp(-10.0 * (distance[..., None] - centres) ** 2)
        h = params["embed"][species]
        for f, dense in zip(params["filter"], params["dense"], strict=True):
            messages = mlp(f, basis, jax.nn.softplus) * h[None]
            messages = messages * (1 - jnp.eye(8))[..., None]
            h = h + mlp(dense, messages.sum(1), jax.nn.softplus)
        return mlp(params["out"], h, jax.nn.softplus).sum()

    e, g = jax.vmap(jax.value_and_grad(energy))(places, species)
    total = -1500.0 + 10.0 * e
    loss = jnp.mean(((total - energies) / 30.0) ** 2) + jnp.mean((-g - forces) ** 2)
    return loss, {"energy": total, "forces": -g}


@program(
    lambda d: (
        d.layers(8, 32, 2),
        d.normal(40, 8),
        d.uniform(40, low=280, high=420),
        d.normal(40, scale=2) - 5,
    ),
    aux=True,
)
def arrhenius(params, molecules, kelvin, log_rate):
    """A barrier in kJ/mol and a prefactor from a network; rates at temperatures in kelvin."""
    out = mlp(params, molecules, jax.nn.silu)
    barrier, log_a = 60.0 + 10.0 * out[:, 0], 17.0 + 2.0 * out[:, 1]
    predicted = log_a - barrier * 1000.0 / (8.314 * kelvin)
    rate = jnp.exp(predicted)
    return jnp.mean((predicted - log_rate) ** 2), {"rate": rate, "barrier": barrier}


@program(
    lambda d: (
        {
            "edge": d.layers(36, 32, 32),
            "cell": (d.weight(32, 96), d.weight(32, 96), d.normal(96, scale=0.1)),
            "gate": d.layers(64, 32),
            "out": d.layers(32, 32, 3),
        },
        d.normal(48, 32),
        d.normal(100, 4),
        d.integers(48, 100),
        d.integers(48, 100),
        d.normal(6, 3),
    )
)
def message_passing(params, atoms, bonds, senders, receivers, target):
    """Gated messages for three rounds, a gated sum over each molecule's eight atoms."""
    h = atoms
    for _ in range(3):
        m = mlp(params["edge"], jnp.concatenate([h[senders], bonds], -1))
        h = gru(params["cell"], h, jax.ops.segment_sum(m, receivers, 48))
    gate = jax.nn.sigmoid(mlp(params["gate"], jnp.concatenate([h, atoms], -1)))
    pooled = (gate * h).reshape(6, 8, 32).sum(1)
    return jnp.mean((mlp(params["out"], pooled) - target) ** 2)


@program(
    lambda d: (
        d.layers(5, 32, 4),
        jnp.exp(d.normal(8, 4, scale=2.5)),
        d.uniform(8, 1, low=300, high=900),
        jnp.exp(d.normal(8, 4, scale=2.5)),
    ),
    aux=True,
)
def kinetics(params, concentration, kelvin, target):
    """Concentrations over orders of magnitude, advanced by log rates of a network."""
    matrix = jnp.array([[-1.0, 1, 0, 0], [0, -1, 1, 0], [0, 0, -1, 1], [1, 0, 0, -1]])

    def step(logc, _):
        x = jnp.concatenate([logc / 3.0, (kelvin - 600.0) / 200.0], -1)
        rate = jnp.exp(logc - 3.0 + mlp(params, x, jnp.tanh))
        change = rate @ matrix
        return jnp.log(jnp.maximum(jnp.exp(logc) + 0.5 * change, 1e-6)), change

    logc, changes = lax.scan(step, jnp.log(concentration), None, length=10)
    mass = jnp.exp(logc).sum(-1)
    return jnp.mean((logc - jnp.log(target)) ** 2), {"mass": mass, "changes": changes}


@program(lambda d: (d.layers(24, 48, 60), d.normal(6, 24), d.uniform(6, 400)), aux=True)
def infrared_spectrum(params, molecule, spectrum):
    """Peaks at wave numbers up to 4,000 with widths near 15, summed and compared by an angle."""
    place, height, width = jnp.split(mlp(params, molecule, jax.nn.silu), 3, -1)
    place = 400.0 + 3600.0 * jax.nn.sigmoid(place)
    width = 15.0 * jnp.exp(0.2 * jnp.tanh(width))
    grid = jnp.linspace(400.0, 4000.0, 400)
    shape = 1 / (1 + ((grid - place[..., None]) / width[..., None]) ** 2)
    out = (jax.nn.softplus(height)[..., None] * shape).sum(1)
    cosine = (out * spectrum).sum(-1) / jnp.sqrt((out**2).sum(-1) * (spectrum**2).sum(-1))
    return 1 - cosine.mean(), {"spectrum": out, "places": place}


@program(
    lambda d: (
        d.layers(12, 32, 16),
        d.normal(60, 12),
        d.normal(60, scale=20) - 400,
        d.normal(10, 12),
    ),
    forward=True,
)
def kernel_ridge(params, x, energy, new):
    """Atomization energies near -400 by kernel ridge regression on learned descriptors."""
    a, b = mlp(params, x, jnp.tanh), mlp(params, new, jnp.tanh)
    d2 = lambda a, b: ((a[:, None] - b[None]) ** 2).sum(-1)
    mean = energy.mean()
    alpha = jnp.linalg.solve(jnp.exp(-d2(a, a) / 20.0) + 1e-2 * jnp.eye(60), energy - mean)
    return jnp.exp(-d2(b, a) / 20.0) @ alpha + mean


@program(
    lambda d: (
        d.layers(7, 32, 1),
        d.normal(64, 6),
        d.uniform(64, low=0, high=40),
        d.uniform(64, low=60, high=1800),
    ),
    aux=True,
)
def retention_times(params, peptides, gradient, seconds):
    """Retention in seconds up to half an hour, with the gradient's share as an input."""
    x = jnp.concatenate([peptides, gradient[:, None] / 40.0], -1)
    predicted = 900.0 + 400.0 * mlp(params, x, jax.nn.gelu)[:, 0]
    delta = (predicted - seconds) / 400.0
    return jnp.where(jnp.abs(delta) < 1, 0.5 * delta**2, jnp.abs(delta) - 0.5).mean(), predicted
