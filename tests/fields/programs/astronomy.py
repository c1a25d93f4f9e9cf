"""Astronomy: light curves, lenses, spectra, pulsars, orbits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.fields.layers import conv1d, layer_norm, mlp
from tests.fields.registry import program


@program(
    lambda d: (
        {"trend": d.layers(8, 32, 1), "orbit": d.normal(3, scale=0.01)},
        d.times(256, start=2457000.0, step=0.02),
        d.normal(256, 8),
        1 + d.normal(256, scale=1e-3),
    ),
    aux=True,
)
def transit_light_curve(params, days, pointing, flux):
    """A transit in Julian days times a learned trend of the instrument; depths of a percent."""
    period, centre, depth = 1.7 + params["orbit"][0], params["orbit"][1], 0.01 + params["orbit"][2]
    phase = jnp.mod((days - 2457000.0 - centre) / period + 0.5, 1.0) - 0.5
    inside = jax.nn.sigmoid((0.03 - jnp.abs(phase)) / 0.003)
    trend = 1 + 1e-2 * mlp(params["trend"], pointing, jnp.tanh)[:, 0]
    model = trend * (1 - depth * inside)
    return jnp.mean(((flux - model) / 1e-3) ** 2), {"model": model, "residual": flux - model}


@program(
    lambda d: (
        d.layers(10, 64, 64, 9),
        22 + d.normal(64, 5),
        d.uniform(64, 5, low=0.02, high=0.2),
        d.uniform(64, low=0.1, high=2.0),
    ),
    aux=True,
)
def photometric_redshift(params, magnitudes, errors, redshift):
    """A mixture over redshift from magnitudes near 22 and their colours."""
    colours = magnitudes[:, :-1] - magnitudes[:, 1:]
    bright = (magnitudes[:, 2:3] - 22.0) / 2.0
    h = mlp(params, jnp.concatenate([colours, bright, jnp.log(errors)], -1), jax.nn.silu)
    logits, mean, width = jnp.split(h, 3, -1)
    mean, width = jax.nn.softplus(mean), 0.05 + jax.nn.softplus(width)
    z = (redshift[:, None] - mean) / width
    logp = jax.nn.log_softmax(logits) - 0.5 * z**2 - jnp.log(width) - 0.919
    expected = (jax.nn.softmax(logits) * mean).sum(-1)
    return -jax.nn.logsumexp(logp, -1).mean(), {"z": expected, "off": expected - redshift}


@program(
    lambda d: (
        {"source": d.layers(2, 48, 48, 1), "lens": d.normal(4, scale=0.05)},
        d.normal(32, 32, scale=0.1),
    ),
    aux=True,
)
def gravitational_lens(params, image):
    """Rays bent by an elliptic mass, to a source that a network paints; arc seconds."""
    axis = jnp.linspace(-2.0, 2.0, 32)
    x, y = jnp.meshgrid(axis, axis, indexing="ij")
    centre, shear, radius = params["lens"][:2], params["lens"][2], 1.2 + params["lens"][3]
    dx, dy = x - centre[0], y - centre[1]
    r = jnp.sqrt(dx**2 + 0.8 * dy**2 + 0.01)
    bx = dx - radius * dx / r - shear * dx
    by = dy - 0.8 * radius * dy / r + shear * dy
    places = jnp.stack([bx, by], -1).reshape(-1, 2)
    waves = jnp.sin(3.0 * places)
    light = jax.nn.softplus(mlp(params["source"], waves, jax.nn.gelu)).reshape(32, 32)
    spread = jnp.exp(-0.5 * (jnp.arange(-2.0, 3.0) / 0.8) ** 2)
    kernel = (spread[:, None] * spread[None] / spread.sum() ** 2)[:, :, None, None]
    seen = lax.conv_general_dilated(
        light[None, :, :, None], kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )[0, :, :, 0]
    return jnp.mean(((seen - image) / 0.1) ** 2) / 100, {"light": light, "places": places}


@program(
    lambda d: (
        [d.layers(4, 64, 128), d.kernel(5, 1, 1, 1)],
        d.normal(8, 4),
        jnp.linspace(4000.0, 7000.0, 128).astype("f"),
        d.normal(8, scale=60.0),
        d.uniform(8, 128, low=0.5, high=1.0),
    ),
    aux=True,
)
def stellar_spectra(params, labels, wavelength, velocity, observed):
    """An emulated spectrum, shifted by a radial velocity in km/s and read on another grid."""
    rest = 1.0 - jax.nn.sigmoid(mlp(params[0], labels, jax.nn.leaky_relu) - 2.0)
    shifted = wavelength * (1.0 + velocity[:, None] / 299792.458)
    spectrum = jax.vmap(lambda s, f: jnp.interp(wavelength, s, f))(shifted, rest)
    kernel = jax.nn.softmax(params[1].reshape(5)).reshape(5, 1, 1)
    spectrum = conv1d(spectrum[..., None], kernel)[..., 0]
    continuum = jnp.median(spectrum, -1, keepdims=True)
    normal = spectrum / continuum
    return jnp.mean((normal - observed) ** 2) * 10, {"spectrum": normal}


@program(
    lambda d: (
        {"noise": d.layers(6, 32, 1), "spin": d.normal(3, scale=1e-3)},
        d.times(128, start=0.0, step=8.0e4),
        d.normal(128, 6),
    ),
    aux=True,
)
def pulsar_timing(params, seconds, state):
    """Phases of a pulsar over months, with a learned delay; residuals are parts of a turn."""
    f0, f1 = 0.7 + 1e-6 * params["spin"][0], -1e-15 + 1e-16 * params["spin"][1]
    delay = 1e-3 * jnp.tanh(mlp(params["noise"], state, jnp.tanh)[:, 0])
    t = seconds - seconds[0] - delay
    turns = f0 * t + 0.5 * f1 * t**2 + params["spin"][2]
    residual = turns - jnp.round(turns)
    return jnp.mean(residual**2) * 10, {"residual": residual, "delay": delay}


@program(
    lambda d: (
        d.layers(3, 48, 48, 3),
        d.uniform(24, low=0.3, high=2.0),
        d.uniform(24, low=0.05, high=0.6),
        d.uniform(24, 16, low=0.0, high=6.28),
        d.normal(24, 16, scale=10.0),
    ),
    aux=True,
)
def radial_velocities(params, axis, eccentricity, anomaly, velocity):
    """Kepler's equation by Newton's method, with a learned activity of the star in m/s."""
    e = eccentricity[:, None]

    def newton(_, big):
        return big - (big - e * jnp.sin(big) - anomaly) / (1 - e * jnp.cos(big))

    big = lax.fori_loop(0, 6, newton, anomaly)
    big = lax.stop_gradient(big)
    big = newton(0, big)
    true = 2 * jnp.arctan2(jnp.sqrt(1 + e) * jnp.sin(big / 2), jnp.sqrt(1 - e) * jnp.cos(big / 2))
    inputs = jnp.stack([jnp.cos(true), jnp.sin(true), jnp.broadcast_to(e, true.shape)], -1)
    amplitude, jitter, offset = jnp.moveaxis(mlp(params, inputs, jax.nn.gelu), -1, 0)
    speed = 28.4 / jnp.sqrt(axis)[:, None] / jnp.sqrt(1 - e**2) * (jnp.cos(true) + e)
    predicted = speed * (1 + 0.1 * jnp.tanh(amplitude)) + 3.0 * offset
    scale = 1.0 + jax.nn.softplus(jitter)
    loss = jnp.mean(0.5 * ((velocity - predicted) / scale) ** 2 + jnp.log(scale)) / 10
    return loss, {"anomaly": true, "velocity": predicted}


@program(
    lambda d: (
        [d.layers(5, 48), d.weight(48, 144), d.layers(48, 2)],
        d.times(8, 40, start=59000.0, step=3.0),
        20 + d.normal(8, 40),
        d.normal(8, 2),
    )
)
def supernova_classifier(params, days, magnitude, target):
    """Attention over an irregular light curve in modified Julian days; peaks by the magnitude."""
    first = days - days[:, :1]
    brightest = magnitude.min(-1, keepdims=True)
    flux = 10.0 ** (-0.4 * (magnitude - 27.5))
    slope = jnp.gradient(magnitude, axis=-1) / jnp.gradient(days, axis=-1)
    x = jnp.stack(
        [first / 60.0, magnitude - brightest, jnp.log1p(flux / 100), slope, jnp.sin(first / 20)], -1
    )
    h = mlp(params[0], x)
    q, k, v = jnp.split(layer_norm(h) @ params[1], 3, -1)
    near = -jnp.abs(days[:, :, None] - days[:, None]) / 30.0
    h = h + jax.nn.softmax(q @ k.swapaxes(1, 2) / 48**0.5 + near) @ v
    return jnp.mean((mlp(params[2], h.mean(1)) - target) ** 2)
