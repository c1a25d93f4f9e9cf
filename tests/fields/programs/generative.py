"""Generative models beside flows: diffusion, adversaries, energies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.fields.layers import conv, layer_norm, mlp
from tests.fields.registry import program


def _waves(t, width=16):
    angle = t[..., None] * jnp.exp(-jnp.log(10000.0) * jnp.arange(width // 2) / (width // 2))
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)


@program(
    lambda d: (d.layers(32, 64, 64, 16), d.normal(32, 16), d.normal(32, 16), d.integers(1000, 32)),
    aux=True,
)
def noise_prediction(params, x, eps, step):
    """DDPM with a thousand steps; the clean sample and the signal to noise as aux."""
    beta = jnp.linspace(1e-4, 0.02, 1000)
    total = jnp.cumprod(1 - beta)[step][:, None]
    noisy = jnp.sqrt(total) * x + jnp.sqrt(1 - total) * eps
    out = mlp(params, jnp.concatenate([noisy, _waves(step.astype(jnp.float32))], -1), jax.nn.silu)
    clean = (noisy - jnp.sqrt(1 - total) * out) / jnp.sqrt(total)
    return jnp.mean((out - eps) ** 2), {"clean": clean, "logsnr": jnp.log(total / (1 - total))}


@program(
    lambda d: (
        d.layers(17, 64, 64, 16),
        d.normal(32, 16, scale=0.5),
        d.normal(32, 16),
        d.normal(32),
    ),
    aux=True,
)
def preconditioned_denoiser(params, x, eps, z):
    """Noise levels from 0.002 to 80 with their preconditioning (EDM)."""
    sigma = jnp.clip(jnp.exp(1.2 * z - 1.2), 0.002, 80.0)[:, None]
    noisy = x + sigma * eps
    skip = 0.25 / (sigma**2 + 0.25)
    out, into = sigma * 0.5 / jnp.sqrt(sigma**2 + 0.25), 1 / jnp.sqrt(sigma**2 + 0.25)
    f = mlp(params, jnp.concatenate([into * noisy, jnp.log(sigma) / 4], -1), jax.nn.silu)
    denoised = skip * noisy + out * f
    weight = (sigma**2 + 0.25) / (0.5 * sigma) ** 2
    return (weight * (denoised - x) ** 2).mean(), {
        "denoised": denoised,
        "score": (denoised - noisy) / sigma**2,
    }


@program(
    lambda d: (d.layers(12, 64, 64, 1), d.normal(32, 12), d.normal(32, 12), d.uniform(32, 1)),
    aux=True,
)
def gradient_penalty(params, real, fake, share):
    """A critic whose gradient between real and fake has length one."""
    critic = lambda x: mlp(params, x, jax.nn.leaky_relu)[..., 0]
    between = share * real + (1 - share) * fake
    g = jax.vmap(jax.grad(critic))(between)
    norm = jnp.sqrt((g**2).sum(-1) + 1e-12)
    distance = critic(real).mean() - critic(fake).mean()
    return -distance + 10.0 * jnp.mean((norm - 1) ** 2), {"distance": distance, "norm": norm}


@program(
    lambda d: (
        [
            d.kernel(3, 3, 16),
            d.kernel(3, 16, 8),
            d.normal(32, 8, scale=0.5),
            d.kernel(3, 8, 16),
            d.kernel(3, 16, 3),
        ],
        d.uniform(4, 12, 12, 3),
    ),
    aux=True,
)
def vector_quantized_autoencoder(params, x):
    """Codes by nearest neighbours through squares and a product; usage as perplexity."""
    a, b, book, c, e = params
    z = conv(jax.nn.relu(conv(x - 0.5, a)), b)
    flat = z.reshape(-1, 8)
    d2 = (flat**2).sum(-1, keepdims=True) - 2 * flat @ book.T + (book**2).sum(-1)
    index = d2.argmin(-1)
    q = book[index].reshape(z.shape)
    commit = jnp.mean((z - lax.stop_gradient(q)) ** 2) * 0.25 + jnp.mean(
        (q - lax.stop_gradient(z)) ** 2
    )
    q = z + lax.stop_gradient(q - z)
    out = conv(jax.nn.relu(conv(q, c)), e) + 0.5
    usage = jax.nn.one_hot(index, 32).mean(0)
    return jnp.mean((out - x) ** 2) + commit, {
        "perplexity": jnp.exp(-(usage * jnp.log(usage + 1e-10)).sum()),
        "out": out,
    }


@program(
    lambda d: (
        d.layers(9, 64, 64, 8),
        d.normal(32, 8),
        d.normal(32, 8),
        d.uniform(32, low=1, high=17),
    ),
    aux=True,
)
def consistency_model(params, x, eps, step):
    """Neighbouring noise levels map to one sample; a small difference of two outputs."""
    level = lambda n: (0.002 ** (1 / 7) + n / 17 * (80 ** (1 / 7) - 0.002 ** (1 / 7))) ** 7

    def f(x, sigma):
        sigma = sigma[:, None]
        skip = 0.25 / ((sigma - 0.002) ** 2 + 0.25)
        out = 0.5 * (sigma - 0.002) / jnp.sqrt(sigma**2 + 0.25)
        h = mlp(
            params,
            jnp.concatenate([x / jnp.sqrt(sigma**2 + 0.25), jnp.log(sigma)], -1),
            jax.nn.silu,
        )
        return skip * x + out * h

    low, high = level(step - 1), level(step)
    a = f(x + high[:, None] * eps, high)
    b = lax.stop_gradient(f(x + low[:, None] * eps, low))
    off = ((a - b) ** 2).sum(-1)
    return (jnp.sqrt(off + 1e-3) - jnp.sqrt(1e-3)).mean(), {"a": a, "off": a - b}


@program(lambda d: (d.layers(6, 48, 6), d.normal(40, 6), d.normal(40, 6)))
def sliced_score(params, x, v):
    """Score matching by products of the Jacobian with random directions."""
    score, directional = jax.jvp(lambda x: mlp(params, x, jax.nn.softplus), (x,), (v,))
    return ((v * directional).sum(-1) + 0.5 * ((v * score).sum(-1)) ** 2).mean()


@program(lambda d: (d.layers(24, 64, 8), d.normal(16, 8)), forward=True)
def deterministic_sampler(params, x):
    """Twenty steps of DDIM in a loop."""
    total = jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, 1000))
    times = jnp.arange(999, -1, -50)

    def step(i, x):
        now, then = total[times[i]], jnp.where(i < 19, total[times[jnp.minimum(i + 1, 19)]], 1.0)
        t = jnp.broadcast_to(times[i].astype(jnp.float32), (16,))
        eps = mlp(params, jnp.concatenate([x, _waves(t)], -1), jax.nn.silu)
        clean = jnp.clip((x - jnp.sqrt(1 - now) * eps) / jnp.sqrt(now), -3, 3)
        return jnp.sqrt(then) * clean + jnp.sqrt(1 - then) * eps

    return lax.fori_loop(0, 20, step, x)


@program(
    lambda d: (d.layers(6, 48, 1), d.normal(24, 6), d.normal(24, 6), d.normal(15, 24, 6)), aux=True
)
def langevin_energy(params, data, start, noise):
    """Samples of an energy by fifteen noisy steps; contrastive divergence."""
    energy = lambda x: mlp(params, x, jax.nn.silu)[..., 0] + 0.1 * (x**2).sum(-1)
    force = jax.grad(lambda x: energy(x).sum())
    x, _ = lax.scan(lambda x, z: (x - 0.05 * force(x) + 0.1 * z, None), start, noise)
    x = lax.stop_gradient(x)
    real, fake = energy(data), energy(x)
    return (real - fake).mean() + 0.01 * (real**2 + fake**2).mean(), {
        "samples": x,
        "gap": real.mean() - fake.mean(),
    }


@program(
    lambda d: (
        (
            {
                "mod": d.layers(16, 192, scale=0.5),
                "qkv": d.weight(32, 96),
                "ff": d.layers(32, 64, 32),
            },
            d.layers(32, 32),
        ),
        d.normal(4, 16, 32),
        d.normal(4, 16, 32),
        d.uniform(4),
    )
)
def modulated_transformer(params, x, eps, t):
    """A diffusion transformer's block: shifts, scales and gates from the time."""
    block, head = params
    noisy = (1 - t)[:, None, None] * x + t[:, None, None] * eps
    s1, b1, g1, s2, b2, g2 = jnp.split(
        mlp(block["mod"], jax.nn.silu(_waves(1000.0 * t)))[:, None], 6, -1
    )
    h = layer_norm(noisy) * (1 + s1) + b1
    q, k, v = jnp.split(h @ block["qkv"], 3, -1)
    h = noisy + g1 * (jax.nn.softmax(q @ k.swapaxes(1, 2) / jnp.sqrt(32.0)) @ v)
    h = h + g2 * mlp(block["ff"], layer_norm(h) * (1 + s2) + b2, jax.nn.gelu)
    return jnp.mean((mlp(head, layer_norm(h)) - (eps - x)) ** 2)
