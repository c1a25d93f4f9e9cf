"""JAX's own primitive harnesses, run plain and under amp.

For each harness: (a) the all-float32 policy forced through planner and rewriter gives the same
bits as plain JAX; (b) the mixed presets raise nothing, keep shapes and dtypes, and make no new NaN
or inf; (c) the bfloat16 table with no regard to gain, so that every operation really is rewritten,
still lowers to valid code with the same types.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.internal_test_util import test_harnesses

from jaxamp import PrecisionPolicy, amp
from jaxamp.core.guards import ALL_GUARDS, Guard
from jaxamp.run.amp import inspected
from tests.conformance.jobs import Job, SkipJob

MIXED = ("auto_mixed_bf16", "auto_mixed")
EVERYTHING_LOW = PrecisionPolicy.AUTO_MIXED_BF16.replace(guards=ALL_GUARDS - {Guard.NO_GAIN})
WIDE = frozenset(map(np.dtype, (np.float64, np.complex128, np.int64, np.uint64)))


@functools.cache
def by_name() -> dict[str, Any]:
    """Every harness by its full name."""
    return {h.fullname: h for h in test_harnesses.all_harnesses}


def all_jobs() -> list[Job]:
    """One job for each harness."""
    return [Job("harnesses", name) for name in by_name()]


def sample(count: int) -> list[Job]:
    """A fixed choice: some of every group first, then the groups in turns until `count`."""
    groups: dict[str, list[str]] = {}
    for name, harness in by_name().items():
        groups.setdefault(harness.group_name, []).append(name)
    for names in groups.values():
        names.sort(key=lambda name: zlib.crc32(name.encode()))
    turns = max(len(names) for names in groups.values())
    order = [names[i] for i in range(turns) for names in groups.values() if i < len(names)]
    return [Job("harnesses", name) for name in order[:count]]


def run(name: str) -> None:
    """Checks one harness.

    Raises:
        SkipJob: if plain JAX cannot run it here.
        AssertionError: if amp changes what it must not.
    """
    harness = by_name()[name]
    _skip_limited(harness)

    def fn(*args: Any) -> Any:
        return harness.dyn_fun(*args)

    # 64-bit harnesses say nothing unless 64-bit types exist.
    with jax.enable_x64(np.dtype(harness.dtype) in WIDE):
        args = harness.dyn_args_maker(np.random.RandomState(zlib.crc32(name.encode())))
        try:
            plain = _leaves(jax.jit(fn)(*args))
        except Exception as error:
            reason = str(error).strip().splitlines()[0][:80]
            raise SkipJob(f"plain JAX itself fails: {type(error).__name__}: {reason}") from None
        _check(fn, args, plain)


def _skip_limited(harness: Any) -> None:
    for limit in harness.jax_unimplemented:
        if limit.filter(device="cpu", dtype=harness.dtype):
            raise SkipJob(f"the harness says for this device: {limit.description}")


def _check(fn: Any, args: Any, plain: list[Any]) -> None:
    forced = jax.jit(inspected(fn, "always_f32")).trace(*args)
    results = {_text(forced): _run(forced, args)}
    _same_bits(results[_text(forced)], plain)
    for preset in MIXED:
        traced = jax.jit(amp(fn, preset)).trace(*args)
        same = results.get(_text(traced))  # nothing to lower: the same jaxpr, run already
        mixed = _run(traced, args) if same is None else same
        _same_types(mixed, plain, preset)
        _no_new_infinities(mixed, plain, preset)
    traced = jax.jit(amp(fn, EVERYTHING_LOW)).trace(*args)
    _same_types(jax.tree.leaves(traced.out_info), plain, "everything low")
    traced.lower()


def _text(traced: Any) -> str:
    try:
        return str(traced.jaxpr)
    except KeyError:  # JAX cannot print a mul that was bound without its out_dtype
        return f"unprintable {id(traced)}"


def _run(traced: Any, args: Any) -> list[Any]:
    return _leaves(traced.lower().compile()(*args))


def _leaves(out: Any) -> list[Any]:
    return [jax.random.key_data(x) if _is_key(x) else x for x in jax.tree.leaves(out)]


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _same_types(got: list[Any], plain: list[Any], what: str) -> None:
    types = [(x.shape, x.dtype) for x in got], [(x.shape, x.dtype) for x in plain]
    assert types[0] == types[1], f"{what}: {types[0]} is not {types[1]}"


def _same_bits(got: list[Any], plain: list[Any]) -> None:
    _same_types(got, plain, "forced f32")
    for i, (x, y) in enumerate(zip(got, plain, strict=True)):
        same = np.asarray(x).tobytes() == np.asarray(y).tobytes()
        assert same, f"forced f32: output {i} differs: {x} is not {y}"


def _no_new_infinities(got: Iterable[Any], plain: Iterable[Any], what: str) -> None:
    for i, (x, y) in enumerate(zip(got, plain, strict=True)):
        if jnp.issubdtype(y.dtype, jnp.inexact):
            new = ~_finite(x) & _finite(y)
            assert not new.any(), f"{what}: output {i} has a new NaN or inf: {x} for {y}"


def _finite(x: Any) -> np.ndarray:
    wide = np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64
    return np.isfinite(np.asarray(x).astype(wide))
