"""Small programs that reach the primitives which JAX's own harnesses do not."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify, io_callback, sparse
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import PartitionSpec as P

x = np.linspace(0.1, 0.9, 16, dtype=np.float32).reshape(4, 4)
v = x[0]
i = np.arange(4)
key = jax.random.key(0)

Program = Callable[..., Any]
PROGRAMS: dict[str, tuple[Program, tuple[Any, ...]]] = {}


def _program(*args: Any) -> Callable[[Program], Program]:
    """List a function as a program of these arguments."""

    def add(fn: Program) -> Program:
        PROGRAMS[fn.__name__] = (fn, args)
        return fn

    return add


@_program(x, v)
def calls(x, v):
    @jax.custom_jvp
    def twice(x):
        return 2 * x

    twice.defjvps(lambda t, _, x: 2 * t)

    @jax.custom_vjp
    def thrice(x):
        return 3 * x

    thrice.defvjp(lambda x: (3 * x, None), lambda _, ct: (3 * ct,))
    y = jax.jit(lambda x: x @ x)(x)
    y = jax.checkpoint(lambda y: jnp.sin(y) @ v)(y)
    return jax.nn.relu(thrice(twice(y)))


@_program(x, v)
def control_flow(x, v):
    carry, ys = lax.scan(lambda c, row: (c + row @ v, c), 0.0, x)
    carry = lax.while_loop(lambda c: c < 10, lambda c: 2 * c + 1, carry)
    carry = lax.cond(carry > 3, jnp.sin, jnp.cos, carry)
    return lax.associative_scan(jnp.add, ys), carry, lax.map(jnp.sum, x)


@_program(x, v)
def solvers(x, v):
    root = lax.custom_root(
        lambda y: y**2 - v, v, lambda f, y: y - f(y), lambda g, y: y / g(jnp.ones_like(y))
    )
    return jnp.linalg.solve(x, v) + root, jax.scipy.sparse.linalg.cg(x, v)[0]


@_program(x)
def collectives(x):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    def body(x):
        total = lax.psum(x, "d") + lax.pmax(x, "d") - lax.pmin(x, "d")
        moved = lax.ppermute(x, "d", [(0, 0)]) + lax.all_to_all(x, "d", 0, 0, tiled=True)
        scattered = lax.psum_scatter(x, "d", tiled=True) * lax.axis_index("d")
        return total + moved + scattered + lax.all_gather(x, "d", tiled=True)

    return body(x)


@_program(v)
def refs(v):
    cell = jax.new_ref(v)
    cell[...] += 1.0
    cell[0] = 2.0
    return cell[...]


@_program(v)
def callbacks(v):
    jax.debug.print("{}", v)
    jax.debug.callback(lambda v: None, v)
    spec = jax.ShapeDtypeStruct(v.shape, v.dtype)
    y = jax.pure_callback(np.sin, spec, v)
    y = io_callback(np.cos, spec, y)
    return jax.ffi.ffi_call("some_target", spec)(y)


@_program(key, v)
def randomness(key, v):
    a, b = jax.random.split(jax.random.fold_in(key, 1))
    raw = jax.random.wrap_key_data(jax.random.key_data(a))
    return (
        jax.random.normal(a, (3,)) + jax.random.gamma(b, v[:3]) + jax.random.uniform(raw),
        lax.rng_uniform(0.0, 1.0, (3,)),
        lax.rng_bit_generator(np.zeros(4, np.uint32), (3,)),
        jax.random.clone(a),
    )


@_program(x, v, i)
def contractions(x, v, i):
    image = x[None, :, :, None]
    kernel = x[:2, :2, None, None]
    dims = ("NHWC", "HWIO", "NHWC")
    return (
        jnp.einsum("ab,b->a", x, v),
        lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=dims),
        lax.ragged_dot(x, jnp.stack([x] * 4), i),
    )


@_program(x, v)
def reductions(x, v):
    pooled = lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (1, 1), "SAME")
    folded = lax.reduce(x, np.float32(0), lambda a, b: a + 2 * b, (0,))
    window = lax.reduce_window(x, np.float32(0), lambda a, b: a + 2 * b, (2, 2), (1, 1), "SAME")
    grad = jax.grad(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (1, 1), "SAME").sum())
    return pooled, folded, window, grad(x), jnp.argmax(x), lax.approx_max_k(v, 2)


@_program(x)
def second_derivative_of_pooling(x):
    def pool(x):
        return lax.reduce_window(x**2, -jnp.inf, lax.max, (2, 2), (1, 1), "SAME").sum()

    return jax.jvp(jax.grad(pool), (x,), (x,))


@_program(x, v, i)
def updates(x, v, i):
    y = x.at[i].add(v).at[i].multiply(v).at[i].max(v).at[i].min(v).at[i].set(v).at[i].subtract(v)
    y = lax.dynamic_update_slice(y, v[None], (0, 0))
    return jnp.take(y, i, axis=0), jnp.concatenate([y, x]), jnp.pad(y, 1), jnp.sort(y), y[i, i]


@_program(x)
def nested(x):
    @jax.custom_batching.custom_vmap
    def f(x):
        return x @ x

    @f.def_vmap
    def rule(size, batched, x):
        return x @ x, batched[0]

    @functools.partial(lax.composite, name="my.op")
    def g(x):
        return jnp.sin(x)

    return g(f(x))


@_program(x)
def partitioned(x):
    @custom_partitioning
    def f(x):
        return jnp.sin(x)

    f.def_partition(
        partition=lambda mesh, args, result: (mesh, jnp.sin, args[0].sharding, ()),
        sharding_rule="i j -> i j",
    )
    return f(x)


@_program(x)
def dtypes(x):
    bits = lax.bitcast_convert_type(x, jnp.int32)
    rounded = lax.reduce_precision(x.astype(jnp.float16), 5, 3)
    generated = lax.iota(np.float32, 3), lax.empty((3,), np.float32), jnp.arange(3.0)
    spectrum = jnp.fft.rfft(x)
    return bits, rounded, generated, jnp.conj(spectrum).real, lax.nextafter(x, x + 1)


@_program(x)
def passing_through(x):
    y = lax.optimization_barrier(checkpoint_name(x, "name"))
    return lax.stop_gradient(jax.device_put(y)), jnp.stack([y, x]), jnp.tile(y, 2), jnp.copy(y)


@_program(x, v)
def sparse_formats(x, v):
    m = sparse.BCOO.fromdense(x, nse=16)
    r = sparse.BCSR.fromdense(x, nse=16)
    return m @ v, m.transpose().todense(), r @ v, m.sum_duplicates(nse=16).sort_indices().data


@_program(x)
def checked(x):
    def f(x):
        checkify.check(jnp.all(x > 0), "positive")
        return jnp.log(x)

    return checkify.checkify(f)(x)


@_program(v)
def called_linearly(v):
    return jax.custom_derivatives.linear_call(lambda r, x: r * x, lambda r, ct: r * ct, v, v)


@_program(v)
def exported(v):
    return jax.export.export(jax.jit(jnp.sin))(v).call(v)


@_program(x)
def pallas_kernel(x):
    from jax.experimental import pallas as pl

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


@_program(x, v)
def rare_functions(x, v):
    special = jax.scipy.special
    half = v.astype(jnp.float16)
    return (
        special.polygamma(1, v) + special.zeta(v + 2, v) + lax.exp2(v) + special.betainc(v, v, v),
        jax.grad(lambda a: special.gammainc(a, 0.5))(0.5),
        lax.unstack(x),
        lax.mul(half, half),
        jnp.linalg.slogdet(x),
        lax.linalg.householder_product(x, v),
        lax.linalg.symmetric_product(x, x),
        lax.linalg.tridiagonal(x + x.T, lower=True),
    )


@_program(x)
def placed(x):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    auto = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    y = lax.with_sharding_constraint(x, jax.NamedSharding(auto, P("d")))
    return jax.sharding.reshard(y, jax.NamedSharding(mesh, P("d")))


@_program(x)
def laid_out(x):
    return with_layout_constraint(x, Layout((1, 0)))


@_program(x)
def annotated(x):
    return set_xla_metadata(x, a="b")


@_program(x)
def collectives_without_types(x):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)
    def body(x):
        x = lax.psum(x, "d") + lax.pbroadcast(x, "d", 0)
        sizes = jnp.ones(1, jnp.int32)
        return lax.ragged_all_to_all(x, x, 0 * sizes, sizes, 0 * sizes, sizes, axis_name="d")

    return body(x)
