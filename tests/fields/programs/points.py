"""Point clouds: lidar, surveys, molecules as points."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.fields.layers import layer_norm, mlp, nll
from tests.fields.registry import program


def _squared(a, b):
    return ((a[..., :, None, :] - b[..., None, :, :]) ** 2).sum(-1)


@program(
    lambda d: (
        {
            "align": d.layers(3, 32, 32),
            "pose": d.layers(32, 9, scale=0.1),
            "point": d.layers(3, 32, 64),
            "head": d.layers(64, 32, 5),
        },
        d.normal(6, 64, 3),
        d.integers(5, 6),
    ),
    aux=True,
)
def pointnet(params, points, labels):
    """A learned alignment, features of each point, a maximum over all."""
    pose = mlp(params["pose"], mlp(params["align"], points).max(1)).reshape(6, 3, 3) + jnp.eye(3)
    points = jnp.einsum("npi,nij->npj", points, pose)
    features = mlp(params["point"], points).max(1)
    logits = mlp(params["head"], features)
    orthogonal = ((jnp.einsum("nij,nkj->nik", pose, pose) - jnp.eye(3)) ** 2).sum((1, 2)).mean()
    return nll(logits, labels) + 1e-3 * orthogonal, {"logits": logits, "pose": pose}


@program(
    lambda d: (
        {"edge": d.layers(6, 32, 32), "edge2": d.layers(64, 32), "head": d.layers(32, 4)},
        d.normal(3, 40, 3, scale=20) + jnp.array([448000.0, 5411000.0, 250.0], "f"),
        d.integers(4, 3, 40),
    )
)
def dynamic_graph_survey(params, points, labels):
    """Edge convolutions over nearest neighbours in surveyed coordinates (UTM metres)."""

    def neighbours(x):
        return lax.top_k(-_squared(x, x), 8)[1]

    index = jax.vmap(neighbours)(points)
    gather = jax.vmap(lambda x, i: x[i])
    near = (gather(points, index) - points[:, :, None]) / 20.0
    local = (points - points.mean(1, keepdims=True)) / 20.0
    h = mlp(
        params["edge"], jnp.concatenate([jnp.broadcast_to(local[:, :, None], near.shape), near], -1)
    ).max(2)
    near = gather(h, index) - h[:, :, None]
    h = mlp(
        params["edge2"], jnp.concatenate([jnp.broadcast_to(h[:, :, None], near.shape), near], -1)
    ).max(2)
    return nll(mlp(params["head"], h), labels)


@program(lambda d: ((d.layers(3, 32, 64), d.layers(64, 64, 96)), d.normal(6, 48, 3)), aux=True)
def chamfer_autoencoder(params, points):
    """Points to a code and back; nearest distances in both directions."""
    encoder, decoder = params
    code = mlp(encoder, points).max(1)
    out = mlp(decoder, code).reshape(6, 32, 3)
    d = _squared(points, out)
    loss = d.min(1).mean() + d.min(2).mean()
    return loss, {"points": out, "code": code}


@program(lambda d: (d.layers(3, 32, 16), d.normal(40, 3), d.normal(40, 3)), aux=True)
def soft_registration(params, source, target):
    """Correspondences from learned features, the rotation by an SVD, the alignment error."""
    fs, ft = mlp(params, source, jnp.tanh), mlp(params, target, jnp.tanh)
    match = jax.nn.softmax(fs @ ft.T / 4.0, -1)
    matched = match @ target
    a, b = source - source.mean(0), matched - matched.mean(0)
    u, _, vt = jnp.linalg.svd(a.T @ b + 0.1 * jnp.diag(jnp.array([3.0, 2.0, 1.0])))
    sign = jnp.sign(jnp.linalg.det(u @ vt))
    rotation = u @ jnp.diag(jnp.array([1.0, 1.0, 1.0]) * jnp.stack([1.0, 1.0, sign])) @ vt
    aligned = a @ rotation
    return jnp.mean((aligned - b) ** 2), {"rotation": rotation, "match": match}


@program(
    lambda d: (
        {"point": d.layers(7, 32), "head": d.layers(32, 7)},
        d.uniform(200, 4, low=-40, high=40),
        d.normal(64, 7),
    ),
    aux=True,
)
def lidar_pillars(params, points, boxes):
    """Points are put into pillars of 10 m; offsets from the pillar's centre and mean."""
    cell = jnp.clip(jnp.floor((points[:, :2] + 40.0) / 10.0).astype(jnp.int32), 0, 7)
    index = cell[:, 0] * 8 + cell[:, 1]
    count = jax.ops.segment_sum(jnp.ones(200), index, 64)
    mean = jax.ops.segment_sum(points[:, :3], index, 64) / jnp.maximum(count, 1.0)[:, None]
    features = jnp.concatenate([points / 40.0, (points[:, :3] - mean[index]) / 10.0], -1)
    h = jax.nn.relu(mlp(params["point"], features))
    pillars = jax.ops.segment_max(h, index, 64)
    pillars = jnp.where(count[:, None] > 0, pillars, 0.0)
    out = mlp(params["head"], pillars)
    weight = (count > 0)[:, None]
    return (weight * jnp.abs(out - boxes)).sum() / weight.sum(), out


@program(
    lambda d: (
        {
            "qkv": d.weight(16, 48),
            "place": d.layers(3, 16, 16),
            "weigh": d.layers(16, 16),
            "head": d.layers(16, 5),
        },
        d.normal(32, 16),
        d.uniform(32, 3, high=30),
        d.integers(32, 32, 8),
        d.integers(5, 32),
    )
)
def point_transformer(params, x, place, near, labels):
    """Vector attention with encodings of relative places."""
    q, k, v = jnp.split(layer_norm(x) @ params["qkv"], 3, -1)
    relative = mlp(params["place"], (place[:, None] - place[near]) / 10.0)
    weights = jax.nn.softmax(mlp(params["weigh"], q[:, None] - k[near] + relative), 1)
    x = x + (weights * (v[near] + relative)).sum(1)
    return nll(mlp(params["head"], layer_norm(x)), labels)


@program(
    lambda d: (
        d.layers(9, 48, 3),
        d.uniform(64, 3, low=-50, high=50),
        d.uniform(64, 3, low=-50, high=50),
        d.normal(64, 3),
    ),
    aux=True,
)
def scene_flow(params, first, second, target):
    """Points of a scene in metres, moved in four refinements towards the next scan."""
    moved = first
    for _ in range(4):
        weight = jax.nn.softmax(-_squared(moved, second) / 20.0, -1)
        nearest = (weight[..., None] * second[None]).sum(1)
        x = jnp.concatenate([moved / 50.0, nearest - moved, moved - first], -1)
        moved = moved + 0.3 * jnp.tanh(mlp(params, x, jax.nn.silu))
    flow = moved - first
    epe = jnp.sqrt(((flow - target) ** 2).sum(-1) + 1e-8)
    return epe.mean(), {"flow": flow, "epe": epe}


@program(lambda d: (d.layers(3, 32, 3), d.normal(4, 24, 3), d.normal(4, 24, 3)))
def sinkhorn_matching(params, source, target):
    """Entropic transport between moved points and targets, in the log domain."""
    moved = source + 0.3 * mlp(params, source, jnp.tanh)
    cost = _squared(moved, target)
    f = g = jnp.zeros((4, 24))
    eps = 0.1
    for _ in range(10):
        f = -eps * jax.nn.logsumexp((g[:, None] - cost) / eps, -1)
        g = -eps * jax.nn.logsumexp((f[:, :, None] - cost) / eps, -2)
    plan = jnp.exp((f[:, :, None] + g[:, None] - cost) / eps)
    return (plan * cost).sum((1, 2)).mean() / 24


@program(
    lambda d: (
        d.layers(4, 32, 32, 6),
        d.normal(8, 50, 3, scale=30) + jnp.array([4.48e5, 5.411e6, 312.0], "f"),
        d.uniform(8, 50),
        d.integers(6, 8, 50),
    ),
    aux=True,
)
def georeferenced_segmentation(params, points, intensity, labels):
    """Coordinates of a national grid; heights above the lowest point of a tile."""
    ground = points[..., 2].min(1, keepdims=True)
    centre = points.mean(1, keepdims=True)
    local = (points - centre) / 30.0
    x = jnp.concatenate(
        [local[..., :2], (points[..., 2:] - ground[..., None]) / 30.0, intensity[..., None]], -1
    )
    logits = mlp(params, x)
    return nll(logits, labels), {"classes": logits.argmax(-1), "centre": centre}


@program(lambda d: (d.normal(128, 3), d.normal(128, 16), d.layers(19, 32, 32)), forward=True)
def sampling_and_grouping(points, features, layers):
    """Farthest points are chosen in turn; features of their neighbours are pooled."""

    def step(carry, _):
        distance, last = carry
        distance = jnp.minimum(distance, ((points - points[last]) ** 2).sum(-1))
        return (distance, distance.argmax()), last

    _, chosen = lax.scan(step, (jnp.full(128, 1e10), 0), None, length=16)
    _, near = lax.top_k(-_squared(points[chosen], points), 8)
    x = jnp.concatenate([points[near] - points[chosen][:, None], features[near]], -1)
    return mlp(layers, x).max(1)


@program(
    lambda d: (
        d.layers(3, 32, 3),
        d.normal(20, 16, 3) * jnp.array([2.0, 1.0, 0.2], "f"),
        d.normal(20, 3),
    )
)
def fitted_normals(params, patches, normals):
    """Weights of points from a network; the normal is the covariance's last eigenvector."""
    weight = jax.nn.softmax(mlp(params, patches, jnp.tanh)[..., 0], -1)[..., None]
    mean = (weight * patches).sum(1, keepdims=True)
    off = patches - mean
    covariance = jnp.einsum("npi,npj->nij", weight * off, off)
    _, vectors = jnp.linalg.eigh(covariance)
    normal = vectors[..., 0]
    target = normals / jnp.linalg.norm(normals, axis=-1, keepdims=True)
    return (1 - (normal * target).sum(-1) ** 2).mean()


@program(
    lambda d: (
        [
            {"edge": d.layers(33, 32, 16), "move": d.layers(16, 1), "node": d.layers(32, 32, 16)}
            for _ in range(3)
        ],
        d.normal(4, 8, 16),
        d.normal(4, 8, 3, scale=3) + 100,
        d.normal(4, 8, 3, scale=3) + 100,
    ),
    aux=True,
)
def equivariant_network(params, h, x, target):
    """EGNN: places are moved along differences, by weights from their distances."""
    x0 = x
    for layer in params:
        off = x[:, :, None] - x[:, None]
        d2 = (off**2).sum(-1, keepdims=True)
        ends = [
            jnp.broadcast_to(h[:, :, None], (4, 8, 8, 16)),
            jnp.broadcast_to(h[:, None], (4, 8, 8, 16)),
            d2 / 10.0,
        ]
        m = jax.nn.silu(mlp(layer["edge"], jnp.concatenate(ends, -1), jax.nn.silu))
        x = x + (off * mlp(layer["move"], m) / (jnp.sqrt(d2) + 1.0)).mean(2)
        h = h + mlp(layer["node"], jnp.concatenate([h, m.sum(2)], -1), jax.nn.silu)
    return jnp.mean((x - target) ** 2) / 9, {"x": x, "moved": x - x0}
