"""Programs whose products are cancelled, or are phases: each beside itself without the product.

A distance by squares and products is spelled in many ways, and so is the phase of a position at
many rates. `by` says how a program gets its distances or phases; told to subtract and multiply
elementwise, it has the accuracy that every spelling is held to. Points lie away from zero, as data
do.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tests.programs.registry import Draw

By = Callable[[Array, Array], Array]
DRAW = Draw("differences")
POINTS, CENTRES, WIDTH = 24, 16, 8
AWAY = 40.0

X = DRAW.normal(POINTS, WIDTH) + AWAY
Y = DRAW.normal(CENTRES, WIDTH) + AWAY
W = DRAW.weight(WIDTH, WIDTH)
TIMES = 3000 + DRAW.uniform(POINTS, high=400).round(2)
RATES = (10000.0 ** -(jnp.arange(8) / 8)).astype(jnp.float32)
PLACES = DRAW.uniform(POINTS, 2)
HEAD = DRAW.weight(16, 4)


@dataclasses.dataclass(frozen=True)
class Case:
    """A program in two forms, with its arguments.

    Attributes:
        fn: the program with a product.
        direct: the same without.
        args: arrays.
    """

    fn: Callable[..., Any]
    direct: Callable[..., Any]
    args: tuple[Any, ...]


# Squared distances of all pairs of rows.


def subtracted(a: Array, b: Array) -> Array:
    return ((a[..., :, None, :] - b[..., None, :, :]) ** 2).sum(-1)


def powers(a: Array, b: Array) -> Array:
    return (a**2).sum(-1)[:, None] + (b**2).sum(-1) - 2 * a @ b.T


def squares(a: Array, b: Array) -> Array:
    return (
        jnp.sum(jnp.square(a), 1, keepdims=True) - 2 * jnp.dot(a, b.T) + jnp.square(b).sum(1)[None]
    )


def products(a: Array, b: Array) -> Array:
    return -2.0 * jnp.matmul(a, b.T) + (a * a).sum(-1, keepdims=True) + (b * b).sum(-1)


def einsums(a: Array, b: Array) -> Array:
    norms = jnp.einsum("nd,nd->n", a, a)[:, None] + jnp.einsum("md,md->m", b, b)[None]
    return norms - 2 * jnp.einsum("nd,md->nm", a, b)


def dot_general(a: Array, b: Array) -> Array:
    cross = lax.dot_general(a, b, (((1,), (1,)), ((), ())))
    return lax.integer_pow(a, 2).sum(1)[:, None] + lax.integer_pow(b, 2).sum(1)[None] - 2 * cross


def norms(a: Array, b: Array) -> Array:
    return (
        jnp.linalg.norm(a, axis=-1)[:, None] ** 2 + jnp.linalg.norm(b, axis=-1) ** 2 - 2 * a @ b.T
    )


def clamped(a: Array, b: Array) -> Array:
    return jnp.maximum(powers(a, b), 0.0)


def gram(a: Array, b: Array) -> Array:
    z = jnp.concatenate([a, b])
    k = z @ z.T
    d = jnp.diagonal(k)
    return (d[:, None] + d[None] - 2 * k)[: len(a), len(a) :]


def vmapped(a: Array, b: Array) -> Array:
    return jax.vmap(lambda x: jax.vmap(lambda y: x @ x + y @ y - 2 * (x @ y))(b))(a)


def vmapped_once(a: Array, b: Array) -> Array:
    return jax.vmap(lambda x: jnp.vdot(x, x) + (b * b).sum(-1) - 2 * b @ x)(a)


def scanned(a: Array, b: Array) -> Array:
    return lax.map(lambda x: (x**2).sum() + (b**2).sum(-1) - 2 * jnp.dot(b, x), a)


def scanned_norms(a: Array, b: Array) -> Array:
    """Norms before the loop, which goes over blocks."""
    size = (b**2).sum(-1)

    def block(_: Any, rows: Array) -> tuple[Any, Array]:
        return None, jnp.einsum("nd,nd->n", rows, rows)[:, None] + size - 2 * rows @ b.T

    return lax.scan(block, None, a.reshape(-1, 4, a.shape[-1]))[1].reshape(len(a), len(b))


def augmented(a: Array, b: Array) -> Array:
    """One product, whose operands have the squares as columns."""
    one_a, one_b = jnp.ones((len(a), 1)), jnp.ones((len(b), 1))
    left = jnp.concatenate([-2 * a, (a**2).sum(-1, keepdims=True), one_a], -1)
    return left @ jnp.concatenate([b, one_b, (b**2).sum(-1, keepdims=True)], -1).T


def unformed(a: Array, b: Array) -> Array:
    """Distances times a matrix, here of ones and zeros, as transport between clouds has them."""
    one_a, one_b = jnp.ones((len(a), 1)), jnp.ones((len(b), 1))
    left = jnp.concatenate([(a**2).sum(-1, keepdims=True), one_a, -2 * a], -1)
    right = jnp.concatenate([one_b, (b**2).sum(-1, keepdims=True), b], -1)
    return left @ (right.T @ jnp.eye(len(b)))


def halves(a: Array, b: Array) -> Array:
    return -2 * (a @ b.T - 0.5 * (a**2).sum(-1)[:, None] - 0.5 * (b**2).sum(-1))


def transposed(a: Array, b: Array) -> Array:
    """A codebook with codes as columns."""
    codes = b.T
    return (a**2).sum(1, keepdims=True) - 2 * a @ codes + (codes**2).sum(0, keepdims=True)


def by_ones(a: Array, b: Array) -> Array:
    """Sums by products with ones."""
    return (a**2) @ jnp.ones_like(b).T + jnp.ones_like(a) @ (b**2).T - 2 * a @ b.T


def scaled_twice(a: Array, b: Array) -> Array:
    """The length scale is divided by in each term."""
    length = jnp.float32(1.7)
    return length**2 * (
        ((a / length) ** 2).sum(-1)[:, None]
        + ((b / length) ** 2).sum(-1)
        - 2 * (a / length) @ (b / length).T
    )


def batched(a: Array, b: Array) -> Array:
    a, b = a[None], b[None]
    d = -2 * jnp.einsum("bnd,bmd->bnm", a, b)
    d = d + (a**2).sum(-1)[:, :, None]
    return (d + (b**2).sum(-1)[:, None, :])[0]


def jitted(a: Array, b: Array) -> Array:
    cross = jax.jit(lambda x, y: x @ y.T)
    size = jax.jit(lambda x: (x * x).sum(-1))
    return size(a)[:, None] + size(b)[None] - 2 * cross(a, b)


def checkpointed(a: Array, b: Array) -> Array:
    return jax.checkpoint(powers)(a, b)


def convolved(a: Array, b: Array) -> Array:
    """The product as a convolution by 1 x 1."""
    cross = lax.conv_general_dilated(
        a[None, :, None],
        b.T[None, None],
        (1, 1),
        "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return (a**2).sum(-1)[:, None] + (b**2).sum(-1) - 2 * cross[0, :, 0]


def _parts(a: Array, b: Array) -> tuple[Array, Array, Array]:
    shape = len(a), len(b)
    own = (jnp.broadcast_to(v, shape) for v in ((a**2).sum(-1)[:, None], (b**2).sum(-1)))
    return (*own, a @ b.T)


def stacked(a: Array, b: Array) -> Array:
    left, right, cross = _parts(a, b)
    return jnp.stack([left, -2 * cross, right]).sum(0)


def weighed(a: Array, b: Array) -> Array:
    """A sum of terms that are joined along their last axis."""
    return jnp.stack(_parts(a, b), -1) @ jnp.array([1.0, 1.0, -2.0])


DISTANCES: dict[str, By] = {
    fn.__name__: fn
    for fn in (
        *(powers, squares, products, einsums, dot_general, norms, clamped, gram, vmapped),
        *(vmapped_once, scanned, scanned_norms, augmented, unformed, halves, transposed, by_ones),
        *(scaled_twice, batched, jitted, checkpointed, convolved, stacked, weighed),
    )
}


# What distances are for: each of `by`, and two arrays of points.


def kernel(by: By, x: Array, y: Array) -> Array:
    return jnp.exp(-by(x, y) / 16)


def kernel_regression(by: By, x: Array, y: Array) -> Array:
    weights = jnp.exp(-by(x, y) / 8) + 1e-6
    return (weights @ (y - AWAY)) / weights.sum(-1, keepdims=True)


def neighbours(by: By, x: Array, y: Array) -> Array:
    return lax.top_k(-by(x, y), 3)[1]


def ordered(by: By, x: Array, y: Array) -> Array:
    return jnp.argsort(by(x, y), -1)[:, :3]


def nearest_code(by: By, x: Array, y: Array) -> tuple[Array, Array]:
    """A vector quantizer's lookup; its codes come back."""
    index = jnp.argmin(by(x, y), -1)
    return index, jax.nn.one_hot(index, len(y)) @ y


def k_means(by: By, x: Array, y: Array) -> Array:
    for _ in range(3):
        member = jax.nn.one_hot(by(x, y).argmin(1), len(y))
        y = (member.T @ x + 1e-3 * y) / (member.sum(0)[:, None] + 1e-3)
    return y - AWAY


def soft_k_means(by: By, x: Array, y: Array) -> Array:
    def step(y: Array, _: Any) -> tuple[Array, None]:
        member = jax.nn.softmax(-by(x, y) / 4, -1)
        return (member.T @ x) / member.sum(0)[:, None], None

    return lax.scan(step, y, None, length=2)[0] - AWAY


def chamfer(by: By, x: Array, y: Array) -> Array:
    d = by(x, y)
    return d.min(0).mean() + d.min(1).mean()


def hausdorff(by: By, x: Array, y: Array) -> Array:
    d = jnp.sqrt(jnp.maximum(by(x, y), 1e-6))
    return jnp.maximum(d.min(0).max(), d.min(1).max())


def discrepancy(by: By, x: Array, y: Array) -> Array:
    """Squared maximum mean discrepancy."""
    k = functools.partial(kernel, by)
    return k(x, x).mean() + k(y, y).mean() - 2 * k(x, y).mean()


def sinkhorn(by: By, x: Array, y: Array) -> Array:
    cost = by(x, y)
    f, g = jnp.zeros(len(x)), jnp.zeros(len(y))
    for _ in range(4):
        f = -4 * jax.nn.logsumexp((g - cost) / 4, 1)
        g = -4 * jax.nn.logsumexp((f[:, None] - cost) / 4, 0)
    return (jnp.exp((f[:, None] + g - cost) / 4) * cost).sum()


def contrastive(by: By, x: Array, y: Array) -> Array:
    logits = -by(x[: len(y)], y) / 4
    return -jnp.diagonal(jax.nn.log_softmax(logits, -1)).mean()


def triplet(by: By, x: Array, y: Array) -> Array:
    d = by(x[: len(y)], y)
    near, far = jnp.diagonal(d), (d + 1e3 * jnp.eye(len(y))).min(-1)
    return jax.nn.relu(near - far + 8).mean()


def student_t(by: By, x: Array, y: Array) -> Array:
    """Affinities as t-SNE and clustering networks have them."""
    q = 1 / (1 + by(x, y))
    return q / q.sum(1, keepdims=True)


def process(by: By, x: Array, y: Array) -> Array:
    """The mean of a Gaussian process."""
    k = jnp.exp(-by(y, y) / 32) + 0.1 * jnp.eye(len(y))
    return jnp.exp(-by(x, y) / 32) @ jnp.linalg.solve(k, jnp.sin(y.sum(-1)))


def forces(by: By, x: Array, y: Array) -> Array:
    d = by(x, y) + 1.0
    return (d**-1.5).sum() + jnp.log(d).mean()


USES = {
    fn.__name__: fn
    for fn in (
        *(kernel, kernel_regression, neighbours, ordered, nearest_code, k_means, soft_k_means),
        *(
            chamfer,
            hausdorff,
            discrepancy,
            sinkhorn,
            contrastive,
            triplet,
            student_t,
            process,
            forces,
        ),
    )
}


# Other quantities of a product's own size.


def covariance(x: Array) -> Array:
    m = x.mean(0)
    return x.T @ x / len(x) - jnp.outer(m, m)


def covariance_of_products(x: Array) -> Array:
    m = x.mean(0, keepdims=True)
    return x.T @ x / len(x) - m.T @ m


def covariance_of_sums(x: Array) -> Array:
    total = np.ones(len(x), "f") @ x
    return x.T @ x / len(x) - jnp.outer(total, total) / len(x) ** 2


def centred_covariance(x: Array) -> Array:
    c = x - x.mean(0)
    return (c[:, :, None] * c[:, None, :]).mean(0)


def cross_covariance(x: Array, y: Array) -> Array:
    return x.T @ y / len(x) - jnp.outer(x.mean(0), y.mean(0))


def direct_cross_covariance(x: Array, y: Array) -> Array:
    return ((x - x.mean(0))[:, :, None] * (y - y.mean(0))[:, None, :]).mean(0)


def covariance_of_layer(x: Array, w: Array) -> Array:
    """Of a layer that is called once for each moment."""
    mean = (x @ w).mean(0)
    return (x @ w).T @ (x @ w) / len(x) - jnp.outer(mean, mean)


def weighted_covariance(w: Array, x: Array) -> Array:
    mean = w @ x
    return jnp.einsum("n,ni,nj->ij", w, x, x) - jnp.outer(mean, mean)


def direct_weighted_covariance(w: Array, x: Array) -> Array:
    c = x - (w[:, None] * x).sum(0)
    return (w[:, None, None] * c[:, :, None] * c[:, None]).sum(0)


def skewness(x: Array) -> Array:
    """Third moments, each mean a product with known numbers."""
    one = jnp.full(len(x), 1 / len(x))
    mean = one @ x
    return one @ x**3 - 3 * mean * (one @ x**2) + 2 * mean**3


def spread(p: Array, x: Array) -> Array:
    """Variances under weights, each mean written out."""
    return p @ (x * x) - (p @ x) * (p @ x)


def direct_spread(p: Array, x: Array) -> Array:
    return (p[..., None] * (x - _times(p, x)[:, None]) ** 2).sum(1)


def nearness(p: Array, x: Array) -> Array:
    """Squared distances under weights of arrays that are near each other."""
    y = x + 0.01 * jnp.flip(x)
    return p @ (x * x) + p @ (y * y) - 2 * (p @ (x * y))


def direct_nearness(p: Array, x: Array) -> Array:
    return (p[..., None] * (0.01 * jnp.flip(x)) ** 2).sum(1)


def _windows(x: Array, times: int) -> Array:
    kernel = jnp.full((5, 1, 1), 0.2)
    rows = x[:, ::times].T[..., None]
    for _ in range(times):
        rows = lax.conv_general_dilated(
            rows, kernel, (1,), "VALID", None, None, ("NWC", "WIO", "NWC")
        )
    return rows


def _each(mean: Callable[[Array], Array], x: Array, y: Array) -> Array:
    return mean(x * x) - mean(x) ** 2 + mean(y * y) - mean(y) ** 2


def _together(mean: Callable[[Array], Array], x: Array, y: Array) -> Array:
    mx, my = mean(x), mean(y)
    return mean(x * x + y * y) - (mx * mx + my * my)


def _negated(mean: Callable[[Array], Array], x: Array, y: Array) -> Array:
    mx, my = mean(x), mean(y)
    return -mx * mx + mean(x * x) - (my * my - mean(y * y))


def _of_sums(mean: Callable[[Array], Array], x: Array, y: Array) -> Array:
    own = mean((x + y) ** 2) - (mean(x) + mean(y)) ** 2
    return own - 2 * (mean(x * y) - mean(x) * mean(y))


SPREADS = {"each": _each, "together": _together, "negated": _negated, "of sums": _of_sums}


def similarity(x: Array, y: Array, times: int = 1, spread: str = "each") -> Array:
    """Covariances over windows, beside variances, as similarities of images have them.

    Windows of windows are of every other column.
    """
    mean = functools.partial(_windows, times=times)
    own = SPREADS[spread](mean, x, y)
    return (2 * (mean(x * y) - mean(x) * mean(y)) + 1e-3) / (own + 1e-3)


def direct_similarity(x: Array, y: Array, times: int = 1) -> Array:
    weights = functools.reduce(np.convolve, [np.full(5, 0.2, "f")] * times)[:, None, None]
    reach = len(weights) - 1

    def centred(v: Array) -> Array:
        parts = jnp.stack([v[k : len(v) - reach + k, ::times] for k in range(reach + 1)])
        return parts - (weights * parts).sum(0)

    a, b = centred(x), centred(y)
    own = (weights * (a * a + b * b)).sum(0)
    return ((2 * (weights * a * b).sum(0) + 1e-3) / (own + 1e-3)).T[..., None]


def mixture(x: Array, y: Array) -> Array:
    """Log-likelihoods under Gaussians of diagonal covariance, by three products."""
    inverse = 1 / (0.5 + (y - AWAY) ** 2)
    return (x**2) @ inverse.T - 2 * x @ (y * inverse).T + (y**2 * inverse).sum(-1)


def direct_mixture(x: Array, y: Array) -> Array:
    inverse = 1 / (0.5 + (y - AWAY) ** 2)
    return ((x[:, None] - y) ** 2 * inverse).sum(-1)


def by_precision(x: Array, y: Array, p: Array) -> Array:
    """Mahalanobis distances."""
    own = (jnp.einsum("nd,de,ne->n", v, p, v) for v in (x, y))
    return next(own)[:, None] - 2 * x @ p @ y.T + next(own)


def direct_by_precision(x: Array, y: Array, p: Array) -> Array:
    d = x[:, None] - y
    return (d[..., None] * d[..., None, :] * p).sum((-1, -2))


def hyperbolic(x: Array, y: Array) -> Array:
    """Distances in the hyperboloid."""
    own = (jnp.sqrt(1 + (v**2).sum(-1)) for v in (x, y))
    return jnp.arccosh(jnp.maximum(next(own)[:, None] * next(own) - x @ y.T, 1 + 1e-3))


def direct_hyperbolic(x: Array, y: Array) -> Array:
    a, b = ((v**2).sum(-1) for v in (x, y))
    both = a[:, None] + b + a[:, None] * b
    # `√(1 + a)√(1 + b) - xy` from squares of differences alone.
    left, right = jnp.sqrt(1 + a)[:, None], jnp.sqrt(1 + b)
    excess = (subtracted(x, y) - ((a[:, None] - b) / (left + right)) ** 2) / 2
    return jnp.arccosh(jnp.maximum(1 + excess + 0 * both, 1 + 1e-3))


def _unit(v: Array) -> Array:
    return v / jnp.linalg.norm(v, axis=-1, keepdims=True)


def direct_cosines(x: Array, y: Array) -> Array:
    return subtracted(_unit(x), _unit(y)) / 2


COSINES: dict[str, By] = {
    "units": lambda x, y: 1 - _unit(x) @ _unit(y).T,
    "einsum": lambda x, y: 1.0 - jnp.einsum("nd,md->nm", _unit(x), _unit(y)),
    "divided": lambda x, y: 1 - x @ y.T / (_norm(x)[:, None] * _norm(y)),
    "rsqrt": lambda x, y: (
        -((x * lax.rsqrt(_norm(x) ** 2)[:, None]) @ (y / _norm(y)[:, None]).T - 1)
    ),
    "halves": lambda x, y: (2 - 2 * _unit(x) @ _unit(y).T) / 2,
    "arc": lambda x, y: 1 - jnp.cos(jnp.arccos(jnp.clip(_unit(x) @ _unit(y).T, -1, 0.999999))),
}


def _norm(v: Array) -> Array:
    return jnp.sqrt((v * v).sum(-1))


def of_units(x: Array, y: Array) -> Array:
    """Arguments of length one, as a table of embeddings has them."""
    return 1 - x @ y.T


def _filtered(x: Array, kernel: Array) -> Array:
    return lax.conv_general_dilated(
        x[None, :, :1], kernel[:, None, None], (1,), "VALID", None, None, ("NWC", "WIO", "NWC")
    )


def edges(x: Array) -> Array:
    """Differences along an axis, by a kernel."""
    return _filtered(x, jnp.array([-1.0, 0.0, 1.0]))


def direct_edges(x: Array) -> Array:
    return (x[2:, :1] - x[:-2, :1])[None]


def bands(x: Array) -> Array:
    """Two averages' difference, by a kernel whose numbers add up to nothing but for roundings."""
    narrow, wide = (jnp.exp(-((jnp.arange(9.0) - 4) ** 2) / s) for s in (2, 6))
    return _filtered(x, narrow / narrow.sum() - wide / wide.sum())


def direct_bands(x: Array) -> Array:
    windows = jnp.stack([x[k : len(x) - 8 + k, :1] for k in range(9)])
    narrow, wide = (np.exp(-((np.arange(9.0) - 4) ** 2) / s) for s in (2, 6))
    kernel = (narrow / narrow.sum() - wide / wide.sum())[:, None, None]
    return (kernel * (windows - windows[4])).sum(0)[None]


def nearest_without_norm(x: Array, y: Array) -> Array:
    """The term that all codes share is left out."""
    return jnp.argmin((y**2).sum(-1) - 2 * x @ y.T, -1)


def centred_gram(x: Array) -> Array:
    k = x @ x.T
    return k - k.mean(0) - k.mean(1)[:, None] + k.mean()


def direct_gram(x: Array) -> Array:
    c = x - x.mean(0)
    return (c[:, None] * c[None]).sum(-1)


# What remains of an array less its product with something: the same with sums in place of products.


def _times(a: Array, b: Array) -> Array:
    return (a[..., None] * b).sum(-2)


def projected(x: Array, q: Array) -> Array:
    return x - x @ q @ q.T


def direct_projected(x: Array, q: Array) -> Array:
    return x - _times(_times(x, q), q.T)


def reconstructed(x: Array, q: Array) -> Array:
    """Errors of a linear autoencoder, of columns."""
    return jnp.sqrt(((q @ (q.T @ x.T) - x.T) ** 2).sum(0))


def direct_reconstructed(x: Array, q: Array) -> Array:
    return jnp.sqrt((direct_projected(x, q) ** 2).sum(-1))


def woodbury(x: Array, u: Array) -> Array:
    """A matrix of low rank and a scale, inverted, times an array."""
    inner = 0.3 * jnp.eye(u.shape[1]) + u.T @ u
    return (x - u @ jnp.linalg.solve(inner, u.T @ x)) / 0.3


def direct_woodbury(x: Array, u: Array) -> Array:
    inner = 0.3 * jnp.eye(u.shape[1]) + _times(u.T, u)
    return (x - _times(u, jnp.linalg.solve(inner, _times(u.T, x)))) / 0.3


def centred(x: Array) -> Array:
    return (jnp.eye(len(x)) - 1 / len(x)) @ x


def dependence(x: Array, y: Array) -> Array:
    """The Hilbert-Schmidt criterion of independence."""
    centre = jnp.identity(len(x)) - jnp.ones((len(x), len(x))) / len(x)
    return jnp.trace(x @ x.T @ centre @ (y @ y.T) @ centre)


def direct_dependence(x: Array, y: Array) -> Array:
    return (_times((x - x.mean(0)).T, y - y.mean(0)) ** 2).sum()


# Matrices of second differences, whose first and last rows lack a neighbour.
BANDS: dict[str, Callable[[int], Any]] = {
    "of_identities": lambda n: -2 * jnp.eye(n) + jnp.eye(n, k=1) + jnp.eye(n, k=-1),
    "chosen": lambda n: (
        lambda far: jnp.where(far == 0, -2.0, jnp.where(far == 1, 1.0, 0.0))
    )(jnp.abs(jnp.arange(n)[:, None] - jnp.arange(n))),
    "scattered": lambda n: (
        lambda i, far: far.at[i, i].set(-2.0).at[i[1:], i[:-1]].set(1.0).at[i[:-1], i[1:]].set(1.0)
    )(jnp.arange(n), jnp.zeros((n, n))),
    "toeplitz": lambda n: (
        3 * jax.scipy.linalg.toeplitz(jnp.zeros(n).at[0].set(-2 / 3).at[1].set(1 / 3))
    ),
    "rolled": lambda n: (
        lambda row: jnp.stack([jnp.roll(row, k - 1) for k in range(n)])
    )(jnp.pad(jnp.array([1.0, -2.0, 1.0]), (0, n - 3))),
    "padded": lambda n: sum(
        c * jnp.pad(jnp.eye(n - 2), ((1, 1), (k, 2 - k))) for k, c in enumerate((1.0, -2.0, 1.0))
    ),
    "captured": lambda n: (
        np.eye(n, k=1, dtype=np.float32) + np.eye(n, k=-1, dtype=np.float32)
        - 2 * np.eye(n, dtype=np.float32)
    ),
}  # fmt: skip


def banded(name: str, x: Array) -> Array:
    return (jnp.asarray(BANDS[name](len(x))) @ x)[1:-1]


def direct_banded(x: Array) -> Array:
    return x[2:] + x[:-2] - 2 * x[1:-1]


def deflated(x: Array) -> Array:
    """A step of Gram and Schmidt: columns less what the first has of them."""
    q = x[:, 0] / jnp.linalg.norm(x[:, 0])
    return x[:, 1:] - jnp.outer(q, q @ x[:, 1:])


def direct_deflated(x: Array) -> Array:
    q = x[:, 0] / jnp.linalg.norm(x[:, 0])
    return x[:, 1:] - q[:, None] * (q[:, None] * x[:, 1:]).sum(0)


def interpolated(x: Array) -> Array:
    """What a mean of neighbours leaves."""
    return x[1:-1] - jnp.einsum("k,kij->ij", jnp.full(2, 0.5), jnp.stack([x[:-2], x[2:]]))


def laplacian(a: Array, x: Array) -> Array:
    return (jnp.diag(a.sum(1)) - a) @ x


def degrees(a: Array, x: Array) -> Array:
    return a.sum(1)[:, None] * x - a @ x


def counted_degrees(a: Array, x: Array) -> Array:
    return (a @ jnp.ones((len(a), 1))) * x - a @ x


def direct_laplacian(a: Array, x: Array) -> Array:
    return (a[..., None] * (x[:, None] - x)).sum(1)


def roughness(a: Array, x: Array) -> Array:
    return jnp.trace(x.T @ (jnp.diag(a.sum(1)) - a) @ x)


def direct_roughness(a: Array, x: Array) -> Array:
    return (a * subtracted(x, x)).sum() / 2


def from_mean(a: Array, x: Array) -> Array:
    """Distances from a weighted mean, as where clouds are aligned."""
    return x - (a[0] / a[0].sum()) @ x


def direct_from_mean(a: Array, x: Array) -> Array:
    return x - (a[0][:, None] * x).sum(0) / a[0].sum()


def posterior(x: Array, y: Array) -> Array:
    """The covariance of a Gaussian process beside what it has seen."""
    k = jnp.exp(-subtracted(x, x) / 32) + 0.01 * jnp.eye(len(x))
    near = jnp.exp(-subtracted(x, y) / 32)
    return jnp.exp(-subtracted(y, y) / 32) - near.T @ jnp.linalg.solve(k, near)


def direct_posterior(x: Array, y: Array) -> Array:
    k = jnp.exp(-subtracted(x, x) / 32) + 0.01 * jnp.eye(len(x))
    near = jnp.exp(-subtracted(x, y) / 32)
    return jnp.exp(-subtracted(y, y) / 32) - _times(near.T, jnp.linalg.solve(k, near))


def updated(p: Array, h: Array) -> Array:
    """What is left of a covariance after a measurement, as a Kalman filter has it."""
    inner = h @ p @ h.T + 0.01 * jnp.eye(len(h))
    gain = jnp.linalg.solve(inner, h @ p).T
    return (jnp.eye(len(p)) - gain @ h) @ p


def direct_updated(p: Array, h: Array) -> Array:
    inner = _times(_times(h, p), h.T) + 0.01 * jnp.eye(len(h))
    gain = jnp.linalg.solve(inner, _times(h, p)).T
    return p - _times(_times(gain, h), p)


def filtered(p: Array, h: Array, once: Callable[..., Array] = updated) -> Array:
    """A covariance after several measurements: the identity is no part of the loop's gradient."""
    return lax.scan(lambda p, _: (once(p, h) + 0.1, None), p, None, length=4)[0]


def variances(x: Array, y: Array) -> Array:
    """The diagonal alone of what a Gaussian process leaves, with a factor of its matrix."""
    factor, near = jax.scipy.linalg.cho_factor(x @ x.T + jnp.eye(len(x))), x @ y.T
    return jnp.diag(y @ y.T) - (near * jax.scipy.linalg.cho_solve(factor, near)).sum(0)


def whitened(x: Array, y: Array) -> Array:
    """The same by a triangular matrix."""
    factor = jnp.linalg.cholesky(x @ x.T + jnp.eye(len(x)))
    v = jax.scipy.linalg.solve_triangular(factor, x @ y.T, lower=True)
    return jnp.diag(y @ y.T) - jnp.sum(v**2, 0)


def direct_variances(x: Array, y: Array) -> Array:
    factor, near = jax.scipy.linalg.cho_factor(_times(x, x.T) + jnp.eye(len(x))), _times(x, y.T)
    return (y**2).sum(1) - (near * jax.scipy.linalg.cho_solve(factor, near)).sum(0)


def deflated_in_place(x: Array) -> Array:
    q = x[:, 0] / jnp.linalg.norm(x[:, 0])
    return x.at[:, 1:].add(-jnp.outer(q, q @ x[:, 1:]))[:, 1:]


def twice_projected(x: Array, q: Array) -> Array:
    """What two subspaces leave, subtracted one after the other."""
    return x - x @ q[:, :1] @ q[:, :1].T - x @ q[:, 1:] @ q[:, 1:].T


def incidence(x: Array) -> Array:
    """Differences along the edges of a graph, by the matrix of their ends."""
    ends = jax.nn.one_hot(jnp.stack([_ENDS, _ENDS[::-1]]), len(x))
    return (ends[0] - ends[1]) @ x


def selected(x: Array) -> Array:
    return jax.nn.one_hot(_ENDS, len(x)) @ x - jax.nn.one_hot(_ENDS[::-1], len(x)) @ x


def moving_sums(x: Array) -> Array:
    sums = jnp.tri(len(x)) @ x
    return (sums[4:] - sums[:-4]) / 4 - x[4:]


def direct_moving_sums(x: Array) -> Array:
    return sum(x[k : len(x) - 4 + k] for k in range(1, 5)) / 4 - x[4:]


def commutator(a: Array, b: Array) -> Array:
    return a @ b - b @ a


def direct_commutator(a: Array, b: Array) -> Array:
    return _times(a, b) - _times(b, a)


def nystrom(x: Array, z: Array, times: By = jnp.matmul) -> Array:
    """What some points leave of a kernel: its blocks are computed each by itself."""
    k = jnp.exp(-subtracted(z, z) / 16) + 1e-3 * jnp.eye(len(z))
    near, far = jnp.exp(-subtracted(x, z) / 16), jnp.exp(-subtracted(z, x) / 16)
    return jnp.exp(-subtracted(x, x) / 16) - times(near, jnp.linalg.solve(k, far))


def ridge_fit(x: Array, z: Array, times: By = jnp.matmul, away: float = 0.0) -> Array:
    """The fit of a kernel ridge regression: large coefficients of both signs cancel in it."""
    k, near = (jnp.exp(-subtracted(x + by, x) / 64) for by in (0.0, away))
    return times(near, jnp.linalg.solve(k + 1e-2 * jnp.eye(len(x)), z))


ridge_mean = functools.partial(ridge_fit, away=0.1)  # at other points


def recursive(p: Array, x: Array, times: By = jnp.matmul) -> Array:
    """Recursive least squares: the gain is divided by what the covariance makes of the input."""

    def step(p: Array, x: Array) -> tuple[Array, None]:
        px, xp = times(p, x[:, None]), times(x[None], p)
        return (p - px * xp / (0.99 + (xp * x).sum())) / 0.99, None

    return lax.scan(step, p, x.reshape(-1, len(p)))[0]


def _conjugate_gradients(a: Array, b: Array, times: By) -> Array:
    def step(state: Any, _: None) -> tuple[Any, None]:
        x, rest, way = state
        image = times(a, way)
        length = (rest**2).sum(0) / (way * image).sum(0)
        left = rest - length * image
        way_on = left + (left**2).sum(0) / (rest**2).sum(0) * way
        return (x + length * way, left, way_on), None

    return lax.scan(step, (jnp.zeros_like(b), b, b), None, length=3)[0][0]


SOLUTIONS: dict[str, Callable[[Array, Array, By], Array]] = {
    "and shifted": lambda a, b, _: jnp.linalg.solve(a, b) + 1e-3,
    "in a loop": _conjugate_gradients,
    "along a line": lambda a, b, times: (
        lambda x: x - 0.3 * (times(a, x) - b)
    )(jnp.linalg.solve(a, b) + 0.01),
}  # fmt: skip


def residual(
    solve: Callable[[Array, Array, By], Array], a: Array, b: Array, times: By = jnp.matmul
) -> Array:
    """What a solution to which something is added leaves, as where it is refined."""
    return b - times(a, solve(a, b, times))


def slopes(x: Array, w: Array, times: By = jnp.matmul) -> Array:
    """The gradient of a surface by central differences."""
    steps = 1e-2 * jnp.eye(WIDTH)[:3, None]
    far, near = (times(jnp.tanh(times(at, w)), w[:, :1]) for at in (x + steps, x - steps))
    return (far - near) / 2e-2


def curvature(x: Array, w: Array, times: By = jnp.matmul) -> Array:
    """Second differences along two axes."""
    around = [x.at[:, i].add(step) for i in range(2) for step in (0.05, -0.05)]
    middle, *sides = (times(jnp.tanh(times(at, w)), w[:, :1]) for at in (x, *around))
    return (sum(sides) - 4 * middle) / 0.05**2


def along(direction: Callable[[Array], Array], x: Array, w: Array, times: By = jnp.matmul) -> Array:
    """The slope of a surface along a direction that no number in the program says."""
    far, near = (times(jnp.tanh(times(x + s * direction(x), w)), w[:, :1]) for s in (1, -1))
    return (jnp.flip(x[:, :1]) * (far - near)).sum(0) / 2e-2


def moved_weights(x: Array, w: Array, times: By = jnp.matmul) -> Array:
    """The slope of a loss along a direction of its weights."""
    size = 0.01 / jnp.sqrt((w**2).sum())
    losses = (
        (times(jnp.tanh(times(x, v)), v[:, :1]) ** 2).mean()
        for v in (w + s * size * jnp.flip(w) for s in (1.0, -1.0))
    )
    return functools.reduce(jnp.subtract, losses) / (2 * size)


def _surface(x: Array, w: Array, times: By) -> Array:
    return times(jnp.tanh(times(x, w)), w[:, :1])[..., 0]


_SIGNS = jnp.array([1.0, -1.0])
_STENCIL = jnp.concatenate([jnp.eye(WIDTH)[:2], -jnp.eye(WIDTH)[:2]])
# Slopes of which one array holds the ends, or whose step is no number that is small.
ENDS: dict[str, Callable[[Array, Array, Array, By], Array]] = {
    "of a stencil": lambda x, w, h, times: (
        lambda f: jnp.stack([f[:, 0] - f[:, 2], f[:, 1] - f[:, 3]], -1) / (2 * h)
    )(_surface(x[:, None] + h * _STENCIL, w, times)),
    "under weights": lambda x, w, h, times: (
        _SIGNS[:, None] * _surface(x + 0.01 * _SIGNS[:, None, None], w, times)
    ).sum(0) / 0.02,
    "joined": lambda x, w, h, times: (
        lambda v: functools.reduce(
            jnp.subtract, jnp.split(_surface(jnp.concatenate([x + v, x - v]), w, times), 2)
        )
    )(jnp.sin(x) / 20),
    "by noise": lambda x, w, h, times: (
        lambda v: (
            lambda f: f[:4] - f[4:]
        )(jax.vmap(lambda v: _surface(x, w + 0.005 * v, times).mean())(jnp.concatenate([v, -v])))
    )(jax.random.normal(jax.random.key(0), (4, WIDTH, WIDTH))),
    "in a loop": lambda x, w, h, times: (
        lambda ends: (ends[0] - ends[1]) / 0.02
    )(lax.map(lambda s: _surface(x + 0.01 * s, w, times), _SIGNS)),
    "divided": lambda x, w, h, times: (
        _surface(x + jnp.flip(x) / 100, w, times) - _surface(x, w, times)
    ) * 100,
    "by an argument": lambda x, w, h, times: (
        _surface(x, w + h * jnp.flip(w), times) - _surface(x, w - h * jnp.flip(w), times)
    ) / (2 * h),
    "relative": lambda x, w, h, times: (
        _surface(x * 1.01, w, times) - _surface(x * (1 - 0.01), w, times)
    ) / 0.02,
}  # fmt: skip


def sigma_points(x: Array, w: Array, times: By = jnp.matmul) -> Array:
    """The mean of points around another, under weights of both signs, as a filter predicts it."""
    size = 0.05**2 * WIDTH
    near = jnp.linalg.cholesky(size * (jnp.eye(WIDTH) + w[:, :1] * w[:, 0])).T
    mean = x.mean(0)
    points = jnp.concatenate([mean[None], mean + near, mean - near])
    weights = jnp.full(len(points), 0.5 / size).at[0].set(1 - WIDTH / size)
    return times(weights[None], times(jnp.tanh(times(jnp.tanh(times(points, w)), w)), w))


ALONG: dict[str, Callable[[Array], Array]] = {
    "multiple": lambda x: 0.01 * jnp.flip(x),
    "normalized": lambda x: jnp.flip(x) / jnp.sqrt((x**2).sum(-1, keepdims=True)) * 0.02,
    "between": lambda x: 0.01 * (jnp.flip(x) - x),
    "mean": lambda x: 0.01 * jnp.flip(x).mean(0),
    "of a size": lambda x: 0.01 * jnp.maximum(jnp.abs(x), 1.0),
}


def _rounded_weights(w: Array) -> Array:
    scale = jnp.abs(w).max() / 127
    return jnp.clip(jnp.round(w / scale), -128, 127) * scale


def rounded_layer(x: Array, w: Array, times: By = jnp.matmul) -> Array:
    """What rounding its weights changes in a layer."""
    return times(x, _rounded_weights(w)) - times(x, w)


def adapted_layer(x: Array, w: Array, u: Array) -> Array:
    """What a product of low rank that is added to its weights changes in a layer."""
    return x @ (w + u.T @ u) - x @ w


_ENDS = jnp.asarray(np.random.default_rng(3).permutation(POINTS))
_SYSTEM = W @ W.T + jnp.eye(WIDTH)
_TURN = jnp.linalg.qr(W)[0] + 0.01 * W
_ROOTS = jnp.linalg.qr(jnp.ones((WIDTH, 3)).at[:, 1:].add(DRAW.normal(WIDTH, 2)))[0]
_AFFINITY = jnp.exp(-subtracted(X, X) / 8)
REMAINDERS = {
    "projected": (projected, direct_projected, (X, _ROOTS)),
    "reconstructed": (reconstructed, direct_reconstructed, (X, _ROOTS)),
    "woodbury": (woodbury, direct_woodbury, (X.T, 30 * _ROOTS)),
    "centred": (centred, lambda x: x - x.mean(0), (X,)),
    "dependence": (dependence, direct_dependence, (X[:CENTRES], Y)),
    "laplacian": (laplacian, direct_laplacian, (_AFFINITY, X)),
    "degrees": (degrees, direct_laplacian, (_AFFINITY, X)),
    "counted degrees": (counted_degrees, direct_laplacian, (_AFFINITY, X)),
    "roughness": (roughness, direct_roughness, (_AFFINITY, X)),
    "posterior": (posterior, direct_posterior, (X, X[:CENTRES] + 0.01 * Y)),
    "updated": (updated, direct_updated, (W @ W.T + 10, jnp.abs(W[:2]))),
    "filtered": (
        filtered,
        functools.partial(filtered, once=direct_updated),
        (W @ W.T + 10, jnp.abs(W[:2])),
    ),
    "variances": (variances, direct_variances, (X[:CENTRES] / 8, Y[:CENTRES] / 8)),
    "whitened": (whitened, direct_variances, (X[:CENTRES] / 8, Y[:CENTRES] / 8)),
    **{
        f"banded {name}": (functools.partial(banded, name), direct_banded, (X / 8,))
        for name in BANDS
    },
    "deflated": (deflated, direct_deflated, (X,)),
    "interpolated": (interpolated, lambda x: direct_banded(x) / -2, (X,)),
    "from_mean": (from_mean, direct_from_mean, (_AFFINITY, X)),
    "deflated in place": (deflated_in_place, direct_deflated, (X,)),
    "twice projected": (
        twice_projected,
        lambda x, q: x - _times(x, _times(q, q.T)),
        (X, _ROOTS),
    ),
    "incidence": (incidence, lambda x: x[_ENDS] - x[_ENDS[::-1]], (X,)),
    "selected": (selected, lambda x: x[_ENDS] - x[_ENDS[::-1]], (X,)),
    "moving sums": (moving_sums, direct_moving_sums, (X,)),
    "commutator": (commutator, direct_commutator, (_TURN, _TURN.T @ _TURN)),
    "orthogonality": (
        lambda q: q.T @ q - jnp.eye(len(q)),
        lambda q: _times(q.T, q) - jnp.eye(len(q)),
        (_TURN,),
    ),
    **{
        fn.__name__: (fn, functools.partial(fn, times=_times), (X / AWAY, W))
        for fn in (slopes, curvature, moved_weights, sigma_points)
    },
    **{
        f"slope, {name}": (
            functools.partial(along, by),
            functools.partial(along, by, times=_times),
            (X / AWAY, W),
        )
        for name, by in ALONG.items()
    },
    **{
        f"ends {name}": (
            functools.partial(fn, times=jnp.matmul),
            functools.partial(fn, times=_times),
            (X / AWAY, W, jnp.float32(0.01)),
        )
        for name, fn in ENDS.items()
    },
    "rounded layer": (rounded_layer, functools.partial(rounded_layer, times=_times), (X, W)),
    "adapted layer": (
        adapted_layer,
        lambda x, w, u: _times(x, u.T @ u),
        (X / AWAY, W, 0.01 * W[:2]),
    ),
    "nystrom": (nystrom, functools.partial(nystrom, times=_times), (X, X[:6])),
    **{
        name: (fn, functools.partial(fn, times=_times), (X, jnp.sin(X[:, :2])))
        for name, fn in (("ridge fit", ridge_fit), ("ridge mean", ridge_mean))
    },
    "recursive": (recursive, functools.partial(recursive, times=_times), (_SYSTEM, X[:, 0] / 8)),
    **{
        f"solved {name}": (
            functools.partial(residual, solve),
            functools.partial(residual, solve, times=_times),
            (_SYSTEM, W[:, :2]),
        )
        for name, solve in SOLUTIONS.items()
    },
}


# Phases: a position at each of several rates.


def multiplied(t: Array, r: Array) -> Array:
    return t[:, None] * r


def contracted(t: Array, r: Array) -> Array:
    return t[:, None] @ r[None]


PHASES: dict[str, By] = {
    "contracted": contracted,
    "einsum": lambda t, r: jnp.einsum("i,j->ij", t, r),
    "outer": jnp.outer,
    "tensordot": lambda t, r: jnp.tensordot(t, r, 0),
    "dotted": lambda t, r: jnp.dot(t.reshape(-1, 1), r.reshape(1, -1)),
    "rotary": lambda t, r: jnp.einsum("bt,d->btd", t[None], r)[0],
    "vmapped_dot": lambda t, r: jax.vmap(lambda s: jnp.dot(r[:, None], s[None]))(t),
    "diagonal": lambda t, r: jnp.broadcast_to(t[:, None], (len(t), len(r))) @ jnp.diag(r),
    "with_offset": lambda t, r: jnp.stack([t, jnp.ones_like(t)], -1) @ jnp.stack([r, 0.3 + 0 * r]),
    "scanned_dot": lambda t, r: lax.map(lambda s: r[:, None] @ s[None], t),
}


def embedding(by: By, t: Array, r: Array, head: Array) -> Array:
    phase = by(t, r)
    return jnp.concatenate([jnp.sin(phase), jnp.cos(phase)], -1) @ head


def complex_wave(by: By, t: Array, r: Array, head: Array) -> Array:
    wave = jnp.exp(1j * by(t, r))
    return jnp.concatenate([wave.real, wave.imag], -1) @ head


def wrapped(by: By, t: Array, r: Array, head: Array) -> Array:
    turn = (by(t, r) / (2 * jnp.pi)) % 1.0
    return jnp.concatenate([turn, turn**2], -1) @ head


def fraction(by: By, t: Array, r: Array, head: Array) -> Array:
    turns = by(t, r) / (2 * jnp.pi)
    turn = turns - jnp.floor(turns)
    return jnp.concatenate([turn, turn**2], -1) @ head


def nearest_turn(by: By, t: Array, r: Array, head: Array) -> Array:
    angle = by(t, r)
    angle = angle - 2 * jnp.pi * jnp.round(angle / (2 * jnp.pi))
    return jnp.concatenate([angle, angle**2], -1) @ head


def rotated(by: By, t: Array, r: Array, head: Array) -> Array:
    """Queries and keys in the coordinates of their positions, and their scores."""
    phase = by(t, r)
    a, b = jnp.split(jnp.cos(jnp.arange(len(t) * 16.0)).reshape(-1, 16) @ head @ head.T, 2, -1)
    q = jnp.concatenate(
        [a * jnp.cos(phase) - b * jnp.sin(phase), a * jnp.sin(phase) + b * jnp.cos(phase)], -1
    )
    return q @ q.T


PERIODIC = {
    fn.__name__: fn for fn in (embedding, complex_wave, wrapped, fraction, rotated, nearest_turn)
}


def features(x: Array, b: Array, head: Array) -> Array:
    """Fourier features of coordinates, and a layer."""
    phase = 2 * jnp.pi * x @ b
    return jnp.concatenate([jnp.sin(phase), jnp.cos(phase)], -1) @ head


def direct_features(x: Array, b: Array, head: Array) -> Array:
    phase = (2 * jnp.pi * x[..., None] * b).sum(-2)
    return jnp.concatenate([jnp.sin(phase), jnp.cos(phase)], -1) @ head


def mapped_features(x: Array, b: Array, head: Array) -> Array:
    return jax.vmap(lambda p: features(p, b, head))(x)


def random_kernel(x: Array, b: Array, head: Array) -> Array:
    return (jnp.cos(x @ b + 0.3) @ head[:8]).sum(-1)


def direct_random_kernel(x: Array, b: Array, head: Array) -> Array:
    return (jnp.cos((x[..., None] * b).sum(-2) + 0.3) @ head[:8]).sum(-1)


def structure_factor(x: Array, b: Array, head: Array) -> Array:
    """Scattering: a sum over atoms of waves."""
    wave = jnp.exp(-1j * (100 * x @ b)).mean(0)
    return wave.real @ head[:8] + wave.imag @ head[8:]


def direct_structure_factor(x: Array, b: Array, head: Array) -> Array:
    wave = jnp.exp(-1j * (100 * x[..., None] * b).sum(-2)).mean(0)
    return wave.real @ head[:8] + wave.imag @ head[8:]


def _among_themselves(by: By, x: Array, w: Array) -> Array:
    h = jnp.tanh((x - AWAY) @ w) * 2 + AWAY
    return kernel(by, h, h).mean()


# What is like these and cancels nothing: its products are narrow.


def normalized_contrast(x: Array, y: Array) -> Array:
    x, y = (v / jnp.linalg.norm(v, axis=-1, keepdims=True) for v in (x, y))
    return jnp.diagonal(jax.nn.log_softmax(x[: len(y)] @ y.T / 0.07, -1)).mean()


def similar_code(x: Array, y: Array) -> Array:
    x, y = (v * lax.rsqrt((v**2).sum(-1, keepdims=True) + 1e-6) for v in (x, y))
    return jnp.argmax(x @ y.T, -1)


def parallel_layers(x: Array, w: Array) -> Array:
    normed = x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    return x + jnp.tanh(normed @ w) @ w.T + normed @ w


def penalized(x: Array, w: Array) -> Array:
    return ((jnp.tanh(x @ w) @ w.T - x) ** 2).mean() + 1e-4 * (w**2).sum()


def linear_residual(x: Array, w: Array) -> Array:
    """Layers without activations that are added to what they read, and steps along a gradient."""
    x = x + x @ w
    step = jax.grad(lambda w: ((x @ w) ** 2).mean())(w)
    return x @ (w - 0.1 * step)


def off_diagonal(x: Array, w: Array) -> Array:
    """Likenesses of an array with itself, but for the diagonal, and labels on it."""
    like = (1 - jnp.eye(len(x))) * (x @ w @ x.T) - 1e9 * jnp.eye(len(x))
    return (1 - jnp.eye(len(x))) @ jnp.tanh(x @ w) + jax.nn.softmax(like) @ x


def masked_projection(x: Array, w: Array) -> Array:
    """A direction taken out of what layers make, where that is the work."""
    for _ in range(3):
        h = jnp.tanh(x @ w)
        x = h - h @ w @ w.T
    return x @ w


def scaled_residual(x: Array, w: Array) -> Array:
    return (0.1 * jnp.tanh(x @ w) @ w + w.mean(0) * x) @ w


def norm_after_layer(x: Array, w: Array) -> Array:
    h = x @ w
    h = (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-6)
    return h @ w.T


def stream_of_norms(x: Array, w: Array) -> Array:
    """A layer multiplies sums of squares, not what these are of."""
    h = jnp.sqrt((x**2).sum(-1, keepdims=True) + jnp.arange(float(WIDTH)))
    return h + jax.nn.relu(h @ w)


def stream_of_products(x: Array, w: Array) -> Array:
    """Nor does it cancel a part of a Gram matrix that it reads."""
    h = (x @ x.T)[:, :WIDTH]
    return h + jax.nn.relu(h @ w)


def polynomial(x: Array, w: Array) -> Array:
    return x**2 + x @ w + (x @ w) * x


def bilinear(x: Array, w: Array) -> Array:
    """A layer less the square of another, with their weights in one array: no moment."""
    one, other = jnp.split(w, 2, -1)
    return x @ one - (x @ other) ** 2


def pooled(x: Array, w: Array) -> Array:
    return jnp.tanh(x @ w + x.mean(0) @ w.T) @ w


def attention(x: Array, w: Array) -> Array:
    q, k, v = x @ w, x @ w.T, x @ (w + 1)
    return jax.nn.softmax(q @ k.T / 8**0.5, -1) @ v


def normed_attention(x: Array, w: Array) -> Array:
    q, k = (_unit(v) for v in (x @ w, x @ w.T))
    return jax.nn.softmax(10 * q @ k.T - 10.0, -1) @ (x @ w)


def margin(x: Array, w: Array) -> Array:
    """Classes by arcs to their normalized centres: the head is the work."""
    arcs = jnp.arccos(jnp.clip(_unit(x @ w) @ _unit(w), -0.999, 0.999))
    return jax.nn.log_softmax(10 * jnp.cos(arcs + 0.1), -1)


def warped(x: Array, w: Array) -> Array:
    """Weights of neighbours at places that a layer says."""
    place = jnp.arange(WIDTH) + jnp.tanh(x @ w) @ w
    near = place - jnp.floor(place)
    return (near * x + (1 - near) * (0 - x @ w)) @ w


def corrected(x: Array, w: Array) -> Array:
    """A layer subtracted from its input, and from one."""
    return (1 - jnp.tanh(x @ w)) * (x - jnp.tanh(x @ w.T) @ w) @ w


def no_slope(x: Array, w: Array) -> Array:
    """What a layer makes of noisy, far and later places, less what it makes here."""
    noise = 0.1 * jnp.flip(x)
    here, noisy, far = (jnp.tanh(at @ w) @ w for at in (x, x + noise, x + 1))
    later = jnp.tanh((x + 0.01 * (here + 1)) @ w) @ w
    return (noisy - here) @ w + far - here + 100 * (later - here)


def twins(x: Array, w: Array) -> Array:
    """A target less a value, as one network makes both of one place."""
    value, target = (
        jnp.tanh(x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-3) @ w) @ w for _ in range(2)
    )
    return 0.9 * jnp.roll(target, 1) + jnp.flip(target) - value


def reflected(x: Array, w: Array) -> Array:
    """Rows of a known matrix that add up to minus one: they leave no difference."""
    return x @ (jnp.eye(WIDTH) - 2 / WIDTH) @ w


def antisymmetric(x: Array, w: Array) -> Array:
    """Rotations with some damping."""
    turn = w - w.T - 0.01 * jnp.eye(WIDTH)
    return (x + 0.1 * jnp.tanh(x @ turn)) @ turn


def recurrent(x: Array, w: Array) -> Array:
    def step(h: Array, v: Array) -> tuple[Array, Array]:
        gate = jax.nn.sigmoid(v @ w + h @ w.T + 1)
        h = gate * h + (1 - gate) * jnp.tanh(v @ w)
        return h, h

    return lax.scan(step, jnp.zeros((6, WIDTH)), x.reshape(4, 6, WIDTH))[1] @ w


def reset(x: Array, w: Array) -> Array:
    """A state that layers make, an iteration before, is reset by what a product multiplies."""

    def step(h: Array, v: Array) -> tuple[Array, None]:
        fired = jax.nn.sigmoid(h)
        return 0.9 * h + v @ w + fired @ w.T - fired, None

    return lax.scan(step, jnp.zeros((6, WIDTH)), x.reshape(4, 6, WIDTH))[0] @ w


def sines(x: Array, w: Array) -> Array:
    """A network of sines: its layers are the work."""
    for _ in range(4):
        x = jnp.sin(jnp.tanh(x) @ w)
    return x @ w


def tied_layers(x: Array, w: Array) -> Array:
    """Layers of one stack of parameters, each of which multiplies by a matrix and its transpose."""
    for matrix in jnp.stack((w, w + 1)):
        hidden = x @ matrix
        normed = (hidden - hidden.mean(-1, keepdims=True)) * lax.rsqrt(
            hidden.var(-1, keepdims=True) + 1e-5
        )
        x = jnp.tanh(normed) @ matrix.T
    return (x**2).mean()


def divergence(x: Array, w: Array) -> Array:
    """The divergence of a variational autoencoder, of what gates have made: no moment of it."""
    h = jax.nn.sigmoid(x) * (x @ w)
    mean, log_variance = jnp.split(h @ w, 2, -1)
    return (jnp.exp(log_variance) + mean**2 - 1 - log_variance).mean()


def augmented_rows(x: Array, w: Array) -> Array:
    """Several views of an input, each a little off, of which a mean is taken."""
    views = jnp.tanh((x[:, None] + 0.02 * jnp.eye(WIDTH)) @ w) @ w
    normed = views - views.mean(-1, keepdims=True)
    return (normed @ w).mean(1)


def sums_and_differences(x: Array, w: Array) -> Array:
    """Of two arrays, as features of their pair; and the margin of what a layer makes of them."""
    y = jnp.sin(x)
    h = jnp.tanh(jnp.concatenate([x + y, x - y], -1) @ jnp.concatenate([w, w])) @ w
    return h[:, 0] - h[:, 1]


def rounded_layers(x: Array, w: Array) -> Array:
    """Weights and activations rounded to multiples, whose derivatives are passed on."""
    rounded = w + lax.stop_gradient(_rounded_weights(w) - w)
    h = jnp.tanh(x @ rounded)
    return (h + lax.stop_gradient(_rounded_weights(h) - h)) @ rounded


def small_inputs(x: Array, w: Array) -> Array:
    """Numbers of eight bits less a mean, and how much outputs of neighbours differ."""
    h = jnp.tanh((x / 255 - w[0]) @ w) @ w
    return h[1:] - h[:-1]


def small_places(x: Array, w: Array) -> Array:
    """Known places in a sequence, added to it."""
    h = jnp.tanh((x + 0.02 * jnp.cos(jnp.arange(len(x)))[:, None]) @ w) @ w
    return h[1:] - h[:-1]


NARROW: dict[str, Case] = {
    fn.__name__: Case(fn, fn, args)
    for fn, args in (
        *((fn, (X, Y)) for fn in (normalized_contrast, similar_code)),
        *(
            (fn, (X - AWAY, W))
            for fn in (
                *(parallel_layers, penalized, scaled_residual, norm_after_layer, polynomial),
                *(pooled, attention, normed_attention, recurrent, reset, corrected, margin),
                *(tied_layers, linear_residual, off_diagonal, masked_projection),
                *(stream_of_norms, stream_of_products, divergence, reflected, antisymmetric),
                *(no_slope, twins, bilinear, augmented_rows, sums_and_differences),
                *(small_inputs, small_places, rounded_layers, warped),
            )
        ),
    )
}


def _cases() -> dict[str, Case]:
    cases = {f"distance {n}": Case(by, subtracted, (X, Y)) for n, by in DISTANCES.items()}
    spellings = list(DISTANCES)
    for place, (name, use) in enumerate(USES.items()):
        by = DISTANCES[spellings[place % len(spellings)]]
        args = functools.partial(use, by), functools.partial(use, subtracted)
        cases[f"use {name}"] = Case(*args, (X, Y))
    for name in ("kernel", "contrastive", "chamfer", "nearest_code"):  # of what a layer has made
        by = DISTANCES[spellings[len(cases) % len(spellings)]]

        def of_layer(use: Any, by: By, x: Array, y: Array, w: Array) -> Any:
            return use(by, jnp.tanh((x - AWAY) @ w) * 2 + AWAY, jnp.tanh((y - AWAY) @ w) * 2 + AWAY)

        pair = (functools.partial(of_layer, USES[name], how) for how in (by, subtracted))
        cases[f"layer {name}"] = Case(*pair, (X, Y, W))
    cases["layer with itself"] = Case(
        functools.partial(_among_themselves, powers),
        functools.partial(_among_themselves, subtracted),
        (X, W),
    )
    for spelt in (covariance, covariance_of_products, covariance_of_sums):
        cases[spelt.__name__] = Case(spelt, centred_covariance, (X,))
    cases["cross covariance"] = Case(cross_covariance, direct_cross_covariance, (X, X[::-1]))
    cases["covariance of layer"] = Case(
        covariance_of_layer, lambda x, w: centred_covariance(x @ w), (X, W)
    )
    weights = _AFFINITY / _AFFINITY.sum(1, keepdims=True)
    cases["weighted covariance"] = Case(
        weighted_covariance, direct_weighted_covariance, (weights[0], X)
    )
    cases["skewness"] = Case(skewness, lambda x: ((x - x.mean(0)) ** 3).mean(0), (X / 4,))
    cases["spread"] = Case(spread, direct_spread, (weights, X))
    cases["nearness"] = Case(nearness, direct_nearness, (weights, X))
    near = X[:CENTRES] + 0.01 * Y
    for times, own in itertools.product((1, 2), SPREADS):
        spelt = functools.partial(similarity, times=times, spread=own)
        direct = functools.partial(direct_similarity, times=times)
        cases[f"similarity {times}, {own}"] = Case(spelt, direct, (X[:CENTRES], near))
    cases["mixture"] = Case(mixture, direct_mixture, (X, Y))
    cases["nearest_without_norm"] = Case(
        nearest_without_norm, lambda x, y: subtracted(x, y).argmin(-1), (X, Y)
    )
    cases["by_precision"] = Case(by_precision, direct_by_precision, (X, Y, W @ W.T))
    cases["hyperbolic"] = Case(hyperbolic, direct_hyperbolic, (X / AWAY, Y / AWAY))
    for name, by in COSINES.items():
        cases[f"cosine {name}"] = Case(by, direct_cosines, (X, Y))
    units = _unit(X), _unit(Y)
    cases["cosine of_units"] = Case(of_units, lambda x, y: subtracted(x, y) / 2, units)
    cases["edges"] = Case(edges, direct_edges, (X,))
    cases["bands"] = Case(bands, direct_bands, (X,))
    cases["centred_gram"] = Case(centred_gram, direct_gram, (X,))
    cases |= {f"remainder {name}": Case(*parts) for name, parts in REMAINDERS.items()}
    for place, (name, by) in enumerate(PHASES.items()):
        use = list(PERIODIC.values())[place % len(PERIODIC)]
        pair = functools.partial(use, by), functools.partial(use, multiplied)
        cases[f"phase {name} {use.__name__}"] = Case(*pair, (TIMES, RATES, HEAD))
    for sigma in (10, 30):
        b = DRAW.normal(2, 8, scale=sigma)
        cases[f"features {sigma}"] = Case(features, direct_features, (PLACES, b, HEAD))
    cases["features mapped"] = Case(mapped_features, direct_features, (PLACES, b, HEAD))
    cases["features captured"] = Case(
        lambda x, h, b=b: features(x, b, h),
        lambda x, h, b=b: direct_features(x, b, h),
        (PLACES, HEAD),
    )
    cases["random_kernel"] = Case(random_kernel, direct_random_kernel, (PLACES, b, HEAD))
    cases["structure_factor"] = Case(structure_factor, direct_structure_factor, (PLACES, b, HEAD))
    return cases


CASES = _cases()
