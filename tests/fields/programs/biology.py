"""Biology and medicine."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.special import gammaln

from tests.fields.layers import attend, conv1d, layer_norm, mlp, nll
from tests.fields.registry import program


@program(
    lambda d: (
        [d.kernel(9, 4, 32, 1), d.weight(32, 96), d.layers(32, 64, 5)],
        d.integers(4, 3, 128),
        d.integers(400, 3, 16, 5),
    ),
    aux=True,
)
def sequence_to_coverage(params, bases, counts):
    """Convolution, attention over bins, Poisson likelihood of counts up to hundreds."""
    h = jax.nn.gelu(conv1d(jax.nn.one_hot(bases, 4), params[0]))
    share = jax.nn.softmax(h.reshape(3, 16, 8, 32), 2)
    h = (share * h.reshape(3, 16, 8, 32)).sum(2)
    h = h + attend(*jnp.split(layer_norm(h) @ params[1], 3, -1))
    rate = 100.0 * jax.nn.softplus(mlp(params[2], layer_norm(h)))
    loss = (rate - counts * jnp.log(rate + 1e-6)).mean() / 100
    return loss, {"rate": rate}


@program(
    lambda d: (
        {
            "left": d.weight(16, 32),
            "right": d.weight(16, 32),
            "gate": d.weight(16, 32),
            "out": d.weight(32, 16),
            "bins": d.weight(16, 12),
        },
        d.normal(20, 20, 16),
        d.integers(12, 20, 20),
    )
)
def triangle_update(params, pairs, bins):
    """Triangular multiplication of a pair representation, distances as classes."""
    z = layer_norm(pairs)
    a = jax.nn.sigmoid(z @ params["gate"]) * (z @ params["left"])
    update = jnp.einsum("ikc,jkc->ijc", a, z @ params["right"])
    pairs = pairs + layer_norm(update) @ params["out"]
    logits = (pairs + pairs.swapaxes(0, 1)) @ params["bins"]
    return nll(logits, bins)


@program(
    lambda d: (
        [d.layers(16, 32, 6, scale=0.5) for _ in range(3)],
        d.normal(30, 16),
        d.normal(30, 3, scale=15),
        d.normal(30, 3, scale=15),
    ),
    aux=True,
)
def backbone_refinement(params, h, place, target):
    """Frames of residues in ångström are refined three times; distances are compared."""
    for layers in params:
        out = mlp(layers, h)
        w = 0.1 * out[:, :3]
        moved = place - place.mean(0)
        place = place + out[:, 3:] + jnp.cross(w, moved)
    distance = lambda x: jnp.sqrt(((x[:, None] - x[None]) ** 2).sum(-1) + 1e-3)
    off = distance(place) - distance(target)
    lddt = (jnp.abs(off) < 2.0).mean()
    return jnp.minimum(jnp.abs(off), 10.0).mean() / 10.0, {"place": place, "lddt": lddt}


@program(
    lambda d: (
        (d.layers(60, 48, 16), d.layers(8, 48, 120), d.normal(60)),
        d.integers(40, 24, 60) * d.mask(24, 60),
        d.normal(24, 8),
    ),
    aux=True,
)
def single_cell_autoencoder(params, counts, eps):
    """Zero-inflated negative binomial counts with the size of each library."""
    encoder, decoder, log_theta = params
    library = counts.sum(-1, keepdims=True).astype(jnp.float32)
    mu, logvar = jnp.split(mlp(encoder, jnp.log1p(counts)), 2, -1)
    z = mu + jnp.exp(0.5 * logvar) * eps
    scale, drop = jnp.split(mlp(decoder, z), 2, -1)
    mean, theta = library * jax.nn.softmax(scale), jnp.exp(log_theta)
    log_both = jnp.log(theta + mean + 1e-8)
    nb = theta * (jnp.log(theta + 1e-8) - log_both) + counts * (jnp.log(mean + 1e-8) - log_both)
    nb += gammaln(counts + theta) - gammaln(theta) - gammaln(counts + 1.0)
    zero = jnp.logaddexp(-jax.nn.softplus(-drop), nb - jax.nn.softplus(drop))
    logp = jnp.where(counts < 1, zero, nb - jax.nn.softplus(drop))
    kl = 0.5 * (jnp.exp(logvar) + mu**2 - 1 - logvar).sum(-1)
    return (kl - logp.sum(-1)).mean() / 60, {"mean": mean, "kl": kl}


@program(
    lambda d: (d.layers(7, 32, 4), d.normal(12, 3), d.uniform(12, 4, low=-70, high=-50)), aux=True
)
def compartment_neuron(params, current, volts):
    """Membrane potentials in millivolts with learned gates, forward Euler for 20 steps."""

    def step(v, _):
        x = jnp.concatenate([(v + 60.0) / 10.0, current], -1)
        gate = jax.nn.sigmoid(mlp(params, x, jnp.tanh))
        dv = 0.1 * (-70.0 - v) + 0.5 * gate * (50.0 - v) * 0.1 + current[:, :1]
        v = v + 0.2 * dv
        return v, v

    v, trace = lax.scan(step, jnp.full((12, 4), -65.0), None, length=20)
    return jnp.mean(((v - volts) / 10.0) ** 2), {"trace": trace, "rate": jnp.diff(trace, axis=0)}


@program(
    lambda d: (
        (d.weight(20, 48), d.weight(48, 48) * 0.5, d.layers(48, 5)),
        (d.uniform(30, 8, 20) < 0.2).astype("f"),
        d.integers(5, 8),
    ),
    aux=True,
)
def spiking_network(params, spikes, labels):
    """Leaky integrate and fire with a surrogate derivative."""
    w, r, head = params

    @jax.custom_jvp
    def fire(v):
        return (v > 0).astype(v.dtype)

    @fire.defjvp
    def _(primals, tangents):
        (v,), (t,) = primals, tangents
        return fire(v), t / (1 + 10 * jnp.abs(v)) ** 2

    def step(carry, x):
        v, s = carry
        v = 0.9 * v * (1 - s) + x @ w + s @ r
        s = fire(v - 1.0)
        return (v, s), s

    zero = jnp.zeros((8, 48))
    _, out = lax.scan(step, (zero, zero), spikes)
    return nll(mlp(head, out.mean(0) * 5.0), labels), {"rate": out.mean((0, 1))}


@program(
    lambda d: (
        d.layers(16, 32, 3),
        d.normal(20, 16),
        jnp.exp(d.uniform(20, 8, low=-18, high=-7)),
        d.uniform(20, 8, high=100),
    ),
    aux=True,
)
def dose_response(params, compounds, molar, response):
    """Hill curves over molar doses from nano to milli, potency as a negative logarithm."""
    out = mlp(params, compounds, jax.nn.silu)
    pic50, hill, top = (
        6.0 + out[:, :1],
        jnp.exp(0.2 * out[:, 1:2]),
        100.0 * jax.nn.sigmoid(out[:, 2:] + 2),
    )
    curve = top / (1 + (10.0**-pic50 / molar) ** hill)
    return jnp.mean(((curve - response) / 30.0) ** 2), {"curve": curve, "pic50": pic50}


@program(lambda d: (d.layers(8, 24, 12), d.normal(11, 8), d.integers(4, 6, 40)), aux=True)
def phylogenetic_likelihood(params, branches, leaves):
    """Rates of substitution by a network per branch; matrix exponentials, pruning of a tree."""
    raw = jax.nn.softplus(mlp(params, branches)).reshape(11, 4, 3) * 0.3
    rate = jnp.concatenate([jnp.zeros((11, 4, 1)), raw], -1)
    rate = jnp.stack([jnp.roll(rate[:, i], i, -1) for i in range(4)], 1)
    rate = rate - jax.vmap(jnp.diag)(rate.sum(-1))
    p = jax.vmap(jax.scipy.linalg.expm)(rate)
    parts = [jax.nn.one_hot(leaf, 4) @ p[i].T for i, leaf in enumerate(leaves)]
    inner = [parts[0] * parts[1], parts[2] * parts[3], parts[4] * parts[5]]
    up = [x @ p[6 + i].T for i, x in enumerate(inner)]
    both = (up[0] * up[1]) @ p[9].T
    site = jnp.log((both * (up[2] @ p[10].T)).mean(-1))
    return -site.mean(), {"site": site}


@program(
    lambda d: (
        [d.kernel(5, 1, 8, 1), d.layers(8, 16, 2)],
        d.normal(8, 90, 1, scale=40) + 130,
        d.uniform(8, low=120, high=180),
    ),
    aux=True,
)
def glucose_forecast(params, glucose, target):
    """Blood sugar in mg/dl: the last value plus a change from convolutions, with its error grid."""
    x = (glucose - 130.0) / 40.0
    h = jax.nn.relu(conv1d(x, params[0], stride=2, padding="CAUSAL"))
    change, spread = mlp(params[1], h[:, -10:].mean(1)).T
    predicted = glucose[:, -1, 0] + 15.0 * change
    sigma = 10.0 * jnp.exp(0.3 * spread)
    loss = (0.5 * ((predicted - target) / sigma) ** 2 + jnp.log(sigma)).mean()
    return loss, {"predicted": predicted, "trend": (predicted - glucose[:, -1, 0]) / 30.0}
