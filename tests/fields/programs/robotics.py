"""Robots: kinematics, state estimation, control."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.fields.layers import attend, conv, layer_norm, mlp
from tests.fields.registry import program


@program(
    lambda d: (
        d.layers(6, 32, 6),
        d.uniform(32, 6, low=-3.1, high=3.1),
        d.normal(32, 3, scale=400),
    ),
    aux=True,
)
def calibrated_arm(params, joints, measured):
    """Forward kinematics in millimetres, with learned offsets of the joints."""
    a = jnp.array([0.0, 425.0, 392.0, 0.0, 0.0, 0.0])
    d = jnp.array([89.0, 0.0, 0.0, 109.0, 94.7, 82.3])
    alpha = jnp.array([1.5708, 0.0, 0.0, 1.5708, -1.5708, 0.0])
    q = joints + 0.01 * jnp.tanh(mlp(params, jnp.sin(joints), jnp.tanh))

    def place(q):
        pose = jnp.eye(4)
        for i in range(6):
            c, s, ca, sa = jnp.cos(q[i]), jnp.sin(q[i]), jnp.cos(alpha[i]), jnp.sin(alpha[i])
            link = jnp.array(
                [
                    [c, -s * ca, s * sa, a[i] * c],
                    [s, c * ca, -c * sa, a[i] * s],
                    [0, sa, ca, d[i]],
                    [0, 0, 0, 1],
                ]
            )
            pose = pose @ link
        return pose[:3, 3]

    tip = jax.vmap(place)(q)
    return jnp.mean(((tip - measured) / 400.0) ** 2), {"tip": tip, "offset": q - joints}


@program(
    lambda d: (
        d.layers(4, 48, 9),
        d.normal(32, 4),
        d.normal(32, 4),
        d.normal(32, 4),
        d.normal(32, 4, scale=10),
    )
)
def inverse_dynamics(params, q, qd, qdd, torque):
    """A mass matrix from its Cholesky factor, gravity and friction by a network."""
    out = mlp(params, jnp.sin(q), jax.nn.softplus)
    lower = (
        jnp.zeros((32, 4, 4))
        .at[:, jnp.arange(4), jnp.arange(4)]
        .set(jax.nn.softplus(out[:, :4]) + 0.1)
    )
    lower = lower.at[:, 1, 0].set(out[:, 4])
    mass = lower @ lower.swapaxes(1, 2)
    predicted = jnp.einsum("nij,nj->ni", mass, qdd) + 9.81 * out[:, 5:9] + 0.1 * qd
    return jnp.mean((predicted - torque) ** 2) / 100


@program(
    lambda d: (
        [d.kernel(5, 3, 16), d.kernel(3, 16, 8), d.layers(16, 32, 4)],
        d.uniform(4, 24, 24, 3),
        d.normal(4, 4),
    ),
    aux=True,
)
def visual_servo(params, image, action):
    """Keypoints by a spatial softmax, in pixels, drive a policy."""
    h = jax.nn.relu(conv(image - 0.5, params[0], 2))
    h = conv(h, params[1])
    share = jax.nn.softmax(4.0 * h.reshape(4, 144, 8), 1)
    grid = jnp.stack(jnp.meshgrid(jnp.arange(12.0), jnp.arange(12.0), indexing="ij"), -1).reshape(
        144, 2
    )
    points = jnp.einsum("npk,pc->nkc", share, grid) * 2.0
    out = mlp(params[2], (points.reshape(4, 16) - 12.0) / 12.0)
    return jnp.mean((out - action) ** 2), {"points": points}


@program(
    lambda d: (
        d.layers(6, 32, 3),
        d.normal(100, 8, 3, scale=0.3),
        d.normal(100, 8, 3) + jnp.array([0, 0, 9.81], "f"),
    ),
    aux=True,
)
def attitude_filter(params, gyro, accel):
    """Quaternions integrated at 100 Hz with a learned bias of the gyroscope; gravity checks."""

    def step(q, inputs):
        w, a = inputs
        bias = 0.02 * jnp.tanh(mlp(params, jnp.concatenate([w, a / 9.81], -1)))
        half = 0.005 * (w - bias)
        s, x, y, z = q.T
        hx, hy, hz = half.T
        dq = jnp.stack(
            [
                -x * hx - y * hy - z * hz,
                s * hx + y * hz - z * hy,
                s * hy - x * hz + z * hx,
                s * hz + x * hy - y * hx,
            ],
            -1,
        )
        q = q + dq
        q = q / jnp.sqrt((q**2).sum(-1, keepdims=True))
        return q, q

    start = jnp.tile(jnp.array([1.0, 0, 0, 0]), (8, 1))
    _, qs = lax.scan(step, start, (gyro, accel))
    s, x, y, z = jnp.moveaxis(qs, -1, 0)
    down = jnp.stack([2 * (x * z - s * y), 2 * (y * z + s * x), s**2 - x**2 - y**2 + z**2], -1)
    unit = accel / jnp.linalg.norm(accel, axis=-1, keepdims=True)
    return jnp.mean((down - unit) ** 2), {"q": qs[-1], "norm": (qs**2).sum(-1)}


@program(
    lambda d: (
        d.layers(28, 64, 64, 16),
        d.normal(16, 8, 2),
        d.normal(16, 8),
        d.normal(16, 8, 2),
        d.uniform(16, low=0, high=1),
    )
)
def diffusion_policy(params, actions, observation, noise, t):
    """Noise of a plan of eight actions is predicted, given an observation and the time."""
    signal = jnp.cos(0.5 * jnp.pi * t)[:, None, None]
    noisy = signal * actions + jnp.sqrt(1 - signal**2) * noise
    waves = jnp.stack(
        [jnp.sin(1000.0 * t), jnp.cos(1000.0 * t), jnp.sin(30.0 * t), jnp.cos(30.0 * t)], -1
    )
    x = jnp.concatenate([noisy.reshape(16, 16), observation, waves], -1)
    return jnp.mean((mlp(params, x, jax.nn.mish).reshape(16, 8, 2) - noise) ** 2)


@program(lambda d: (d.normal(20, 2, scale=0.1), d.layers(6, 32, 4), d.normal(4)), aux=True)
def trajectory_optimization(actions, model, start):
    """Twenty actions through a learned model; the derivative goes to the actions."""

    def step(x, u):
        x = x + 0.05 * mlp(model, jnp.concatenate([x, jnp.clip(u, -2, 2)]), jnp.tanh)
        return x, x

    _, path = lax.scan(step, start, actions)
    goal = jnp.array([1.0, -1.0, 0.0, 0.0])
    cost = ((path - goal) ** 2).sum(-1)
    smooth = (jnp.diff(actions, axis=0) ** 2).sum()
    return cost.mean() + 10 * cost[-1] + 0.1 * smooth, {"path": path, "cost": cost}


@program(
    lambda d: (
        (d.layers(4, 24, 3), d.normal(3, scale=0.1)),
        d.normal(12, 60, 3, scale=5) + jnp.array([4.08e6, 9.3e5, 4.8e6], "f"),
        d.times(60, start=1.7e4, step=0.1),
        d.normal(12, 3),
    ),
    aux=True,
)
def satellite_positions(params, fixes, seconds, velocity):
    """Fixes in earth-centred metres; a network corrects differences from the first."""
    net, bias = params
    local = fixes - fixes[:, :1]
    t = (seconds - seconds[0]) / 10.0
    x = jnp.concatenate([local / 10.0, jnp.broadcast_to(t[:, None], (12, 60, 1))], -1)
    corrected = fixes + 0.5 * mlp(net, x, jnp.tanh) + bias
    speed = (corrected[:, -1] - corrected[:, 0]) / (seconds[-1] - seconds[0])
    return jnp.mean((speed - velocity) ** 2), {"corrected": corrected, "speed": speed}


@program(
    lambda d: (
        (d.layers(14, 32), d.layers(32, 32), d.normal(10, 32), d.weight(32, 96), d.layers(32, 7)),
        d.normal(6, 5, 14),
        d.normal(6, 10, 7),
        d.normal(6, 32),
    ),
    aux=True,
)
def action_chunks(params, observation, actions, eps):
    """A transformer decodes ten actions from a latent and observations."""
    embed, latent, queries, qkv, head = params
    memory = mlp(embed, observation)
    stats = mlp(latent, jnp.tanh(memory.mean(1)))
    z = stats + 0.1 * eps
    x = jnp.concatenate([memory, z[:, None], jnp.broadcast_to(queries, (6, 10, 32))], 1)
    x = x + attend(*jnp.split(layer_norm(x) @ qkv, 3, -1))
    out = mlp(head, layer_norm(x))[:, -10:]
    return jnp.abs(out - actions).mean() + 0.01 * jnp.mean(stats**2), {"actions": out}


@program(
    lambda d: (
        {"obs": d.layers(5, 32, 2), "motion": d.layers(5, 32, 3)},
        d.normal(3),
        d.normal(15, 2, scale=0.2) + 1,
        d.normal(15, 5),
        d.normal(6, 2, scale=20) + 500,
    ),
    aux=True,
)
def landmark_filter(params, pose, controls, features, landmarks):
    """An extended Kalman filter with learned motion; landmarks near 500 m, bearings wrapped."""

    def motion(x, u, f):
        v, w = 0.5 * u[0], 0.1 * u[1]
        return jnp.array(
            [x[0] + v * jnp.cos(x[2]), x[1] + v * jnp.sin(x[2]), x[2] + w]
        ) + 0.01 * mlp(params["motion"], f)

    def observe(x, landmark):
        off = landmark - x[:2]
        return jnp.array([jnp.sqrt((off**2).sum()), jnp.arctan2(off[1], off[0]) - x[2]])

    def step(carry, inputs):
        x, p = carry
        u, f, landmark = inputs
        a = jax.jacfwd(motion)(x, u, f)
        x, p = motion(x, u, f), a @ p @ a.T + 0.01 * jnp.eye(3)
        h = jax.jacfwd(observe)(x, landmark)
        seen = observe(x, landmark) + 0.1 * jnp.tanh(mlp(params["obs"], f))
        off = seen - observe(x, landmark)
        off = off.at[1].set(jnp.arctan2(jnp.sin(off[1]), jnp.cos(off[1])))
        s = h @ p @ h.T + jnp.diag(jnp.array([0.5, 0.01]))
        gain = jnp.linalg.solve(s, h @ p).T
        return (x + gain @ off, p - gain @ h @ p), (x, off)

    start = pose + jnp.array([480.0, 500.0, 0.0]), jnp.eye(3)
    (x, p), (path, off) = lax.scan(step, start, (controls, features, landmarks[jnp.arange(15) % 6]))
    return (off**2).mean() + 1e-3 * ((x[:2] - 490.0) ** 2).sum(), {"path": path, "p": p}
