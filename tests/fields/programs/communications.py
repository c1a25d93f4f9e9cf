"""Communications: equalizers, decoders, detectors, amplifiers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.fields.layers import conv1d, gru, layer_norm, mlp
from tests.fields.registry import program


@program(
    lambda d: (
        d.layers(8, 64, 64, 2),
        d.normal(8, 64, 2),
        d.normal(8, 5, 2, scale=0.4),
        d.normal(8, 64, 2, scale=0.05),
    ),
    aux=True,
)
def ofdm_equalizer(params, symbols, taps, noise):
    """Symbols through a channel of five taps; a network corrects the least-squares equalizer."""
    x = jax.lax.complex(symbols[..., 0], symbols[..., 1])
    h = jnp.fft.fft(jax.lax.complex(taps[..., 0], taps[..., 1]), 64)
    sent = jnp.fft.ifft(x) * 8.0
    received = jnp.fft.fft(sent) / 8.0 * h + jax.lax.complex(noise[..., 0], noise[..., 1])
    estimate = received * jnp.conj(h) / (jnp.abs(h) ** 2 + 0.01)
    left, right = jnp.roll(estimate, 1, -1), jnp.roll(estimate, -1, -1)
    parts = [f(z) for z in (estimate, left, right, h) for f in (jnp.real, jnp.imag)]
    fix = mlp(params, jnp.stack(parts, -1), jax.nn.relu)
    out = jnp.stack([estimate.real, estimate.imag], -1) + 0.1 * fix
    power = 10 * jnp.log10(jnp.mean((out - symbols) ** 2, (1, 2)) + 1e-8)
    return jnp.mean((out - symbols) ** 2), {"evm_db": power, "out": out}


@program(
    lambda d: (
        {"in": d.uniform(5, 12, 24, low=0.7, high=1.2), "out": d.uniform(24, low=0.8, high=1.2)},
        d.normal(32, 24, scale=2.0) + 2.0,
        (d.uniform(12, 24) < 0.25).astype("f"),
    ),
    aux=True,
)
def neural_belief_propagation(params, llr, parity):
    """Five turns of weighted sums and products of messages on a parity-check matrix."""
    edges = parity[None]

    def turn(messages, weight):
        total = llr[:, None] + (weight * messages).sum(1, keepdims=True)
        to_check = jnp.clip(total - weight * messages, -10, 10)
        t = jnp.where(edges > 0, jnp.tanh(to_check / 2), 1.0)
        t = jnp.where(jnp.abs(t) < 1e-4, 1e-4, t)
        product = t.prod(-1, keepdims=True) / t
        product = jnp.clip(product, -0.9999, 0.9999)
        messages = edges * 2 * jnp.arctanh(product)
        return messages, (llr + messages.sum(1)).mean()

    messages, trace = lax.scan(turn, jnp.zeros((32, 12, 24)), params["in"])
    belief = llr + params["out"] * messages.sum(1)
    return jax.nn.softplus(-belief).mean(), {"belief": belief, "trace": trace}


@program(
    lambda d: (
        [(d.layers(40, 64, 16), d.normal(2, scale=0.1)) for _ in range(6)],
        d.normal(16, 16, 8),
        d.normal(16, 8),
        d.normal(16, 16, scale=0.1),
    ),
    aux=True,
)
def unfolded_mimo_detector(params, channel, symbols, noise):
    """Projected gradient steps with learned sizes and memories, and a normalized error."""
    x = jnp.sign(symbols)
    y = jnp.einsum("bij,bj->bi", channel, x) + noise
    hty = jnp.einsum("bij,bi->bj", channel, y)
    hth = jnp.einsum("bij,bik->bjk", channel, channel)
    guess, memory, loss = jnp.zeros_like(x), jnp.zeros_like(x), 0.0
    scale = jnp.sqrt((hty**2).mean(-1, keepdims=True))
    ls = jnp.linalg.solve(hth + 0.01 * jnp.eye(8), hty[..., None])[..., 0]
    for turn, (layers, steps) in enumerate(params):
        hthx = jnp.einsum("bjk,bk->bj", hth, guess)
        q = guess - steps[0] * hty / scale + steps[1] * hthx / scale
        both = jnp.concatenate([q, hty / scale, hthx / scale, memory, guess], -1)
        out = mlp(layers, both)
        guess = jnp.tanh(guess + out[:, :8])
        memory = memory + out[:, 8:]
        error = ((guess - x) ** 2).mean(-1) / ((ls - x) ** 2).mean(-1).clip(1e-3)
        loss = loss + jnp.log(turn + 2.0) * error.mean()
    return loss / 10, {"guess": guess, "margin": guess - ls}


@program(
    lambda d: (
        (d.layers(16, 64, 14), d.layers(14, 64, 16)),
        d.normal(128, 16),
        d.normal(128, 14),
    ),
    aux=True,
)
def autoencoder_over_the_air(params, logits, noise):
    """Messages as symbols of unit power, a channel at 7 dB, and a decoder's cross entropy."""
    sent = jax.nn.softmax(5 * logits)
    code = mlp(params[0], sent)
    code = code / jnp.sqrt((code**2).mean(0, keepdims=True) + 1e-9)
    papr = (code**2).max(-1) / (code**2).mean(-1)
    received = code + noise * 10 ** (-7 / 20)
    logp = jax.nn.log_softmax(mlp(params[1], received))
    rate = 1 + (sent * logp).sum(-1) / jnp.log(16.0)
    return -(sent * logp).sum(-1).mean(), {"rate": rate, "papr_db": 10 * jnp.log10(papr)}


@program(
    lambda d: (
        {"poly": d.normal(5, 4, 2, scale=0.01), "net": d.layers(16, 32, 2)},
        d.normal(512, 2, scale=0.4),
        d.normal(512, 2, scale=0.4),
    ),
    aux=True,
)
def predistortion(params, sent, measured):
    """Memory polynomials up to the ninth power and a network, before an amplifier in complex."""
    x = jax.lax.complex(sent[:, 0], sent[:, 1])
    delayed = jnp.stack([jnp.roll(x, k) for k in range(4)], -1)
    size = jnp.abs(delayed) + 1e-6
    weights = jax.lax.complex(params["poly"][..., 0], params["poly"][..., 1])
    y = x
    for order in range(5):
        y = y + ((delayed * size ** (2 * order)) @ weights[order])
    parts = jnp.concatenate([delayed.real, delayed.imag, size, size**3], -1)
    fix = mlp(params["net"], parts, jnp.tanh)
    y = y + 0.05 * jax.lax.complex(fix[:, 0], fix[:, 1])
    gain = 1.0 / (1.0 + (jnp.abs(y) / 1.2) ** 4) ** 0.25
    z = y * gain
    error = z - jax.lax.complex(measured[:, 0], measured[:, 1])
    nmse = 10 * jnp.log10((jnp.abs(error) ** 2).mean() / (jnp.abs(x) ** 2).mean())
    return (jnp.abs(error) ** 2).mean(), {"nmse_db": nmse, "z": jnp.abs(z)}


@program(
    lambda d: (
        (
            (d.weight(4, 96), d.weight(32, 96), d.normal(96, scale=0.1)),
            d.layers(32, 2),
        ),
        d.normal(60, 8, 2),
        d.normal(8, scale=0.02),
        d.normal(60, 8, 2, scale=0.05),
    ),
    aux=True,
)
def carrier_tracking(params, symbols, offset, noise):
    """A phase-locked loop whose filter is a GRU; phases add up over sixty symbols."""
    symbols = jnp.sign(symbols)

    def step(state, xs):
        h, phase, drift = state
        symbol, eps = xs
        drift = drift + offset
        c, s = jnp.cos(drift - phase), jnp.sin(drift - phase)
        got = jnp.stack(
            [symbol[:, 0] * c - symbol[:, 1] * s, symbol[:, 0] * s + symbol[:, 1] * c], -1
        )
        got = got + eps
        hard = jnp.tanh(4 * got)
        error = got[:, 1] * hard[:, 0] - got[:, 0] * hard[:, 1]
        h = gru(params[0], h, jnp.concatenate([got, error[:, None], hard[:, :1]], -1))
        out = mlp(params[1], h)
        phase = phase + 0.1 * error + 0.05 * jnp.tanh(out[:, 0])
        return (h, phase, drift), (drift - phase, ((got - symbol) ** 2).mean())

    zero = jnp.zeros(8)
    start = (jnp.zeros((8, 32)), zero, zero)
    _, (off, error) = lax.scan(step, start, (symbols, noise))
    return error.mean(), {"phase": off}


@program(
    lambda d: (
        [d.kernel(7, 2, 32, 1), d.kernel(5, 32, 32, 1), d.layers(32, 11)],
        d.normal(8, 128, 2),
    ),
    forward=True,
)
def modulation_classifier(params, iq):
    """Convolutions of a signal of unit power and of its spectrum in decibels."""
    z = jax.lax.complex(iq[..., 0], iq[..., 1])
    power = (jnp.abs(z) ** 2).mean(-1, keepdims=True)
    z = z / jnp.sqrt(power)
    spectrum = jnp.fft.fftshift(jnp.abs(jnp.fft.fft(z)) ** 2, -1) / 128
    decibels = 10 * jnp.log10(spectrum + 1e-6)
    x = jnp.stack([jnp.abs(z), decibels / 20], -1)
    h = jax.nn.relu(conv1d(x, params[0], 2))
    h = layer_norm(jax.nn.relu(conv1d(h, params[1], 2)))
    return jax.nn.log_softmax(mlp(params[2], h.mean(1))), decibels
