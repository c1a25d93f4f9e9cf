"""Geometry: rotations, meshes, curved spaces, curves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tests.fields.layers import mlp
from tests.fields.registry import program


@program(
    lambda d: (
        (d.layers(10, 32, 3), d.layers(6, 32, 3)),
        d.normal(40, 3, scale=0.3) + 5,
        d.normal(7, scale=0.3),
        d.integers(40, 40, 6),
        d.normal(40, 3, scale=0.3) + 5,
    ),
    aux=True,
)
def mesh_refinement(params, vertices, code, near, target):
    """Two refinements of a mesh; Laplacian smoothness as a difference from the neighbours' mean."""
    first, second = params
    v = vertices
    x = jnp.concatenate([v - 5.0, jnp.broadcast_to(code, (40, 7))], -1)
    v = v + 0.1 * mlp(first, x)
    delta = v - v[near].mean(1)
    v = v + 0.1 * mlp(second, jnp.concatenate([v - 5.0, delta], -1))
    laplacian = v - v[near].mean(1)
    return jnp.mean((v - target) ** 2) + 0.1 * jnp.mean(laplacian**2), {
        "vertices": v,
        "laplacian": laplacian,
    }


@program(lambda d: (d.layers(16, 48, 6), d.normal(24, 16), d.normal(24, 6)), aux=True)
def rotations_from_six_numbers(params, x, target):
    """Gram and Schmidt's rotations; the geodesic angle by an arc cosine."""

    def rotation(r):
        a = r[:, :3] / jnp.linalg.norm(r[:, :3], axis=-1, keepdims=True)
        b = r[:, 3:] - (a * r[:, 3:]).sum(-1, keepdims=True) * a
        b = b / jnp.linalg.norm(b, axis=-1, keepdims=True)
        return jnp.stack([a, b, jnp.cross(a, b)], 1)

    p, t = rotation(mlp(params, x)), rotation(target)
    trace = jnp.einsum("nij,nij->n", p, t)
    angle = jnp.arccos(jnp.clip((trace - 1) / 2, -0.9999, 0.9999))
    return angle.mean(), {"degrees": jnp.degrees(angle), "rotation": p}


@program(
    lambda d: (d.layers(12, 32, 4, scale=0.5), d.normal(24, 12), d.normal(24, 12), d.mask(24)),
    aux=True,
)
def poincare_embedding(params, a, b, related):
    """Distances of the Poincaré ball, near its rim where they grow."""

    def ball(x):
        y = 2.0 * mlp(params, x, jnp.tanh)
        n = jnp.sqrt((y**2).sum(-1, keepdims=True) + 1e-9)
        return jnp.tanh(n) * y / n

    u, v = ball(a), ball(b)
    d2 = ((u - v) ** 2).sum(-1)
    fraction = 2 * d2 / ((1 - (u**2).sum(-1)) * (1 - (v**2).sum(-1)) + 1e-5)
    distance = jnp.arccosh(1 + fraction + 1e-6)
    loss = jnp.where(related, distance**2, jnp.maximum(6.0 - distance, 0.0) ** 2)
    return loss.mean(), {"distance": distance, "radius": jnp.sqrt((u**2).sum(-1))}


@program(
    lambda d: ((d.layers(20, 48, 32), d.normal(32, 10)), d.normal(32, 20), d.integers(10, 32)),
    aux=True,
)
def angular_margin(params, x, labels):
    """Cosines to class centres with a margin in the angle, scaled by 64."""
    net, centres = params
    f = mlp(net, x)
    f = f / jnp.linalg.norm(f, axis=-1, keepdims=True)
    w = centres / jnp.linalg.norm(centres, axis=0, keepdims=True)
    cosine = jnp.clip(f @ w, -1 + 1e-6, 1 - 1e-6)
    hot = jax.nn.one_hot(labels, 10)
    logits = 64.0 * jnp.cos(jnp.arccos(cosine) + 0.5 * hot)
    return -(hot * jax.nn.log_softmax(logits)).sum(-1).mean(), {"cosine": (cosine * hot).sum(-1)}


@program(
    lambda d: (
        d.layers(5, 32, 2),
        d.normal(12, 10, 2, scale=40) + jnp.array([448000.0, 5411000.0], "f"),
        d.normal(12, 10, 3),
        d.uniform(12, low=2000, high=9000),
    ),
    aux=True,
)
def parcel_areas(params, corners, features, area):
    """Corners of parcels in a national grid, corrected; areas by the shoelace formula."""
    centre = corners.mean(1, keepdims=True)
    x = jnp.concatenate([(corners - centre) / 40.0, features], -1)
    moved = corners + 0.5 * jnp.tanh(mlp(params, x))
    local = moved - moved[:, :1]
    following = jnp.roll(local, -1, 1)
    signed = 0.5 * (local[..., 0] * following[..., 1] - local[..., 1] * following[..., 0]).sum(1)
    return jnp.mean((signed / area) ** 2), {"corners": moved, "area": signed}


@program(
    lambda d: (d.layers(8, 48, 20), d.normal(16, 8), d.normal(16, 50, 2, scale=30) + 200), aux=True
)
def spline_curves(params, code, points):
    """Control points in pixels from a network; a B-spline by one product with its basis."""
    control = 200.0 + 30.0 * mlp(params, code).reshape(16, 10, 2)
    t = np.linspace(0, 6.999, 50)
    i, u = np.floor(t).astype(int), t - np.floor(t)
    cubic = (
        np.stack([(1 - u) ** 3, 3 * u**3 - 6 * u**2 + 4, -3 * u**3 + 3 * u**2 + 3 * u + 1, u**3])
        / 6
    )
    basis = np.zeros((50, 10))
    for k in range(4):
        basis[np.arange(50), i + k] += cubic[k]
    curve = jnp.asarray(basis, jnp.float32) @ control
    bend = jnp.diff(curve, 2, axis=1)
    return jnp.mean(((curve - points) / 30.0) ** 2) + 0.01 * jnp.mean(bend**2), {
        "curve": curve,
        "bend": bend,
    }


@program(lambda d: (d.layers(3, 48, 48, 1), d.normal(64, 3), d.normal(32, 3)), aux=True)
def eikonal_surface(params, space, surface):
    """A signed distance whose gradient has length one."""
    f = lambda p: jnp.linalg.norm(p) - 1.0 + 0.1 * mlp(params, p, jax.nn.softplus)[0]
    gradient = jax.vmap(jax.grad(f))(space)
    eikonal = ((jnp.linalg.norm(gradient, axis=-1) - 1) ** 2).mean()
    on = surface / jnp.linalg.norm(surface, axis=-1, keepdims=True)
    value, normal = jax.vmap(jax.value_and_grad(f))(on)
    return jnp.abs(value).mean() + 0.1 * eikonal + 0.1 * (1 - (normal * on).sum(-1)).mean(), {
        "value": value,
        "eikonal": eikonal,
    }


@program(lambda d: (d.layers(12, 48, 8), d.normal(16, 12), d.normal(16, 4, 3, scale=0.1)), aux=True)
def triangulation(params, features, directions):
    """Four cameras on a circle of 5 m see a point; least squares of rays, weights of a network."""
    angle = jnp.arange(4.0) * jnp.pi / 2
    centres = 5.0 * jnp.stack([jnp.cos(angle), jnp.sin(angle), jnp.zeros(4)], -1)
    out = mlp(params, features).reshape(16, 4, 2)
    rays = -centres / 5.0 + directions + 0.05 * jnp.pad(out, ((0, 0), (0, 0), (0, 1)))
    rays = rays / jnp.linalg.norm(rays, axis=-1, keepdims=True)
    project = jnp.eye(3) - rays[..., None] * rays[..., None, :]
    a, b = project.sum(1), jnp.einsum("nkij,kj->ni", project, centres)
    point = jnp.linalg.solve(a, b[..., None])[..., 0]
    off = jnp.einsum("nkij,nkj->nki", project, point[:, None] - centres)
    return (off**2).sum(-1).mean() + (point**2).sum(-1).mean(), {"point": point}
