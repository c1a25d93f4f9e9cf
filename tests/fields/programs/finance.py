"""Finance: prices, hedges, risks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.stats import norm

from tests.fields.layers import attend, causal, conv1d, layer_norm, mlp, nll
from tests.fields.registry import program


@program(lambda d: (d.layers(3, 32, 32, 1), d.normal(128, 20, scale=0.01)), aux=True)
def deep_hedging(params, returns):
    """A network holds shares of a stock near 100; entropic risk of a call's hedge."""
    price = 100.0 * jnp.exp(jnp.cumsum(returns, 1))
    price = jnp.concatenate([jnp.full((128, 1), 100.0), price], 1)
    hold, wealth = jnp.zeros(128), jnp.zeros(128)
    for t in range(20):
        x = jnp.stack([jnp.log(price[:, t] / 100.0) * 10, jnp.full(128, (20 - t) / 20), hold], -1)
        new = jax.nn.sigmoid(mlp(params, x))[:, 0]
        wealth = wealth - 1e-3 * price[:, t] * jnp.abs(new - hold)
        wealth = wealth + new * (price[:, t + 1] - price[:, t])
        hold = new
    pnl = wealth - jnp.maximum(price[:, -1] - 100.0, 0.0)
    risk = jax.nn.logsumexp(-pnl) - jnp.log(128.0)
    return risk, {"pnl": pnl, "shortfall": -jnp.sort(pnl)[:6].mean()}


@program(
    lambda d: (
        d.layers(3, 32, 1),
        d.uniform(64, low=80, high=120),
        d.uniform(64, low=0.1, high=2),
        d.uniform(64, low=2, high=25),
    ),
    aux=True,
)
def volatility_surface(params, strike, years, price):
    """Implied volatility by a network, Black and Scholes' prices of calls, and Vega."""
    k = jnp.log(strike / 100.0)
    sigma = (
        0.2
        + 0.1
        * jax.nn.softplus(mlp(params, jnp.stack([k * 5, years, jnp.sqrt(years)], -1), jnp.tanh))[
            :, 0
        ]
    )
    total = sigma * jnp.sqrt(years)
    d1 = -k / total + 0.5 * total
    call = 100.0 * norm.cdf(d1) - strike * norm.cdf(d1 - total)
    vega = 100.0 * norm.pdf(d1) * jnp.sqrt(years)
    return jnp.mean(((call - price) / vega) ** 2), {"sigma": sigma, "call": call}


@program(
    lambda d: (
        (d.layers(3, 32, 2), d.normal(1)),
        d.normal(24, 256, 2),
        d.uniform(8, low=2, high=12),
    ),
    aux=True,
)
def neural_stochastic_volatility(params, noise, quotes):
    """Log prices and variances simulated with networks; options over strikes are matched."""
    net, rho = params
    rho, dt = jnp.tanh(rho), 1 / 24

    def step(carry, z):
        logs, v, t = carry
        x = jnp.stack([logs * 5, v * 10, jnp.broadcast_to(t, (256,))], -1)
        a, b = mlp(net, x, jnp.tanh).T
        sv = jnp.sqrt(jnp.maximum(v, 1e-4))
        logs = logs - 0.5 * v * dt + sv * jnp.sqrt(dt) * z[:, 0]
        w = rho * z[:, 0] + jnp.sqrt(1 - rho**2) * z[:, 1]
        v = v + (0.3 * a + 2.0 * (0.04 - v)) * dt + 0.3 * jax.nn.sigmoid(b) * sv * jnp.sqrt(dt) * w
        return (logs, v, t + dt), None

    (logs, *_), _ = lax.scan(step, (jnp.zeros(256), jnp.full(256, 0.04), 0.0), noise)
    price = 100.0 * jnp.exp(logs)
    strikes = jnp.linspace(90.0, 110.0, 8)
    calls = jnp.maximum(price[:, None] - strikes, 0.0).mean(0)
    return jnp.mean((calls - quotes) ** 2), {"calls": calls, "martingale": price.mean() - 100.0}


@program(
    lambda d: (d.layers(60, 48, 12), d.normal(64, 60, scale=0.01), d.normal(64, 12, scale=0.01)),
    aux=True,
)
def portfolio(params, features, returns):
    """Softmax weights, costs of turnover, the annual Sharpe ratio of daily returns."""
    weights = jax.nn.softmax(mlp(params, features * 50.0))
    turnover = jnp.abs(jnp.diff(weights, axis=0)).sum(-1)
    daily = (weights * returns).sum(-1)[1:] - 5e-4 * turnover
    sharpe = jnp.sqrt(252.0) * daily.mean() / (daily.std() + 1e-8)
    wealth = jnp.cumprod(1 + daily)
    drawdown = (1 - wealth / lax.cummax(wealth)).max()
    return -sharpe, {"daily": daily, "drawdown": drawdown, "weights": weights}


@program(
    lambda d: (
        [d.kernel(3, 8, 24, 1), d.weight(24, 72), d.layers(24, 3)],
        d.normal(4, 40, 1, scale=30) + 42000,
        d.uniform(4, 40, 4, low=0.5, high=12),
        d.uniform(4, 40, 4, high=500),
        d.integers(3, 4),
    )
)
def limit_order_book(params, mid, spread, size, label):
    """Quotes around a mid price of 42,000: distances, log sizes, the price's moves."""
    ask, bid = mid + spread[..., :2], mid - spread[..., 2:]
    quotes = jnp.concatenate([ask, bid], -1)
    moves = (quotes - mid[:, :1]) / 30.0
    x = jnp.concatenate([moves, jnp.log1p(size) / 5.0], -1)
    h = jax.nn.relu(conv1d(x, params[0], padding="CAUSAL"))
    h = h + attend(*jnp.split(layer_norm(h) @ params[1], 3, -1), causal(40))
    return nll(mlp(params[2], layer_norm(h)[:, -1]), label)


@program(lambda d: ((d.layers(2, 16, 1), d.normal(3)), d.normal(8, 200, scale=0.012)), aux=True)
def neural_garch(params, returns):
    """Variances of 1e-4 follow squared returns; a network sees both as logarithms."""
    net, raw = params
    omega, alpha, beta = (
        1e-6 * jnp.exp(raw[0]),
        0.1 * jax.nn.sigmoid(raw[1]),
        0.85 + 0.05 * jnp.tanh(raw[2]),
    )

    def step(v, r):
        x = jnp.stack([jnp.log(v) + 9.0, jnp.log(r**2 + 1e-8) + 9.0], -1)
        logp = -0.5 * (jnp.log(2 * jnp.pi * v) + r**2 / v)
        v = (omega + alpha * r**2 + beta * v) * jnp.exp(0.05 * jnp.tanh(mlp(net, x, jnp.tanh)))[
            :, 0
        ]
        return v, (logp, v)

    _, (logp, v) = lax.scan(step, returns.var(1), returns.T)
    return -logp.mean(), {"volatility": jnp.sqrt(252.0 * v)}


@program(
    lambda d: (d.layers(6, 24, 4), d.normal(40, 6), d.uniform(40, 10, low=0.01, high=0.05)),
    aux=True,
)
def yield_curve(params, macro, yields):
    """Level, slope and curvature of Nelson and Siegel, errors in basis points."""
    tau = jnp.array([0.25, 0.5, 1, 2, 3, 5, 7, 10, 20, 30.0])
    out = mlp(params, macro, jnp.tanh)
    x = tau / jnp.exp(0.5 + 0.2 * out[:, 3:])
    slope = (1 - jnp.exp(-x)) / x
    curve = 0.03 + 0.01 * (out[:, :1] + out[:, 1:2] * slope + out[:, 2:3] * (slope - jnp.exp(-x)))
    bp = 1e4 * (curve - yields)
    forward = jnp.diff(curve * tau, axis=1) / jnp.diff(tau)
    return jnp.sqrt(jnp.mean(bp**2)), {"bp": bp, "forward": forward}


@program(
    lambda d: (
        (d.layers(12, 48, 24), d.normal(30, 8, scale=0.3)),
        jnp.exp(d.normal(64, 3, scale=3) + 6),
        d.integers(30, 64),
        d.uniform(64, low=1.69e9, high=1.7e9),
        d.integers(24, 64),
        d.mask(64),
    ),
    aux=True,
)
def default_hazards(params, amounts, region, opened, month, defaulted):
    """Monthly hazards from log amounts, a region and the account's age in time stamps."""
    net, embed = params
    age = (1.7e9 - opened) / 2.6e6
    x = jnp.concatenate([jnp.log1p(amounts) / 5.0, embed[region], age[:, None]], -1)
    logits = mlp(net, x) - 4.0
    alive = jnp.cumsum(-jax.nn.softplus(logits), -1)
    before = jnp.pad(alive, ((0, 0), (1, 0)))[:, :-1]
    at = lambda v: jnp.take_along_axis(v, month[:, None], 1)[:, 0]
    logp = jnp.where(defaulted, at(before) - jax.nn.softplus(-at(logits)), at(alive))
    return -logp.mean(), {"survival": jnp.exp(alive)}
