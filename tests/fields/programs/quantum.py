"""Quantum mechanics and materials: circuits, tensor networks, crystals, plasticity."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.fields.layers import mlp
from tests.fields.registry import program


@program(
    lambda d: (
        {"angles": d.layers(3, 32, 16), "field": d.normal(2, scale=0.1)},
        d.normal(8, 3),
        d.normal(8),
    ),
    aux=True,
)
def variational_circuit(params, inputs, target):
    """Four qubits turned by angles of a network, entangled twice; an energy is expected."""
    angles = mlp(params["angles"], inputs, jnp.tanh) * jnp.pi

    def turned(state, angle, qubit, about_x):
        c, s = jnp.cos(angle / 2), jnp.sin(angle / 2)
        gate = jnp.array([[c, -1j * s], [-1j * s, c]]) if about_x else jnp.array([[c, -s], [s, c]])
        state = jnp.tensordot(gate.astype("complex64"), state, [[1], [qubit]])
        return jnp.moveaxis(state, 0, qubit)

    parity = jnp.stack([jnp.arange(16) >> k & 1 for k in range(4)], -1)
    spins = 1.0 - 2.0 * parity
    entangle = jnp.where((parity[:, :-1] * parity[:, 1:]).sum(-1) % 2 == 1, -1.0, 1.0)

    def energy(angle):
        state = jnp.zeros((2,) * 4, jnp.complex64).at[0, 0, 0, 0].set(1)
        for layer in range(2):
            for qubit in range(4):
                state = turned(state, angle[8 * layer + qubit], qubit, True)
                state = turned(state, angle[8 * layer + 4 + qubit], qubit, False)
            state = state * entangle.reshape((2,) * 4)
        p = (jnp.abs(state) ** 2).reshape(16)
        bonds = (spins[:, :-1] * spins[:, 1:]).sum(-1)
        return (p * (bonds + params["field"][0] * spins.sum(-1))).sum(), p

    value, p = jax.vmap(energy)(angles)
    return jnp.mean((value - target) ** 2), {"p": p, "norm": p.sum(-1)}


@program(
    lambda d: (
        (d.normal(12, 8, 2, 8, scale=0.4), d.normal(8, 5, scale=0.4)),
        d.uniform(32, 12),
        d.integers(5, 32),
    ),
    aux=True,
)
def tensor_train_classifier(params, pixels, label):
    """A matrix product state reads pixels as vectors; the state is normalized at each site."""
    cores, head = params
    angle = jnp.pi / 2 * pixels
    features = jnp.stack([jnp.cos(angle), jnp.sin(angle)], -1)

    def site(state, xs):
        left, log_norm = state
        core, x = xs
        left = jnp.einsum("nl,lpr,np->nr", left, core, x)
        norm = jnp.sqrt((left**2).sum(-1, keepdims=True))
        return (left / norm, log_norm + jnp.log(norm[:, 0])), norm

    start = (jnp.ones((32, 8)) / 8**0.5, jnp.zeros(32))
    (left, log_norm), norms = lax.scan(site, start, (cores, features.swapaxes(0, 1)))
    amplitude = left @ head
    logp = jnp.log(amplitude**2 + 1e-9)
    logp = logp - jax.nn.logsumexp(logp, -1, keepdims=True)
    loss = -jnp.take_along_axis(logp, label[:, None], -1).mean() + 1e-3 * (log_norm**2).mean()
    return loss, {"log_norm": log_norm, "norms": norms}


@program(
    lambda d: (
        {
            "embed": d.normal(5, 32),
            "filter": d.layers(16, 32, 32),
            "update": d.layers(32, 32, 32),
            "head": d.layers(32, 32, 1),
        },
        d.uniform(14, 3, low=0.0, high=8.0),
        d.integers(5, 14),
        d.normal(14, 3, scale=0.1),
    ),
    aux=True,
)
def crystal_forces(params, places, species, forces):
    """Periodic distances by the nearest image, a Gaussian basis, and forces from an energy."""

    def energy(places):
        off = places[:, None] - places[None]
        off = off - 8.0 * jnp.round(off / 8.0)
        square = (off**2).sum(-1) + jnp.eye(14)
        r = jnp.sqrt(square)
        window = jnp.where(r < 4.0, 0.5 * (jnp.cos(jnp.pi * r / 4.0) + 1), 0.0)
        window = window * (1 - jnp.eye(14))
        basis = jnp.exp(-4.0 * (r[..., None] - jnp.linspace(0.5, 4.0, 16)) ** 2)
        h = params["embed"][species]
        for _ in range(2):
            weight = mlp(params["filter"], basis, jax.nn.softplus) * window[..., None]
            h = h + mlp(params["update"], jnp.einsum("ijc,jc->ic", weight, h), jax.nn.softplus)
        repulsion = (window * 0.5 * (1.2 / (r + 0.3)) ** 6).sum()
        return mlp(params["head"], h, jax.nn.softplus).sum() + repulsion - 340.0 * 14

    value, gradient = jax.value_and_grad(energy)(places)
    loss = jnp.mean((gradient + forces) ** 2) + 1e-4 * (value + 4760.0) ** 2
    return loss, {"energy": value, "forces": -gradient}


@program(
    lambda d: (
        d.layers(2, 24, 1),
        d.normal(40, 16, scale=1e-3),
        d.normal(40, 16, scale=150.0),
    ),
    aux=True,
)
def plastic_material(params, strain_steps, stress):
    """A return map: elastic trials in megapascals, a learned hardening, and yielding."""
    modulus = 70e3

    def step(state, xs):
        strain, plastic, hard = state
        strain = strain + xs
        trial = modulus * (strain - plastic)
        inputs = jnp.stack([hard * 100, jnp.abs(trial) / 200], -1)
        extra = 40.0 * jax.nn.softplus(mlp(params, inputs, jnp.tanh)[:, 0])
        limit = 120.0 + extra + 500.0 * hard
        over = jax.nn.relu(jnp.abs(trial) - limit)
        flow = over / (modulus + 500.0)
        plastic = plastic + flow * jnp.sign(trial)
        hard = hard + flow
        return (strain, plastic, hard), (modulus * (strain - plastic), plastic)

    zero = jnp.zeros(16)
    _, (predicted, plastic) = lax.scan(step, (zero, zero, zero), strain_steps)
    return jnp.mean(((predicted - stress) / 150) ** 2), {"plastic": plastic, "stress": predicted}


@program(
    lambda d: (
        d.layers(1, 24, 24, 1),
        d.normal(2, 24, 24, scale=0.05),
        d.normal(2, 24, 24, scale=0.1),
    ),
    aux=True,
)
def phase_separation(params, mixture, observed):
    """Cahn and Hilliard's equation by an implicit spectral step, the chemical potential learned."""
    k = 2 * jnp.pi * jnp.fft.fftfreq(24)
    k2 = k[:, None] ** 2 + k[None] ** 2

    def step(c, _):
        potential = c**3 - c + 0.1 * mlp(params, c[..., None], jnp.tanh)[..., 0]
        top = jnp.fft.fft2(c) - 0.5 * k2 * jnp.fft.fft2(potential)
        c = jnp.fft.ifft2(top / (1 + 0.5 * k2**2)).real
        return c, (c**2).mean()

    c, energy = lax.scan(step, mixture, None, length=12)
    mass = c.mean((1, 2)) - mixture.mean((1, 2))
    return jnp.mean((c - observed) ** 2) * 100, {"c": c, "mass": mass, "energy": energy}


@program(
    lambda d: (
        [d.kernel(3, 1, 16, 1), d.kernel(3, 16, 16, 1), d.layers(16, 2)],
        d.integers(2, 32, 10),
    ),
    aux=True,
)
def neural_quantum_state(params, bits):
    """Log amplitudes and phases of a spin chain; local energies by flips of each spin."""
    spins = 2.0 * bits - 1.0

    def log_psi(s):
        x = s[..., None]
        x = jnp.concatenate([x[:, -2:], x, x[:, :2]], 1)
        names = ("NWC", "WIO", "NWC")
        h = lax.conv_general_dilated(x, params[0], (1,), "VALID", dimension_numbers=names)
        h = jnp.log(jnp.cosh(h))
        h = jax.nn.gelu(
            lax.conv_general_dilated(h, params[1], (1,), "VALID", dimension_numbers=names)
        )
        out = mlp(params[2], h.sum(1))
        return out[:, 0], out[:, 1]

    size, phase = log_psi(spins)
    bonds = (spins * jnp.roll(spins, 1, -1)).sum(-1)
    flips = spins[:, None] * (1 - 2 * jnp.eye(10))
    size2, phase2 = log_psi(flips.reshape(-1, 10))
    ratio = jnp.exp(size2.reshape(32, 10) - size[:, None])
    real = -bonds - (ratio * jnp.cos(phase2.reshape(32, 10) - phase[:, None])).sum(-1)
    centred = lax.stop_gradient(real - real.mean())
    return (centred * size).mean() * 2, {"energy": real, "size": size}
