"""One case of the product programs × transforms × presets, and how it is checked."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxamp.errors import JaxAmpError
from jaxamp.run.amp import inspected
from tests import audit, tolerances
from tests.programs import PROGRAMS, Program
from tests.transforms import TRANSFORMS, Transform, Wrap

PRESETS = {
    "always_f32": None,
    "always_f16": "float16",
    "auto_mixed_conservative": "float16",
    "auto_mixed": "float16",
    "auto_mixed_bf16": "bfloat16",
}
"""Each preset and its low format."""

UNGUARDED = frozenset(
    (
        "adam_update_alone", "adamw_step", "attention_additive", "attention_multi_head",
        "attention_row_all_masked", "cancellations", "integer_floats", "large_and_small",
        "mean_of_many", "norm_of_zeros", "ode", "random_draws", "rms_norm", "running_mean",
        "scatter_modes", "train_scan",
    )
)  # fmt: skip
"""What the guards are for: programs that the literal preset, which has none, computes wrongly."""

REFUSALS_FILE = pathlib.Path(__file__).with_name("refusals.json")
REFUSALS: dict[str, dict[str, str]] = (
    json.loads(REFUSALS_FILE.read_text()) if REFUSALS_FILE.exists() else {}
)
"""What JAX refuses to do with the plain function: program, transform, the error."""


NEWER = jax.__version_info__ > (0, 10, 2)
"""Whether this JAX is newer than the one that the table was made with."""

_ADDRESS = re.compile(r"0x[0-9a-f]+|id=[0-9]+|array\(.*")


@dataclasses.dataclass(frozen=True)
class Case:
    """One point of the product."""

    program: str
    transform: str
    preset: str

    def __str__(self) -> str:
        return f"{self.program}-{self.transform}-{self.preset}"

    @property
    def refusal(self) -> str | None:
        """Why JAX refuses the plain composition, None where it does not."""
        return REFUSALS.get(self.program, {}).get(self.transform)


def _identity(fn: Any) -> Any:
    return fn


def _build(case: Case, wrap: Wrap) -> tuple[Any, Any]:
    program = PROGRAMS[case.program]
    return TRANSFORMS[case.transform].build(wrap, program.fn, program.args)


def plain_refusal(program: Program, transform: Transform) -> str | None:
    """Tries the plain composition; the error's class and first line if JAX refuses it."""
    try:
        fn, args = transform.build(_identity, program.fn, program.args)
        jax.jit(fn).trace(*args).lower()
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {_ADDRESS.sub('...', text[0])[:100]}"
    return None


def check_refused(case: Case) -> None:
    """The plain composition is refused as the table says.

    The amped one may be accepted: it does without `optimize_remat`, which is what JAX stumbles on.
    The table is that of the oldest supported JAX; what a newer one accepts must lower as the rest.
    """
    seen = plain_refusal(PROGRAMS[case.program], TRANSFORMS[case.transform])
    if NEWER:
        if seen is None:
            check_lowering(case)
        return
    assert seen is not None, f"JAX accepts this now; the table says {case.refusal}"
    assert case.refusal is not None
    assert seen.split(":")[0] == case.refusal.split(":")[0], f"{seen} is not {case.refusal}"


def _signature(traced: Any) -> Any:
    avals = [(a.shape, a.dtype, a.weak_type) for a in traced.jaxpr.out_avals]
    return jax.tree.structure(traced.out_info), avals


def check_lowering(case: Case) -> None:
    """Traces and lowers a case: types, structure, a valid jaxpr, and where products run.

    Raises:
        AssertionError: if the amped program differs from the plain one in more than precision.
    """
    if NEWER and plain_refusal(PROGRAMS[case.program], TRANSFORMS[case.transform]):
        return  # this JAX refuses the plain function, so there is nothing to compare with
    plain = jax.jit((built := _build(case, _identity))[0]).trace(*built[1])
    try:
        fn, args = _build(case, lambda f: inspected(f, case.preset))
        amped = jax.jit(fn).trace(*args)
    except JaxAmpError:
        if case.preset == "always_f16":  # the literal preset may be refused, in words
            return
        raise
    assert _signature(amped) == _signature(plain)
    if _is_valid(plain):
        core.check_jaxpr(amped.jaxpr.jaxpr)
    amped.lower()
    if case.preset == "always_f32":
        assert _dtypes(amped) <= _dtypes(plain), "the identity policy changed dtypes"
    else:
        _check_products(case, audit.products(amped.jaxpr.jaxpr))


def _is_valid(traced: Any) -> bool:
    """Whether JAX's checker accepts the plain jaxpr: it knows not all that closed_call may hold."""
    try:
        core.check_jaxpr(traced.jaxpr.jaxpr)
    except TypeError:
        return False
    return True


def _dtypes(traced: Any) -> set[Any]:
    """Every float dtype that some equation gives."""
    outs = (v.aval for e in audit.equations(traced.jaxpr.jaxpr) for v in e.outvars)
    dtypes = {dtype for a in outs if (dtype := getattr(a, "dtype", None)) is not None}
    return {d for d in dtypes if jnp.issubdtype(d, jnp.floating)}


def _check_products(case: Case, found: list[audit.Product]) -> None:
    program = PROGRAMS[case.program]
    low = jnp.dtype(PRESETS[case.preset])
    mixed = [p for p in found if p.is_mixed]
    assert not mixed, f"products of mixed dtypes: {mixed}"
    lows = [p for p in found if p.operands == (low, low)]
    if "compute" in program.tags and case.transform != "export":  # what is exported is opaque
        high = [p for p in found if p.is_float and not p.is_low and not p.kept]
        assert not high, f"products left in float32: {high}"
        assert lows or not found, f"no product in {low}: {found}"
    if case.transform in ("plain", "jit") and program.low_dots is not None:
        if case.preset == "always_f16":  # the literal preset leaves only what the user asks for
            wide = [p for p in found if p.is_float and not p.is_low and not p.kept]
            assert not wide, f"products left in float32: {wide}"
            return
        already = 1 if case.program == "matmul_user_bf16" and low == jnp.float16 else 0
        assert len(lows) == program.low_dots - already, f"{len(lows)} low: {found}"


def check_values(case: Case, policy: Any = None) -> None:
    """Runs a case and holds it to the table of tolerances.

    Args:
        case: what to run.
        policy: the policy to run it under, by default the preset itself.

    Raises:
        AssertionError: if a value, a dtype or the structure is wrong.
    """
    program, order = PROGRAMS[case.program], TRANSFORMS[case.transform].order
    low, is_literal = PRESETS[case.preset], case.preset == "always_f16"
    if is_literal and (order or case.program in UNGUARDED):
        return  # gradients underflow without a loss scale
    fn, args = _build(case, lambda f: inspected(f, policy or case.preset))
    plain = jax.jit(_build(case, _identity)[0])
    reference = plain(*args)
    result = fn(*args) if case.transform == "plain" else jax.jit(fn)(*args)
    _check_same_types(result, reference)
    tolerance = program.tolerance
    if case.preset == "always_f32":
        if case.transform in ("plain", "jit"):
            jax.tree.map(np.testing.assert_array_equal, result, reference)
            return
        low, tolerance = "float32", "fused"  # JAX differentiates what is rewritten as a whole
    if is_literal and tolerance in ("exact", "f32"):
        tolerance = "tight"  # it lowers what gains nothing too
    assert low is not None
    nudged = plain(*tolerances.moved(args, low))
    leaves = (jax.tree.leaves(t) for t in (result, reference, nudged))
    for i, (got, want, near) in enumerate(zip(*leaves, strict=True)):
        _check_leaf(f"leaf {i}", got, want, near, (tolerance, order, low))


def _check_same_types(result: Any, reference: Any) -> None:
    assert jax.tree.structure(result) == jax.tree.structure(reference)
    for got, want in zip(jax.tree.leaves(result), jax.tree.leaves(reference), strict=True):
        assert (got.shape, got.dtype, got.weak_type) == (want.shape, want.dtype, want.weak_type)


def _check_leaf(name: str, got: Any, want: Any, near: Any, how: tuple[str, int, str]) -> None:
    if not jnp.issubdtype(want.dtype, jnp.inexact):
        np.testing.assert_array_equal(got, want, err_msg=name)
        return
    got, want, near = (_wide(x) for x in (got, want, near))
    finite = np.isfinite(want)
    assert np.isfinite(got[finite]).all(), f"{name}: not finite where float32 is"
    error = np.abs(got - want)[finite]
    worst = float(error.max()) if error.size else 0.0
    allowed = tolerances.bound(*how, want, near)
    assert worst <= allowed, f"{name}: off by {worst:.3g}, allowed {allowed:.3g}"


def _wide(x: Any) -> np.ndarray:
    """As float64 or complex128, so that differences are exact."""
    is_complex = jnp.issubdtype(x.dtype, jnp.complexfloating)
    return np.asarray(x).astype(np.complex128 if is_complex else np.float64)


def every_case(preset: str | None = None) -> list[Case]:
    """The whole product, or that of one preset."""
    presets = [preset] if preset else list(PRESETS)
    return [Case(p, t, s) for p in PROGRAMS for t in TRANSFORMS for s in presets]


def lowering_sample(first: int = 0) -> list[Case]:
    """Every program under every third transform that JAX allows, in the default preset.

    Programs start with different ones, so that each transform meets a third of them; the samples
    from 0, 1 and 2 are all there is.
    """
    allowed = [
        [case for t in TRANSFORMS if (case := Case(p, t, "auto_mixed_bf16")).refusal is None]
        for p in PROGRAMS
    ]
    return [case for i, cases in enumerate(allowed) for case in cases[(first + i) % 3 :: 3]]


def value_sample() -> list[Case]:
    """Cases to run by default: each program in two presets, transforms in rotation.

    Over all programs every pair (preset, transform) comes up several times. Of the literal preset a
    few.
    """
    names, chosen = list(TRANSFORMS), []
    for i, program in enumerate(PROGRAMS):
        half = ("auto_mixed", "auto_mixed_conservative")[i // len(names) % 2]
        for start, preset in ((i, "auto_mixed_bf16"), (i + 5, half)):
            turns = (
                Case(program, names[(start + k) % len(names)], preset) for k in range(len(names))
            )
            chosen.append(next(case for case in turns if case.refusal is None))
    guarded = [name for name in PROGRAMS if name not in UNGUARDED]
    return [*chosen, *(Case(name, "jit", "always_f16") for name in guarded[::12])]


def write_refusals() -> None:
    """Tries every plain composition and writes the table of those that JAX refuses."""
    table: dict[str, dict[str, str]] = {}
    for program in PROGRAMS.values():
        for transform in TRANSFORMS.values():
            reason = plain_refusal(program, transform)
            if reason is not None:
                table.setdefault(program.name, {})[transform.name] = reason
    REFUSALS_FILE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
