"""``probe``: planted faults are found, statistics are right, shadows are the original program."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxamp
from jaxamp import probe
from jaxamp.compiled.deviceless import compile_all, exported
from jaxamp.compiled.targets import TARGETS
from jaxamp.compiled.traffic import measure as traffic_of
from jaxamp.numerics.shadow import run_beside
from tests.inspect.planted import FAULTS, MARK, Fault

# One of each kind; `python -m benchmarks.probe faults` goes through all.
LONG = "backward_overflow_in_layer_7_of_12"
SAMPLE = (
    "zero_over_zero",
    "scan_iteration_37",
    "custom_vjp_backward",
    "while_loop",
    "small_product",
    "kept_in_a_cell",
    "frozen_in_a_cell",
    "read_from_a_cell",
)


@pytest.mark.product("fault", every=2)
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(f, marks=pytest.mark.long if f.name == LONG else ())
        for f in FAULTS
        if f.name in (*SAMPLE, LONG)
    ],
    ids=lambda f: f.name,
)
def test_planted_faults_are_found(fault: Fault):
    """The line, scope, pass and iteration of a planted fault are named."""
    assert wrong(fault) == ""


def wrong(fault: Fault) -> str:
    """What is wrong with the answer of ``probe``; empty if nothing is."""
    report = probe(fault.fn, fault.policy)(*fault.args)
    if fault.kind == "underflow":
        first = next(report.underflowing(), None)
        found = first and (first.place.text, first.scope, first.backward, "underflow", ())
    else:
        first = report.first
        found = first and (
            first.place.text,
            first.scope,
            first.backward,
            first.kind,
            first.iterations,
        )
    wanted = (MARK, fault.scope, fault.backward, fault.kind, fault.iterations)
    if not found:
        return f"nothing found, wanted {wanted}"
    right = found[0].endswith(MARK) and found[1:] == wanted[1:]
    return "" if right else f"found {found}, wanted {wanted}"


def test_statistics_of_one_product():
    """Errors, SQNR and headroom are those of the rounded product, computed by hand."""
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 16), (16, 4)))
    low = np.asarray(jaxamp.amp(jnp.dot)(x, w), np.float64)
    exact = np.asarray(jnp.dot(x, w), np.float64)
    (found,) = probe(jnp.dot)(x, w).operations
    error = np.abs(low - exact)
    assert (found.primitive, found.arithmetic, found.count) == ("dot_general", "bf16", 32)
    np.testing.assert_allclose(found.max_error, error.max(), rtol=1e-4)
    np.testing.assert_allclose(found.rms_error, np.sqrt((error**2).mean()), rtol=1e-4)
    sqnr = 10 * np.log10((exact**2).sum() / (error**2).sum())
    np.testing.assert_allclose(found.sqnr, sqnr, rtol=1e-4)
    np.testing.assert_allclose(found.largest, np.abs(low).max(), rtol=1e-6)


def test_a_loop_adds_up_in_one_row():
    """An operation in a loop has one row, with the numbers of all iterations."""

    def looped(x, w):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=5)[0]

    report = probe(looped)(jnp.ones((2, 4)), 0.3 * jnp.eye(4))
    (dot,) = [op for op in report.operations if op.primitive == "dot_general"]
    assert dot.count == 5 * 8
    assert dot.place.function.endswith("<lambda>")
    assert 20 < dot.sqnr < 70


@jax.custom_vjp
def _scaled(x):
    return 3 * x


_scaled.defvjp(lambda x: (3 * x, x), lambda x, ct: (3 * ct,))


def nested(x, w):
    """Products in a loop with remat, a branch, a while loop, a custom derivative and a call."""
    step = jax.checkpoint(lambda c, _: (jnp.tanh(c @ w), None))
    x = jax.lax.scan(step, x @ w, length=3)[0]
    x = jax.lax.cond(x[0, 0] < 2, lambda x: jnp.sin(x @ w), lambda x: x, x)
    x = jax.jit(lambda x: jax.nn.softmax(_scaled(x @ w)))(x)
    return x @ w


def looped_further(x, w):
    """The same with a while loop, which has no backward pass."""
    return (
        jax.lax.while_loop(
            lambda s: s[0] < 2, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)), (0, nested(x, w))
        )[1]
        @ w
    )


def in_complex(x, w):
    """Products of the real parts of what a loop hands on."""
    step = lambda c, _: (c.real @ w + 1j * c.imag, None)  # noqa: E731
    return jax.lax.scan(step, x + 1j * x, length=3)[0].real @ w


@pytest.mark.parametrize(
    "fn", [nested, looped_further, in_complex, jax.grad(lambda x, w: jnp.sum(nested(x, w) ** 2))],
    ids=["forward", "while", "complex", "gradient"],
)  # fmt: skip
def test_errors_are_carried_through_all_that_holds_operations(fn):
    """The error of the last operation is that of the whole program, by running both."""
    x, w = (jax.random.normal(jax.random.key(i), (8, 8)) / 2 for i in (0, 1))
    low, exact = jaxamp.amp(fn, "auto_mixed")(x, w), fn(x, w)
    last = [op for op in probe(fn, "auto_mixed")(x, w).operations if op.count == low.size][-1]
    assert last.primitive == "dot_general"
    np.testing.assert_allclose(last.max_error, np.abs(low - exact).max(), rtol=0.02)
    np.testing.assert_allclose(last.largest, np.abs(low).max(), rtol=1e-6)


def test_a_loop_takes_no_more_memory_the_longer_it_is():
    """An operation has one row however often it runs; a state that is stacked is the program's."""

    def bytes_for(length):
        def looped(x, w):
            return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=length)[0]

        args = jnp.ones((8, 16)), jnp.eye(16)
        planned = jax.jit(measured(looped, "auto_mixed", args)).lower(*args).compile()
        needed = planned.memory_analysis()
        return needed.temp_size_in_bytes + needed.output_size_in_bytes

    assert 0 < bytes_for(4) == bytes_for(400)


def test_what_is_not_lowered_has_no_error():
    """Under the identity policy every shadow is the value itself."""
    report = probe(lambda x: jnp.exp(x) @ x, "always_f32")(jnp.ones((3, 3)))
    assert [op.max_error for op in report.operations] == [0.0] * len(report.operations)
    assert not report.worst()


def test_fractions_are_counted():
    """One overflow in four numbers is a quarter, and so are zeros and subnormals."""
    x = jnp.array([[1.0, 1e6, 1e-9, 1e-6]])
    rule = jaxamp.Rule(precision="f16", primitive="mul")
    policy = jaxamp.PrecisionPolicy.AUTO_MIXED.with_rules(rule).replace(guards=())
    report = probe(lambda x, w: (x * 1.0) @ w, policy)(x, jnp.eye(4))
    (made,) = [op for op in report.operations if op.primitive == "mul"]
    assert (made.overflow, made.underflow, made.subnormal) == (0.25, 0.25, 0.25)
    assert report.first is not None


def test_operands_of_the_first_are_at_hand():
    """What the operation took can be looked at."""
    first = probe(jnp.log)(jnp.array([1.0, 0.0])).first
    assert first is not None
    np.testing.assert_array_equal(first.operands[0], [1.0, 0.0])


def test_report_is_json_and_text():
    """The report can be stored, and read by people."""
    report = probe(lambda x, w: jnp.exp(x) @ w, "auto_mixed")(
        12 * jnp.ones((2, 2)), jnp.ones((2, 2))
    )
    data = json.loads(report.to_json())
    assert data["first"]["kind"] == "infinity"
    assert [op["primitive"] for op in data["operations"]] == ["exp", "dot_general"]
    assert "The first infinity was made by dot_general in float16" in str(report)


def test_probe_needs_numbers():
    """Shapes are enough for plans, not for errors."""
    with pytest.raises(jaxamp.errors.InspectionError, match="arrays rather than shapes"):
        probe(jnp.sin)(jax.ShapeDtypeStruct((2,), jnp.float32))


def test_operations_of_no_line_have_none():
    """A function of a library, asked for by itself, was called by no line of the user."""
    assert ":0" not in str(probe(jnp.dot)(jnp.ones((2, 2)), jnp.ones((2, 2))))


def test_infinities_among_the_operands_are_told():
    """A NaN made of infinities is not put down to the largest finite number beside them."""
    x = jnp.array([jnp.inf, 1.0])
    first = probe(lambda x: x - x)(x).first
    assert first.primitive == "sub"
    assert "from operands with infinities." in str(first)


def test_probe_inside_jit_is_refused():
    """There are no numbers to look at while a function is compiled."""
    with pytest.raises(jaxamp.errors.InspectionError, match="Call it outside"):
        jax.jit(lambda x: probe(jnp.sin)(x))(1.0)


def shadowed(x, w):
    """Roundings of a parameter, of products, of results, and in a loop; one of each function."""

    def body(carry, _):
        return jnp.cosh(jnp.sin(carry) @ w), None

    return jnp.exp(jax.lax.scan(body, jnp.tanh(jnp.cos(x)), length=3)[0])


LITERAL = jaxamp.PrecisionPolicy.custom(
    dict.fromkeys(("compute", "reduction", "elementwise", "data_movement"), "bf16")
).replace(guards=())
_SAME = frozenset(("convert", "bitcast", "copy", "reshape", "transpose", "broadcast"))


def compiled(*calls):
    """Functions with their arguments, compiled for an H200."""
    programs = [exported(fn, lambda f: f, args, {}, "cuda") for fn, args in calls]
    options = {"xla_allow_excess_precision": True}  # as it comes; the other tests forbid it
    return [module for module, _ in compile_all(TARGETS["h200"], programs, options)]


def measured(fn, policy, args):
    """The pass that ``probe`` compiles."""
    return functools.partial(run_beside, jaxamp.plan_of(fn, policy)(*args))


def reads_narrow(module, op):
    """For each operation of a name in a compiled program: whether what it reads was rounded."""
    found = []
    for computation in module.computations.values():
        for line in computation.instructions:
            if line.op == op and line.results[0].dims:
                found.append(any(_is_rounded(computation, name) for name in line.operands))
    return sorted(found)


def _is_rounded(computation, name):
    line = computation.by_name[name]
    while line.op in _SAME and line.results[0].dtype == "f32":
        line = computation.by_name[line.operands[0]]
    return line.results[0].dtype != "f32"


@pytest.mark.deviceless("h200")
def test_no_rounding_is_undone_by_the_compiler_of_a_gpu():
    """Each function runs twice, on rounded numbers and beside them; all that is compared differs.

    That the compiler would undo roundings is seen in the same program written without barriers.
    """
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((333, 128), (128, 128)))

    def rounded_twice(x):
        for function in (jnp.cos, jnp.sin, jnp.tanh):
            x = function(x.astype(jnp.bfloat16).astype(jnp.float32))
        return x

    probed, mixed, undone = compiled(
        (measured(shadowed, LITERAL, (x, w)), (x, w)),
        (measured(shadowed, "auto_mixed_bf16", (x, w)), (x, w)),
        (rounded_twice, (x,)),
    )
    assert [reads_narrow(undone, op) for op in ("cosine", "sine", "tanh")] == [[False]] * 3
    for op in ("cosine", "sine", "tanh"):
        assert reads_narrow(probed, op) == [False, True], op
    differences = reads_narrow(probed, "subtract")
    assert differences
    assert all(differences)
    assert traffic_of(mixed).dots == {"bf16": 3, "f32": 3}
