"""Regions: the marker reaches every equation of the region, whatever transforms the program."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxamp.core.formats import Precision
from jaxamp.core.keep_precision import keep_precision, kept_precision
from jaxamp.errors import NotCallableError, PolicyError
from tests.scopes import equations_of

X = np.linspace(0.1, 0.4, 4, dtype=np.float32)


@jax.custom_vjp
def sin_vjp(x):
    """A sine with its own backward rule."""
    return jnp.sin(x)


sin_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.cos(x),))


@jax.custom_jvp
def sin_jvp(x):
    """A sine with its own forward-mode rule."""
    return jnp.sin(x)


sin_jvp.defjvp(lambda x, dx: (jnp.sin(x[0]), jnp.cos(x[0]) * dx[0]))


@jax.custom_vjp
def marked_rules(x):
    """A function whose rules mark regions by themselves."""
    with keep_precision("f32"):
        return jnp.sin(x)


def _marked_fwd(x):
    with keep_precision("f32"):
        return jnp.sin(x), x


def _marked_bwd(x, ct):
    with keep_precision("f32"):
        return (ct * jnp.cos(x),)


marked_rules.defvjp(_marked_fwd, _marked_bwd)


def _scan(x):
    return jax.lax.scan(lambda c, _: (jnp.sin(c), c), x, None, length=2)[0]


def _while(x):
    return jax.lax.while_loop(lambda c: c[0] < 0, jnp.sin, x)


def _shard_map(x):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("i")
    return jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)(x)


CALLEES = {
    "plain": jnp.sin,
    "jit": jax.jit(jnp.sin),
    "jit of custom_vjp": jax.jit(sin_vjp),
    "remat": jax.checkpoint(jnp.sin),
    "remat of custom_vjp": jax.checkpoint(sin_vjp),
    "scan": _scan,
    "while": _while,
    "cond": lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
    "map": lambda x: jax.lax.map(jnp.sin, x),
    "custom_jvp": sin_jvp,
    "custom_vjp": sin_vjp,
    "shard_map": _shard_map,
    "vmap": jax.vmap(jnp.sin),
}
TRANSFORMS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x])),
    "grad": jax.grad,
    "grad of jit": lambda f: jax.grad(jax.jit(f)),
    "jit of vmap of grad": lambda f: jax.jit(lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, x]))),
    "grad of remat": lambda f: jax.grad(jax.checkpoint(f)),
    "grad of scan": lambda f: jax.grad(
        lambda x: jax.lax.scan(lambda c, _: (c * f(c), None), x, None, length=2)[0].sum()
    ),
    "hessian": jax.hessian,
}
NO_REVERSE = {"grad", "grad of jit", "jit of vmap of grad", "grad of remat", "grad of scan"}
NO_REVERSE |= {"hessian"}


def _assert_marked(fn, *, backward):
    """The sines of ``fn`` are in the region and its hyperbolic tangents are not."""
    found = equations_of(fn, X)
    kept = {name: set() for name in ("sin", "cos", "tanh")}
    for eqn, path in found:
        kept.setdefault(eqn.primitive.name, set()).add(kept_precision(path))
    assert kept["sin"] | kept["cos"] == {Precision.F32}
    assert kept["tanh"] == {None}
    if backward:  # the region's part of the backward pass is in the region
        regions = {kept_precision(path) for _, path in found if "transpose(" in path}
        assert regions == {Precision.F32, None}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("callee", CALLEES)
def test_region_around_a_call(callee, transform):
    """A region entered outside of jit, loops, branches and custom rules covers what is inside."""
    if callee == "while" and transform in NO_REVERSE:
        pytest.skip("JAX has no reverse mode for while_loop")

    def f(x):
        with keep_precision("f32"):
            y = CALLEES[callee](x)
        return jnp.tanh(y).sum()

    _assert_marked(TRANSFORMS[transform](f), backward="grad" in transform)


INSIDE = {
    "plain": lambda g: g,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": lambda g: lambda x: jax.lax.scan(lambda c, _: (g(c), None), x, None, length=2)[0],
    "cond": lambda g: lambda x: jax.lax.cond(x[0] > 0, g, lambda x: x, x),
    "while": lambda g: lambda x: jax.lax.while_loop(lambda c: c[0] < 0, g, x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("wrapper", INSIDE)
def test_region_inside_a_body(wrapper, transform):
    """A decorated function called inside jit, remat, a loop or a branch keeps its region."""
    if wrapper == "while" and transform in NO_REVERSE:
        pytest.skip("JAX has no reverse mode for while_loop")

    def f(x):
        y = INSIDE[wrapper](keep_precision("f32")(jnp.sin))(x)
        return jnp.tanh(y).sum()

    _assert_marked(TRANSFORMS[transform](f), backward="grad" in transform)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_region_inside_custom_rules(transform):
    """Regions written in forward and backward rules are found where JAX inlines the rules."""
    fn = TRANSFORMS[transform](lambda x: jnp.tanh(marked_rules(x)).sum())
    _assert_marked(fn, backward="grad" in transform)


def test_innermost_region_wins():
    """Nested regions: the inner one decides inside, the outer one before and after."""

    @keep_precision("bf16")
    def f(x):
        y = jnp.exp(x)
        with keep_precision("f32"):
            y = jnp.sin(y)
        return jnp.tanh(y)

    found = equations_of(f, X)
    kept = {eqn.primitive.name: kept_precision(path) for eqn, path in found}
    assert kept == {"exp": Precision.BF16, "sin": Precision.F32, "tanh": Precision.BF16}


def test_one_region_object_can_be_nested_and_used_again():
    """A region keeps its own books: nesting it in itself and reusing it restore the scope."""
    region = keep_precision("f32")

    def f(x):
        with region:
            with region:
                x = jnp.sin(x)
            x = jnp.cos(x)
        x = jnp.tanh(x)
        with region:
            return jnp.exp(x)

    kept = {eqn.primitive.name: kept_precision(path) for eqn, path in equations_of(f, X)}
    f32 = Precision.F32
    assert kept == {"sin": f32, "cos": f32, "tanh": None, "exp": f32}


def test_scope_is_restored_after_an_exception():
    """An exception inside a region ends it."""

    def f(x):
        with pytest.raises(RuntimeError), keep_precision("f32"):
            raise RuntimeError
        return jnp.sin(x)

    assert [kept_precision(path) for _, path in equations_of(f, X)] == [None]


def test_decorator_keeps_name_signature_and_methods():
    """A decorated function has its name, and a decorated method gets its ``self``."""

    class Model:
        scale = 2.0

        @keep_precision("f32")
        def forward(self, x, *, shift=0.0):
            """Doc."""
            return jnp.sin(x) * self.scale + shift

    assert (Model.forward.__name__, Model.forward.__doc__) == ("forward", "Doc.")
    np.testing.assert_allclose(Model().forward(X, shift=1.0), np.sin(X) * 2 + 1, rtol=1e-6)
    found = equations_of(lambda x: Model().forward(x), X)
    assert {kept_precision(path) for _, path in found} == {Precision.F32}


def test_numbers_do_not_change_outside_of_amp():
    """A region alone changes no value and no dtype."""
    fn = keep_precision("bf16")(lambda x: jnp.sin(x) * 3)
    assert np.array_equal(fn(X), jnp.sin(X) * 3)
    assert fn(X).dtype == np.float32


def test_default_is_f32():
    """``keep_precision()`` keeps f32."""
    assert keep_precision().precision is Precision.F32
    assert repr(keep_precision()) == "keep_precision('f32')"


@pytest.mark.parametrize("word", ["f64", "full", "f16", jnp.bfloat16])
def test_words_are_those_of_precision(word):
    """Every spelling of a precision of 16 bits or more is accepted and found again."""
    found = equations_of(keep_precision(word)(jnp.sin), X)
    assert [kept_precision(path) for _, path in found] == [Precision.parse(word)]


@pytest.mark.parametrize("word", ["f8_e4m3", "f4_e2m1", "f23", None, 3])
def test_wrong_words_are_refused_at_once(word):
    """A wrong word fails where it is written, before the region is entered."""
    with pytest.raises(PolicyError, match="Accepted: "):
        keep_precision(word)


@pytest.mark.parametrize("fn", [jnp.sin, lambda x: x])
def test_brackets_that_are_missing_are_named(fn):
    """`@keep_precision` without brackets is given the function, and says what to write."""
    with pytest.raises(NotCallableError, match=re.escape("@keep_precision('f32')")):
        keep_precision(fn)


def test_only_functions_are_decorated():
    """Classes, generators and what is no function are refused: their work is done later."""

    class Model:
        pass

    def generator():
        yield 1

    async def coroutine():
        return 1

    for thing in (Model, generator, coroutine, 3):
        with pytest.raises(NotCallableError):
            keep_precision("f32")(thing)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("scope", "precision"),
    [
        ("", None),
        ("keep_precision", None),
        ("keep_precision[f8_e4m3]", None),
        ("a/keep_precision[bf16]/b", Precision.BF16),
        ("jvp(keep_precision[f32])/transpose(jvp(keep_precision[f16]))/c", Precision.F16),
    ],
)
def test_reading_a_raw_path(scope, precision):
    """The last marker of a path is the innermost; foreign brackets are no marker."""
    assert kept_precision(scope) is precision
