"""Signal processing: filters, spectra, arrays of sensors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.fields.layers import conv1d, gru, mlp
from tests.fields.registry import program


def _frames(x, size=64, hop=32):
    starts = np.arange(0, x.shape[-1] - size + 1, hop)
    return x[..., starts[:, None] + np.arange(size)] * jnp.asarray(np.hanning(size), jnp.float32)


@program(
    lambda d: (
        (d.layers(33, 48, 33), d.uniform(33, 20)),
        d.normal(4, 512, scale=0.1),
        d.normal(4, 512, scale=0.1),
    )
)
def log_mel_loss(params, noisy, clean):
    """A spectral mask, judged on log-mel spectra."""
    layers, mel = params
    spectrum, target = jnp.fft.rfft(_frames(noisy)), jnp.fft.rfft(_frames(clean))
    power = jnp.abs(spectrum) ** 2
    mask = jax.nn.sigmoid(mlp(layers, jnp.log(power + 1e-6)))
    mel = lax.stop_gradient(mel)
    enhanced = jnp.log(jnp.maximum(power * mask @ mel, 1e-5))
    return jnp.abs(enhanced - jnp.log(jnp.maximum(jnp.abs(target) ** 2 @ mel, 1e-5))).mean()


@program(
    lambda d: (
        {
            "low": d.uniform(16, low=100, high=3000),
            "band": d.uniform(16, low=100, high=800),
            "net": d.layers(16, 32, 5),
        },
        d.normal(4, 800, 1, scale=0.1),
        d.integers(5, 4),
    )
)
def sinc_filterbank(params, audio, labels):
    """Band-pass filters of learned cut-offs in hertz at 16 kHz, then pooled log energies."""
    t = (jnp.arange(65) - 32.0) / 16000.0
    low, high = jnp.abs(params["low"]), jnp.abs(params["low"]) + jnp.abs(params["band"])
    band = 2 * high * jnp.sinc(2 * high * t[:, None]) - 2 * low * jnp.sinc(2 * low * t[:, None])
    window = 0.54 + 0.46 * jnp.cos(jnp.pi * t / t[-1])
    filters = band * window[:, None] / (2 * params["band"])
    h = conv1d(audio, filters[:, None])
    features = jnp.log(jnp.mean(h**2, 1) + 1e-6)
    logp = jax.nn.log_softmax(mlp(params["net"], features))
    return -logp[jnp.arange(4), labels].mean()


@program(lambda d: (d.layers(24, 32, 2), d.normal(10, 30, 6, 2), d.normal(10, 6, 2)), aux=True)
def mask_beamformer(params, x, steering):
    """MVDR: covariances of masked spectra, real and imaginary parts apart, then a solve."""
    features = jnp.log1p(jnp.abs(jnp.concatenate([x[..., 0], x[..., 1]], -1)) * 3)
    features = jnp.concatenate([features, features**2], -1)
    mask = jax.nn.softmax(mlp(params, features), -1)
    z = x[..., 0] + 1j * x[..., 1]
    a = steering[..., 0] + 1j * steering[..., 1]
    noise = (
        jnp.einsum("ft,fti,ftj->fij", mask[..., 0], z, z.conj())
        / mask[..., 0].sum(-1)[:, None, None]
    )
    noise = noise + 1e-2 * jnp.eye(6)
    w = jnp.linalg.solve(noise, a[..., None])[..., 0]
    w = w / jnp.einsum("fi,fi->f", a.conj(), w)[:, None]
    out = jnp.einsum("fi,fti->ft", w.conj(), z)
    return jnp.mean(jnp.abs(out) ** 2), {"mask": mask, "power": jnp.abs(out)}


@program(
    lambda d: (
        (d.weight(33, 96), d.weight(32, 96), d.normal(96, scale=0.1), d.weight(32, 33)),
        d.normal(4, 640, scale=3000),
        d.normal(4, 640, scale=3000),
    ),
    aux=True,
)
def recurrent_denoiser(params, noisy, clean):
    """A GRU's gains on spectra of 16 bit samples, back to a wave; signal to noise in decibels."""
    *cell, head = params
    spectrum = jnp.fft.rfft(_frames(noisy))
    features = jnp.log10(jnp.abs(spectrum) ** 2 + 1e-3) / 5.0
    step = lambda h, x: (gru(cell, h, x),) * 2
    _, h = lax.scan(step, jnp.zeros((4, 32)), features.swapaxes(0, 1))
    gain = jax.nn.sigmoid(h @ head).swapaxes(0, 1)
    frames = jnp.fft.irfft(spectrum * gain)
    target = _frames(clean)
    error = ((frames - target) ** 2).sum((-1, -2))
    snr = 10 * jnp.log10((target**2).sum((-1, -2)) / error)
    return -snr.mean(), {"snr": snr, "frames": frames}


@program(lambda d: (d.layers(6, 32, 2), d.normal(30, 8, 6), d.normal(30, 8, 2)), aux=True)
def kalman_network(params, observations, states):
    """A Kalman filter whose observations come from a network."""
    transition = jnp.array([[1.0, 0.1], [0.0, 1.0]])
    q, r = 1e-3 * jnp.eye(2), 0.1 * jnp.eye(2)

    def step(carry, y):
        m, p = carry
        m, p = m @ transition.T, transition @ p @ transition.T + q
        z = mlp(params, y, jnp.tanh)
        gain = jnp.linalg.solve(p + r, p).T
        innovation = z - m
        m = m + innovation @ gain.T
        p = (jnp.eye(2) - gain) @ p
        return (m, p), (m, innovation)

    start = (jnp.zeros((8, 2)), jnp.eye(2))
    (_, p), (means, innovations) = lax.scan(step, start, observations)
    return jnp.mean((means - states) ** 2), {"means": means, "innovations": innovations, "p": p}


@program(
    lambda d: (
        (d.weight(64, 64) * 0.1, d.weight(32, 64), d.normal(16, scale=0.1)),
        d.weight(64, 32),
        d.normal(24, 64) * d.mask(24, 64),
    )
)
def learned_ista(params, dictionary, codes):
    """Unrolled sparse coding with learned matrices and thresholds."""
    s, w, theta = params
    y = codes @ dictionary
    b = y @ w
    z = b
    for k in range(8):
        c = b + z @ s
        z = jnp.sign(c) * jnp.maximum(jnp.abs(c) - 0.1 * jax.nn.softplus(theta[k]), 0.0)
    return jnp.mean((z - codes) ** 2)


@program(lambda d: (d.normal(4, 128, scale=0.3), d.weight(128, 64), d.normal(4, 64)), forward=True)
def compressed_sensing(x, a, y):
    """Proximal gradient steps: state plus a step along a residual of two products."""

    def step(_, x):
        gradient = (x @ a - y) @ a.T
        x = x - 0.2 * gradient
        return jnp.sign(x) * jnp.maximum(jnp.abs(x) - 0.01, 0.0)

    x = lax.fori_loop(0, 30, step, x)
    return x, x @ a - y


@program(
    lambda d: (d.layers(8, 48, 17), d.normal(6, 40, 8), d.uniform(6, 40, low=200, high=210)),
    aux=True,
)
def phase_vocoder(params, features, base):
    """Instantaneous frequencies in hertz are integrated to a phase, then compared as waves."""
    out = mlp(params, features, jax.nn.silu)
    frequency = base + 5.0 * jnp.tanh(out[..., 0])
    phase = 2 * jnp.pi * jnp.cumsum(frequency * 256.0 / 16000.0, -1)
    target = 2 * jnp.pi * jnp.cumsum(base * 256.0 / 16000.0, -1)
    wave = (jax.nn.softmax(out[..., 1:]) * jnp.sin(phase[..., None] * jnp.arange(1, 17.0))).sum(-1)
    loss = (1 - jnp.cos(phase - target)).mean() + 0.1 * jnp.mean(wave**2)
    return loss, {"frequency": frequency, "phase": phase}


@program(
    lambda d: (
        [d.kernel(7, 1, 16, 1), d.kernel(5, 16, 32, 1), d.layers(32, 4)],
        d.normal(6, 250, 1, scale=0.4) + 1.2,
        d.integers(4, 6),
    )
)
def heartbeats(params, ecg, labels):
    """Electrocardiograms in millivolts with a drifting base line; strided convolutions."""
    drift = jnp.linspace(0.0, 1.0, 250)[None, :, None]
    x = ecg + drift
    x = (x - x.mean(1, keepdims=True)) / (x.std(1, keepdims=True) + 1e-6)
    h = jax.nn.relu(conv1d(x, params[0], stride=2))
    h = jax.nn.relu(conv1d(h, params[1], stride=2))
    logp = jax.nn.log_softmax(mlp(params[2], h.max(1)))
    return -logp[jnp.arange(6), labels].mean()


@program(
    lambda d: ((d.layers(64, 64), d.uniform(64, low=1, high=20)), d.uniform(8, 16, 64, high=255)),
    aux=True,
)
def transform_coding(params, blocks):
    """Pixels of 8 bits: cosine transform, learned steps with straight-through rounding, rate."""
    layers, steps = params
    k = np.arange(8)
    basis = np.cos(np.pi * (2 * k[None] + 1) * k[:, None] / 16) * np.where(
        k[:, None] == 0, 0.354, 0.5
    )
    dct = jnp.asarray(np.kron(basis, basis), jnp.float32)
    y = (blocks - 128.0) @ dct.T
    y = y + 0.1 * jnp.tanh(mlp(layers, y / 64.0))
    q = y / steps
    q = q + lax.stop_gradient(jnp.round(q) - q)
    decoded = (q * steps) @ dct + 128.0
    rate = jnp.log2(1 + jnp.abs(q)).mean()
    mse = jnp.mean((decoded - blocks) ** 2)
    return rate + 0.01 * mse, {"psnr": 10 * jnp.log10(255.0**2 / mse), "decoded": decoded}
