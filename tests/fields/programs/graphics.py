"""Rendering, cameras, images."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.ndimage import map_coordinates

from tests.fields.layers import conv, mlp
from tests.fields.registry import program


@program(
    lambda d: (d.layers(39, 64, 64, 4), d.normal(12, 3), d.normal(12, 3), d.uniform(12, 3)),
    aux=True,
)
def radiance_field(params, origins, directions, colors):
    """NeRF: positions in waves, densities, transmittance by a product along the ray."""
    directions = directions / jnp.sqrt((directions**2).sum(-1, keepdims=True))
    t = jnp.linspace(2.0, 6.0, 24)
    points = origins[:, None] + directions[:, None] * t[:, None]
    scaled = points[..., None] * 2.0 ** jnp.arange(6)
    waves = jnp.concatenate([points[..., None], jnp.sin(scaled), jnp.cos(scaled)], -1)
    out = mlp(params, waves.reshape(12, 24, -1))
    rgb, sigma = jax.nn.sigmoid(out[..., :3]), jax.nn.relu(out[..., 3])
    delta = jnp.append(jnp.diff(t), 1e3)
    alpha = 1 - jnp.exp(-sigma * delta)
    through = jnp.cumprod(1 - alpha + 1e-10, -1)
    weights = alpha * jnp.concatenate([jnp.ones((12, 1)), through[:, :-1]], -1)
    image, depth = (weights[..., None] * rgb).sum(1), (weights * t).sum(1)
    return jnp.mean((image - colors) ** 2), {
        "image": image,
        "depth": depth,
        "psnr": -10 * jnp.log10(jnp.mean((image - colors) ** 2)),
    }


@program(lambda d: (d.layers(3, 32, 1), d.normal(64, 3, scale=0.1), d.normal(64, 3)), forward=True)
def sphere_tracing(params, origins, directions):
    """Steps along rays by the signed distance: a sphere plus a learned bump."""
    directions = directions / jnp.linalg.norm(directions, axis=-1, keepdims=True)
    origins = origins - 4.0 * directions

    def distance(p):
        return jnp.linalg.norm(p, axis=-1) - 1.0 + 0.05 * jnp.tanh(mlp(params, p, jnp.tanh))[:, 0]

    def body(state):
        t, i = state
        return t + 0.9 * distance(origins + t[:, None] * directions), i + 1

    t, _ = lax.while_loop(lambda s: s[1] < 24, body, (jnp.zeros(64), 0))
    return t, origins + t[:, None] * directions


@program(
    lambda d: (
        {"grids": [d.normal(n, n, 4, scale=0.3) for n in (16, 32, 64)], "net": d.layers(12, 32, 3)},
        d.uniform(128, 2),
        d.uniform(128, 3),
    )
)
def feature_grids(params, coordinates, colors):
    """Grids of three resolutions, read by bilinear weights, before a small network."""
    features = []
    for grid in params["grids"]:
        n = grid.shape[0]
        x = coordinates * (n - 1)
        low = jnp.clip(jnp.floor(x).astype(jnp.int32), 0, n - 2)
        f = x - low
        i, j, u, v = low[:, 0], low[:, 1], f[:, :1], f[:, 1:]
        top = grid[i, j] * (1 - v) + grid[i, j + 1] * v
        bottom = grid[i + 1, j] * (1 - v) + grid[i + 1, j + 1] * v
        features.append(top * (1 - u) + bottom * u)
    rgb = jax.nn.sigmoid(mlp(params["net"], jnp.concatenate(features, -1)))
    return jnp.mean((rgb - colors) ** 2)


@program(
    lambda d: (
        {
            "deform": d.layers(3, 32, 2),
            "grid": d.normal(128, 128, 8, scale=0.5),
            "net": d.layers(8, 32, 3),
        },
        d.uniform(96, 2),
        d.uniform(96, 3),
    )
)
def deformed_grid(params, coordinates, colors):
    """A network bends the coordinates by which a grid of 128 cells is read."""
    t = jnp.full((96, 1), 0.3)
    shift = 0.1 * jnp.tanh(mlp(params["deform"], jnp.concatenate([coordinates, t], -1), jnp.tanh))
    x = jnp.clip((coordinates + shift) * 127.0, 0.0, 126.999)
    low = jnp.floor(x)
    f, (i, j) = x - low, low.astype(jnp.int32).T
    u, v = f[:, :1], f[:, 1:]
    grid = params["grid"]
    value = (1 - u) * ((1 - v) * grid[i, j] + v * grid[i, j + 1]) + u * (
        (1 - v) * grid[i + 1, j] + v * grid[i + 1, j + 1]
    )
    return jnp.mean((jax.nn.sigmoid(mlp(params["net"], value)) - colors) ** 2)


@program(
    lambda d: (
        {
            "mean": d.uniform(24, 2, low=100, high=400),
            "scale": d.normal(24, 2) + 3,
            "angle": d.uniform(24, high=3.1),
            "net": d.layers(8, 32, 4),
        },
        d.normal(24, 8),
        d.uniform(24, low=2, high=30),
        d.uniform(200, 2, low=100, high=400),
        d.uniform(200, 3),
    ),
    aux=True,
)
def gaussian_splatting(params, features, depth, pixels, colors):
    """Flat Gaussians in pixel coordinates, sorted by depth and blended from the front."""
    order = jnp.argsort(depth)
    out = mlp(params["net"], features)[order]
    rgb, opacity = jax.nn.sigmoid(out[:, :3]), jax.nn.sigmoid(out[:, 3])
    c, s = jnp.cos(params["angle"])[order], jnp.sin(params["angle"])[order]
    off = pixels[:, None] - params["mean"][order]
    x = (c * off[..., 0] + s * off[..., 1]) / jnp.exp(params["scale"][order, 0])
    y = (-s * off[..., 0] + c * off[..., 1]) / jnp.exp(params["scale"][order, 1])
    alpha = jnp.minimum(opacity * jnp.exp(-0.5 * (x**2 + y**2)), 0.99)
    through = jnp.cumprod(1 - alpha, 1) / (1 - alpha)
    image = ((alpha * through)[..., None] * rgb).sum(1)
    return jnp.abs(image - colors).mean(), {"image": image, "left": through[:, -1]}


@program(
    lambda d: (
        d.layers(8, 48, 6),
        d.normal(4, 8),
        d.uniform(30, 2, low=0, high=64),
        d.uniform(4, 30),
    )
)
def soft_silhouette(params, code, pixels, mask):
    """A triangle from a network, in pixels; coverage by sigmoids of the edges' distances."""
    corners = 32.0 + 24.0 * jnp.tanh(mlp(params, code)).reshape(4, 3, 2)
    a, b = corners, jnp.roll(corners, -1, 1)
    edge = b - a
    off = pixels[None, :, None] - a[:, None]
    cross = edge[:, None, :, 0] * off[..., 1] - edge[:, None, :, 1] * off[..., 0]
    signed = cross / jnp.sqrt((edge**2).sum(-1) + 1e-6)[:, None]
    inside = jax.nn.sigmoid(signed / 0.7).prod(-1)
    return 1 - (inside * mask).sum() / (inside + mask - inside * mask).sum()


@program(
    lambda d: (
        [d.kernel(3, 2, 16), d.kernel(3, 16, 2)],
        d.uniform(2, 32, 32),
        d.uniform(2, 32, 32),
    ),
    aux=True,
)
def optical_flow(params, first, second):
    """A flow in pixels warps the second image onto the first; a photometric loss."""
    h = jax.nn.relu(conv(jnp.stack([first, second], -1), params[0]))
    flow = 3.0 * conv(h, params[1])
    y, x = jnp.meshgrid(jnp.arange(32.0), jnp.arange(32.0), indexing="ij")

    def warp(image, flow):
        return map_coordinates(image, [y + flow[..., 0], x + flow[..., 1]], order=1, mode="nearest")

    warped = jax.vmap(warp)(second, flow)
    smooth = jnp.abs(jnp.diff(flow, axis=1)).mean() + jnp.abs(jnp.diff(flow, axis=2)).mean()
    return jnp.sqrt((warped - first) ** 2 + 1e-3).mean() + 0.1 * smooth, {
        "flow": flow,
        "warped": warped,
    }


@program(
    lambda d: (
        (d.layers(6, 32, 27), d.layers(9, 3)),
        d.normal(64, 3),
        d.normal(64, 6),
        d.uniform(64, 3),
    )
)
def harmonic_lighting(params, normals, features, colors):
    """Nine spherical harmonics of the normals, with coefficients from a network."""
    n = normals / jnp.linalg.norm(normals, axis=-1, keepdims=True)
    x, y, z = n.T
    basis = jnp.stack(
        [
            0.282 + 0 * x,
            0.489 * y,
            0.489 * z,
            0.489 * x,
            1.093 * x * y,
            1.093 * y * z,
            0.315 * (3 * z**2 - 1),
            1.093 * x * z,
            0.546 * (x**2 - y**2),
        ],
        -1,
    )
    light = mlp(params[0], features).reshape(64, 3, 9)
    rgb = jnp.einsum("nck,nk->nc", light, basis) + basis @ params[1][0][0]
    return jnp.mean((jax.nn.softplus(rgb) - colors) ** 2)


@program(lambda d: (d.layers(2, 64, 64, 1), d.uniform(128, 2, low=-1), d.uniform(128)))
def siren(params, coordinates, values):
    """Sines of frequency 30 represent an image; its gradient's size is penalized."""
    (w0, b0), *rest = params

    def image(x):
        h = jnp.sin(30.0 * (x @ (w0 / 4) + b0))
        for w, b in rest[:-1]:
            h = jnp.sin(30.0 * (h @ (w / 12) + b))
        return (h @ rest[-1][0] + rest[-1][1])[0]

    value = jax.vmap(image)(coordinates)
    return jnp.mean((value - values) ** 2)


@program(
    lambda d: (
        [d.kernel(3, 3, 16), d.kernel(3, 16, 3)],
        jnp.exp(d.normal(2, 16, 16, 3, scale=2.5)),
        d.uniform(2, 16, 16, 3),
    ),
    aux=True,
)
def tone_mapping(params, radiance, target):
    """Radiance over five orders of magnitude, exposed by its log mean and mapped to the screen."""
    luminance = radiance @ jnp.array([0.2126, 0.7152, 0.0722])
    key = jnp.exp(jnp.log(luminance + 1e-4).mean((1, 2), keepdims=True))
    exposed = 0.18 * radiance / key[..., None]
    h = jax.nn.relu(conv(jnp.log1p(exposed), params[0]))
    gain = jnp.exp(0.3 * jnp.tanh(conv(h, params[1])))
    mapped = exposed * gain / (1 + exposed * gain)
    return jnp.abs(mapped - target).mean(), {"mapped": mapped, "key": key}


@program(
    lambda d: (
        {
            "rot": d.normal(3, scale=0.2),
            "trans": d.normal(3) + jnp.array([0, 0, 12.0], "f"),
            "points": d.normal(60, 3, scale=2),
        },
        d.uniform(60, 2, low=300, high=900),
    ),
    aux=True,
)
def bundle_adjustment(params, observed):
    """Points through Rodrigues' rotation and a pinhole of 1,000 pixels; robust reprojection."""
    theta = jnp.sqrt((params["rot"] ** 2).sum() + 1e-12)
    k = params["rot"] / theta
    cross = jnp.array([[0, -k[2], k[1]], [k[2], 0, -k[0]], [-k[1], k[0], 0]])
    rotation = jnp.eye(3) + jnp.sin(theta) * cross + (1 - jnp.cos(theta)) * cross @ cross
    camera = params["points"] @ rotation.T + params["trans"]
    pixels = 1000.0 * camera[:, :2] / camera[:, 2:] + jnp.array([640.0, 480.0])
    error = pixels - observed
    return jnp.log1p((error**2).sum(-1) / 100.0).mean(), {"pixels": pixels, "error": error}


@program(
    lambda d: (
        {"texture": d.uniform(64, 64, 3), "net": d.layers(5, 32, 2)},
        d.uniform(80, 2),
        d.normal(80, 3),
        d.uniform(80, 3),
    ),
    aux=True,
)
def texture_lookup(params, uv, view, colors):
    """Parallax: a network moves texture coordinates by the view, then bilinear sampling."""
    height = 0.02 * mlp(params["net"], jnp.concatenate([uv, view], -1), jax.nn.silu)
    uv = uv + height * view[:, :2] / (jnp.abs(view[:, 2:]) + 0.5)
    x = jnp.mod(uv, 1.0) * 63.0
    sample = jax.vmap(
        lambda channel: map_coordinates(channel, [x[:, 0], x[:, 1]], order=1, mode="wrap")
    )
    rgb = sample(params["texture"].transpose(2, 0, 1)).T
    return jnp.abs(rgb - colors).mean(), {"uv": uv, "rgb": rgb}
