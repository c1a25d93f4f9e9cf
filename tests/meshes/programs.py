"""The programs: layers, losses and loops that cross from one context of a mesh to another."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.sharding import auto_axes, explicit_axes, reshard

from tests.meshes.registry import program

ROW, COL = P("d", None), P(None, "m")


def _softmax(x):
    return jax.nn.softmax(x, axis=-1)


def _norm(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)


def _mlp(x, w, v):
    return jnp.tanh(x @ w) @ v


# Auto axes throughout, and constraints


@program("auto", ROW, COL, P("m", None))
def constraint_between_products(x, w, v):
    """A hidden layer that is constrained."""
    h = lax.with_sharding_constraint(jnp.tanh(x @ w), P("d", "m"))
    return lax.with_sharding_constraint(h @ v, P("d", None))


@program("auto", ROW)
def jit_with_shardings(x, w, v):
    """A nested jit that says where its results lie."""
    place = jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), P("d", "m"))
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w) * 0.5, out_shardings=place)
    return layer(layer(x, w), v)


# From Auto axes to Explicit ones


@program("auto", ROW)
def explicit_layer(x, w, v):
    """A layer whose axes are Explicit, between two others."""
    layer = explicit_axes(lambda x, w: jnp.tanh(x * 2) @ w, in_sharding=(ROW, P(None, None)))
    return jnp.sin(layer(jnp.tanh(x @ w), v)) @ w


@program("auto", ROW)
def explicit_layer_first(x, w, v):
    """Arguments enter the Explicit layer as they come."""
    layer = explicit_axes(_mlp, in_sharding=(ROW, P(), P()))
    return layer(x, w, v)


@program("auto", ROW)
def explicit_contraction(x, w, v):
    """A contraction of a divided axis, whose result says where it lies."""

    def body(h, v):
        return jnp.einsum("rk,kc->rc", h, v, out_sharding=ROW)

    split = explicit_axes(body, in_sharding=(P("d", "m"), P("m", None)))
    return jnp.tanh(split(jnp.tanh(x @ w), v)) @ w


@program("auto", ROW)
def explicit_along_one_axis(x, w, v):
    """Only one axis of the mesh becomes Explicit."""
    layer = explicit_axes(lambda h, v: jnp.tanh(h @ v), axes=("d",), in_sharding=(ROW, P()))
    return layer(jnp.sin(x @ w), v) @ w


@program("auto", ROW, tolerance="deep")
def explicit_in_scan(x, w, v):
    """Layers of a scan, each with an Explicit part."""
    part = explicit_axes(lambda h, w: jnp.tanh(h * 1.5) @ w, in_sharding=(ROW, P()))
    return lax.scan(lambda h, w: (jnp.sin(part(h, w)) @ v, None), x, jnp.stack([w, v]))[0]


@program("auto", ROW, tolerance="deep")
def scan_in_explicit(x, w, v):
    """A scan inside of the Explicit part."""

    def body(x, ws):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0]

    whole = explicit_axes(body, in_sharding=(ROW, P()))
    return whole(x * 2, jnp.stack([w, v, w])) @ v


@program("auto", ROW)
def checkpoint_around_explicit(x, w, v):
    """What a checkpoint recomputes crosses to Explicit axes."""
    part = explicit_axes(lambda h, v: jnp.tanh(h @ v), in_sharding=(ROW, P()))
    return jax.checkpoint(lambda x: part(jnp.sin(x @ w), v))(x) @ w


@program("auto", ROW)
def checkpoint_in_explicit(x, w, v):
    """A checkpoint inside of the Explicit part."""
    layer = jax.checkpoint(lambda h, v: jnp.tanh(_norm(h) @ v))
    return explicit_axes(layer, in_sharding=(ROW, P()))(x @ w, v) @ w


@program("auto", ROW)
def softmax_parted_by_explicit(x, w, v):
    """The maximum and the exponentials of a softmax have different meshes."""
    scores = x @ w
    largest = lax.stop_gradient(scores.max(-1, keepdims=True))

    def body(scores, largest):
        weights = jnp.exp(scores - largest)
        return weights / weights.sum(-1, keepdims=True)

    return explicit_axes(body, in_sharding=(ROW, ROW))(scores, largest) @ v


@program("auto", ROW)
def norm_parted_by_explicit(x, w, v):
    """The statistics of a norm are on Auto axes, its scaling on Explicit ones."""
    h = x @ w
    mean, var = h.mean(-1, keepdims=True), h.var(-1, keepdims=True)
    scaled = explicit_axes(
        lambda h, mean, var: (h - mean) * lax.rsqrt(var + 1e-5), in_sharding=(ROW, ROW, ROW)
    )
    return scaled(h, mean, var) @ v


@program("auto", ROW)
def elementwise_chain_across_explicit(x, w, v):
    """A chain of elementwise operations goes into the Explicit part and out again."""
    h = jnp.tanh(x @ w) * 1.25 + 0.5
    h = explicit_axes(lambda h: jax.nn.gelu(h * h + h), in_sharding=(ROW,))(h)
    return (jnp.sin(h) + h * 0.5) @ v


@program("auto", ROW)
def explicit_in_cond(x, w, v):
    """A branch with an Explicit part, and one without."""
    part = explicit_axes(lambda h, v: jnp.tanh(h @ v), in_sharding=(ROW, P()))
    h = jnp.tanh(x @ w)
    return lax.cond(x[0, 0] > -9, lambda h: part(h, v), lambda h: h @ v, h) @ w


@program("auto", ROW, tolerance="deep")
def explicit_in_fori(x, w, v):
    """A loop of a known length, whose body has an Explicit part."""
    part = explicit_axes(lambda h, w: jnp.tanh(h @ w), in_sharding=(ROW, P()))
    return lax.fori_loop(0, 3, lambda _, h: part(h, w) + 0.25 * h, x) @ v


@program("auto", ROW)
def explicit_in_custom_vjp(x, w, v):
    """Both rules of a ``custom_vjp`` have Explicit parts."""
    times = explicit_axes(lambda h, w: h @ w, in_sharding=(ROW, P()))
    back = explicit_axes(lambda g, w: g @ w.T, in_sharding=(ROW, P()))
    over = explicit_axes(lambda h, g: h.T @ g, in_sharding=(P(), P()))

    @jax.custom_vjp
    def layer(h, v):
        return jnp.tanh(times(h, v))

    def forward(h, v):
        y = jnp.tanh(times(h, v))
        return y, (y, h, v)

    def backward(saved, g):
        y, h, v = saved
        g = g * (1 - y * y)
        return back(g, v), over(h, g)

    layer.defvjp(forward, backward)
    return layer(x @ w, v) @ w


@program("auto", ROW)
def explicit_lookup(x, w, v):
    """Rows of a table, looked up in the Explicit part."""

    def body(table, ids):
        return table.at[ids].get(out_sharding=ROW)

    ids = jnp.arange(8) * 3 % 16
    return explicit_axes(body, in_sharding=(P("m", None), P("d")))(w, ids) @ v + x @ w


@program("auto", ROW)
def attention_parted_by_explicit(x, w, v):
    """Scores are on Auto axes; their softmax and the sum of values on Explicit ones."""
    q, k = x @ w, x @ v
    scores = q @ k.T * 0.25
    rest = explicit_axes(lambda s, k: _softmax(s) @ k, in_sharding=(ROW, P()))
    return rest(scores, k) @ w


# Manual axes


@program("auto", ROW, P(None, "m"), P("m", None))
def manual_row_parallel(x, w, v):
    """All axes are Manual: a hidden layer is divided, and its products are added up."""
    body = lambda x, w, v: lax.psum(jnp.tanh(x @ w) @ v, "m")  # noqa: E731
    return jax.shard_map(body, in_specs=(ROW, COL, P("m", None)), out_specs=ROW)(x, w, v)


@program("auto", ROW, P(None, "m"), P("m", None))
def one_manual_axis(x, w, v):
    """One axis is Manual and the other stays Auto; what is added up is read by a product."""
    body = lambda x, w, v: lax.psum(jnp.tanh(x @ w) @ v, "m")  # noqa: E731
    specs = (P(), COL, P("m", None))
    layer = jax.shard_map(body, in_specs=specs, out_specs=P(), axis_names={"m"})
    return layer(layer(x, w, v), w, v)


@program("auto", ROW, P(None, "m"), P("m", None))
def scatter_along_one_manual_axis(x, w, v):
    """What is added up is divided over the devices, and gathered again."""

    def body(x, w, v):
        part = lax.psum_scatter(jnp.tanh(x @ w) @ v, "m", scatter_dimension=1, tiled=True)
        return lax.all_gather(jnp.sin(part), "m", axis=1, tiled=True) @ w

    specs = (P(), COL, P("m", None))
    return jax.shard_map(body, in_specs=specs, out_specs=COL, axis_names={"m"})(x, w, v)


@program("auto", P(), P(), P())
def mean_along_one_manual_axis(x, w, v):
    """Statistics of a batch whose examples lie on several devices."""

    def body(x, w, v):
        h = x @ w
        mean = lax.pmean(h.mean(0), "d")
        return jnp.tanh(h - mean) @ v

    return jax.shard_map(body, in_specs=(ROW, P(), P()), out_specs=ROW, axis_names={"d"})(x, w, v)


@program("auto", P(), P(), P())
def softmax_over_a_manual_axis(x, w, v):
    """A softmax whose maximum and sum go over devices."""

    def body(x, w, v):
        scores = x @ w
        largest = lax.pmax(lax.stop_gradient(scores.max(-1, keepdims=True)), "m")
        weights = jnp.exp(scores - largest)
        weights /= lax.psum(weights.sum(-1, keepdims=True), "m")
        return lax.psum(weights @ v, "m")

    specs = (P(), COL, P("m", None))
    return jax.shard_map(body, in_specs=specs, out_specs=P(), axis_names={"m"})(x, w, v)


@program("auto", ROW, P("m", None), P("m", None))
def gathered_along_one_manual_axis(x, w, v):
    """Parameters are gathered where they are used; their gradients are scattered sums."""

    def body(x, w, v):
        gather = partial(lax.all_gather, axis_name="m", tiled=True)
        return jnp.tanh(x @ gather(w)) @ gather(v)

    specs = (P(), P("m", None), P("m", None))
    return jax.shard_map(body, in_specs=specs, out_specs=P(), axis_names={"m"}, check_vma=False)(
        x, w, v
    )


@program("auto", ROW, P(None, "m"), P("m", None))
def unchecked_along_one_manual_axis(x, w, v):
    """Nothing says which values vary: cotangents of an activation are added up as it enters."""

    def body(h, w, v):
        return lax.psum(jnp.tanh(h @ w) @ v, "m")

    layer = jax.shard_map(
        body, in_specs=(P(), COL, P("m", None)), out_specs=P(), axis_names={"m"}, check_vma=False
    )
    return layer(jnp.tanh(x @ w), w, v) @ w


@program("auto", ROW, P(None, "m"), P("m", None))
def rules_along_one_manual_axis(x, w, v):
    """A ``custom_vjp`` whose cotangents are added up over devices by its own rule."""

    @jax.custom_vjp
    def times(h, w):
        return h @ w

    def backward(saved, g):
        h, w = saved
        return lax.psum(g @ w.T, "m"), h.T @ g

    times.defvjp(lambda h, w: (h @ w, (h, w)), backward)

    def body(h, w, v):
        return lax.psum(jnp.tanh(times(h, w)) @ v, "m")

    specs = (P(), COL, P("m", None))
    layer = jax.shard_map(body, in_specs=specs, out_specs=P(), axis_names={"m"})
    return layer(jnp.tanh(x @ w), w, v) @ w


@program("auto", ROW, P(None, "m"), P("m", None))
def extremes_along_one_manual_axis(x, w, v):
    """Largest and smallest activations over devices, which a gate compares with."""

    def body(x, w, v):
        h = x @ w
        still = lax.stop_gradient(h)
        gate = (h - lax.pmin(still, "m")) / (1 + lax.pmax(still, "m") - lax.pmin(still, "m"))
        return lax.psum(gate @ v, "m")

    specs = (P(), COL, P("m", None))
    layer = jax.shard_map(body, in_specs=specs, out_specs=P(), axis_names={"m"})
    return layer(jnp.tanh(x @ w), w, v) @ w


@program("auto", ROW, P("m", None), P("m", None))
def gathered_to_reduced(x, w, v):
    """The gather says that its cotangents are to be added up."""

    def body(x, w, v):
        gather = partial(lax.all_gather, axis_name="m", tiled=True, to="reduced")
        return jnp.tanh(x @ gather(w)) @ gather(v)

    specs = (P("m", None), P("m", None), P("m", None))
    return jax.shard_map(body, in_specs=specs, out_specs=P("m", None))(x, w, v)


@program("auto", ROW, P(None, "m"), P("m", None), tolerance="deep")
def manual_in_scan(x, w, v):
    """The body of a scan has a Manual part along one axis."""
    body = lambda h, w, v: lax.psum(jnp.tanh(h @ w) @ v, "m")  # noqa: E731
    specs = (P(), COL, P("m", None))
    layer = jax.shard_map(body, in_specs=specs, out_specs=P(), axis_names={"m"})
    return lax.scan(lambda h, s: (_norm(layer(h * s, w, v)), None), x, jnp.ones(2))[0]


@program("auto", ROW, P(None, "m"), P("m", None), tolerance="deep")
def scan_in_manual(x, w, v):
    """A scan inside of a Manual part along one axis."""

    def body(x, w, v):
        step = lambda h, _: (_norm(lax.psum(jnp.tanh(h @ w) @ v, "m")), None)  # noqa: E731
        return lax.scan(step, x, None, length=2)[0]

    specs = (P(), COL, P("m", None))
    return jax.shard_map(body, in_specs=specs, out_specs=P(), axis_names={"m"})(x, w, v)


@program("auto", ROW, P(None, "m"), P("m", None))
def manual_in_manual(x, w, v):
    """A part that is Manual along one axis within one that is so along the other."""

    @jax.checkpoint  # JAX refuses residuals of a Manual part in another
    def inner(x, w, v):
        return lax.psum(jnp.tanh(x @ w) @ v, "m")

    def outer(x, w, v):
        specs = (P(), COL, P("m", None))
        layer = jax.shard_map(inner, in_specs=specs, out_specs=P(), axis_names={"m"})
        h = layer(x, w, v)
        return jnp.tanh(h - lax.pmean(h.mean(0), "d")) @ w

    return jax.shard_map(outer, in_specs=(ROW, P(), P()), out_specs=ROW, axis_names={"d"})(x, w, v)


@program("auto", ROW, P(None, "m"), P("m", None))
def checkpoint_around_manual(x, w, v):
    """A Manual part is recomputed."""
    body = lambda h, w, v: lax.psum(jnp.tanh(h @ w) @ v, "m")  # noqa: E731
    specs = (P(), COL, P("m", None))
    layer = jax.shard_map(body, in_specs=specs, out_specs=P(), axis_names={"m"})
    return jax.checkpoint(lambda x: layer(jnp.sin(x), w, v))(x) @ w


@program("auto", ROW, P(None, "m"), P("m", None))
def checkpoint_in_manual(x, w, v):
    """A Manual part recomputes its layer."""
    layer = jax.checkpoint(lambda x, w, v: lax.psum(jnp.tanh(_norm(x) @ w) @ v, "m"))
    specs = (P(), COL, P("m", None))
    return jax.shard_map(layer, in_specs=specs, out_specs=P(), axis_names={"m"})(x, w, v)


@program("auto", P(), P(), P())
def explicit_in_manual(x, w, v):
    """Within a part that is Manual along one axis, the other becomes Explicit."""

    def inner(h, v):
        return jnp.einsum("rk,kc->rc", jnp.tanh(h), v, out_sharding=P())

    def body(x, w, v):
        specs = P(None, "m"), P("m", None)
        return explicit_axes(inner, axes=("m",), in_sharding=specs)(x @ w, v)

    body = jax.checkpoint(body)  # JAX refuses residuals with another mesh than that of the body
    return jax.shard_map(body, in_specs=(ROW, P(), P()), out_specs=ROW, axis_names={"d"})(x, w, v)


@program("auto", ROW)
def ring_of_parts(x, w, v):
    """Parts of keys travel round the devices, as in attention over a ring."""

    def body(x, w, v):
        q, k = x @ w, x @ v
        turn = partial(lax.ppermute, axis_name="d", perm=[(0, 1), (1, 0)])
        other = turn(k)
        scores = jnp.concatenate([q @ k.T, q @ other.T], -1) * 0.25
        return _softmax(scores) @ jnp.concatenate([k, other])

    return jax.shard_map(body, in_specs=(ROW, P(), P()), out_specs=ROW, axis_names={"d"})(x, w, v)


@program("auto", ROW)
def all_to_all_of_parts(x, w, v):
    """Heads and rows change places between devices."""

    def body(x, w, v):
        h = lax.all_to_all(jnp.tanh(x @ w), "d", 1, 0, tiled=True)
        return lax.all_to_all(h * 2, "d", 0, 1, tiled=True) @ v

    return jax.shard_map(body, in_specs=(ROW, P(), P()), out_specs=ROW, axis_names={"d"})(x, w, v)


# Explicit axes throughout


@program("explicit", ROW, COL, P("m", None))
def typed_row_parallel(x, w, v):
    """The result of a contraction over a divided axis says where it lies."""
    h = jnp.tanh(jnp.einsum("rk,kc->rc", x, w, out_sharding=P("d", "m")))
    return jnp.einsum("rk,kc->rc", h, v, out_sharding=ROW)


@program("explicit", ROW, P("m", None), P("m", None))
def typed_gathered_parameters(x, w, v):
    """Parameters are resharded where they are used."""
    whole = partial(reshard, out_shardings=P())
    return jnp.tanh(x @ whole(w)) @ whole(v)


@program("explicit", ROW, P("m", None), P("m", None), tolerance="deep")
def typed_gathered_in_scan(x, w, v):
    """Parameters of each layer are resharded in the body of a scan."""
    layer = lambda h, w: (jnp.tanh(h @ reshard(w, P())) + h, None)  # noqa: E731
    return lax.scan(layer, x, jnp.stack([w, v]))[0]


@program("explicit", ROW)
def typed_norm_and_softmax(x, w, v):
    """Fused groups on Explicit axes alone."""
    return _softmax(_norm(x) @ w) @ v


@program("explicit", ROW)
def activation_resharded(x, w, v):
    """An activation moves from rows to columns and back."""
    h = reshard(jnp.tanh(x @ w), P("d", "m"))
    h = reshard(jax.nn.gelu(h), ROW)
    return h @ v


@program("explicit", P("d", None), P(None, "m"), P())
def typed_loss(x, w, v):
    """Sums over divided axes."""
    h = jnp.tanh(jnp.einsum("rk,kc->rc", x, w, out_sharding=P("d", "m")))
    return h.mean(1)[:, None] * reshard(h, ROW) @ v


# From Explicit axes to Auto ones


@program("explicit", ROW, COL, P("m", None))
def auto_layer(x, w, v):
    """A layer whose axes are Auto."""
    return auto_axes(_mlp, out_sharding=ROW)(x, w, v)


@program("explicit", ROW)
def auto_between_products(x, w, v):
    """Elementwise operations on Auto axes between products on Explicit ones."""
    h = auto_axes(lambda h: jnp.tanh(h * 2) + h, out_sharding=ROW)(x @ w)
    return jnp.sin(h) @ v


@program("explicit", P("d", None), P(None, "m"))
def heads_on_auto_axes(x, w, v):
    """Positions are rotated on Explicit axes; heads are parted on Auto ones."""
    angle = jnp.arange(8.0)[:, None] * 0.1
    q = jnp.einsum("rk,kc->rc", x, w, out_sharding=P("d", "m")) * jnp.cos(angle)

    def core(q, v):
        return jnp.einsum("rgc,cd->rgd", q.reshape(8, 4, 4), v[:4])

    heads = auto_axes(core, out_sharding=P("d", "m"))(q, v)
    return auto_axes(lambda h: h.reshape(8, 64)[:, :16], out_sharding=ROW)(jnp.sin(heads)) @ v


@program("explicit", ROW)
def auto_along_one_axis(x, w, v):
    """One axis becomes Auto and the other stays Explicit."""
    layer = auto_axes(lambda h, v: jnp.tanh(h) @ v, axes=("m",), out_sharding=ROW)
    return layer(x @ w, v) @ w


@program("explicit", ROW, tolerance="deep")
def auto_in_scan(x, w, v):
    """Layers of a scan, each with an Auto part."""
    part = auto_axes(lambda h, w: jnp.tanh(h * 1.5) @ w, out_sharding=ROW)
    return lax.scan(lambda h, w: (jnp.sin(part(h, w)) @ v, None), x, jnp.stack([w, v]))[0]


@program("explicit", ROW, tolerance="deep")
def scan_in_auto(x, w, v):
    """A scan inside of the Auto part."""

    def body(x, ws):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0]

    return auto_axes(body, out_sharding=ROW)(x * 2, jnp.stack([w, v, w])) @ v


@program("explicit", ROW)
def checkpoint_around_auto(x, w, v):
    """What a checkpoint recomputes crosses to Auto axes."""
    part = auto_axes(lambda h, v: jnp.tanh(h @ v), out_sharding=ROW)
    return jax.checkpoint(lambda x: part(jnp.sin(x @ w), v))(x) @ w


@program("explicit", ROW)
def checkpoint_in_auto(x, w, v):
    """A checkpoint inside of the Auto part."""
    layer = jax.checkpoint(lambda h, v: jnp.tanh(_norm(h) @ v))
    return auto_axes(layer, out_sharding=ROW)(x @ w, v) @ w


@program("explicit", ROW)
def named_residual_across_auto(x, w, v):
    """A checkpoint saves by name what has crossed to Auto axes."""
    name = jax.ad_checkpoint.checkpoint_name
    part = auto_axes(lambda h, v: name(jnp.tanh(h @ v), "kept"), out_sharding=ROW)
    policy = jax.checkpoint_policies.save_only_these_names("kept")
    return jax.checkpoint(lambda x: jnp.sin(part(x @ w, v)) @ w, policy=policy)(x)


@program("explicit", ROW)
def softmax_parted_by_auto(x, w, v):
    """The maximum and the exponentials of a softmax have different meshes."""
    scores = x @ w
    largest = lax.stop_gradient(scores.max(-1, keepdims=True))

    def body(scores, largest):
        weights = jnp.exp(scores - largest)
        return weights / weights.sum(-1, keepdims=True)

    return auto_axes(body, out_sharding=ROW)(scores, largest) @ v


@program("explicit", ROW)
def norm_parted_by_auto(x, w, v):
    """The statistics of a norm are on Auto axes, its scaling on Explicit ones."""
    h = x @ w
    statistics = lambda h: (h.mean(-1, keepdims=True), h.var(-1, keepdims=True))  # noqa: E731
    mean, var = auto_axes(statistics, out_sharding=(ROW, ROW))(h)
    return (h - mean) * lax.rsqrt(var + 1e-5) @ v


@program("explicit", ROW)
def attention_parted_by_auto(x, w, v):
    """Scores are on Explicit axes; their softmax and the sum of values on Auto ones."""
    q, k = x @ w, reshard(x, P()) @ v
    scores = q @ k.T * 0.25
    return auto_axes(lambda s, k: _softmax(s) @ k, out_sharding=ROW)(scores, k) @ w


@program("explicit", ROW)
def attention_on_auto_axes(x, w, v):
    """A whole attention on Auto axes, masked."""

    def attend(x, w, v):
        q, k = x @ w, x @ v
        scores = jnp.where(jnp.tril(jnp.ones((8, 8), bool)), q @ k.T * 0.25, -1e9)
        return _softmax(scores) @ k

    return auto_axes(attend, out_sharding=ROW)(x, w, v) @ w


@program("explicit", ROW)
def auto_in_cond(x, w, v):
    """A branch with an Auto part, and one without."""
    part = auto_axes(lambda h, v: jnp.tanh(h @ v), out_sharding=ROW)
    h = jnp.tanh(x @ w)
    return lax.cond(v[0, 0] > -9, lambda h: part(h, v), lambda h: h @ v, h) @ w


@program("explicit", ROW, tolerance="deep")
def auto_in_fori(x, w, v):
    """A loop of a known length, whose body has an Auto part."""
    part = auto_axes(lambda h, w: jnp.tanh(h @ w), out_sharding=ROW)
    return lax.fori_loop(0, 3, lambda _, h: part(h, w) + 0.25 * h, x) @ v


@program("explicit", ROW)
def auto_in_custom_vjp(x, w, v):
    """Both rules of a ``custom_vjp`` have Auto parts."""
    times = auto_axes(lambda h, w: h @ w, out_sharding=ROW)
    back = auto_axes(lambda g, w: g @ w.T, out_sharding=ROW)
    over = auto_axes(lambda h, g: h.T @ g, out_sharding=P())

    @jax.custom_vjp
    def layer(h, v):
        return jnp.tanh(times(h, v))

    def forward(h, v):
        y = jnp.tanh(times(h, v))
        return y, (y, h, v)

    def backward(saved, g):
        y, h, v = saved
        g = g * (1 - y * y)
        return back(g, v), over(h, g)

    layer.defvjp(forward, backward)
    return layer(x @ w, v) @ w


@program("explicit", ROW)
def auto_in_custom_jvp(x, w, v):
    """The rule of a ``custom_jvp`` has an Auto part."""
    part = auto_axes(lambda h, t: t * (1 - jnp.square(jnp.tanh(h))), out_sharding=ROW)

    @jax.custom_jvp
    def bent(h):
        return jnp.tanh(h)

    @bent.defjvp
    def _(primals, tangents):
        return bent(*primals), part(*primals, *tangents)

    return bent(x @ w) @ v


@program("explicit", ROW)
def auto_then_explicit(x, w, v):
    """An Explicit part within an Auto part."""
    inner = explicit_axes(lambda h, v: jnp.tanh(h) @ v, in_sharding=(ROW, P()))
    return auto_axes(lambda x, w, v: jnp.sin(inner(x @ w, v)) @ w, out_sharding=ROW)(x, w, v)


@program("explicit", ROW)
def bias_across_auto(x, w, v):
    """A bias is broadcast on Auto axes, and its gradient summed there."""
    biased = auto_axes(lambda h, b: jnp.tanh(h + b), out_sharding=ROW)
    return biased(x @ w, v[0]) @ v


@program("explicit", ROW)
def labels_on_auto_axes(x, w, v):
    """Logits are on Explicit axes; the numbers of their labels are looked up on Auto ones."""
    logits = jnp.tanh(x @ w) @ v
    labels = jnp.arange(8)[:, None] * 5 % 16
    find = auto_axes(lambda p, n: jnp.take_along_axis(p, n, -1), out_sharding=ROW)
    return find(jax.nn.log_softmax(logits), labels) * x


@program("auto", ROW)
def labels_on_explicit_axes(x, w, v):
    """The other way round."""

    def find(logits):
        labels = reshard(jnp.arange(8)[:, None] * 5 % 16, ROW)
        picked = jax.nn.one_hot(labels[:, 0], 16) * jax.nn.log_softmax(logits)
        return picked.sum(-1, keepdims=True)

    return explicit_axes(find, in_sharding=(ROW,))(jnp.tanh(x @ w) @ v) * x


@program("explicit", ROW)
def relu_across_auto(x, w, v):
    """A ReLU on Auto axes, whose sign the backward pass reads, and a residual connection."""
    h = x @ w
    return (auto_axes(jax.nn.relu, out_sharding=ROW)(h) + h * 0.5) @ v


@program("explicit", ROW)
def weights_of_both_meshes(x, w, v):
    """One parameter is multiplied on Explicit axes and on Auto ones, three times each."""
    part = auto_axes(lambda h, w: jnp.tanh(h @ w), out_sharding=ROW)
    for _ in range(3):
        x = part(jnp.sin(x @ w), w)
    return x @ v


@program("explicit", ROW)
def dropout_on_auto_axes(x, w, v):
    """Random bits are drawn on Auto axes."""

    def dropped(h):
        kept = jax.random.bernoulli(jax.random.key(1), 0.75, h.shape)
        return jnp.where(kept, h / 0.75, 0)

    return auto_axes(dropped, out_sharding=ROW)(jnp.tanh(x @ w)) @ v


@program("explicit", ROW)
def convolution_on_auto_axes(x, w, v):
    """A convolution on Auto axes between products on Explicit ones."""

    def convolved(h, w):
        kernel = w[None, :, :3]
        return lax.conv_general_dilated(h[:, None], kernel[:, :1], (1,), "SAME")[:, 0]

    return auto_axes(convolved, out_sharding=ROW)(jnp.tanh(x @ w), w) @ v


# Sums that are still to be added up over devices, and values whose cotangents are


@program("explicit", P(None, "m"), P("m", None), P())
def unreduced_product(x, w, v):
    """A product is left unreduced, and added up by a reshard."""
    part = jnp.einsum("rk,kc->rc", x, w, out_sharding=P(None, None, unreduced={"m"}))
    return jnp.tanh(reshard(part, P())) @ v


@program("explicit", P("d", "m"), P("m", None), P("m", None))
def unreduced_sum_of_products(x, w, v):
    """Two unreduced products are added before they are reduced."""
    left = jnp.einsum("rk,kc->rc", x, w, out_sharding=P("d", None, unreduced={"m"}))
    right = jnp.einsum("rk,kc->rc", x, v, out_sharding=P("d", None, unreduced={"m"}))
    return jnp.tanh(reshard(left + right, ROW)) @ reshard(v, P())


@program("explicit", ROW)
def reduced_parameters(x, w, v):
    """Gradients of parameters are added up where the parameters were resharded."""
    reduced = partial(reshard, out_shardings=P(None, None, reduced={"d"}))
    return jnp.tanh(x @ reduced(w)) @ reduced(v)


@program("explicit", ROW, tolerance="deep")
def reduced_parameters_in_scan(x, w, v):
    """Layers of a scan have parameters that are reduced."""
    ws = reshard(jnp.stack([w, v]), P(None, None, None, reduced={"d"}))
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0]


@program("explicit", ROW)
def reduced_lookup(x, w, v):
    """Rows of a table that is reduced."""
    table = reshard(w, P(None, None, reduced={"d"}))
    ids = reshard(jnp.arange(8) * 3 % 16, P("d"))
    return jnp.tanh(table.at[ids].get(out_sharding=ROW) + x) @ v


@program("explicit", ROW, P("m", None), P())
def split_lookup(x, w, v):
    """Rows of a table whose rows lie on several devices."""
    ids = reshard(jnp.arange(8) * 3 % 16, P("d"))
    return jnp.tanh(w.at[ids].get(out_sharding=ROW) + x) @ v


@program("explicit", ROW)
def reduced_in_chains(x, w, v):
    """Elementwise operations, a transposition and a reshape of parameters that are reduced."""
    reduced = partial(reshard, out_shardings=P(None, None, reduced={"d"}))
    scaled = jnp.tanh(reduced(w) * 1.5) + reduced(v).T
    return jnp.sin(x @ scaled) @ scaled.reshape(2, 128).reshape(16, 16)


@program("explicit", ROW, P(), P())
def reduced_then_checkpoint(x, w, v):
    """A checkpoint recomputes with reduced parameters."""
    reduced = partial(reshard, out_shardings=P(None, None, reduced={"d"}))
    return jax.checkpoint(lambda x, w, v: jnp.sin(jnp.tanh(x @ w) @ v))(x, reduced(w), reduced(v))


@program("explicit", ROW)
def gradients_left_unreduced(x, w, v):
    """Gradients of two parts of a batch are added before they are reduced."""
    reduced = reshard(w, P(None, None, reduced={"d"}))

    def loss(w, x):
        return jnp.sum(jnp.square(jnp.tanh(x @ w)))

    gradient = jax.grad(loss)(reduced, x) + jax.grad(loss)(reduced, x * 0.5)
    return x @ reshard(gradient, P()) @ v * 0.1


# Manual axes on an Explicit mesh


@program("explicit", ROW, COL, P("m", None))
def manual_on_explicit(x, w, v):
    """All axes become Manual."""
    body = lambda x, w, v: lax.psum(jnp.tanh(x @ w) @ v, "m")  # noqa: E731
    specs = (ROW, COL, P("m", None))
    return jnp.sin(jax.shard_map(body, in_specs=specs, out_specs=ROW)(x, w, v)) @ reshard(w, P())


@program("explicit", ROW, COL, P("m", None))
def one_manual_axis_on_explicit(x, w, v):
    """One axis becomes Manual and the other stays Explicit; what is added up meets a product."""
    body = lambda x, w, v: lax.psum(jnp.tanh(x @ w) @ v, "m")  # noqa: E731
    specs = (P(), COL, P("m", None))
    layer = jax.shard_map(body, in_specs=specs, out_specs=P(), axis_names={"m"})
    return layer(layer(x, w, v), w, v)


@program("explicit", ROW)
def auto_in_manual(x, w, v):
    """Within a part that is Manual along one axis, the other becomes Auto."""

    def body(x, w, v):
        h = auto_axes(lambda h: jnp.tanh(h * 2), axes=("m",), out_sharding=P())(x @ w)
        return h @ v

    body = jax.checkpoint(body)  # JAX refuses residuals with another mesh than that of the body
    return jax.shard_map(body, in_specs=(ROW, P(), P()), out_specs=ROW, axis_names={"d"})(x, w, v)


@program("explicit", ROW)
def unreduced_within_manual(x, w, v):
    """Within a Manual part values are made unreduced, and added up as they leave it."""

    def body(x, w, v):
        h = jnp.tanh(x @ w)
        return lax.psum_scatter(h.T @ (h @ v), "d", tiled=True)

    gradient = jax.shard_map(body, in_specs=(ROW, P(), P()), out_specs=P("d", None))(x, w, v)
    return x @ reshard(gradient, P())


@program("explicit", ROW)
def manual_in_auto(x, w, v):
    """A Manual part within an Auto part."""
    body = lambda h, w: jnp.tanh(h - lax.pmean(h.mean(0), "d")) @ w  # noqa: E731

    def outer(x, w, v):
        mapped = jax.shard_map(body, in_specs=(ROW, P()), out_specs=ROW, axis_names={"d"})
        return mapped(x @ w, v) @ w

    return auto_axes(outer, out_sharding=ROW)(x, w, v)


# A mesh of both types


@program("mixed", P(), COL, P("m", None))
def mixed_row_parallel(x, w, v):
    """An axis of the batch is Auto, and that of the hidden layer Explicit."""
    h = jnp.tanh(jnp.einsum("rk,kc->rc", x, w, out_sharding=P(None, "m")))
    return jnp.einsum("rk,kc->rc", h, v, out_sharding=P())


@program("mixed")
def mixed_to_auto(x, w, v):
    """The Explicit axis becomes Auto for a while."""
    h = auto_axes(lambda x, w: jnp.tanh(x @ w) * 2, out_sharding=P(None, "m"))(x, w)
    return reshard(jnp.sin(h), P()) @ v


@program("mixed")
def mixed_to_explicit(x, w, v):
    """The Auto axis becomes Explicit for a while."""
    layer = explicit_axes(lambda h, v: jnp.tanh(h) @ v, axes=("d",), in_sharding=(ROW, P()))
    return layer(x @ w, v) @ w


@program("mixed")
def mixed_to_manual(x, w, v):
    """The Auto axis becomes Manual for a while."""

    def body(x, w, v):
        h = x @ w
        return jnp.tanh(h - lax.pmean(h.mean(0), "d")) @ v

    return jax.shard_map(body, in_specs=(ROW, P(), P()), out_specs=ROW, axis_names={"d"})(x, w, v)


@program("mixed", tolerance="deep")
def mixed_in_scan(x, w, v):
    """A scan whose body goes over both."""
    auto = auto_axes(lambda h, w: jnp.tanh(h @ w), out_sharding=P())
    typed = explicit_axes(lambda h: jnp.sin(h) + h, axes=("d",), in_sharding=(ROW,))
    return lax.scan(lambda h, w: (typed(auto(h, w)) @ v, None), x, jnp.stack([w, v]))[0]


@program("mixed", P(None, "m"), P("m", None), P())
def mixed_unreduced(x, w, v):
    """A product is left unreduced along the Explicit axis."""
    part = jnp.einsum("rk,kc->rc", x, w, out_sharding=P(None, None, unreduced={"m"}))
    return jnp.tanh(reshard(part, P())) @ v


@program("explicit", ROW)
def whole_rows_added_to_parted(x, w, v):
    """Rows that each device holds whole are added to those of a product, which are parted."""
    parted = (x @ w).reshape(8, 2, 8) + (v @ v)[:8, None, :8]
    return jax.nn.relu(parted).reshape(8, 16) @ v


@program("auto", P(), P(), P())
def numbers_saved_by_each_device(x, w, v):
    """JAX saves an array that each device makes of one number, in parts, for the loop around."""

    @partial(jax.shard_map, in_specs=P(), out_specs=P(), check_vma=False)
    def layer(h, w):
        return jnp.where(h > 0, h @ w, 0.0)

    return lax.scan(lambda h, w: (layer(h, w), None), x, jnp.stack([w, v]))[0]
