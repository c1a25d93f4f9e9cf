"""What the rules read of JAX's own structures, one entry each.

When JAX changes one of them, this file fails and names it; `core/jax_compat/` is then the place
to mend. The shims there name the release that they serve, and go when the oldest supported JAX is
as new.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core
from jax.sharding import PartitionSpec as P

from jaxamp.core import jax_compat
from jaxamp.jaxprs.nested import nested
from tests import audit

ROOT = Path(__file__).parents[2]
DOORS = [ROOT / f"jaxamp/{room}/jax_compat" for room in ("core", "kernels")]
X = jnp.ones((4, 4))
_SAVE_DOTS = jax.checkpoint_policies.dots_saveable
Params = dict[str, Any]


@jax.custom_jvp
def with_jvp(x: Any) -> Any:
    """Has a forward-mode rule."""
    return x * X


with_jvp.defjvp(lambda primals, tangents: (primals[0], tangents[0]))


@jax.custom_vjp
def with_vjp(x: Any) -> Any:
    """Has forward and backward rules."""
    return x * 2


with_vjp.defvjp(lambda x: (x * 2, (x, x * 3)), lambda saved, g: (g * saved[0],))


@jax.custom_vjp
def with_lean_vjp(x: Any) -> Any:
    """Leaves out, under a checkpoint, what the backward rule does not need."""
    return x * 2


with_lean_vjp.defvjp(lambda x: (x * 2, x), lambda saved, g: (g * saved,), optimize_remat=True)


def _closed(value: Any) -> bool:
    return isinstance(value, core.ClosedJaxpr) and hasattr(value, "consts")


def _open(value: Any) -> bool:
    return hasattr(value, "eqns") and not getattr(value, "consts", ())


def _callable(value: Any) -> bool:
    return callable(getattr(value, "call_wrapped", None))


def _integer(value: Any) -> bool:
    return isinstance(value, int)


def _anything(value: Any) -> bool:
    return True


def _manual(x: Any) -> Any:
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(lambda x: x + 1, mesh=mesh, in_specs=P("i"), out_specs=P("i"))(x)


DEVICE = jax.devices()[0]
READ: dict[str, tuple[Callable[[Any], Any], dict[str, Callable[[Any], bool]]]] = {
    "jit": (
        jax.jit(jnp.sin),
        {
            "jaxpr": _closed,
            "name": lambda v: v == "sin",
            "in_shardings": lambda v: len(v) == 1,
            "out_shardings": lambda v: len(v) == 1,
        },
    ),
    "reshape": (
        lambda x: x.reshape(2, 8),
        {"dimensions": lambda v: v is None, "new_sizes": lambda v: v == (2, 8)},
    ),
    "pad": (
        lambda x: lax.pad(x, 0.0, ((1, 2, 0), (0, 0, 1))),
        {"padding_config": lambda v: v == ((1, 2, 0), (0, 0, 1))},
    ),
    "cumsum": (lambda x: lax.cumsum(x, 1), {"axis": lambda v: v == 1}),
    "custom_linear_solve": (
        lambda x: lax.custom_linear_solve(lambda y: x @ y, x[0], lambda f, b: b / x[0]),
        {"const_lengths": lambda v: sum(v) == 2},
    ),
    "cond": (
        lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
        {"branches": lambda v: len(v) == 2 and all(map(_closed, v))},
    ),
    "sharding_constraint": (
        lambda x: lax.with_sharding_constraint(x, jax.sharding.SingleDeviceSharding(DEVICE)),
        {"sharding": lambda v: v.num_devices == 1},
    ),
    "triangular_solve": (
        lambda x: lax.linalg.triangular_solve(x, x, left_side=True, unit_diagonal=True),
        {"unit_diagonal": lambda v: v is True},
    ),
    "transpose": (lambda x: x.T, {"permutation": lambda v: v == (1, 0)}),
    "while": (
        lambda x: lax.while_loop(
            lambda c: c[0] < x[0, 0], lambda c: (c[0] + 1, c[1] @ x), (0.0, x)
        ),
        {
            "cond_nconsts": lambda v: v == 1,
            "body_nconsts": lambda v: v == 1,
            "cond_jaxpr": _closed,
            "body_jaxpr": _closed,
        },
    ),
    "scan": (
        lambda x: lax.scan(lambda c, s: (c @ x, s * 2), x, x),
        {"jaxpr": _closed, "length": lambda v: v == 4, "reverse": _anything, "unroll": _integer},
    ),
    "broadcast_in_dim": (
        lambda x: lax.broadcast_in_dim(x, (4, 4, 2), (0, 1)),
        {
            "broadcast_dimensions": lambda v: [*map(int, v)] == [0, 1],
            "shape": lambda v: v == (4, 4, 2),
        },
    ),
    "remat2": (
        jax.checkpoint(jnp.sin),
        {
            "jaxpr": _open,
            "policy": _anything,
            "differentiated": _anything,
            "prevent_cse": _anything,
        },
    ),
    "gather": (
        lambda x: jnp.take_along_axis(x, jnp.zeros((4, 1), int), 1),
        {
            "dimension_numbers": _anything,
            "fill_value": _anything,
            "mode": lambda v: v is lax.GatherScatterMode.FILL_OR_DROP,
            "slice_sizes": lambda v: v == (1, 1),
            "unique_indices": lambda v: v is False,
        },
    ),
    "integer_pow": (lambda x: x**-2, {"y": lambda v: v == -2}),
    "slice": (
        lambda x: lax.slice(x, (0, 1), (4, 3), (1, 2)),
        {
            "start_indices": lambda v: v == (0, 1),
            "limit_indices": lambda v: v == (4, 3),
            "strides": lambda v: v == (1, 2),
        },
    ),
    "iota": (
        lambda x: x + lax.broadcasted_iota(jnp.float32, (4, 4), 1),
        {"dimension": lambda v: v == 1},
    ),
    "custom_jvp_call": (
        with_jvp,
        {
            "call_jaxpr": _closed,
            "jvp_jaxpr_fun": _callable,
            "num_consts": _integer,
            "symbolic_zeros": lambda v: v is False,
        },
    ),
    "custom_vjp_call": (
        with_vjp,
        {
            "call_jaxpr": _closed,
            "fwd_jaxpr_thunk": _callable,
            "bwd": _callable,
            "num_consts": _integer,
            "out_trees": callable,
            "symbolic_zeros": lambda v: v is False,
        },
    ),
    "remat_opt": (lambda x: jax.vjp(with_lean_vjp, x)[0], {"fwd_jaxpr": _closed}),
    "dot_general": (
        lambda x: x @ x,
        {
            "out_sharding": lambda v: v is None,
            "dimension_numbers": lambda v: v == (((1,), (0,)), ((), ())),
            "precision": lambda v: v is None,
            "preferred_element_type": lambda v: v == np.float32,
        },
    ),
    "conv_general_dilated": (
        lambda x: lax.conv(x[None, None], x[None, None], (1, 1), "SAME"),
        {
            "dimension_numbers": lambda v: v.rhs_spec == (0, 1, 2, 3),
            "lhs_dilation": lambda v: v == (1, 1),
            "precision": lambda v: v is None,
            "preferred_element_type": _anything,
        },
    ),
    "ragged_dot_general": (
        lambda x: lax.ragged_dot(x, x[None], jnp.array([4])),
        {"ragged_dot_dimension_numbers": _anything, "preferred_element_type": _anything},
    ),
    "convert_element_type": (
        lambda x: x.astype(jnp.bfloat16),
        {"new_dtype": lambda v: v == jnp.bfloat16, "weak_type": lambda v: v is False},
    ),
    "scatter-add": (
        lambda x: x.at[0].add(1.0),
        {"update_jaxpr": _open, "update_consts": lambda v: v == ()},
    ),
    "reduce_precision": (  # float32's own, of a residual that a checkpoint saves
        jax.grad(jax.checkpoint(lambda x: jnp.sin(x @ x).sum(), policy=_SAVE_DOTS)),
        {"exponent_bits": lambda v: v == 8, "mantissa_bits": lambda v: v == 23},
    ),
    "reduce_sum": (lambda x: x.sum(1), {"axes": lambda v: v == (1,)}),
    "shard_map": (
        _manual,
        {
            "jaxpr": _open,
            "mesh": _anything,
            "in_specs": lambda v: tuple(v) == (P("i"),),
            "out_specs": lambda v: tuple(v) == (P("i"),),
            "newly_manual_axes": lambda v: set(v) == {"i"},
            "check_vma": lambda v: v is True,
        },
    ),
}


def _equation(name: str) -> core.JaxprEqn:
    closed = jax.make_jaxpr(READ[name][0])(X)
    return next(e for e in audit.equations(closed.jaxpr) if e.primitive.name == name)


@pytest.mark.parametrize("name", READ)
def test_parameters(name: str) -> None:
    """The parameters that are read exist and hold what is expected of them."""
    params = _equation(name).params
    for key, holds in READ[name][1].items():
        assert key in params, f"{name} has no {key} any more, but {sorted(params)}"
        assert holds(params[key]), f"{name}: {key} is {params[key]!r} now"


# Parameters of jaxamp's own primitives.
OWN = {"bias_grad", "dtype", "given", "how", "op", "rounded", "spec"}
# Those that differ from release to release; the test below asks `scan_layout` for what they say.
SCAN = {"ft_in", "num_consts", "num_carry"}


def _read(tree: ast.AST) -> set[str]:
    """Names in `params["name"]` and `params.get("name")`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            place, name = node.value, node.slice
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("params.get"):
            place, name = node.func.value, node.args[0]  # type: ignore[attr-defined]
        else:
            continue
        if ast.unparse(place).endswith("params") and isinstance(name, ast.Constant):
            names.add(str(name.value))
    return names


@pytest.mark.feature("found")
@pytest.mark.feature("tools")
@pytest.mark.feature("xla")
def test_every_parameter_that_is_read_is_pinned() -> None:
    """Nothing is read of an equation that the table above does not name."""
    sources = (path.read_text() for path in (ROOT / "jaxamp").rglob("*.py"))
    read = set().union(*(_read(ast.parse(source)) for source in sources))
    pinned = {name for _, params in READ.values() for name in params}
    assert read - pinned == OWN | SCAN - pinned


def test_scan_is_wired_by_its_counts() -> None:
    """Operands and body inputs are invariants, carries, slices; results are carries, stacks."""
    eqn = _equation("scan")
    assert jax_compat.scan_layout(eqn) == (1, 1)
    body = eqn.params["jaxpr"].jaxpr
    assert [v.aval.shape for v in eqn.invars] == [(4, 4)] * 3
    assert [v.aval.shape for v in body.invars] == [(4, 4), (4, 4), (4,)]
    assert [v.aval.shape for v in body.outvars] == [(4, 4), (4,)]


def test_while_is_wired_by_its_counts() -> None:
    """Operands are those of the test, those of the body, carries."""
    eqn = _equation("while")
    test, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
    assert [v.aval.shape for v in eqn.invars] == [(4, 4), (4, 4), (), (4, 4)]
    assert (len(test.invars), len(body.invars), len(body.outvars)) == (3, 3, 2)


def test_cond_chooses_by_its_first_operand() -> None:
    """An int32 index, then what every branch takes."""
    eqn = _equation("cond")
    assert eqn.invars[0].aval.dtype == np.int32
    assert len(eqn.params["branches"][0].jaxpr.invars) == len(eqn.invars) - 1


def test_rules_of_custom_jvp() -> None:
    """Asked which tangents are zero, the rule gives a jaxpr, constants, and zeros of its own."""
    jaxpr, consts, zeros = _equation("custom_jvp_call").params["jvp_jaxpr_fun"].call_wrapped(False)
    assert (len(jaxpr.invars), len(jaxpr.outvars), list(zeros)) == (2, 2, [False])
    assert list(consts) == []


def test_equal_rules_of_custom_jvp() -> None:
    """Calls of one function have one rule; other functions, and other arguments, have others."""

    @partial(jax.custom_jvp, nondiff_argnums=(1,))
    def power(x: jax.Array, exponent: int) -> jax.Array:
        return x**exponent

    @power.defjvp
    def _(exponent: int, primals: Any, tangents: Any) -> Any:
        return power(*primals, exponent), exponent * primals[0] ** (exponent - 1) * tangents[0]

    def used(x: jax.Array) -> jax.Array:
        return jax.nn.relu(x) + jax.nn.relu(x) + jax.nn.relu6(x) + power(x, 2) + power(x, 3)

    eqns = jax.make_jaxpr(used)(X).jaxpr.eqns
    rules = [jax_compat.jvp_rule(e) for e in eqns if e.primitive.name == "custom_jvp_call"]
    assert rules[0] is not None
    assert rules[0] == rules[1] != rules[2]
    assert rules[3:] == [None, None]  # theirs depend on the exponent
    assert {jax_compat.jvp_rule(e) for e in eqns if e.primitive.name == "add_any"} <= {None}


def test_rules_of_custom_vjp() -> None:
    """The forward rule gives residuals, then results; the backward one takes them all."""
    eqn = _equation("custom_vjp_call")
    jaxpr, _ = eqn.params["fwd_jaxpr_thunk"].call_wrapped(True)
    _, residuals, forwarded = eqn.params["out_trees"]()
    assert residuals.num_leaves == len(forwarded) == 2
    assert forwarded == [0, None]  # the first is the function's own argument, and not saved
    assert len(jaxpr.outvars) == 2
    cotangents, logs = jax_compat.backward_results(eqn, [X, X, X])
    assert [c.shape for c in cotangents] == [(4, 4)]
    assert logs is None


def test_what_an_equation_knows_of_its_origin() -> None:
    """Names, functions and lines, by which rules select and reports speak."""

    def named(x: Any) -> Any:
        with jax.named_scope("outer"), jax.named_scope("inner"):
            return jnp.sin(x)

    (eqn,) = jax.make_jaxpr(named)(X).jaxpr.eqns
    assert str(eqn.source_info.name_stack) == "outer/inner"
    assert jax_compat.common_names([eqn, eqn]) == (2, 0)
    without = jax_compat.drop_common_names(eqn, jax_compat.CommonNames(1))
    assert str(without.source_info.name_stack) == "inner"
    user, _ = jax_compat.functions(eqn.source_info.traceback)
    assert user[0].endswith("named")
    assert jax_compat.user_frames(eqn.source_info)[0][0] == __file__
    assert Path(__file__).name in jax_compat.user_line(eqn.source_info)


def test_names_around_a_forward_and_a_backward_equation() -> None:
    """What is transformed and what is not share the names inside of the transformations."""

    def named(x: Any) -> Any:
        with jax.named_scope("outer"), jax.named_scope("inner"):
            return jnp.sin(x).sum()

    eqns = list(audit.equations(jax.make_jaxpr(jax.grad(named))(X).jaxpr))
    cos, mul = (next(e for e in eqns if e.primitive.name == n) for n in ("cos", "mul"))
    stacks = ([entry.name for entry in e.source_info.name_stack.stack] for e in (cos, mul))
    assert [*stacks] == [["jvp", "outer", "inner"], ["transpose", "jvp", "outer", "inner"]]
    around = jax_compat.common_names([cos, mul])
    assert around == (0, 2)
    assert str(jax_compat.keep_common_names(cos, around).source_info.name_stack) == "outer/inner"
    assert (
        jax_compat.drop_common_names(mul, around).source_info.name_stack.stack[0].name
        == "transpose"
    )


def test_pieces_of_a_jaxpr() -> None:
    """Closed jaxprs have constants, open ones none, and literals values."""
    closed = jax.make_jaxpr(lambda x: x + np.ones(4, np.float32) + 1.0)(X)
    assert isinstance(closed, core.ClosedJaxpr)
    assert [c.shape for c in closed.consts] == [(4,)]
    opened = jax_compat.without_constvars(closed.jaxpr)
    assert (len(opened.invars), len(opened.constvars)) == (2, 0)
    literals = [v for e in closed.jaxpr.eqns for v in e.invars if isinstance(v, core.Literal)]
    assert jax_compat.literal_value(literals[-1]) == 1.0


def _shims() -> list[tuple[Path, int, tuple[int, ...]]]:
    """File, line and version of every place where `jax_compat` asks which JAX this is."""
    return [
        (path, node.lineno, ast.literal_eval(node.comparators[0]))
        for door in DOORS
        for path in door.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == "JAX"
    ]


def _floor() -> tuple[int, ...]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (floor,) = (re.match(r"jax>=([\d.]+)", d) for d in project["dependencies"] if "jax>" in d)
    assert floor is not None
    return tuple(map(int, floor[1].split(".")[:2]))


def test_where_the_type_of_an_array_says_that_it_lies() -> None:
    """By partitions, which are not to be unpacked where axes are reduced, and by manual axes."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    place = P("d", None), P(None, None, reduced={"d"}), P(None, None, unreduced={"d"})
    found = [jax.typeof(jax.device_put(X, jax.NamedSharding(mesh, spec))) for spec in place[:2]]
    with jax.set_mesh(mesh):
        unreduced = jax.eval_shape(lambda x: jax.reshard(x, place[2]), X)
    found.append(X.aval.update(sharding=unreduced.sharding))
    assert [aval.sharding.spec.partitions for aval in found] == [("d", None), *[(None, None)] * 2]
    sums = [(aval.sharding.spec.reduced, aval.sharding.spec.unreduced) for aval in found]
    assert sums == [(set(), set()), ({"d"}, set()), (set(), {"d"})]
    assert all(aval.sharding.mesh.are_all_axes_explicit for aval in found)
    assert found[0].manual_axis_type.unreduced == found[0].manual_axis_type.reduced == set()


def test_a_reshard_is_transposed_where_it_came_from() -> None:
    """By JAX's own rule, whatever its kind."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        closed = jax.make_jaxpr(lambda x: jax.reshard(x, P("d", None)))(jax.reshard(X, P()))
        (eqn,) = closed.eqns
        cotangent = jax.reshard(X, P("d", None))
        given = closed.in_avals[0]
        back = jax_compat.transpose(eqn.primitive, cotangent, given, (), eqn.params)
    assert jax.typeof(back) == given


def test_where_a_jitted_function_leaves_its_results() -> None:
    """In host memory, where its ``out_shardings`` say so."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    jitted = jax.jit(lambda x: {"a": x, "b": x}, out_shardings={"a": place, "b": None})
    assert jax_compat.host_placement(jitted)["out_shardings"]["a"] is place
    assert jax_compat.host_placement(jax.jit(jnp.sin)) == jax_compat.host_placement(jnp.sin) == {}


def test_no_shim_is_dead() -> None:
    """A shim for what every supported JAX does can go; this lists those."""
    dead = [f"{path}:{line}" for path, line, version in _shims() if version <= _floor()]
    assert _shims()
    assert not dead, dead


def test_shims_name_their_release() -> None:
    """Beside each question stands, in words, what that release changed."""
    for path, line, version in _shims():
        near = " ".join(path.read_text().splitlines()[line - 2 : line])
        assert re.search(rf"# .*{'.'.join(map(str, version))}", near), near


def test_only_compat_asks_for_versions_and_private_names() -> None:
    """The rest of the package is the same on every JAX."""
    asking = re.compile(r"jax\._src|__version_info__|jax(lib)?\.__version__ *[<>=]")
    for path in (ROOT / "jaxamp").rglob("*.py"):
        if path.parent not in DOORS:
            assert not asking.search(path.read_text()), path


@pytest.mark.parametrize("wrap", [jax.checkpoint, jax.jit, lambda f: partial(jax.lax.map, f)])
def test_call_stacks_begin_inside(wrap) -> None:
    """Where an inner jaxpr is traced; what is taken out of a checkpoint has the same call stack."""

    def around(x: Any) -> Any:
        return wrap(lambda x: jnp.sin(x))(x)

    def functions(eqn: Any) -> tuple[str, ...]:
        return jax_compat.functions(eqn.source_info.traceback)[0]

    (outer,) = jax.make_jaxpr(around)(X).jaxpr.eqns
    (inner,) = nested(outer)[0].jaxpr.eqns
    assert any(name.endswith("around") for name in functions(outer))
    assert functions(inner)
    assert not any(name.endswith("around") for name in functions(inner))
    if wrap is jax.checkpoint:
        eqns = jax.make_jaxpr(lambda x: jax.vjp(around, x)[1](x))(X).jaxpr.eqns
        (left,) = [eqn for eqn in eqns if nested(eqn)]
        inside = {id(eqn.source_info.traceback) for eqn in nested(left)[0].jaxpr.eqns}
        taken = [eqn for eqn in eqns if eqn.primitive.name == "sin"]
        assert taken
        assert all(id(eqn.source_info.traceback) in inside for eqn in taken)
