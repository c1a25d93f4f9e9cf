"""Forecasts of weather, loads, prices and levels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.fields.layers import attend, causal, conv1d, gru, layer_norm, lstm, mlp
from tests.fields.registry import program


@program(
    lambda d: (
        d.layers(24, 64, 24),
        d.normal(8, 24, scale=12) + 288,
        d.normal(4, 8, 24, scale=12) + 288,
        d.uniform(24, low=0.2),
    ),
    aux=True,
)
def weather_rollout(params, state, targets, area):
    """Four steps of a residual network over temperatures in kelvin, weighted by area."""
    mean, std = 288.0, 12.0

    def step(state, target):
        x = (state - mean) / std
        state = state + std * 0.1 * mlp(params, x, jax.nn.gelu)
        return state, (area * (state - target) ** 2).mean() / std**2

    last, losses = lax.scan(step, state, targets)
    return losses.mean(), {"state": last, "losses": losses, "rmse": jnp.sqrt(losses * std**2)}


@program(
    lambda d: (
        d.layers(48, 64, 12),
        d.normal(16, 48, scale=300) + 42000,
        d.normal(16, 12, scale=300) + 42000,
    ),
    aux=True,
)
def reversible_instance_norm(params, history, future):
    """Prices near 42,000: each window normalized, forecast and brought back."""
    mean = history.mean(1, keepdims=True)
    std = jnp.sqrt(history.var(1, keepdims=True) + 1e-5)
    out = mlp(params, (history - mean) / std)
    forecast = out * std + mean
    return jnp.mean(((forecast - future) / std) ** 2), {
        "forecast": forecast,
        "return": forecast / history[:, -1:] - 1,
    }


@program(
    lambda d: (
        [(d.layers(40, 64, 52), d.normal(1)) for _ in range(3)],
        d.normal(16, 40, scale=4) + 60,
        d.normal(16, 12, scale=4) + 60,
    )
)
def nbeats(params, x, target):
    """Doubly residual stacks: each explains a part of what is left."""
    forecast, rest = jnp.zeros_like(target), x
    for layers, gain in params:
        both = mlp(layers, rest / 60.0) * 10.0
        rest = rest - both[:, :40]
        forecast = forecast + both[:, 40:] * (1 + 0.1 * gain)
    smape = jnp.abs(forecast - target) / (jnp.abs(forecast) + jnp.abs(target))
    return 200 * smape.mean()


@program(
    lambda d: (
        ((d.weight(3, 128), d.weight(32, 128), d.normal(128, scale=0.1)), d.layers(32, 2)),
        d.uniform(12, 8, low=50, high=4000),
        d.normal(12, 8, 2),
    ),
    aux=True,
)
def deepar(params, series, covariates):
    """An LSTM that gives mean and deviation of the next value, scaled by the series' mean."""
    cell, head = params
    scale = 1 + series.mean(0)
    z = series / scale

    def step(state, inputs):
        previous, cov = inputs
        state = lstm(cell, state, jnp.concatenate([previous[:, None], cov], -1))
        return state, mlp(head, state[0])

    zero = jnp.zeros((8, 32))
    _, out = lax.scan(step, (zero, zero), (z[:-1], covariates[1:]))
    mu, sigma = out[..., 0] * scale, jax.nn.softplus(out[..., 1]) * scale
    logp = -0.5 * ((series[1:] - mu) / sigma) ** 2 - jnp.log(sigma) - 0.5 * jnp.log(2 * jnp.pi)
    return -logp.mean(), (mu, sigma)


@program(
    lambda d: (
        {"alpha": d.normal(1), "gamma": d.normal(1), "net": d.layers(12, 32, 1)},
        d.uniform(36, 6, low=900, high=1400),
    )
)
def exponential_smoothing_network(params, series):
    """Holt-Winters levels and seasons, with a network for what they leave."""
    alpha, gamma = jax.nn.sigmoid(params["alpha"]), jax.nn.sigmoid(params["gamma"])
    level, seasons = series[:12].mean(0), list(series[:12] / series[:12].mean(0))
    window, loss = list(series[:12] / level / jnp.stack(seasons)), 0.0
    for t in range(12, 30):
        features = jnp.log(jnp.stack(window[-12:], -1))
        predicted = level * seasons[t % 12] * jnp.exp(0.1 * mlp(params["net"], features)[:, 0])
        loss = loss + jnp.mean(jnp.abs(jnp.log(predicted) - jnp.log(series[t])))
        new = alpha * series[t] / seasons[t % 12] + (1 - alpha) * level
        seasons[t % 12] = gamma * series[t] / new + (1 - gamma) * seasons[t % 12]
        level = new
        window.append(series[t] / level / seasons[t % 12])
    return loss / 18


@program(
    lambda d: (
        (d.normal(16), d.normal(16), d.weight(17, 32), d.weight(32, 96), d.layers(32, 64, 1)),
        d.normal(4, 24),
        d.times(4, 24, start=480000.0),
    )
)
def time2vec_transformer(params, values, hours):
    """Hours since 1970, as a line and waves of learned frequencies, before attention."""
    freq, phase, embed, qkv, head = params
    t = hours - hours[:, :1]
    waves = jnp.sin(t[..., None] * (2 * jnp.pi / 24) * jnp.exp(0.1 * freq) + phase)
    x = jnp.concatenate([values[..., None], waves], -1) @ embed
    q, k, v = jnp.split(layer_norm(x) @ qkv, 3, -1)
    x = x + attend(q, k, v, causal(24))
    return jnp.mean((mlp(head, layer_norm(x))[:, :-1, 0] - values[:, 1:]) ** 2)


@program(
    lambda d: (
        (d.layers(20, 48, 48), d.layers(48, 96), d.layers(48, 36)),
        d.normal(16, 20),
        d.normal(16, 12, scale=80) + 500,
    ),
    aux=True,
)
def quantile_forecast(params, x, y):
    """Gated residual network with three quantiles and the pinball loss, megawatts."""
    first, gate, head = params
    h = mlp(first, x, jax.nn.elu)
    a, b = jnp.split(mlp(gate, h), 2, -1)
    h = layer_norm(h + a * jax.nn.sigmoid(b))
    q = 500 + 80 * mlp(head, h).reshape(16, 12, 3)
    levels = jnp.array([0.1, 0.5, 0.9])
    diff = y[..., None] - q
    loss = jnp.maximum(levels * diff, (levels - 1) * diff).mean()
    return loss, {"quantiles": q, "coverage": ((y > q[..., 0]) & (y < q[..., 2])).mean()}


@program(
    lambda d: (
        d.layers(6, 32, 32, 1),
        d.uniform(32, 1, low=412.0, high=413.0),
        d.normal(32, 5),
        d.uniform(32, low=412.0, high=413.0),
    ),
    aux=True,
)
def river_level(params, level, rain, target):
    """Tomorrow's level of a river, metres above the sea: today's plus a network."""
    x = jnp.concatenate([level - 412.5, rain], -1)
    predicted = level[:, 0] + 0.05 * mlp(params, x, jnp.tanh)[:, 0]
    error = predicted - target
    nse = 1 - (error**2).sum() / ((target - target.mean()) ** 2).sum()
    return jnp.mean(error**2), {
        "predicted": predicted,
        "nse": nse,
        "change": predicted - level[:, 0],
    }


@program(
    lambda d: (
        [(d.normal(3, 16, 16, scale=0.15), d.uniform(16, low=0.5)) for _ in range(4)],
        d.normal(4, 64, 16),
        d.normal(4, 16),
    )
)
def dilated_convolutions(params, x, y):
    """A temporal convolution network with weight norm."""
    for i, (v, g) in enumerate(params):
        w = g * v / jnp.sqrt((v**2).sum((0, 1)))
        h = conv1d(x, w, dilation=2**i, padding="CAUSAL")
        x = jax.nn.relu(x + jax.nn.relu(h))
    return jnp.mean((x[:, -1] - y) ** 2)


@program(
    lambda d: (
        {
            "enc": d.layers(11, 32, 32),
            "edge": d.layers(67, 32, 32),
            "node": d.layers(64, 32, 32),
            "dec": d.layers(32, 8),
        },
        d.normal(40, 8, scale=900) + 54000,
        d.uniform(40, 2, low=-1.5, high=1.5),
        d.integers(40, 120),
        d.integers(40, 120),
        d.normal(40, 8, scale=900) + 54000,
    ),
    aux=True,
)
def graph_weather(params, geopotential, latlon, senders, receivers, target):
    """Geopotential near 54,000 m²/s² on a mesh: encode, pass messages, decode an increment."""
    lat, lon = latlon[:, 0], latlon[:, 1]
    place = jnp.stack([jnp.cos(lat) * jnp.cos(lon), jnp.cos(lat) * jnp.sin(lon), jnp.sin(lat)], -1)
    h = mlp(params["enc"], jnp.concatenate([(geopotential - 54000.0) / 900.0, place], -1))
    for _ in range(2):
        ends = [h[senders], h[receivers], place[senders] - place[receivers]]
        messages = mlp(params["edge"], jnp.concatenate(ends, -1), jax.nn.silu)
        mean = jax.ops.segment_sum(messages, receivers, 40) / 3.0
        h = h + mlp(params["node"], jnp.concatenate([h, mean], -1), jax.nn.silu)
    new = geopotential + 90.0 * mlp(params["dec"], layer_norm(h))
    weight = jnp.cos(lat)[:, None]
    return (weight * ((new - target) / 900.0) ** 2).mean(), new


@program(
    lambda d: (
        (d.layers(16, 64, 16), d.layers(16, 64, 16)),
        d.normal(8, 16, scale=800) + 101325,
        d.normal(8, 16, scale=40),
    ),
    aux=True,
)
def pressure_tendency(params, pressure, observed):
    """Surface pressure in pascal, two half steps; the tendency is compared, Pa per hour."""
    p = pressure
    for layers in params:
        p = p + 20.0 * jnp.tanh(mlp(layers, (p - 101325.0) / 800.0))
    tendency = (p - pressure) / 1.0
    return jnp.mean((tendency - observed) ** 2) / 1600.0, {"pressure": p, "tendency": tendency}


@program(
    lambda d: (
        ((d.weight(4, 96), d.weight(32, 96), d.normal(96, scale=0.1)), d.layers(33, 1)),
        d.normal(16, 8, 3),
        d.uniform(8, low=5.2e4, high=5.4e4),
        d.normal(6, 8, scale=200) + 53000,
    ),
    aux=True,
)
def load_decoder(params, context, last, target):
    """A GRU reads a context and decodes grid loads in megawatts, each step from the last one."""
    cell, head = params
    h = jnp.zeros((8, 32))
    h, _ = lax.scan(lambda h, x: (gru(cell, h, jnp.pad(x, ((0, 0), (0, 1)))), None), h, context)
    load, loads = last, []
    for _ in range(6):
        x = (load - 53000.0) / 500.0
        h = gru(cell, h, jnp.stack([x, x**2 / 10, jnp.tanh(x), jnp.ones_like(x)], -1))
        load = load + 300.0 * mlp(head, jnp.concatenate([h, x[:, None]], -1))[:, 0]
        loads.append(load)
    loads = jnp.stack(loads)
    return jnp.mean(jnp.abs(loads - target) / target), {
        "loads": loads,
        "ramp": jnp.diff(loads, axis=0),
    }
