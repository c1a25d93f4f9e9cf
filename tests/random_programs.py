"""Random programs over a pool of (4, 4) float32 values, and the invariants that amp must keep.

A program is plain data, a tuple of steps, so that what hypothesis prints is a reproduction:
`check((("dot", 0, 1, ()), ("scan", 2, 0, ((("tanh", 0, 0, ()),),))))`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from jax import Array, lax
from jax.extend import core

from jaxamp import amp
from jaxamp.run.amp import inspected
from tests.audit import equations

Step: TypeAlias = "tuple[str, int, int, tuple[Steps, ...]]"
Steps: TypeAlias = "tuple[Step, ...]"
Binary = Callable[[Array, Array], Array]

_SLOW_IS_FINE = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)
DRAWN = settings(deadline=None, database=None, suppress_health_check=_SLOW_IS_FINE)
SIZE = 4
PRESETS = ("auto_mixed_bf16", "auto_mixed")
_ROWS = np.array([2, 0, 2, 1], np.int32)
_KERNEL = np.array([0.25, 0.5, 0.25], np.float32)


def _clip(x: Array) -> Array:
    """Keeps values where no format overflows."""
    return lax.clamp(-8.0, x, 8.0)


def _mask(x: Array) -> Array:
    return jnp.where(jnp.tril(jnp.ones((SIZE, SIZE), bool)), x, -1e30)


def _normalised(x: Array) -> Array:
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)


def _convolved(x: Array) -> Array:
    kernel = jnp.asarray(_KERNEL)[None, None]
    return lax.conv_general_dilated(x[:, None], kernel, (1,), "SAME")[:, 0]


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & ~0xFF, jnp.float32)


def _noise(x: Array) -> Array:
    return x + 0.1 * jax.random.normal(jax.random.key(0), x.shape)


UNARY: dict[str, Callable[[Array], Array]] = {
    "neg": lambda x: -x,
    "abs": jnp.abs,
    "sign": jnp.sign,
    "floor": jnp.floor,
    "round": jnp.round,
    "square": lambda x: _clip(x * x),
    "cube": lambda x: _clip(x**3),
    "exp": lambda x: jnp.exp(jnp.minimum(x, 2.0)),
    "expm1": lambda x: jnp.expm1(jnp.minimum(x, 2.0)),
    "log": lambda x: jnp.log(jnp.abs(x) + 0.5),
    "log1p": lambda x: jnp.log1p(jnp.abs(x)),
    "sqrt": lambda x: jnp.sqrt(jnp.abs(x) + 0.1),
    "rsqrt": lambda x: lax.rsqrt(jnp.abs(x) + 0.1),
    "cbrt": lambda x: jnp.cbrt(jnp.abs(x) + 0.1),
    "power": lambda x: _clip((jnp.abs(x) + 0.1) ** 1.7),
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tanh": jnp.tanh,
    "logistic": jax.nn.sigmoid,
    "erf": lax.erf,
    "erf_inv": lambda x: lax.erf_inv(0.9 * jnp.tanh(x)),
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "cumsum": lambda x: _clip(jnp.cumsum(x, axis=1)),
    "cummax": lax.cummax,
    "cumlogsumexp": lambda x: lax.cumlogsumexp(x, axis=1),
    "sort": lambda x: jnp.sort(x, axis=0),
    "top_k": lambda x: lax.top_k(x, SIZE)[0],
    "argmax": lambda x: jax.nn.one_hot(jnp.argmax(x, axis=1), SIZE),
    "flip": lambda x: jnp.flip(x, 0),
    "transpose": lambda x: x.T,
    "reshape": lambda x: x.reshape(2, 2 * SIZE).reshape(SIZE, SIZE),
    "row_sum": lambda x: _clip(jnp.broadcast_to(x.sum(0), x.shape)),
    "row_max": lambda x: x - x.max(-1, keepdims=True),
    "mean": lambda x: x - x.mean(),
    "product": lambda x: x * jnp.prod(jnp.tanh(x)),
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
    "masked_softmax": lambda x: jax.nn.softmax(_mask(x)),
    "normalise": _normalised,
    "norm": lambda x: x / (jnp.sqrt(jnp.sum(x * x)) + 1e-12),
    "gather": lambda x: x[_ROWS],
    "scatter": lambda x: _clip(jnp.zeros_like(x).at[_ROWS].add(x)),
    "slice": lambda x: jnp.pad(x[1:, :-1], ((0, 1), (1, 0)), constant_values=1.0),
    "roll": lambda x: jnp.roll(x, 1, axis=1),
    "window": lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 1), (1, 1), "SAME") * 0.5,
    "positions": lambda x: x + lax.iota(jnp.float32, SIZE) * 0.5,
    "counts": lambda x: jnp.tanh(x) + (x > 0).astype(jnp.float32).sum(),
    "integers": lambda x: (x * 16).astype(jnp.int32).astype(jnp.float32) / 16,
    "bits": _bits,
    "reduce_precision": lambda x: lax.reduce_precision(x, 8, 12),
    "stop_gradient": lax.stop_gradient,
    "barrier": lambda x: lax.optimization_barrier(x) * 1.0,
    "conv": _convolved,
    "noise": _noise,
    "cholesky": lambda x: jnp.linalg.cholesky(jnp.tanh(x) @ jnp.tanh(x).T + jnp.eye(SIZE)),
    "fft": lambda x: _clip(jnp.fft.ifft(jnp.fft.fft(x) * 0.5).real),
}

BINARY: dict[str, Binary] = {
    "dot": lambda x, y: _clip(x @ y),
    "dot_transposed": lambda x, y: _clip(x @ y.T),
    "einsum": lambda x, y: _clip(jnp.einsum("ij,ij,kj->ik", x, y, x)),
    "add": lambda x, y: _clip(x + y),
    "sub": lambda x, y: _clip(x - y),
    "mul": lambda x, y: _clip(x * y),
    "div": lambda x, y: _clip(x / (jnp.abs(y) + 0.5)),
    "rem": lambda x, y: jnp.remainder(x, jnp.abs(y) + 0.5),
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "atan2": jnp.arctan2,
    "where": lambda x, y: jnp.where(x > y, x, y * 0.5),
    "concatenate": lambda x, y: jnp.concatenate([x[:2], y[2:]]),
    "stack": lambda x, y: jnp.stack([x, y]).mean(0),
    "update": lambda x, y: lax.dynamic_update_slice(x, y[:2], (1, 0)),
    "bias": lambda x, y: _clip(x + y[0]),
}


def _cond(f: Binary, g: Binary, x: Array, y: Array) -> Array:
    return lax.cond(x.mean() > 0.0, f, g, x, y)


def _switch(f: Binary, g: Binary, x: Array, y: Array) -> Array:
    return lax.switch(jnp.argmax(x[0]) % 3, [f, g, lambda x, y: x], x, y)


def _scan(f: Binary, g: Binary, x: Array, y: Array) -> Array:
    def body(carry: Array, row: Array) -> tuple[Array, Array]:
        new = f(carry, y)
        return new, g(new, jnp.broadcast_to(row, new.shape))[0]

    last, rows = lax.scan(body, x, y)
    return _clip(last + rows)


def _while(f: Binary, g: Binary, x: Array, y: Array) -> Array:
    return lax.fori_loop(0, jnp.argmax(y[0]), lambda i, c: f(c, y), g(x, y))


def _custom_jvp(f: Binary, g: Binary, x: Array, y: Array) -> Array:
    h = jax.custom_jvp(f)
    h.defjvp(lambda p, t: (h(*p), t[0] * jnp.cos(g(*p)) + t[1]))
    return h(x, y)


def _custom_vjp(f: Binary, g: Binary, x: Array, y: Array) -> Array:
    h = jax.custom_vjp(f)
    h.defvjp(lambda x, y: (f(x, y), (x, y)), lambda s, ct: (ct @ s[1].T, g(*s) * ct))
    return h(x, y)


def _checkpoint(f: Binary, g: Binary, x: Array, y: Array) -> Array:
    policy = jax.checkpoint_policies.dots_saveable
    return jax.checkpoint(lambda x, y: f(g(x, y), y), policy=policy)(x, y)


def _jit(f: Binary, g: Binary, x: Array, y: Array) -> Array:
    h = jax.jit(f)
    return g(h(x, y), h(y, x))


def _vmap(f: Binary, g: Binary, x: Array, y: Array) -> Array:
    return jax.vmap(f, in_axes=(0, None))(jnp.stack([x, g(x, y)]), y).mean(0)


NESTED: dict[str, Callable[[Binary, Binary, Array, Array], Array]] = {
    "cond": _cond,
    "switch": _switch,
    "scan": _scan,
    "while": _while,
    "custom_jvp": _custom_jvp,
    "custom_vjp": _custom_vjp,
    "checkpoint": _checkpoint,
    "jit": _jit,
    "vmap": _vmap,
}


def run(steps: Steps, x: Array, y: Array) -> tuple[Array, ...]:
    """Runs a program: each step reads two earlier values; the last three values come back."""
    pool = [x, y]
    for name, i, j, inner in steps:
        a, b = pool[i % len(pool)], pool[j % len(pool)]
        if name in UNARY:
            pool.append(UNARY[name](a))
        elif name in BINARY:
            pool.append(BINARY[name](a, b))
        else:
            f, g = map(_last, inner)
            pool.append(NESTED[name](f, g, a, b))
    return tuple(pool[-3:])


def _last(steps: Steps) -> Binary:
    return lambda x, y: run(steps, x, y)[-1]


def program(steps: Steps) -> Callable[..., Any]:
    """The function that a random program stands for; a weak scalar rides along."""

    def random_program(x: Array, y: Array) -> dict[str, Any]:
        values = run(steps, x, y)
        return {"values": values, "loss": values[-1].mean(), "weak": jnp.asarray(0.5) * 3}

    return random_program


def arguments() -> tuple[np.ndarray, np.ndarray]:
    """Two (4, 4) float32 arrays, always the same."""
    rng = np.random.default_rng(7)
    x, y = rng.standard_normal((2, SIZE, SIZE)).astype(np.float32)
    return x, y


def _steps(depth: int, longest: int) -> st.SearchStrategy[Steps]:
    place = st.integers(0, 7)
    # Products more often than their share: what is far from one is not lowered.
    flat = st.sampled_from([*UNARY, *BINARY, *["dot", "dot_transposed"] * 12])
    kinds: list[Any] = [st.tuples(flat, place, place, st.just(()))]
    if depth:
        inner = _steps(depth - 1, 2)
        nested = st.tuples(st.sampled_from([*NESTED]), place, place, st.tuples(inner, inner))
        kinds.append(nested)
    return st.lists(st.one_of(kinds), min_size=1, max_size=longest).map(tuple)


def programs() -> st.SearchStrategy[Steps]:
    """Programs of up to five steps, nested up to two deep."""
    return _steps(2, 5)


def primitives(fn: Callable[..., Any], *args: Any) -> set[str]:
    """The names of all primitives in the function's jaxpr."""
    return {e.primitive.name for e in equations(jax.make_jaxpr(fn)(*args).jaxpr)}


def check(steps: Steps, presets: tuple[str, ...] = PRESETS) -> None:
    """Holds one program to the invariants.

    Raises:
        AssertionError: if amp breaks one of them.
    """
    fn, args = program(steps), arguments()
    plain = _compiled(fn, args)
    expected = plain(*args)
    forced = _compiled(inspected(fn, "always_f32"), args)(*args)
    _same_types(forced, expected)
    jax.tree.map(_same_bits, forced, expected)
    for preset in presets:
        _check_preset(functools.partial(amp, policy=preset), fn, args, expected)
    if differentiable(fn, args):
        _check_gradient(functools.partial(amp, policy=presets[0]), fn, args)


def _compiled(fn: Callable[..., Any], args: Any) -> Callable[..., Any]:
    return jax.jit(fn).trace(*args).lower().compile(QUICK)


QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}
"""Compiling takes most of the time, and the programs are tiny."""


def _check_preset(wrap: Any, fn: Any, args: Any, expected: Any) -> None:
    traced = jax.jit(wrap(fn)).trace(*args)
    core.check_jaxpr(traced.jaxpr.jaxpr)
    again = jax.jit(wrap(lambda x, y: fn(x, y))).trace(*args)
    assert _text(again) == _text(traced), "the same program gave another jaxpr"
    result = traced.lower().compile(QUICK)(*args)
    _same_types(result, expected)
    jax.tree.map(_stays_finite, result, expected)


def _check_gradient(wrap: Any, fn: Any, args: Any) -> None:
    loss = wrap(lambda x, y: fn(x, y)["loss"])
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(*args)
    core.check_jaxpr(gradient.jaxpr.jaxpr)
    assert [x.dtype for x in gradient.out_info] == [np.float32] * 2
    gradient.lower()


def _text(traced: Any) -> list[str]:
    return [
        f"{e.primitive.name} {[v.aval for v in e.invars]} {[v.aval for v in e.outvars]}"
        for e in equations(traced.jaxpr.jaxpr)
    ]


def differentiable(fn: Any, args: Any) -> bool:
    """Whether JAX differentiates the plain program once it is a jaxpr.

    Reverse mode refuses while loops; and what some rules of ``custom_jvp`` give under ``vmap`` has
    other batch axes when the jaxpr is run than when it was made.
    """

    def loss(x: Array, y: Array) -> Any:
        return core.jaxpr_as_fun(closed)(x, y)[0]

    try:
        closed = jax.make_jaxpr(lambda x, y: fn(x, y)["loss"])(*args)
        jax.eval_shape(jax.grad(loss, argnums=(0, 1)), *args)
    except (ValueError, TypeError, NotImplementedError):
        return False
    return True


def _same_types(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.shape, x.dtype, x.weak_type) == (y.shape, y.dtype, y.weak_type)


def _same_bits(got: Array, want: Array) -> None:
    assert np.asarray(got).tobytes() == np.asarray(want).tobytes(), f"{got} is not {want}"


def _stays_finite(got: Array, want: Array) -> None:
    assert (jnp.isfinite(got) | ~jnp.isfinite(want)).all(), f"{got} for {want}"
