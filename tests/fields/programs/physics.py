"""Physics: differential equations, particles, quantum states."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.fields.layers import conv, layer_norm, mlp
from tests.fields.registry import program


@program(
    lambda d: (d.layers(2, 32, 32, 1), d.uniform(64, 2, low=-1), d.uniform(32, 1, low=-1)), aux=True
)
def burgers_pinn(params, points, start):
    """A network that obeys Burgers' equation, by nested derivatives."""
    u = lambda x, t: mlp(params, jnp.stack([x, t]), jnp.tanh)[0]
    ux = jax.grad(u)

    def residual(p):
        x, t = p
        return jax.grad(u, 1)(x, t) + u(x, t) * ux(x, t) - 0.01 / jnp.pi * jax.grad(ux)(x, t)

    r = jax.vmap(residual)(points)
    initial = jax.vmap(lambda x: u(x[0], 0.0))(start) + jnp.sin(jnp.pi * start[:, 0])
    return jnp.mean(r**2) + jnp.mean(initial**2), {"residual": r}


@program(
    lambda d: (
        d.layers(3, 48, 48, 1),
        d.uniform(48, 2, high=0.1),
        d.uniform(48, 1, high=3600.0),
        d.uniform(48, low=293, high=600),
    ),
    aux=True,
)
def heat_pinn(params, place, seconds, measured):
    """Temperatures in kelvin of a plate in metres over an hour; a data term and the equation."""

    def temperature(xy, t):
        inputs = jnp.concatenate([xy / 0.1, t / 3600.0])
        return 293.0 + 300.0 * mlp(params, inputs, jnp.tanh)[0]

    def residual(xy, t):
        laplacian = jnp.trace(jax.hessian(temperature)(xy, t))
        return jax.grad(temperature, 1)(xy, t)[0] - 1.2e-5 * laplacian

    kelvin = jax.vmap(temperature)(place, seconds)
    r = jax.vmap(residual)(place, seconds)
    return jnp.mean(((kelvin - measured) / 100.0) ** 2) + 10.0 * jnp.mean(r**2), {
        "kelvin": kelvin,
        "residual": r,
    }


@program(
    lambda d: (
        {
            "lift": d.layers(2, 16),
            "real": d.normal(3, 8, 16, 16, scale=0.1),
            "imag": d.normal(3, 8, 16, 16, scale=0.1),
            "skip": d.normal(3, 16, 16, scale=0.25),
            "out": d.layers(16, 32, 1),
        },
        d.normal(6, 64),
        d.normal(6, 64),
    )
)
def fourier_operator(params, a, u):
    """A Fourier neural operator: the lowest modes are mixed."""
    grid = jnp.broadcast_to(jnp.linspace(0, 1, 64), (6, 64))
    x = mlp(params["lift"], jnp.stack([a, grid], -1))
    for k in range(3):
        modes = jnp.fft.rfft(x, axis=1)[:, :8]
        mixed = jnp.einsum("bmi,mio->bmo", modes, params["real"][k] + 1j * params["imag"][k])
        spectral = jnp.fft.irfft(jnp.pad(mixed, ((0, 0), (0, 25), (0, 0))), n=64, axis=1)
        x = jax.nn.gelu(spectral + x @ params["skip"][k])
    out = mlp(params["out"], x)[..., 0]
    return (jnp.sqrt(((out - u) ** 2).sum(-1)) / jnp.sqrt((u**2).sum(-1))).mean()


@program(
    lambda d: (
        (d.layers(40, 48, 32), d.layers(1, 48, 32)),
        d.normal(16, 40),
        d.uniform(30, 1),
        d.normal(16, 30),
    )
)
def deep_operator(params, sensors, places, values):
    """Branch and trunk of an operator network, joined by one product."""
    branch, trunk = params
    out = mlp(branch, sensors, jnp.tanh) @ jnp.tanh(mlp(trunk, places, jnp.tanh)).T
    return jnp.mean((out / jnp.sqrt(32.0) - values) ** 2)


@program(
    lambda d: (
        d.layers(16, 32, 32, 1),
        d.uniform(6, 3, low=0, high=4),
        d.normal(6, 3, scale=0.5),
        d.normal(1) - 76.4,
    ),
    aux=True,
)
def molecular_potential(params, places, forces, energy):
    """Energies in hartree near -76.4 and forces as their derivative."""
    centres = jnp.linspace(0.5, 5.0, 16)

    def total(places):
        off = places[:, None] - places[None]
        distance = jnp.sqrt((off**2).sum(-1) + jnp.eye(6))
        basis = jnp.exp(-4.0 * (distance[..., None] - centres) ** 2)
        cutoff = 0.5 * (jnp.cos(jnp.pi * jnp.clip(distance / 5.0, 0, 1)) + 1) * (1 - jnp.eye(6))
        pairs = mlp(params, basis, jax.nn.silu)[..., 0] * cutoff
        return -76.4 + 0.05 * pairs.sum()

    e, gradient = jax.value_and_grad(total)(places)
    loss = 100.0 * (e - energy[0]) ** 2 + jnp.mean((-gradient - forces) ** 2)
    return loss, {"energy": e, "forces": -gradient}


@program(
    lambda d: (
        [d.kernel(3, 2, 16), d.kernel(3, 16, 2)],
        d.normal(2, 16, 16, 2),
        d.normal(2, 16, 16, 2),
    ),
    aux=True,
)
def pressure_projection(params, velocity, target):
    """A network advances a velocity; conjugate gradients make it free of divergence."""
    v = velocity + 0.1 * conv(jax.nn.gelu(conv(velocity, params[0])), params[1])

    def divergence(v):
        return 0.5 * (
            jnp.roll(v[..., 0], -1, 1)
            - jnp.roll(v[..., 0], 1, 1)
            + jnp.roll(v[..., 1], -1, 2)
            - jnp.roll(v[..., 1], 1, 2)
        )

    def laplacian(p):
        near = sum(jnp.roll(p, s, a) for s in (1, -1) for a in (1, 2))
        return 4.0 * p - near + 0.05 * p

    p, _ = jax.scipy.sparse.linalg.cg(laplacian, -divergence(v), maxiter=25)
    gradient = 0.5 * jnp.stack([jnp.roll(p, -1, a) - jnp.roll(p, 1, a) for a in (1, 2)], -1)
    v = v - gradient
    return jnp.mean((v - target) ** 2), {"pressure": p, "divergence": divergence(v)}


@program(lambda d: (d.layers(16, 32, 1), jnp.sign(d.normal(64, 16))), aux=True)
def ising_ground_state(params, spins):
    """Variational Monte Carlo: local energies by ratios of amplitudes after single flips."""

    def log_psi(s):
        (w, b), (v, c) = params
        return jnp.log(jnp.cosh(s @ w + b)).sum(-1) + 0.1 * (s @ w @ v)[..., 0] + c[0]

    flips = spins[:, None] * (1 - 2 * jnp.eye(16))
    ratio = jnp.exp(log_psi(flips) - log_psi(spins)[:, None])
    energy = -(spins * jnp.roll(spins, 1, 1)).sum(-1) - 1.0 * ratio.sum(-1)
    centred = lax.stop_gradient(energy - energy.mean())
    loss = 2 * (centred * log_psi(spins)).mean()
    return loss, {"energy": energy.mean() / 16, "variance": energy.var()}


@program(
    lambda d: (
        [d.kernel(3, 2, 12), d.kernel(3, 12, 1)],
        d.uniform(4, 8, 8, 2, low=-3.1, high=3.1),
        d.normal(1) + 2,
    ),
    aux=True,
)
def lattice_gauge(params, links, beta):
    """Angles on a lattice: plaquettes, an update by a network of their sines and cosines."""

    def plaquette(links):
        a, b = links[..., 0], links[..., 1]
        p = a + jnp.roll(b, -1, 1) - jnp.roll(a, -1, 2) - b
        return jnp.mod(p + jnp.pi, 2 * jnp.pi) - jnp.pi

    p = plaquette(links)
    h = jnp.tanh(conv(jnp.stack([jnp.sin(p), jnp.cos(p)], -1), params[0]))
    links = links.at[..., 0].add(0.3 * jnp.tanh(conv(h, params[1]))[..., 0])
    p = plaquette(links)
    action = -beta[0] * jnp.cos(p).sum((1, 2))
    return action.mean() / 64, {"action": action, "charge": p.sum((1, 2)) / (2 * jnp.pi)}


@program(
    lambda d: (
        d.layers(15, 32, 1),
        d.normal(4, 32, scale=20) + 10000,
        d.normal(4, 32, scale=3),
        d.normal(4, 32, scale=20) + 10000,
    ),
    aux=True,
)
def shallow_water(params, height, speed, target):
    """Heights near 10,000 m and speeds, differences in space, with a learned stress."""
    dx, dt = 1e5, 60.0

    def step(state, _):
        h, u = state
        near = [jnp.roll(h - 10000.0, s, 1) / 20.0 for s in range(-2, 3)]
        near += [jnp.roll(u, s, 1) / 3.0 for s in range(-2, 3)] + [
            jnp.roll(u**2, s, 1) / 9.0 for s in range(-2, 3)
        ]
        stress = 1e-3 * mlp(params, jnp.stack(near, -1), jnp.tanh)[..., 0]
        dh = (jnp.roll(h * u, -1, 1) - jnp.roll(h * u, 1, 1)) / (2 * dx)
        du = 9.81 * (jnp.roll(h, -1, 1) - jnp.roll(h, 1, 1)) / (2 * dx)
        return (h - dt * dh, u - dt * du - dt * stress), None

    (h, u), _ = lax.scan(step, (height, speed), None, length=6)
    return jnp.mean(((h - target) / 20.0) ** 2), {"anomaly": h - 10000.0, "u": u}


@program(
    lambda d: (
        {
            "node": d.layers(8, 32, 32),
            "edge": d.layers(67, 32, 32),
            "update": d.layers(64, 32, 32),
            "out": d.layers(32, 2),
        },
        d.uniform(5, 30, 2, low=0.0, high=0.8),
        d.integers(30, 90),
        d.integers(30, 90),
        d.uniform(30, 2, high=0.8),
    ),
    aux=True,
)
def particle_simulator(params, history, senders, receivers, following):
    """A graph network simulator: accelerations normalized, places integrated."""
    mean, std = 1e-4, 2e-3
    v = jnp.diff(history, axis=0)
    now = history[-1]
    h = mlp(params["node"], ((v - mean) / std / 100).transpose(1, 0, 2).reshape(30, 8))
    off = (now[senders] - now[receivers]) / 0.05
    distance = jnp.sqrt((off**2).sum(-1, keepdims=True) + 1e-8)
    for _ in range(2):
        e = mlp(params["edge"], jnp.concatenate([h[senders], h[receivers], off, distance], -1))
        total = jax.ops.segment_sum(e, receivers, 30)
        h = h + layer_norm(mlp(params["update"], jnp.concatenate([h, total], -1)))
    acceleration = mlp(params["out"], h)
    place = now + v[-1] + std * acceleration
    wanted = (following - 2 * now + history[-2]) / std / 100
    return jnp.mean((acceleration - wanted) ** 2), {"place": place, "step": place - now}


@program(
    lambda d: (
        {
            "h": d.layers(4, 32, 32),
            "orbital": d.weight(32, 4),
            "decay": d.uniform(4, low=0.5, high=1.5),
        },
        d.normal(16, 4, 3),
    ),
    aux=True,
)
def electron_determinant(params, electrons):
    """A determinant of network orbitals; the kinetic energy from its log."""

    def log_psi(flat):
        r = flat.reshape(4, 3)
        radius = jnp.sqrt((r**2).sum(-1, keepdims=True) + 1e-6)
        h = mlp(params["h"], jnp.concatenate([r, radius], -1), jnp.tanh)
        orbitals = h @ params["orbital"] * jnp.exp(-params["decay"] * radius)
        return jnp.linalg.slogdet(orbitals + 0.5 * jnp.eye(4))[1]

    def local(flat):
        g = jax.grad(log_psi)(flat)
        potential = -4.0 / jnp.sqrt((flat.reshape(4, 3) ** 2).sum(-1) + 0.1)
        return 0.5 * (g**2).sum() + potential.sum()

    energy = jax.vmap(local)(electrons.reshape(16, 12))
    return jnp.median(energy), {"energy": energy}


@program(
    lambda d: (
        [d.kernel(3, 4, 16), d.kernel(3, 16, 16), d.kernel(3, 16, 3)],
        d.normal(2, 16, 16, 2, scale=0.3) + jnp.array([10.0, 0.0], "f"),
        d.normal(2, 16, 16, 3, scale=0.01),
    ),
    aux=True,
)
def eddy_closure(params, velocity, stress):
    """Gradients of a mean flow of 10 m/s by differences give a network its inputs."""
    dx = 0.1
    gradient = jnp.concatenate(
        [(jnp.roll(velocity, -1, a) - jnp.roll(velocity, 1, a)) / (2 * dx) for a in (1, 2)], -1
    )
    size = jnp.sqrt((gradient**2).sum(-1, keepdims=True) + 1e-6)
    h = jax.nn.relu(conv(gradient / size, params[0]))
    h = h + jax.nn.relu(conv(h, params[1]))
    tau = 1e-3 * size**2 * conv(h, params[2])
    work = (tau[..., :2] * gradient[..., :2]).sum(-1)
    return jnp.mean((tau - stress) ** 2) / 1e-4, {"tau": tau, "work": work}


@program(
    lambda d: (
        (d.weight(24, 24) * 0.5, d.weight(12, 24), d.layers(24, 6)),
        d.normal(16, 12),
        d.normal(16, 6),
    )
)
def equilibrium_model(params, x, y):
    """A fixed point by iteration, differentiated through its last steps."""
    w, u, head = params
    f = lambda z: jnp.tanh(z @ w + x @ u)
    z = lax.stop_gradient(lax.fori_loop(0, 30, lambda _, z: f(z), jnp.zeros((16, 24))))
    for _ in range(3):
        z = f(z)
    return jnp.mean((mlp(head, z) - y) ** 2)
