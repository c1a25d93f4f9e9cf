"""Text to speech and speech: durations, alignments, vocoders, recognizers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from tests.fields.layers import attend, conv1d, layer_norm, lstm, mlp
from tests.fields.registry import program


@program(
    lambda d: (
        (d.layers(32, 32, 1), d.layers(32, 48, 20)),
        d.normal(4, 12, 32),
        d.normal(4, 60, 20),
    ),
    aux=True,
)
def duration_upsampling(params, tokens, mel):
    """Durations in frames are summed to centres; frames weigh tokens by Gaussians of distance."""
    predict, decode = params
    duration = jnp.exp(1.5 + 0.3 * jnp.tanh(mlp(predict, tokens)[..., 0]))
    end = jnp.cumsum(duration, -1)
    centre = end - 0.5 * duration
    frames = jnp.arange(60.0) + 0.5
    logits = -0.1 * (frames[None, :, None] - centre[:, None]) ** 2
    out = mlp(decode, jax.nn.softmax(logits, -1) @ tokens)
    return jnp.abs(out - mel).mean(), {"duration": duration, "length": end[:, -1], "mel": out}


@program(
    lambda d: (
        (d.layers(24, 32, 1), d.layers(24, 48, 16)),
        d.normal(3, 40, 24),
        d.normal(3, 400, 16),
    )
)
def length_regulator(params, tokens, mel):
    """Each of 400 frames looks up its token by the cumulative duration."""
    predict, decode = params
    duration = 10.0 * jnp.exp(0.2 * mlp(predict, tokens)[..., 0])
    end = jnp.cumsum(duration, -1)
    frames = jnp.arange(400.0) + 0.5
    index = jnp.minimum((frames[None, :, None] > lax.stop_gradient(end)[:, None]).sum(-1), 39)
    take = jax.vmap(lambda x, i: x[i])
    start = take(jnp.pad(end, ((0, 0), (1, 0))), index)
    within = (frames - start) / take(duration, index)
    h = take(tokens, index) * (1 + 0.1 * within[..., None])
    return jnp.mean((mlp(decode, h) - mel) ** 2) + 1e-2 * jnp.mean((end[:, -1] / 400.0 - 1) ** 2)


@program(
    lambda d: (
        (
            (d.weight(40, 128), d.weight(32, 128), d.normal(128, scale=0.1)),
            d.weight(32, 16),
            d.weight(24, 16),
            d.normal(5, 1, 16, scale=0.3),
            d.weight(16, 1),
            d.layers(56, 16),
        ),
        d.normal(3, 15, 24),
        d.normal(20, 3, 16),
    ),
    aux=True,
)
def tacotron_decoder(params, memory, mel):
    """Attention that sees where it has been, teacher forced."""
    cell, wq, wk, location, v, head = params
    keys = memory @ wk

    def step(carry, frame):
        h, c, context, total = carry
        h, c = lstm(cell, (h, c), jnp.concatenate([frame, context], -1))
        place = conv1d(total[..., None], location)
        energy = (jnp.tanh((h @ wq)[:, None] + keys + place) @ v)[..., 0]
        weights = jax.nn.softmax(energy, -1)
        context = (weights[..., None] * memory).sum(1)
        out = mlp(head, jnp.concatenate([h, context], -1))
        return (h, c, context, total + weights), (out, weights)

    start = jnp.zeros((3, 32)), jnp.zeros((3, 32)), jnp.zeros((3, 24)), jnp.zeros((3, 15))
    _, (out, weights) = lax.scan(step, start, jnp.pad(mel[:-1], ((1, 0), (0, 0), (0, 0))))
    return jnp.abs(out - mel).mean(), {"alignment": weights}


@program(
    lambda d: (
        [d.normal(8, 20, 16, scale=0.15), d.kernel(3, 16, 16, 1), d.kernel(7, 16, 1, 1)],
        d.normal(2, 24, 20),
        d.normal(2, 96, 1, scale=0.2),
    )
)
def vocoder_generator(params, mel, wave):
    """A transposed convolution, a residual block, and a loss on spectra of several sizes."""
    h = lax.conv_transpose(mel, params[0], (4,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    h = h + conv1d(jax.nn.leaky_relu(h, 0.1), params[1], dilation=3)
    out = jnp.tanh(conv1d(jax.nn.leaky_relu(h, 0.1), params[2]))
    loss = 0.0
    for size in (16, 32):
        frames = lambda x: (
            x[..., 0].reshape(2, -1, size) * jnp.asarray(np.hanning(size), jnp.float32)
        )
        a, b = jnp.abs(jnp.fft.rfft(frames(out))) + 1e-5, jnp.abs(jnp.fft.rfft(frames(wave))) + 1e-5
        loss += (
            jnp.sqrt(((a - b) ** 2).sum() / (b**2).sum()) + jnp.abs(jnp.log(a) - jnp.log(b)).mean()
        )
    return loss


@program(
    lambda d: (
        (
            d.normal(32, 24, scale=0.3),
            [(d.kernel(2, 24, 48, 1), d.weight(24, 24), d.weight(24, 24)) for _ in range(5)],
            d.layers(24, 32),
        ),
        d.integers(32, 3, 64),
    )
)
def wavenet(params, codes):
    """Gated dilated convolutions over mu-law codes; skips are added up."""
    embed, blocks, head = params
    x, skips = embed[codes[:, :-1]], 0.0
    for i, (w, res, skip) in enumerate(blocks):
        a, b = jnp.split(conv1d(x, w, dilation=2**i, padding="CAUSAL"), 2, -1)
        h = jnp.tanh(a) * jax.nn.sigmoid(b)
        x, skips = x + h @ res, skips + h @ skip
    logp = jax.nn.log_softmax(mlp(head, jax.nn.relu(skips)))
    return -jnp.take_along_axis(logp, codes[:, 1:, None], -1).mean()


@program(
    lambda d: (
        d.layers(3, 48, 22),
        d.uniform(4, 20, low=180, high=260),
        d.normal(4, 20, scale=8) - 30,
        d.normal(4, 1280, scale=0.1),
    ),
    aux=True,
)
def harmonic_synthesizer(params, f0, loudness, wave):
    """DDSP: a pitch in hertz is integrated at 16 kHz; a network gives twenty harmonics."""
    features = jnp.stack([jnp.log2(f0 / 440.0), loudness / 40.0, jnp.ones_like(f0)], -1)
    out = mlp(params, features, jax.nn.leaky_relu)
    up = lambda x: jnp.repeat(x, 64, 1)
    pitch = up(f0 * jnp.exp2(0.02 * jnp.tanh(out[..., 21])))
    amplitude = up(jax.nn.softplus(out[..., 0]))
    shares = up(jax.nn.softmax(out[..., 1:21]))
    phase = jnp.cumsum(2 * jnp.pi * pitch / 16000.0, -1)
    number = jnp.arange(1, 21.0)
    shares = shares * (pitch[..., None] * number < 8000.0)
    audio = amplitude * (jnp.sin(phase[..., None] * number) * shares).sum(-1)
    spectra = [jnp.log(jnp.abs(jnp.fft.rfft(x.reshape(4, -1, 128))) + 1e-3) for x in (audio, wave)]
    return jnp.abs(spectra[0] - spectra[1]).mean(), {"audio": audio, "pitch": pitch}


@program(
    lambda d: (
        d.layers(32, 32, 3),
        d.normal(4, 30, 32),
        d.uniform(4, 30, low=80, high=300),
        d.mask(4, 30),
    ),
    aux=True,
)
def pitch_predictor(params, text, f0, voiced):
    """Log pitch with its mean and deviation, a voicing flag; the error in cents."""
    mean, std = 5.2, 0.35
    out = mlp(params, text, jax.nn.gelu)
    logf0 = mean + std * out[..., 0]
    error = jnp.where(voiced, (logf0 - jnp.log(f0)) / std, 0.0)
    flag = optax.sigmoid_binary_cross_entropy(out[..., 1], voiced.astype(jnp.float32)).mean()
    cents = 1200.0 * (logf0 - jnp.log(f0)) / jnp.log(2.0)
    return (error**2).sum() / voiced.sum() + flag, {"hertz": jnp.exp(logf0), "cents": cents}


@program(
    lambda d: ((d.weight(16, 16), d.weight(20, 16)), d.normal(3, 10, 16), d.normal(3, 30, 20)),
    aux=True,
)
def forward_sum_alignment(params, text, mel):
    """All monotone alignments are summed in the log domain, frame by frame."""
    wt, wm = params
    keys, queries = text @ wt, mel @ wm
    d2 = (
        (queries**2).sum(-1)[..., None]
        - 2 * queries @ keys.swapaxes(1, 2)
        + (keys**2).sum(-1)[:, None]
    )
    logits = jax.nn.log_softmax(-0.05 * d2, -1)

    def step(alpha, row):
        moved = jnp.pad(alpha, ((0, 0), (1, 0)), constant_values=-1e9)[:, :-1]
        alpha = jnp.logaddexp(alpha, moved) + row
        return alpha, alpha

    start = jnp.full((3, 10), -1e9).at[:, 0].set(0.0) + logits[:, 0]
    last, _ = lax.scan(step, start, logits[:, 1:].swapaxes(0, 1))
    return -last[:, -1].mean() / 30, {"attention": jnp.exp(logits)}


@program(
    lambda d: (
        (d.layers(24, 32, 16), d.normal(3, 32, 16, scale=0.5), d.layers(16, 32, 24)),
        d.normal(4, 20, 24),
    ),
    aux=True,
)
def residual_vector_quantizer(params, x):
    """A codec: three codebooks, each for what the earlier ones leave, straight through."""
    encode, books, decode = params
    z = mlp(encode, x)
    rest, total, commit, codes = z, 0.0, 0.0, []
    for book in books:
        d2 = ((rest[..., None, :] - book) ** 2).sum(-1)
        index = d2.argmin(-1)
        q = book[index]
        commit += jnp.mean((lax.stop_gradient(rest) - q) ** 2) + 0.25 * jnp.mean(
            (rest - lax.stop_gradient(q)) ** 2
        )
        total, rest = total + q, rest - lax.stop_gradient(q)
        codes.append(index)
    quantized = z + lax.stop_gradient(total - z)
    return jnp.mean((mlp(decode, quantized) - x) ** 2) + commit, {
        "codes": jnp.stack(codes),
        "rest": jnp.sqrt((rest**2).mean()),
    }


@program(
    lambda d: (
        (d.layers(20, 48, 48), d.weight(48, 144), d.layers(48, 12)),
        d.normal(3, 40, 20, scale=3) - 8,
        d.integers(11, 3, 12),
    ),
    aux=True,
)
def ctc_recognizer(params, logmel, labels):
    """Log-mel features with mean -8, one attention layer, connectionist temporal classification."""
    first, qkv, head = params
    x = (logmel - logmel.mean(1, keepdims=True)) / (logmel.std(1, keepdims=True) + 1e-5)
    h = mlp(first, x, jax.nn.silu)
    h = h + attend(*jnp.split(layer_norm(h) @ qkv, 3, -1))
    logits = mlp(head, layer_norm(h))
    zero = jnp.zeros((3, 40)), jnp.zeros((3, 12))
    loss = optax.ctc_loss(logits, zero[0], labels + 1, zero[1])
    return loss.mean() / 40, {"path": logits.argmax(-1), "loss": loss}


@program(
    lambda d: (
        (d.weight(24, 32), d.normal(10, 32), d.weight(32, 32), d.layers(32, 24)),
        d.normal(4, 30, 24),
        d.normal(4, 24),
    )
)
def style_tokens(params, reference, target):
    """A reference's mean asks ten tokens for a style."""
    wq, tokens, wk, head = params
    query = jnp.tanh(reference.mean(1) @ wq)
    weights = jax.nn.softmax(query @ (jnp.tanh(tokens) @ wk).T / jnp.sqrt(32.0))
    return jnp.mean((mlp(head, weights @ jnp.tanh(tokens)) - target) ** 2)
