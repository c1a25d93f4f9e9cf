"""Images: classification, detection, segmentation, matching."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
from jax import lax

from tests.fields.layers import attend, conv, layer_norm, mlp, nll
from tests.fields.registry import program


@program(
    lambda d: (
        [
            (d.kernel(3, 3 if i == 0 else 16, 16), d.uniform(16, low=0.5), d.normal(16, scale=0.1))
            for i in range(4)
        ]
        + [d.layers(16, 10)],
        d.uniform(8, 16, 16, 3, high=255),
        [(d.normal(16), d.uniform(16)) for _ in range(4)],
        d.integers(10, 8),
    ),
    aux=True,
)
def batch_norm_network(params, pixels, running, labels):
    """Residual blocks with batch statistics; moving averages and logits come back."""
    *blocks, head = params
    x = (pixels - jnp.array([123.7, 116.3, 103.5])) / jnp.array([58.4, 57.1, 57.4])
    new = []
    for i, ((w, g, b), (m, v)) in enumerate(zip(blocks, running, strict=True)):
        h = conv(x, w, 2 if i == 2 else 1)
        mean, var = h.mean((0, 1, 2)), h.var((0, 1, 2))
        new.append((0.9 * m + 0.1 * mean, 0.9 * v + 0.1 * var))
        h = jax.nn.relu((h - mean) * lax.rsqrt(var + 1e-5) * g + b)
        x = h if i in (0, 2) else x + h
    logits = mlp(head, x.mean((1, 2)))
    return nll(logits, labels), {"running": new, "logits": logits}


@program(
    lambda d: (
        [d.kernel(3, 8, 32), d.kernel(1, 32, 4), d.kernel(1, 32, 1)],
        d.normal(2, 12, 12, 8),
        d.uniform(2, 12, 12, 2, low=0, high=900),
        d.uniform(2, 12, 12, 2, low=20, high=300),
    ),
    aux=True,
)
def box_regression(params, features, corner, size):
    """Anchors on a grid of 1,024 pixels; boxes decoded, generalized intersection over union."""
    h = jax.nn.relu(conv(features, params[0]))
    out, score = conv(h, params[1]), conv(h, params[2])[..., 0]
    grid = (
        85.0 * jnp.stack(jnp.meshgrid(jnp.arange(12.0), jnp.arange(12.0), indexing="ij"), -1) + 42.0
    )
    centre = grid + 100.0 * out[..., :2]
    extent = 100.0 * jnp.exp(jnp.clip(out[..., 2:], -2, 2))
    a0, a1, b0, b1 = centre - extent / 2, centre + extent / 2, corner, corner + size
    inter = jnp.maximum(jnp.minimum(a1, b1) - jnp.maximum(a0, b0), 0).prod(-1)
    union = (a1 - a0).prod(-1) + (b1 - b0).prod(-1) - inter
    hull = (jnp.maximum(a1, b1) - jnp.minimum(a0, b0)).prod(-1)
    giou = inter / union - (hull - union) / hull
    focal = optax.sigmoid_focal_loss(score, (inter / union > 0.1).astype(jnp.float32)).mean()
    return (1 - giou).mean() + focal, {"boxes": jnp.concatenate([a0, a1], -1), "iou": inter / union}


@program(
    lambda d: (
        [
            d.kernel(3, 1, 16),
            d.kernel(3, 16, 32),
            d.normal(2, 2, 32, 16, scale=0.1),
            d.kernel(3, 32, 1),
        ],
        d.normal(4, 16, 16, 1, scale=300) - 500,
        d.mask(4, 16, 16),
    ),
    aux=True,
)
def unet_segmentation(params, hounsfield, mask):
    """Tomography in Hounsfield units, a window, a U-Net and Dice's loss."""
    x = jnp.clip((hounsfield + 1000.0) / 2000.0, 0.0, 1.0)
    a = jax.nn.relu(conv(x, params[0]))
    b = jax.nn.relu(conv(a, params[1], 2))
    up = lax.conv_transpose(
        b, params[2], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    p = jax.nn.sigmoid(conv(jnp.concatenate([a, jax.nn.relu(up)], -1), params[3]))[..., 0]
    dice = (2 * (p * mask).sum((1, 2)) + 1) / (p.sum((1, 2)) + mask.sum((1, 2)) + 1)
    return 1 - dice.mean(), {"dice": dice, "p": p}


@program(
    lambda d: (
        (
            d.kernel(4, 3, 32),
            d.normal(17, 32, scale=0.02),
            d.normal(1, 32),
            [(d.weight(32, 96), d.weight(32, 32), d.layers(32, 64, 32)) for _ in range(2)],
            d.layers(32, 10),
        ),
        d.normal(4, 16, 16, 3),
        d.integers(10, 4),
    ),
    aux=True,
)
def vision_transformer(params, images, labels):
    """Patches, a class token, two blocks with layer scale, label smoothing."""
    patch, place, token, blocks, head = params
    x = conv(images, patch, 4, "VALID").reshape(4, 16, 32)
    x = jnp.concatenate([jnp.broadcast_to(token, (4, 1, 32)), x], 1) + place
    for qkv, out, ff in blocks:
        q, k, v = (
            t.reshape(4, 17, 4, 8).swapaxes(1, 2) for t in jnp.split(layer_norm(x) @ qkv, 3, -1)
        )
        x = x + 0.1 * attend(q, k, v).swapaxes(1, 2).reshape(4, 17, 32) @ out
        x = x + 0.1 * mlp(ff, layer_norm(x), jax.nn.gelu)
    logits = mlp(head, layer_norm(x)[:, 0])
    smooth = 0.9 * jax.nn.one_hot(labels, 10) + 0.01
    return optax.softmax_cross_entropy(logits, smooth).mean(), {
        "logits": logits,
        "top": logits.argmax(-1),
    }


@program(
    lambda d: (
        (
            d.weight(48, 32),
            d.normal(16, 32, scale=0.1),
            d.weight(32, 96),
            d.weight(32, 96),
            d.layers(32, 48),
        ),
        d.uniform(4, 16, 48),
        d.integers(1000, 16),
    )
)
def masked_autoencoder(params, patches, order):
    """A quarter of the patches is seen; normalized pixels of the others are compared."""
    embed, place, first, second, head = params
    shuffled = jnp.argsort(order)
    keep, rest = shuffled[:4], shuffled[4:]
    x = (patches @ embed + place)[:, keep]
    x = x + attend(*jnp.split(layer_norm(x) @ first, 3, -1))
    x = jnp.zeros((4, 16, 32)).at[:, keep].set(x) + place
    x = x + attend(*jnp.split(layer_norm(x) @ second, 3, -1))
    mean, var = patches.mean(-1, keepdims=True), patches.var(-1, keepdims=True)
    target = (patches - mean) / jnp.sqrt(var + 1e-6)
    return jnp.mean(((mlp(head, layer_norm(x)) - target)[:, rest]) ** 2)


@program(
    lambda d: ((d.layers(48, 64, 32), d.layers(32, 32, 16)), d.normal(24, 48), d.normal(24, 48)),
    aux=True,
)
def contrastive_views(params, a, b):
    """Two views, a projection, cross entropy at temperature 0.07 over all others."""
    encoder, projector = params
    z = mlp(projector, jax.nn.relu(mlp(encoder, jnp.concatenate([a, b]))))
    z = z / jnp.linalg.norm(z, axis=-1, keepdims=True)
    similarity = z @ z.T / 0.07 - 1e9 * jnp.eye(48)
    positive = jnp.roll(jnp.arange(48), 24)
    logp = jax.nn.log_softmax(similarity)[jnp.arange(48), positive]
    hit = (similarity.argmax(-1) == positive).mean()
    return -logp.mean(), {"hit": hit, "alignment": (z[:24] * z[24:]).sum(-1)}


@program(
    lambda d: (d.layers(32, 48, 16), d.layers(32, 48, 16), d.normal(24, 32), d.normal(24, 32)),
    aux=True,
)
def self_distillation(params, teacher, a, b):
    """A student follows a moving average of itself; the new average is an output."""
    s = jax.nn.log_softmax(mlp(params, a) / 0.1)
    t = mlp(teacher, b)
    t = jax.nn.softmax((t - t.mean(0)) / 0.04)
    loss = -(lax.stop_gradient(t) * s).sum(-1).mean()
    new = jax.tree.map(lambda o, n: 0.996 * o + 0.004 * n, teacher, params)
    return loss, {"teacher": new, "centre": mlp(teacher, b).mean(0)}


@program(
    lambda d: (
        [d.kernel(3, 3, 16), d.kernel(3, 16, 16)],
        d.uniform(2, 12, 40, 3),
        d.uniform(2, 12, 40, 3),
        d.uniform(2, 12, 40, high=15),
    ),
    aux=True,
)
def stereo_disparity(params, left, right, truth):
    """A cost volume over sixteen disparities, read by a soft argmin; depth by the base line."""
    f = lambda x: conv(jax.nn.relu(conv(x - 0.5, params[0])), params[1])
    a, b = f(left), f(right)
    volume = jnp.stack([(a * jnp.roll(b, k, 2)).mean(-1) for k in range(16)], -1)
    disparity = (jax.nn.softmax(10.0 * volume) * jnp.arange(16.0)).sum(-1)
    depth = 721.0 * 0.54 / (disparity + 0.5)
    off = disparity - truth
    return jnp.where(jnp.abs(off) < 1, 0.5 * off**2, jnp.abs(off) - 0.5).mean(), {
        "disparity": disparity,
        "depth": depth,
    }


@program(
    lambda d: (
        [d.kernel(3, 3, 24), d.kernel(3, 24, 1)],
        d.uniform(3, 16, 16, 3),
        d.uniform(3, 16, 16, low=1, high=80),
    ),
    aux=True,
)
def monocular_depth(params, image, metres):
    """Log depth up to 80 m, the scale-invariant loss and a relative error."""
    h = jax.nn.elu(conv(image - 0.45, params[0]))
    logd = 2.5 + 0.5 * conv(h, params[1])[..., 0]
    g = logd - jnp.log(metres)
    loss = jnp.sqrt(jnp.mean(g**2) - 0.85 * jnp.mean(g) ** 2)
    depth = jnp.exp(logd)
    return loss, {"depth": depth, "relative": (jnp.abs(depth - metres) / metres).mean()}


@program(
    lambda d: (
        {
            "feature": d.kernel(3, 3, 16),
            "context": d.kernel(3, 3, 16),
            "update": [d.kernel(3, 27, 24), d.kernel(3, 24, 2)],
        },
        d.uniform(2, 12, 12, 3),
        d.uniform(2, 12, 12, 3),
        d.normal(2, 12, 12, 2, scale=2),
    ),
    aux=True,
)
def recurrent_flow(params, first, second, truth):
    """RAFT: all correlations, looked up around where the flow points, four refinements."""
    fa, fb = conv(first - 0.5, params["feature"]), conv(second - 0.5, params["feature"])
    volume = jnp.einsum("nijc,nklc->nijkl", fa, fb) / 4.0
    context = jnp.tanh(conv(first - 0.5, params["context"]))
    grid = jnp.stack(jnp.meshgrid(jnp.arange(12.0), jnp.arange(12.0), indexing="ij"), -1)
    offsets = jnp.stack(jnp.meshgrid(*[jnp.arange(-1.0, 2.0)] * 2, indexing="ij"), -1).reshape(9, 2)

    def lookup(plane, place):
        low = jnp.floor(place)
        u, v = (place - low).T
        i, j = low.astype(jnp.int32).T
        at = lambda i, j: plane[jnp.clip(i, 0, 11), jnp.clip(j, 0, 11)]
        return (1 - u) * ((1 - v) * at(i, j) + v * at(i, j + 1)) + u * (
            (1 - v) * at(i + 1, j) + v * at(i + 1, j + 1)
        )

    flow, loss = jnp.zeros((2, 12, 12, 2)), 0.0
    for k in range(4):
        places = (grid + flow)[..., None, :] + offsets
        near = jax.vmap(jax.vmap(jax.vmap(lookup)))(volume, places)
        x = jnp.concatenate([near, context, flow], -1)
        flow = flow + conv(jax.nn.relu(conv(x, params["update"][0])), params["update"][1])
        loss += 0.8 ** (3 - k) * jnp.abs(flow - truth).mean()
    return loss, {"flow": flow, "epe": jnp.sqrt(((flow - truth) ** 2).sum(-1)).mean()}


@program(
    lambda d: (
        [d.kernel(3, 3, 16), d.kernel(3, 16, 24)],
        d.uniform(1, 24, 24, 3, high=255),
        d.uniform(1, 24, 24, 3, high=255),
        d.uniform(1, 24, 24, 3, high=255),
    ),
    aux=True,
)
def style_transfer(params, image, style, content):
    """Gram matrices of features of pixels up to 255, and features of the content."""

    def features(x):
        x = x - jnp.array([123.7, 116.8, 103.9])
        a = jax.nn.relu(conv(x, params[0]))
        return a, jax.nn.relu(conv(a, params[1], 2))

    def gram(f):
        f = f.reshape(-1, f.shape[-1])
        return f.T @ f / f.shape[0]

    mine, theirs, kept = features(image), features(style), features(content)
    s = sum(jnp.mean((gram(a) - gram(b)) ** 2) for a, b in zip(mine, theirs, strict=True))
    c = jnp.mean((mine[1] - kept[1]) ** 2)
    tv = jnp.abs(jnp.diff(image, axis=1)).mean()
    return 1e-6 * s + 1e-2 * c + 1e-3 * tv, {"style": s, "content": c}


@program(
    lambda d: (
        {"in": d.kernel(3, 1, 8), "out": d.kernel(3, 8, 1)},
        d.uniform(2, 32, 32, 1),
    ),
    aux=True,
)
def structural_similarity(params, image):
    """A restored image beside the original: means, variances and covariances of windows."""
    restored = image + 0.1 * conv(jax.nn.relu(conv(image, params["in"])), params["out"])
    window = functools.partial(conv, w=jnp.full((7, 7, 1, 1), 1 / 49), padding="VALID")
    mx, my = window(image), window(restored)
    vx, vy = window(image * image) - mx**2, window(restored * restored) - my**2
    vxy = window(image * restored) - mx * my
    like = (2 * mx * my + 1e-4) * (2 * vxy + 9e-4)
    like /= (mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4)
    return 1 - like.mean(), {"like": like}
