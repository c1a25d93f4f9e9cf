"""Medicine: scanners, doses, records, segmentation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.ndimage import map_coordinates

from tests.fields.layers import conv, mlp
from tests.fields.registry import program


@program(
    lambda d: (
        [(d.kernel(3, 2, 16), d.kernel(3, 16, 2), d.normal(1, scale=0.1)) for _ in range(4)],
        d.normal(2, 32, 32, 2),
        (d.uniform(32) < 0.4).astype("f"),
    ),
    aux=True,
)
def unrolled_mri(params, image, mask):
    """Denoisers and data consistency by turns; the lines of k-space that are missing are filled."""
    target = jax.lax.complex(image[..., 0], image[..., 1])
    lines = mask[None, :, None]
    measured = jnp.fft.fft2(target) / 32 * lines
    x = jnp.fft.ifft2(measured) * 32
    for first, second, weight in params:
        parts = jnp.stack([x.real, x.imag], -1)
        fix = conv(jax.nn.relu(conv(parts, first)), second)
        z = x + jax.lax.complex(fix[..., 0], fix[..., 1])
        k = jnp.fft.fft2(z) / 32
        k = k - lines * (k - measured) * jax.nn.sigmoid(4 + weight)
        x = jnp.fft.ifft2(k) * 32
    error = jnp.abs(x - target)
    psnr = 20 * jnp.log10(jnp.abs(target).max() / jnp.sqrt((error**2).mean()))
    return (error**2).mean(), {"psnr": psnr, "magnitude": jnp.abs(x)}


@program(
    lambda d: (
        [d.kernel(3, 1, 16), d.kernel(3, 16, 1)],
        d.uniform(1, 24, 24, low=0.0, high=0.4),
        d.uniform(12, 24, low=20000.0, high=90000.0),
    ),
    aux=True,
)
def tomography(params, attenuation, counts):
    """Attenuation corrected by a network, projected along rotated rays to counts of photons."""
    fix = conv(jax.nn.relu(conv(attenuation[..., None], params[0])), params[1])[0, :, :, 0]
    mu = jax.nn.softplus(attenuation[0] + 0.1 * fix - 1.0)
    axis = jnp.arange(24.0) - 11.5
    s, t = jnp.meshgrid(axis, axis, indexing="ij")

    def projected(angle):
        x = s * jnp.cos(angle) - t * jnp.sin(angle) + 11.5
        y = s * jnp.sin(angle) + t * jnp.cos(angle) + 11.5
        return map_coordinates(mu, [x, y], 1).sum(-1)

    lines = jax.vmap(projected)(jnp.linspace(0.0, 3.0, 12)) * 0.1
    expected = 1e5 * jnp.exp(-lines) + 50.0
    loss = (expected - counts * jnp.log(expected)).mean() / 1e5
    return loss, {"lines": lines, "mu": mu}


@program(
    lambda d: (
        d.layers(4, 32, 4),
        d.uniform(24, low=50.0, high=110.0),
        d.normal(24, 3),
        d.uniform(12, 24, low=0.5, high=9.0),
    ),
    aux=True,
)
def pharmacokinetics(params, weight, covariates, measured):
    """Two compartments in milligrams and litres, rates by a network, doses every twelve hours."""
    size = jnp.log(weight / 70.0)[:, None]
    out = mlp(params, jnp.concatenate([size, covariates], -1), jnp.tanh)
    clearance = 4.0 * (weight / 70.0) ** 0.75 * jnp.exp(0.2 * out[:, 0])
    volume = 30.0 * (weight / 70.0) * jnp.exp(0.2 * out[:, 1])
    absorbed, exchange = 0.8 * jnp.exp(0.2 * out[:, 2]), 0.1 * jnp.exp(0.2 * out[:, 3])

    def hour(state, t):
        gut, central, outer = state
        gut = gut + jnp.where(t % 12 == 0, 500.0, 0.0)
        for _ in range(4):
            flow = absorbed * gut
            change = flow - clearance / volume * central - exchange * central + 0.05 * outer
            outer = outer + 0.25 * (exchange * central - 0.05 * outer)
            gut, central = gut - 0.25 * flow, central + 0.25 * change
        return (gut, central, outer), central / volume

    zero = jnp.zeros(24)
    _, level = lax.scan(hour, (zero, zero, zero), jnp.arange(48))
    seen = level[3::4]
    loss = jnp.mean((jnp.log(seen + 0.05) - jnp.log(measured)) ** 2)
    return loss, {"level": level, "half_life": 0.693 * volume / clearance}


@program(
    lambda d: (
        {
            "decay": d.layers(6, 32),
            "cell": (d.weight(12, 96), d.weight(32, 96), d.normal(96, scale=0.1)),
            "head": d.layers(32, 1),
            "rate": d.normal(6, scale=0.3),
        },
        d.times(16, 20, step=2.0),
        d.normal(16, 20, 6, scale=15.0) + 90.0,
        d.uniform(16, 20, 6),
        (d.uniform(16) < 0.3).astype("f"),
    ),
    aux=True,
)
def intensive_care(params, hours, vitals, seen, died):
    """Vital signs near ninety with gaps: values and states decay while nothing is seen."""
    mask = (seen < 0.5).astype("float32")
    mean = (vitals * mask).sum((0, 1)) / mask.sum((0, 1))
    std = jnp.sqrt((mask * (vitals - mean) ** 2).sum((0, 1)) / mask.sum((0, 1)))
    gaps = jnp.diff(hours, axis=1, prepend=hours[:, :1])

    def step(state, xs):
        h, last, since = state
        x, m, gap = xs
        since = since + gap[:, None]
        gamma = jnp.exp(-jax.nn.softplus(params["rate"]) * since)
        x = jnp.where(m > 0, x, gamma * last + (1 - gamma) * mean)
        h = h * jnp.exp(-jax.nn.relu(mlp(params["decay"], since / 10.0)))
        from_x = jnp.concatenate([(x - mean) / std, m], -1)
        wx, wh, b = params["cell"]
        xr, xz, xn = jnp.split(from_x @ wx + b, 3, -1)
        hr, hz, hn = jnp.split(h @ wh, 3, -1)
        r, z = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
        h = (1 - z) * jnp.tanh(xn + r * hn) + z * h
        last = jnp.where(m > 0, x, last)
        return (h, last, jnp.where(m > 0, 0.0, since)), h

    start = (jnp.zeros((16, 32)), jnp.broadcast_to(mean, (16, 6)), jnp.zeros((16, 6)))
    xs = (vitals.swapaxes(0, 1), mask.swapaxes(0, 1), gaps.T)
    _, hs = lax.scan(step, start, xs)
    risk = mlp(params["head"], hs)[..., 0]
    loss = jnp.mean(jax.nn.softplus(risk[-1]) - died * risk[-1])
    return loss, {"risk": jax.nn.sigmoid(risk), "mean": mean}


@program(
    lambda d: (
        [d.kernel(3, 1, 8, 3), d.kernel(3, 8, 16, 3), d.kernel(1, 24, 3, 3)],
        d.normal(1, 12, 12, 12, 1, scale=400.0) - 300.0,
        d.integers(3, 1, 12, 12, 12),
    ),
    aux=True,
)
def organ_segmentation(params, hounsfield, label):
    """A small net in three dimensions on Hounsfield units, windowed; Dice and focal losses."""
    names = ("NDHWC", "DHWIO", "NDHWC")

    def conv3(x, w, stride=1):
        return lax.conv_general_dilated(x, w, (stride,) * 3, "SAME", dimension_numbers=names)

    x = (jnp.clip(hounsfield, -1000, 400) + 300.0) / 700.0
    a = jax.nn.leaky_relu(conv3(x, params[0]))
    mean, var = a.mean((1, 2, 3), keepdims=True), a.var((1, 2, 3), keepdims=True)
    a = (a - mean) * lax.rsqrt(var + 1e-5)
    b = jax.nn.leaky_relu(conv3(a, params[1], 2))
    b = jax.image.resize(b, (1, 12, 12, 12, 16), "trilinear")
    p = jax.nn.softmax(conv3(jnp.concatenate([a, b], -1), params[2]))
    truth = jax.nn.one_hot(label, 3)
    overlap = (p * truth).sum((0, 1, 2, 3))
    dice = (2 * overlap + 1e-5) / (p.sum((0, 1, 2, 3)) + truth.sum((0, 1, 2, 3)) + 1e-5)
    right = (p * truth).sum(-1)
    focal = -((1 - right) ** 2 * jnp.log(right + 1e-8)).mean()
    return 1 - dice.mean() + focal, {"dice": dice, "volume": p.sum((1, 2, 3))}


@program(
    lambda d: (
        d.layers(7, 48, 7),
        d.uniform(32, 20, low=100.0, high=900.0),
        d.normal(20, 3),
    ),
    aux=True,
)
def diffusion_tensors(params, signal, gradients):
    """Tensors by least squares of log signals, corrected by a network, and their anisotropy."""
    g = gradients / jnp.linalg.norm(gradients, axis=-1, keepdims=True)
    b = 1000.0
    x, y, z = g.T
    design = -b * jnp.stack([x * x, y * y, z * z, 2 * x * y, 2 * x * z, 2 * y * z], -1)
    design = jnp.concatenate([design, jnp.ones((20, 1))], -1)
    logs = jnp.log(signal)
    scaled = design * jnp.array([1e-3] * 6 + [1.0])
    normal = jnp.einsum("nk,ki,kj->nij", signal**2 / 1e5, scaled, scaled)
    right = jnp.einsum("nk,ki,nk->ni", signal**2 / 1e5, scaled, logs)
    fit = jnp.linalg.solve(normal + 1e-3 * jnp.eye(7), right[..., None])[..., 0]
    fit = fit + 0.05 * mlp(params, (fit - fit.mean(0)) / (fit.std(0) + 1e-3), jnp.tanh)
    a, c, e, f, h, i = fit[:, :6].T
    tensor = jnp.stack([jnp.stack([a, f, h]), jnp.stack([f, c, i]), jnp.stack([h, i, e])])
    tensor = jnp.moveaxis(tensor, -1, 0)
    trace = jnp.trace(tensor, axis1=1, axis2=2)
    off = tensor - trace[:, None, None] / 3 * jnp.eye(3)
    anisotropy = jnp.sqrt(1.5 * (off**2).sum((1, 2)) / ((tensor**2).sum((1, 2)) + 1e-6))
    predicted = fit @ scaled.T
    return jnp.mean((predicted - logs) ** 2), {"fa": anisotropy, "trace": trace}
