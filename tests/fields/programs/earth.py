"""Earth: climate, water, earthquakes, stations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.fields.layers import conv, lstm, mlp
from tests.fields.registry import program


@program(
    lambda d: (
        [d.kernel(3, 5, 24), d.kernel(3, 24, 1)],
        d.normal(2, 16, 16, 5),
        jnp.exp(d.normal(2, 16, 16, scale=2)),
    ),
    aux=True,
)
def precipitation(params, predictors, rain):
    """Rain in millimetres as its log plus one; occurrence and totals."""
    h = jax.nn.gelu(conv(predictors, params[0]))
    out = jax.nn.softplus(conv(h, params[1]))[..., 0]
    mm = jnp.expm1(out)
    loss = jnp.mean((out - jnp.log1p(rain)) ** 2)
    return loss, {"mm": mm, "total": mm.sum((1, 2)), "bias": mm.mean() - rain.mean()}


@program(
    lambda d: (
        (d.layers(8, 32, 8), d.weight(60, 8)),
        d.normal(20, 60, scale=1.5) + 290,
        d.normal(20, 60, scale=1.5) + 290,
    ),
    aux=True,
)
def sea_surface(params, kelvin, following):
    """Anomalies from a climatology are projected on patterns, advanced and put back."""
    net, patterns = params
    climatology = kelvin.mean(0)
    scores = (kelvin - climatology) @ patterns
    scores = scores + 0.3 * mlp(net, scores, jnp.tanh)
    forecast = climatology + scores @ patterns.T
    nino = forecast[:, :10].mean(-1) - climatology[:10].mean()
    return jnp.mean((forecast - following) ** 2), {"forecast": forecast, "nino": nino}


@program(
    lambda d: (
        ((d.weight(4, 64), d.weight(16, 64), d.normal(64, scale=0.1)), d.layers(16, 3)),
        d.uniform(40, 6, 3, high=20),
        d.uniform(40, 6, low=0.1, high=30),
    ),
    aux=True,
)
def catchment(params, forcing, discharge):
    """A bucket of water in millimetres whose rates an LSTM gives; Nash and Sutcliffe."""
    cell, head = params

    def step(carry, x):
        store, state = carry
        state = lstm(cell, state, jnp.concatenate([x / 10.0, jnp.log(store)[:, None] / 5.0], -1))
        k, e, f = jax.nn.sigmoid(mlp(head, state[0]) - 3.0).T
        out = k * store + f * jnp.maximum(store - 200.0, 0.0)
        store = jnp.maximum(store + x[:, 0] - e * x[:, 1] - out, 1e-3)
        return (store, state), (out, store)

    zero = jnp.zeros((6, 16))
    _, (q, store) = lax.scan(step, (jnp.full(6, 150.0), (zero, zero)), forcing)
    nse = 1 - ((q - discharge) ** 2).sum(0) / ((discharge - discharge.mean(0)) ** 2).sum(0)
    balance = store[-1] - 150.0
    return -nse.mean(), {"q": q, "store": store, "balance": balance}


@program(
    lambda d: (
        d.layers(6, 48, 48, 1),
        d.uniform(48, 3, low=0, high=2e4),
        d.uniform(48, 3, low=0, high=2e4),
        d.uniform(48, low=0.5, high=6),
    ),
    aux=True,
)
def travel_times(params, source, receiver, seconds):
    """Seismic travel times: distance in metres over a factored speed; picks in seconds."""
    off = receiver - source
    distance = jnp.sqrt((off**2).sum(-1) + 1.0)
    x = jnp.concatenate([(source - 1e4) / 1e4, (receiver - 1e4) / 1e4], -1)
    slowness = (1 / 5000.0) * jnp.exp(0.2 * jnp.tanh(mlp(params, x, jax.nn.elu)))[:, 0]
    t = distance * slowness
    residual = t - seconds
    return jnp.abs(residual).mean(), {"t": t, "residual": residual}


@program(
    lambda d: (
        d.layers(10, 32, 10),
        d.normal(40, 10, scale=5) + 280,
        d.normal(6, scale=1) + 280,
        d.normal(40, 6),
    ),
    forward=True,
)
def ensemble_filter(params, ensemble, observed, noise):
    """An ensemble Kalman filter: forecasts of a network, covariances of anomalies in kelvin."""
    forecast = ensemble + 0.5 * mlp(params, (ensemble - 280.0) / 5.0, jnp.tanh)
    anomaly = forecast - forecast.mean(0)
    covariance = anomaly.T @ anomaly / 39
    h = jnp.eye(6, 10)
    gain = jnp.linalg.solve(h @ covariance @ h.T + jnp.eye(6), h @ covariance).T
    innovation = observed + noise - forecast @ h.T
    analysis = forecast + innovation @ gain.T
    return analysis, analysis.mean(0) - 280.0, analysis.std(0)


@program(
    lambda d: (
        d.layers(4, 32, 4),
        d.uniform(30, 2, low=0.7, high=0.9),
        d.normal(30, 2, scale=5) + 283,
        d.uniform(10, 2, low=0.7, high=0.9),
        d.normal(10, scale=5) + 283,
    )
)
def station_kriging(params, place, values, targets, truth):
    """Stations at latitudes and longitudes: haversine distances, kriging of learned features."""

    def haversine(a, b):
        dlat, dlon = a[:, None, 0] - b[None, :, 0], a[:, None, 1] - b[None, :, 1]
        s = (
            jnp.sin(dlat / 2) ** 2
            + jnp.cos(a[:, None, 0]) * jnp.cos(b[None, :, 0]) * jnp.sin(dlon / 2) ** 2
        )
        return 2 * 6371.0 * jnp.arcsin(jnp.sqrt(s + 1e-9))

    x = jnp.concatenate([(place - 0.8) * 10, (values - 283.0) / 5.0], -1)
    correction = mlp(params, x, jnp.tanh)[:, 0]
    k = jnp.exp(-haversine(place, place) / 300.0) + 0.1 * jnp.eye(30)
    mean = values[:, 0].mean()
    w = jnp.linalg.solve(k, values[:, 0] + correction - mean)
    predicted = mean + jnp.exp(-haversine(targets, place) / 300.0) @ w
    return jnp.mean((predicted - truth) ** 2) / 25.0


@program(
    lambda d: (
        d.layers(3, 24, 2),
        d.uniform(20, 12, low=0.1, high=0.9),
        d.times(20, 12, start=19700.0, step=16.0),
        d.uniform(20, 12, low=0.1, high=0.9),
    ),
    aux=True,
)
def vegetation_phenology(params, ndvi, days, target):
    """Days since 1970 as an angle of the year; a phase and an amplitude for each pixel."""
    year = 2 * jnp.pi * days / 365.25
    x = jnp.stack([ndvi.mean(1), ndvi.std(1), ndvi[:, 0]], -1)
    amplitude, phase = mlp(params, x, jnp.tanh).T
    curve = ndvi.mean(1, keepdims=True) + 0.2 * amplitude[:, None] * jnp.cos(year - phase[:, None])
    return jnp.mean((curve - target) ** 2), {
        "curve": curve,
        "peak": jnp.mod(phase, 2 * jnp.pi) * 58.1,
    }


@program(
    lambda d: (
        d.layers(40, 64, 40),
        d.normal(12, 20, scale=15) + 260,
        jnp.exp(d.uniform(12, 20, low=-12, high=-4)),
        d.normal(12, 20, scale=2),
    ),
    aux=True,
)
def radiative_heating(params, kelvin, humidity, heating):
    """Columns of temperature and log humidity to fluxes in W/m²; heating is their difference."""
    x = jnp.concatenate([(kelvin - 260.0) / 15.0, (jnp.log(humidity) + 8.0) / 2.5], -1)
    up, down = jnp.split(mlp(params, x, jax.nn.elu), 2, -1)
    surface = 5.67e-8 * kelvin[:, -1:] ** 4
    up, down = surface * (1 - 0.3 * jax.nn.sigmoid(up)), 0.8 * surface * jax.nn.sigmoid(down)
    net = up - down
    rate = -jnp.diff(net, axis=1, prepend=net[:, :1]) * 9.81 / (1004.0 * 5000.0) * 86400.0
    return jnp.mean((rate - heating) ** 2), {"rate": rate, "net": net}
