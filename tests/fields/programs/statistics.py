"""Statistics: likelihoods, posteriors, kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.special import gammaln

from tests.fields.layers import mlp
from tests.fields.registry import program


@program(
    lambda d: (
        {"net": d.layers(6, 32, 4), "scale": d.normal(1), "noise": d.normal(1) - 1},
        d.normal(40, 6),
        d.normal(40, scale=15) + 120,
    ),
    aux=True,
)
def deep_kernel_process(params, x, y):
    """A Gaussian process on learned features; the marginal likelihood by Cholesky."""
    z = mlp(params["net"], x, jnp.tanh)
    d2 = ((z[:, None] - z[None]) ** 2).sum(-1)
    k = jnp.exp(params["scale"]) * jnp.exp(-0.5 * d2) + (jnp.exp(params["noise"]) + 1e-3) * jnp.eye(
        40
    )
    chol = jnp.linalg.cholesky(k)
    r = (y - y.mean()) / y.std()
    alpha = jax.scipy.linalg.cho_solve((chol, True), r)
    mll = -0.5 * r @ alpha - jnp.log(jnp.diag(chol)).sum() - 20 * jnp.log(2 * jnp.pi)
    mean = y.mean() + y.std() * (k @ alpha - (jnp.exp(params["noise"]) + 1e-3) * alpha)
    return -mll / 40, {"mean": mean, "mll": mll}


@program(
    lambda d: (
        [
            (d.weight(8, 32), d.normal(8, 32, scale=0.1) - 4),
            (d.weight(32, 1), d.normal(32, 1, scale=0.1) - 4),
        ],
        [d.normal(8, 32), d.normal(32, 1)],
        d.normal(64, 8),
        d.normal(64),
    ),
    aux=True,
)
def bayesian_network(params, noise, x, y):
    """Weights with means and deviations, reparametrized; the evidence bound."""
    h, kl = x, 0.0
    for i, ((mu, rho), eps) in enumerate(zip(params, noise, strict=True)):
        sigma = jax.nn.softplus(rho)
        h = h @ (mu + sigma * eps)
        h = jnp.tanh(h) if i == 0 else h
        kl += (0.5 * (sigma**2 + mu**2) - 0.5 - jnp.log(sigma)).sum()
    likelihood = -0.5 * ((h[:, 0] - y) / 0.3) ** 2 - jnp.log(0.3)
    elbo = likelihood.mean() - kl / 1000.0
    return -elbo, {"kl": kl, "predicted": h[:, 0]}


@program(
    lambda d: (
        {
            "net": d.layers(10, 32, 3),
            "mean": d.normal(5, 3),
            "chol": d.normal(5, 3, 3, scale=0.3),
            "logits": d.normal(5),
        },
        d.normal(64, 10),
    ),
    aux=True,
)
def gaussian_mixture(params, x):
    """A mixture with full covariances on learned features: quadratic forms and logsumexp."""
    z = mlp(params["net"], x, jnp.tanh)
    lower = (
        jnp.tril(params["chol"], -1)
        + jnp.eye(3) * jnp.exp(jnp.diagonal(params["chol"], axis1=1, axis2=2))[..., None]
    )
    off = z[:, None] - params["mean"]
    white = jnp.einsum("kij,nkj->nki", lower, off)
    logdet = jnp.log(jnp.diagonal(lower, axis1=1, axis2=2)).sum(-1)
    parts = jax.nn.log_softmax(params["logits"]) - 0.5 * (white**2).sum(-1) + logdet
    logp = jax.nn.logsumexp(parts, -1) - 1.5 * jnp.log(2 * jnp.pi)
    return -logp.mean(), {"responsibility": jax.nn.softmax(parts)}


@program(lambda d: (jnp.zeros(8, "f"), d.normal(200, 8), d.mask(200).astype("f")), forward=True)
def logistic_newton(w, x, y):
    """Logistic regression by Newton's steps: iteratively reweighted least squares."""
    for _ in range(6):
        p = jax.nn.sigmoid(x @ w)
        hessian = (x * (p * (1 - p))[:, None]).T @ x + 0.1 * jnp.eye(8)
        w = w - jnp.linalg.solve(hessian, x.T @ (p - y) + 0.1 * w)
    return w, jnp.linalg.inv(hessian)


@program(lambda d: ((d.weight(20, 4), d.normal(20, scale=0.3)), d.normal(100, 20)), aux=True)
def factor_analysis(params, x):
    """Low rank plus diagonal covariance, by the identities of Woodbury and Sylvester."""
    w, logpsi = params
    x = x - x.mean(0)
    psi = jnp.exp(logpsi)
    inner = jnp.eye(4) + (w / psi[:, None]).T @ w
    chol = jnp.linalg.cholesky(inner)
    projected = jax.scipy.linalg.solve_triangular(chol, w.T @ (x / psi).T, lower=True)
    quad = (x**2 / psi).sum(-1) - (projected**2).sum(0)
    logdet = logpsi.sum() + 2 * jnp.log(jnp.diag(chol)).sum()
    return 0.5 * (quad.mean() + logdet), {"quad": quad}


@program(lambda d: ((d.normal(6, 6), d.layers(5, 32, 6)), d.normal(40, 8, 5)), aux=True)
def hidden_markov(params, x):
    """A neural hidden Markov model: the forward algorithm in the log domain."""
    transition, net = params
    logt = jax.nn.log_softmax(transition, -1)
    emission = 3.0 * mlp(net, x, jnp.tanh) - 5.0

    def step(alpha, e):
        alpha = jax.nn.logsumexp(alpha[:, :, None] + logt, 1) + e
        return alpha, alpha

    last, alphas = lax.scan(step, emission[0] - jnp.log(6.0), emission[1:])
    logp = jax.nn.logsumexp(last, -1)
    return -logp.mean() / 40, {"logp": logp, "filtered": jax.nn.softmax(alphas, -1)}


@program(
    lambda d: (d.layers(12, 32, 1), d.normal(80, 12), d.uniform(80, high=3650.0), d.mask(80)),
    aux=True,
)
def cox_survival(params, x, days, observed):
    """A proportional hazard: partial likelihood by cumulative log sums in order of days."""
    order = jnp.argsort(-days)
    risk = mlp(params, x, jax.nn.selu)[:, 0][order]
    event = observed[order]
    at_risk = lax.cumlogsumexp(risk)
    loss = -jnp.where(event, risk - at_risk, 0.0).sum() / event.sum()
    return loss, {"hazard": jnp.exp(risk - risk.mean())}


@program(lambda d: (d.layers(10, 32, 8), d.normal(40, 10), d.normal(40, 10) + 0.3))
def kernel_two_sample(params, x, y):
    """The maximum mean discrepancy of learned features: a small difference of large means."""
    a, b = mlp(params, x, jnp.tanh), mlp(params, y, jnp.tanh)

    def kernel(a, b):
        d2 = (a**2).sum(-1)[:, None] + (b**2).sum(-1)[None] - 2 * a @ b.T
        return sum(jnp.exp(-d2 / (2 * s**2)) for s in (1.0, 2.0, 4.0)).mean()

    mmd = kernel(a, a) + kernel(b, b) - 2 * kernel(a, b)
    return -mmd


@program(
    lambda d: (
        (d.layers(6, 32, 1), d.normal(12, 1, scale=0.2)),
        d.normal(64, 6),
        d.integers(12, 64),
        d.uniform(64, low=2e4, high=4e6),
        d.integers(400, 64),
    ),
    aux=True,
)
def poisson_rates(params, x, region, population, deaths):
    """Counts of regions with their populations as exposure: log rates near -9."""
    net, effect = params
    log_rate = -9.0 + mlp(net, x)[:, 0] * 0.3 + effect[region, 0]
    log_mean = jnp.log(population) + log_rate
    logp = deaths * log_mean - jnp.exp(log_mean) - gammaln(deaths + 1.0)
    return -logp.mean() / 100.0, {"rate": 1e5 * jnp.exp(log_rate), "expected": jnp.exp(log_mean)}


@program(
    lambda d: (
        (d.layers(50, 48, 16), d.layers(8, 48, 50)),
        (d.uniform(32, 50) < 0.3).astype("f"),
        d.normal(10, 32, 8),
    ),
    aux=True,
)
def importance_weighted(params, x, eps):
    """Ten samples of an autoencoder's posterior; log weights of some minus forty."""
    encoder, decoder = params
    mu, logvar = jnp.split(mlp(encoder, x), 2, -1)
    z = mu + jnp.exp(0.5 * logvar) * eps
    logits = mlp(decoder, z)
    log_px = (x * logits - jax.nn.softplus(logits)).sum(-1)
    log_pz, log_qz = -0.5 * (z**2).sum(-1), -0.5 * (eps**2 + logvar).sum(-1)
    log_w = log_px + log_pz - log_qz
    bound = jax.nn.logsumexp(log_w, 0) - jnp.log(10.0)
    share = jax.nn.softmax(log_w, 0)
    return -bound.mean(), {"bound": bound, "effective": 1 / (share**2).sum(0)}


@program(lambda d: (d.layers(4, 32, 15), d.normal(64, 4), d.normal(64, scale=20) + 300), aux=True)
def mixture_density(params, x, y):
    """A network gives five normals; the target is near 300."""
    logits, mu, s = jnp.split(mlp(params, x, jnp.tanh), 3, -1)
    mu, sigma = 300.0 + 20.0 * mu, 20.0 * jnp.exp(0.5 * s)
    parts = jax.nn.log_softmax(logits) - 0.5 * ((y[:, None] - mu) / sigma) ** 2 - jnp.log(sigma)
    mean = (jax.nn.softmax(logits) * mu).sum(-1)
    return -jax.nn.logsumexp(parts, -1).mean(), {"mean": mean, "residual": y - mean}


@program(lambda d: (d.layers(6, 32, 3), d.normal(64, 6), d.normal(64) ** 3), aux=True)
def student_regression(params, x, y):
    """Heavy tails with learned degrees of freedom."""
    mu, log_scale, raw = mlp(params, x, jax.nn.gelu).T
    df, scale = 2.0 + jax.nn.softplus(raw), jnp.exp(0.3 * log_scale)
    z = (y - mu) / scale
    logp = gammaln((df + 1) / 2) - gammaln(df / 2) - 0.5 * jnp.log(df * jnp.pi) - jnp.log(scale)
    logp -= (df + 1) / 2 * jnp.log1p(z**2 / df)
    return -logp.mean(), {"df": df, "z": z}


@program(
    lambda d: (
        {
            "z": d.normal(12, 3),
            "mean": d.normal(12),
            "chol": d.normal(12, 12, scale=0.1),
            "net": d.layers(8, 32, 3),
        },
        d.normal(64, 8),
        d.normal(64),
    ),
    aux=True,
)
def sparse_process(params, x, y):
    """Twelve inducing points: a variational Gaussian process on learned features."""
    f = mlp(params["net"], x, jnp.tanh)
    kernel = lambda a, b: jnp.exp(-0.5 * ((a[:, None] - b[None]) ** 2).sum(-1))
    lower = jnp.linalg.cholesky(kernel(params["z"], params["z"]) + 1e-3 * jnp.eye(12))
    a = jax.scipy.linalg.solve_triangular(lower, kernel(params["z"], f), lower=True)
    s = jnp.tril(params["chol"]) + jnp.eye(12)
    mean = a.T @ params["mean"]
    variance = 1.0 - (a**2).sum(0) + ((s.T @ a) ** 2).sum(0)
    fit = -0.5 * ((y - mean) ** 2 + variance) / 0.1
    kl = (
        0.5 * ((s**2).sum() + (params["mean"] ** 2).sum() - 12)
        - jnp.log(jnp.abs(jnp.diag(s))).sum()
    )
    return -fit.mean() + kl / 64, {"mean": mean, "variance": variance}


@program(lambda d: (d.normal(50, 4), d.normal(50)), aux=True)
def recursive_least_squares(x, y):
    """A regression that forgets, one example at a time; the inverse is updated."""

    def step(state, example):
        inverse, w = state
        x, y = example
        gain = inverse @ x / (0.99 + x @ inverse @ x)
        w = w + gain * (y - w @ x)
        return ((inverse - jnp.outer(gain, x @ inverse)) / 0.99, w), w

    (inverse, w), trace = lax.scan(step, (100 * jnp.eye(4), jnp.zeros(4)), (x, y))
    return (w**2).sum(), {"inverse": inverse, "trace": trace}
