"""Energy and transport: grids, batteries, traffic, routes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.fields.layers import attend, gru, layer_norm, mlp
from tests.fields.registry import program


@program(
    lambda d: (
        d.layers(12, 64, 12),
        d.normal(16, 6, scale=0.3),
        d.normal(16, 6, scale=0.1),
        d.uniform(6, 6, low=0.5, high=2.0),
    ),
    aux=True,
)
def power_flow(params, active, reactive, admittance):
    """A warm start by a network, then Newton's steps on the equations of alternating current."""
    b = (admittance + admittance.T) / 2 * (1 - jnp.eye(6))
    b = b * 5
    susceptance = jnp.diag(b.sum(-1) + 0.5) - b
    out = mlp(params, jnp.concatenate([active, reactive], -1), jnp.tanh)
    state = jnp.concatenate([0.1 * out[:, :6], 1 + 0.05 * out[:, 6:]], -1)

    def mismatch(state, p, q):
        angle, volt = state[:6], state[6:]
        diff = angle[:, None] - angle[None]
        both = volt[:, None] * volt[None] * susceptance
        flow = -(both * jnp.sin(diff)).sum(-1) - p + 0.1 * angle
        react = (both * jnp.cos(diff)).sum(-1) - q + volt - 1
        return jnp.concatenate([flow, react])

    def newton(state):
        jacobian = jax.vmap(jax.jacfwd(mismatch))(state, active, reactive)
        residual = jax.vmap(mismatch)(state, active, reactive)
        damped = jacobian + 1e-2 * jnp.eye(12)
        return state - jnp.linalg.solve(damped, residual[..., None])[..., 0]

    for _ in range(2):
        state = newton(state)
    left = jax.vmap(mismatch)(state, active, reactive)
    loss = jnp.mean(left**2) + jnp.mean((state[:, 6:] - 1) ** 2)
    return loss, {"voltage": state[:, 6:], "angle": state[:, :6]}


@program(
    lambda d: (
        d.layers(3, 32, 2),
        d.uniform(16, low=0.4, high=0.9),
        d.normal(120, 16, scale=20.0),
        3.6 + d.normal(120, 16, scale=0.05),
    ),
    aux=True,
)
def battery(params, charge, current, voltage):
    """Charge counted in ampere-hours, an open-circuit table, and a network for the rest."""
    places = jnp.linspace(0.0, 1.0, 11)
    table = jnp.array([3.0, 3.35, 3.48, 3.56, 3.61, 3.65, 3.72, 3.81, 3.92, 4.04, 4.18])

    def second(state, xs):
        charge, relaxed = state
        amps, _ = xs
        charge = charge - amps * 10.0 / 3600.0 / 50.0
        relaxed = relaxed * jnp.exp(-10.0 / 35.0) + amps * (1 - jnp.exp(-10.0 / 35.0)) * 8e-4
        out = mlp(params, jnp.stack([charge, amps / 20.0, relaxed * 50], -1), jnp.tanh)
        open_circuit = jnp.interp(charge, places, table)
        volts = open_circuit - amps * 1.5e-3 * (1 + 0.2 * out[:, 0]) - relaxed + 0.01 * out[:, 1]
        return (charge, relaxed), (volts, charge)

    _, (volts, charges) = lax.scan(second, (charge, jnp.zeros(16)), (current, voltage))
    return jnp.mean(((volts - voltage) / 0.05) ** 2), {"volts": volts, "charge": charges}


@program(
    lambda d: (
        {
            "gate": d.layers(3 * 33, 64),
            "cell": d.layers(3 * 33, 32),
            "head": d.layers(32, 1),
        },
        55 + d.normal(12, 4, 20, 1, scale=8.0),
        d.uniform(20, 20),
        55 + d.normal(4, 20, scale=8.0),
    ),
    aux=True,
)
def traffic_diffusion(params, speed, distance, target):
    """Speeds in miles an hour on a graph of sensors, by a recurrent diffusion convolution."""
    near = jnp.exp(-((distance / 0.3) ** 2))
    near = jnp.where(near > 0.1, near, 0.0)
    forward = near / near.sum(-1, keepdims=True)
    backward = near.T / near.T.sum(-1, keepdims=True)
    mean, std = speed.mean(), speed.std()

    def spread(x):
        first = jnp.einsum("ij,bjc->bic", forward, x)
        return jnp.concatenate([x, first, jnp.einsum("ij,bjc->bic", backward, x)], -1)

    def step(h, x):
        both = spread(jnp.concatenate([(x - mean) / std, h], -1))
        r, u = jnp.split(jax.nn.sigmoid(mlp(params["gate"], both)), 2, -1)
        c = jnp.tanh(mlp(params["cell"], spread(jnp.concatenate([(x - mean) / std, r * h], -1))))
        return u * h + (1 - u) * c, None

    h, _ = lax.scan(step, jnp.zeros((4, 20, 32)), speed)
    predicted = mlp(params["head"], h)[..., 0] * std + mean
    error = jnp.abs(predicted - target)
    return error.mean(), {"speed": predicted, "mape": (error / target).mean() * 100}


@program(
    lambda d: (
        [d.layers(6, 64, 64, 2)],
        d.uniform(64, 2, low=40.6, high=40.9) * jnp.array([1.0, -1.82], "f"),
        d.uniform(64, 2, low=40.6, high=40.9) * jnp.array([1.0, -1.82], "f"),
        d.uniform(64, low=0.0, high=604800.0),
        d.uniform(64, low=200.0, high=3000.0),
    ),
    aux=True,
)
def arrival_times(params, start, end, clock, seconds):
    """Durations of rides from degrees of latitude and longitude and the second of the week."""
    lat1, lon1, lat2, lon2 = jnp.deg2rad(jnp.stack([*start.T, *end.T]))
    a = jnp.sin((lat2 - lat1) / 2) ** 2
    a = a + jnp.cos(lat1) * jnp.cos(lat2) * jnp.sin((lon2 - lon1) / 2) ** 2
    km = 6371.0 * 2 * jnp.arcsin(jnp.sqrt(a))
    bearing = jnp.arctan2(
        jnp.sin(lon2 - lon1) * jnp.cos(lat2),
        jnp.cos(lat1) * jnp.sin(lat2) - jnp.sin(lat1) * jnp.cos(lat2) * jnp.cos(lon2 - lon1),
    )
    day, week = 2 * jnp.pi * clock / 86400.0, 2 * jnp.pi * clock / 604800.0
    inputs = [jnp.log1p(km), jnp.sin(bearing), jnp.cos(day), jnp.sin(day), jnp.cos(week)]
    out = mlp(params[0], jnp.stack([*inputs, jnp.sin(week)], -1), jax.nn.relu)
    speed = 4.0 + 8.0 * jax.nn.sigmoid(out[:, 0])
    expected = km * 1000 / speed + 60 * jax.nn.softplus(out[:, 1])
    loss = jnp.mean(jnp.abs(jnp.log(expected) - jnp.log(seconds)))
    return loss, {"seconds": expected, "km": km}


@program(
    lambda d: (
        [d.layers(4, 32), d.weight(32, 96), d.layers(32, 64, 3)],
        d.uniform(8, 24, 4, low=0.0, high=25.0),
        d.uniform(8, 24, low=0.0, high=1.0),
    ),
    aux=True,
)
def wind_power(params, wind, produced):
    """Quantiles of a park's output from winds at several heights, cubed up to the rated power."""
    shear = jnp.log(wind[..., -1:] + 0.1) - jnp.log(wind[..., :1] + 0.1)
    hub = wind.mean(-1)
    density = 1.225 * (1 - 0.02 * jnp.tanh(shear[..., 0]))
    curve = jnp.clip(0.5 * density * 0.4 * hub**3 / 2000.0, 0.0, 1.0)
    curve = jnp.where((hub < 3) | (hub > 24), 0.0, curve)
    h = mlp(params[0], (wind - 10.0) / 5.0)
    q, k, v = jnp.split(layer_norm(h) @ params[1], 3, -1)
    h = h + attend(q, k, v)
    out = mlp(params[2], layer_norm(h), jax.nn.gelu)
    low = curve[..., None] + 0.1 * out[..., :1]
    steps = jnp.cumsum(0.05 * jax.nn.softplus(out[..., 1:]), -1)
    quantiles = jnp.concatenate([low, low + steps], -1)
    level = jnp.array([0.1, 0.5, 0.9])
    off = produced[..., None] - quantiles
    loss = jnp.maximum(level * off, (level - 1) * off).mean()
    return loss, {"quantiles": quantiles, "curve": curve}


@program(
    lambda d: (
        [(d.weight(32, 96), d.layers(32, 64, 32)) for _ in range(2)]
        + [(d.weight(2, 32), d.weight(64, 32))],
        d.uniform(6, 12, 2),
    ),
    aux=True,
)
def route_construction(params, places):
    """Attention picks the next of twelve places; the tour's length weighs its log likelihood."""
    h = places @ params[-1][0]
    for qkv, ff in params[:-1]:
        q, k, v = jnp.split(layer_norm(h) @ qkv, 3, -1)
        h = h + attend(q, k, v)
        h = h + mlp(ff, layer_norm(h))
    rows = jnp.arange(6)

    def step(state, _):
        seen, here, logp = state
        query = jnp.concatenate([h.mean(1), h[rows, here]], -1) @ params[-1][1]
        logits = 10 * jnp.tanh(jnp.einsum("bd,bnd->bn", query, h) / 32**0.5)
        logits = jnp.where(seen, -1e9, logits)
        following = logits.argmax(-1)
        chosen = jax.nn.log_softmax(logits)[rows, following]
        return (seen.at[rows, following].set(True), following, logp + chosen), following

    zero = jnp.zeros(6, jnp.int32)
    start = (jnp.zeros((6, 12), bool).at[:, 0].set(True), zero, jnp.zeros(6))
    (_, _, logp), tour = lax.scan(step, start, None, length=11)
    tour = jnp.concatenate([zero[None], tour]).T
    visited = places[rows[:, None], tour]
    length = jnp.linalg.norm(visited - jnp.roll(visited, 1, 1), axis=-1).sum(-1)
    weight = lax.stop_gradient(length - length.mean())
    return (weight * logp).mean(), {"length": length, "logp": logp}


@program(
    lambda d: (
        (
            (d.weight(3, 96), d.weight(32, 96), d.normal(96, scale=0.1)),
            d.layers(32, 1),
        ),
        19.5 + d.normal(10, scale=0.5),
        d.normal(48, 10, scale=4.0) + 2.0,
        d.uniform(48, 10, low=0.05, high=0.4),
    ),
    aux=True,
)
def building_heating(params, inside, outside, price):
    """A learned controller heats rooms near 20 degrees; cost and discomfort over two days."""

    def hour(state, xs):
        h, room, wall = state
        out, cost = xs
        inputs = jnp.stack([(room - 20.0) / 2, out / 10, cost * 5], -1)
        h = gru(params[0], h, inputs)
        power = 8.0 * jax.nn.sigmoid(mlp(params[1], h)[:, 0])
        change = 0.3 * (wall - room) + 0.05 * (out - room) + 0.2 * power
        wall = wall + 0.04 * (room - wall) + 0.02 * (out - wall)
        room = room + 0.5 * change
        cold = jax.nn.relu(20.0 - room) ** 2
        return (h, room, wall), (cost * power + cold, room)

    start = (jnp.zeros((10, 32)), inside, inside - 2.0)
    _, (cost, rooms) = lax.scan(hour, start, (outside, price))
    return cost.mean(), {"rooms": rooms}
