"""Break the package on purpose, one place at a time, and see that `make test` notices.

    python -m tests.mutations                 all of them, two at a time
    python -m tests.mutations --only plan/    those in files with this in their path

Each mutation is made in a copy of the checkout, in which those tests run that should notice: only
tests that `make test` runs. Ends with a table, and unsuccessfully if one was not noticed or if the
text to replace is no longer there once.
"""

from __future__ import annotations

import argparse
import os
import queue
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
COPIED = ("jaxamp", "tests", "benchmarks", "examples", "docs", "pyproject.toml", "README.md")


class Mutation(NamedTuple):
    """A place to break.

    Attributes:
      file: in the package.
      before: text that occurs in it once.
      after: what to write instead.
      tests: arguments of pytest: files, and a choice among their tests.
    """

    file: str
    before: str
    after: str
    tests: str


MUTATIONS = (
    Mutation(
        "modules/call_stacks.py",
        "names = called if called is not None else (cls,) * (cls != owner)",
        "names = (cls,) * (cls != owner)",
        "tests/modules/test_module_paths.py",
    ),
    Mutation(
        "kernels/jax_compat/cudnn_calls.py",
        "lambda least: capability >= parsed(least)",
        "lambda least: capability < parsed(least)",
        "tests/found/attention/kernels",
    ),
    Mutation(
        "core/formats.py",
        "if p.bits < Precision.F32.bits)",
        "if p.bits <= Precision.F32.bits)",
        "tests/core/test_formats.py jaxamp/core/formats.py",
    ),
    Mutation(
        "policy/jmp_string.py",
        'parts.get("compute", params)',
        'parts.get("compute", Precision.F32)',
        "tests/policy/test_jmp_string.py",
    ),
    Mutation(
        "policy/rules.py",
        "return max(map(size_of_shape, self.shapes), default=0)",
        "return min(map(size_of_shape, self.shapes), default=0)",
        "tests/policy",
    ),
    Mutation(
        "quantized/lowp/arithmetic.py",
        "return jnp.where(amax < np.inf, scale, np.float32(np.nan))",
        "return scale",
        "tests/quantized/lowp/test_quantize.py",
    ),
    Mutation(
        "quantized/lowp/scaled_array.py",
        "round_up=cast.round_sf), cast)",
        "round_up=True), cast)",
        "tests/quantized/lowp/test_quantize.py",
    ),
    Mutation(
        "inspect/dce.py",
        "*map(any, zip(results, carries, strict=False)), *",
        "*results[: wired.carries], *",
        "tests/inspect/test_dce.py",
    ),
    Mutation(
        "jaxprs/name_stack.py",
        'at, starts_name = at + 1, char == "/"',
        "at, starts_name = at + 1, False",
        "jaxamp/jaxprs/name_stack.py tests/plan/precision/test_overrides.py",
    ),
    Mutation(
        "jaxprs/hashing.py",
        'return literal.aval, value.tobytes() if hasattr(value, "tobytes") else value',
        "return literal.aval",
        "tests/xla tests/jaxprs jaxamp/jaxprs",
    ),
    Mutation(
        "plan/precision/stored_joins.py",
        'if reader.name != "add" or len(others) != 1:',
        'if reader.name != "sub" or len(others) != 1:',
        "tests/plan/precision/test_convolution_biases.py",
    ),
    Mutation(
        "plan/precision/stored_joins.py",
        "{*shared, *curved}",
        "{*shared}",
        "tests/plan/precision/test_stored_joins.py",
    ),
    Mutation(
        "plan/precision/stored_joins.py",
        "if self.made[value] & LINEAR:",
        "if False:",
        "tests/plan/precision/test_stored_joins.py",
    ),
    Mutation(
        "plan/conditioning/rescaled_products.py",
        "return scales.keys() if scaled else _NONE",
        "return {value} if scaled else _NONE",
        "tests/plan/conditioning/test_rescaled_products.py",
    ),
    Mutation(
        "plan/precision/stored_joins.py",
        "] = _ROWS",
        "] = node.outs[0]",
        "tests/plan/dataflow/test_repeated_gathers.py",
    ),
    Mutation(
        "plan/precision/overrides.py",
        "by_node[node] = policy.rules[index].precision",
        "by_node[node] = policy.rules[0].precision",
        "tests/plan/precision/test_overrides.py",
    ),
    Mutation(
        "plan/precision/carries.py",
        "return _is_activation(provenance, uses, carry) and _bears_rounding(",
        "return _is_activation(provenance, uses, carry) or _bears_rounding(",
        "tests/plan/precision/test_carries.py",
    ),
    Mutation(
        "plan/precision/carries.py",
        "or carry.inner in graph.undone or _has_differences(graph, carry)",
        "or carry.inner in graph.undone",
        "tests/plan/precision/test_carries.py",
    ),
    Mutation(
        "plan/precision/carries.py",
        "flags = union(made, node.ins) if node.is_elementwise else _ADDED",
        "flags = union(made, node.ins)",
        "tests/plan/precision/test_carries.py",
    ),
    Mutation(
        "plan/dataflow/shift_invariant_logits.py",
        "own = [v for v in node.ins if graph.origin(v) not in invariants]",
        "own = node.ins",
        "tests/plan/dataflow/test_shift_invariant_logits.py",
    ),
    Mutation(
        "plan/conditioning/singularities.py",
        "if maker and not _divides_itself(graph, maker, node) else ()",
        "if maker else ()",
        "tests/plan/conditioning/test_singularities.py",
    ),
    Mutation(
        "core/intervals.py",
        "return Interval(max(x.low, y.low), max(x.high, y.high))",
        "return Interval(max(x.low, y.low), min(x.high, y.high))",
        "tests/core/test_semantics.py",
    ),
    Mutation(
        "plan/dataflow/ranges.py",
        "last = float(max(size - 1, 0)) if isinstance(size, int) else math.inf",
        "last = 0.0",
        "tests/plan/dataflow/test_ranges.py",
    ),
    Mutation(
        "plan/dataflow/exact.py",
        "if len(graph.readers[value]) != 1 or is_taken:",
        "if is_taken:",
        "tests/plan/dataflow/test_exact.py",
    ),
    Mutation(
        "plan/dataflow/uses.py",
        "mark(bits, graph.predicates, STOPS_LOOP | TESTED)",
        "mark(bits, graph.predicates, 0)",
        "tests/plan tests/numerics/test_hostile.py",
    ),
    Mutation(
        "plan/dataflow/uses.py",
        "if passed & ITERATED and _jumps(graph, node):",
        "if False:",
        "tests/plan/dataflow/test_loop_states.py",
    ),
    Mutation(
        "plan/dataflow/uses.py",
        "if not (is_exact(node) or node.role is Role.LINK):",
        "if True:",
        "tests/plan/dataflow/test_loop_states.py",
    ),
    Mutation(
        "plan/graph/sweeps.py",
        "while before != (before := ",
        "if before != (before := ",
        "tests/plan tests/numerics/test_hostile.py",
    ),
    Mutation(
        "cancellation/arrays.py",
        "self.makers.setdefault(out, node)",
        "self.makers[out] = node",
        "tests/cancellation/test_arrays.py",
    ),
    Mutation(
        "plan/conditioning/amplification.py",
        "return node.trait is Trait.EXTREMUM and any(picks)",
        "return False",
        "tests/plan/conditioning/test_topk_stability.py",
    ),
    Mutation(
        "plan/conditioning/amplification.py",
        "return bool(is_cotangent and not self.made[out] & PROPAGATED)",
        "return False",
        "tests/plan/conditioning/test_derivatives_of_losses.py",
    ),
    Mutation(
        "plan/dataflow/linearity.py",
        "if not (made[v] & BOUNDED or _is_repeated",
        "if not (False or _is_repeated",
        "tests/plan/conditioning/test_gated_branches.py",
    ),
    Mutation(
        "plan/dataflow/regions.py",
        "return graph.origin(value) in cheap and found.issuperset(products)",
        "return False",
        "tests/plan/precision/test_stored_joins.py",
    ),
    Mutation(
        "plan/dataflow/fused_groups.py",
        "if is_of_activation and reduces_rows(graph, node):",
        "if False:",
        "tests/xla/test_recomputation.py",
    ),
    Mutation(
        "plan/conditioning/singularities.py",
        "return AT_NUMBER | given & AT_BOUND",
        "return given",
        "tests/plan/conditioning/test_singularities.py",
    ),
    Mutation(
        "rewrite/rules/elementwise.py",
        "operands = tuple(lax.reduce_precision(x, info.nexp, info.nmant) for x in operands)",
        "operands = tuple(operands)",
        "tests/rewrite/test_gradients.py",
    ),
    Mutation(
        "rewrite/rules/movement.py",
        "if update is None or update.invars[0].aval.dtype == dtype:",
        "if True:",
        "tests/rewrite/test_scatter.py",
    ),
    Mutation(
        "rewrite/rules/control_flow.py",
        "[*forms, *operands]",
        "[*operands, *forms]",
        "tests/plan/test_loop_invariants.py tests/rewrite/test_products.py -k 'while or loop'",
    ),
    Mutation(
        "rewrite/primitives/accumulate.py",
        "return accumulate(how.primitive, operands, others, how.narrow, aval.dtype)",
        "return accumulate(how.primitive, operands, others, how.narrow, how.narrow)",
        "tests/rewrite/test_weight_gradients.py",
    ),
    Mutation(
        "rewrite/primitives/narrow_collective.py",
        "total = sum((ct.astype(operand.aval.dtype) for ct in given[1:]), given[0])",
        "total = given[0]",
        "tests/rewrite/test_collectives.py",
    ),
    Mutation(
        "plan/planner.py",
        "closed_jaxpr, more, others = replace_regions(",
        "_, more, others = replace_regions(",
        "tests/found/attention/test_fuse.py",
    ),
    Mutation(
        "xla/hints/constant_rematerialization.py",
        "return (*parts, node) if len(parts) < _MOST else None",
        "return None",
        "tests/xla/test_techniques.py",
    ),
    Mutation(
        "xla/primitives/label_gather.py",
        "lax.broadcasted_iota(jnp.int32, shape, axis) == place",
        "lax.broadcasted_iota(jnp.int32, shape, axis) >= place",
        "tests/plan/dataflow/test_label_gathers.py",
    ),
    Mutation(
        "xla/primitives/row_broadcasts.py",
        "return emitted(closed, find)",
        "return closed",
        "tests/xla/test_row_broadcasts.py",
    ),
    Mutation(
        "plan/dataflow/provenance.py",
        "elif not drawn.issuperset(node.ins):",
        "else:",
        "tests/plan/test_solvers.py",
    ),
    Mutation(
        "plan/dataflow/provenance.py",
        " and node.ins[0] not in made",
        "",
        "tests/plan/test_solvers.py",
    ),
    Mutation(
        "cancellation/remainders.py",
        "not any(n.link is Link.SLICE for n, _ in arrays.path(a))",
        "True",
        "tests/plan/test_solvers.py",
    ),
    Mutation(
        "found/cross_entropy/losses.py",
        "if jax_compat.is_partly_manual():",
        "if False:",
        "tests/found/cross_entropy/test_meshes.py",
    ),
    Mutation(
        "plan/precision/choose.py",
        "if out in self.hazards.ordered and",
        "if False and",
        "tests/plan/conditioning/test_topk_stability.py",
    ),
    Mutation(
        "plan/conditioning/rescaled_products.py",
        "(bool(divided) and not any(divided)) or any(",
        "any(",
        "tests/plan/conditioning/test_rescaled_products.py",
    ),
    Mutation(
        "xla/primitives/narrow_moves.py",
        "narrow, eqn, tuple(operands), is_alone)",
        "narrow, eqn, tuple(operands[::-1]), is_alone)",
        "tests/xla/test_narrow_moves.py",
    ),
    Mutation(
        "xla/primitives/split_sums.py",
        "return emitted(closed, _find)",
        "return closed",
        "tests/xla/test_split_sums.py",
    ),
    Mutation(
        "xla/primitives/rounding_barrier.py",
        "_ONE_PASS = 4096",
        "_ONE_PASS = 0",
        "tests/xla/test_unbarriered_reads.py",
    ),
    Mutation(
        "quantized/delayed_scaling/history.py",
        "return self.largest[first:end]",
        "return jnp.max(finite(rows), axis=1, initial=0)",
        "tests/quantized/delayed_scaling/test_delayed_function.py",
    ),
    Mutation(
        "quantized/delayed_scaling/carried_parameters.py",
        "x = old if new is None else new[argument]",
        "x = old",
        "tests/quantized/delayed_scaling/test_carried_parameters.py",
    ),
    Mutation(
        "quantized/delayed_scaling/history.py",
        "return with_scale(_infinite_as_nan(wide), stored_scale(scale, cast), cast)",
        "return with_scale(wide, stored_scale(scale, cast), cast)",
        "tests/quantized/delayed_scaling/test_delayed_function.py",
    ),
    Mutation(
        "found/attention/masks.py",
        "scale = float(found.scale)",
        "scale = 1.0",
        "tests/found/attention",
    ),
    Mutation(
        "found/attention/kernels/platforms.py",
        "return replace(spec, mask=None, window=spec.window if has_window else None)",
        "return replace(spec, mask=None, window=None)",
        "tests/found/attention/kernels/test_ways.py",
    ),
    Mutation(
        "run/runner.py",
        'return getattr(aval, "weak_type", False) or aval.dtype == bool',
        "return False",
        "tests/run",
    ),
    Mutation(
        "trace/contents.py",
        "return kind, value.hex()  #",
        "return kind, abs(value).hex()  #",
        "tests/run tests/trace",
    ),
    Mutation(
        "inspect/count.py",
        "return self.bytes_f32 - self.bytes",
        "return self.bytes_f32",
        "tests/inspect jaxamp/inspect/count.py",
    ),
    Mutation(
        "display/lines.py",
        "while abs(size) >= 999.5",
        "while abs(size) >= 9995",
        "tests/display jaxamp/display",
    ),
    Mutation(
        "compiled/traffic.py",
        "flops += kernel.runs * contraction.flops",
        "flops += contraction.flops",
        "tests/project/test_deviceless.py tests/tools",
    ),
    Mutation(
        "compiled/roofline.py",
        "if multiplying > moving:",
        "if multiplying < moving:",
        "tests/tools/test_estimate.py jaxamp/compiled",
    ),
    Mutation(
        "numerics/statistics.py",
        "overflow = ~jnp.isfinite(wide) & jnp.isfinite(reference)",
        "overflow = ~jnp.isfinite(wide) & ~jnp.isfinite(reference)",
        "tests/numerics/test_probe.py",
    ),
    Mutation(
        "training/trees.py",
        "return jax.lax.pmin(finite",
        "return jax.lax.pmax(finite",
        "tests/training/test_finite.py",
    ),
    Mutation(
        "training/low_params.py",
        "lost = (wide - target) + due",
        "lost = wide - target",
        "tests/training/test_low_params.py",
    ),
    Mutation(
        "training/loss_scale.py",
        "full = counter + 1 >= self.period",
        "full = counter + 1 > self.period",
        "tests/training/test_loss_scale.py tests/training/test_loss_scale_trajectory.py",
    ),
    Mutation(
        "found/cross_entropy/chunks.py",
        "here = (tokens >= rows.start) & (tokens < rows.start + rows.length)",
        "here = tokens >= rows.start",
        "tests/found/cross_entropy/test_spellings.py",
    ),
    Mutation(
        "found/cross_entropy/rows.py",
        "if label is None or label not in {*labels.result, *labels.summed}:",
        "if label is None:",
        "tests/found/cross_entropy/test_spellings.py",
    ),
    Mutation(
        "found/cross_entropy/one_number.py",
        "if not jax_compat.is_symbolic_zero(t)",
        "",
        "tests/found/cross_entropy/test_one_number.py",
    ),
    Mutation(
        "found/attention/kernels/composed.py",
        "dscores = weights * (dweights - row)",
        "dscores = weights * dweights",
        "tests/found/attention/kernels/test_attention.py",
    ),
    Mutation(
        "quantized/kernels/block_quantize.py",
        "if block_of(cast)[0] == 1 and not transposed else",
        "if not transposed else",
        "tests/kernels/test_kernels.py",
    ),
    Mutation(
        "quantized/choices/scaled.py",
        'return "" if scale_results else',
        'return "" if not scale_results else',
        "tests/inspect/test_report.py",
    ),
    Mutation(
        "quantized/primitives/quantized_product.py",
        "scale = _by_row(lhs) * _by_row(rhs).mT",
        "scale = _by_row(lhs) * _by_row(lhs).mT",
        "tests/quantized/lowp/test_scaled_dots.py",
    ),
    Mutation(
        "quantized/fp8_products.py",
        "return self.claimed == self.found",
        "return self.claimed >= self.found",
        "tests/inspect/test_report.py tests/quantized/lowp/test_scaled_dots.py",
    ),
    Mutation(
        "kernels/params.py",
        '{"gpu": mosaic_gpu, "tpu": mosaic_tpu}',
        '{"gpu": mosaic_tpu, "tpu": mosaic_gpu}',
        "tests/kernels/test_config.py jaxamp/kernels/params.py",
    ),
    Mutation(
        "xla/steering_emitter.py",
        "is_known and Technique.LABEL_COMPARISONS in self._chosen",
        "is_known and Technique.LABEL_COMPARISONS not in self._chosen",
        "tests/xla/test_techniques.py",
    ),
    Mutation(
        "quantized/lowp/arithmetic.py",
        "scale = scale_factor(amax, cast.out_dtype, round_up=cast.round_sf)",
        "scale = amax",
        "tests/kernels",
    ),
    Mutation(
        "interop/jmp.py",
        "dtypes = parsed.param_dtype, parsed.base, parsed.output_dtype",
        "dtypes = parsed.output_dtype, parsed.base, parsed.output_dtype",
        "tests/interop tests/policy/test_jmp_string.py",
    ),
    Mutation(
        "interop/equinox.py",
        "return AmpFunction(value, self.amp_settings) if bound else value",
        "return value",
        "tests/interop/test_equinox.py",
    ),
    Mutation(
        "interop/flax_nnx.py",
        "written = [is_new or new is not old",
        "written = [is_new",
        "tests/interop/test_flax.py",
    ),
    Mutation(
        "tools/tune/search.py",
        "np.lexsort((errors, -(every @ gains)))",
        "np.lexsort((errors, every @ gains))",
        "tests/tools/test_tune.py jaxamp/tools/tune",
    ),
    Mutation(
        "tools/serving/narrow.py",
        "return [*results, *own[len(results) :]]",
        "return own",
        "tests/tools/test_serving.py jaxamp/tools/serving",
    ),
    Mutation(
        "cli/specs.py",
        "elif kwargs:",
        "elif False:",
        "tests/cli jaxamp/cli",
    ),
    Mutation(
        "core/jax_compat/binding.py",
        'return {"num_consts": eqn.params["num_consts"] + count}',
        'return {"num_consts": eqn.params["num_consts"]}',
        "tests/plan/test_loop_invariants.py",
    ),
    Mutation(
        "plan/assemble.py",
        "return (*(InputCast(i, p) for i, p in casts if p not in (None, Precision.F32)), *narrow)",
        "return (*narrow,)",
        "tests/plan/test_loop_invariants.py",
    ),
    Mutation(
        "rewrite/environment.py",
        "if jax.typeof(value).weak_type == declared:",
        "if True:",
        "tests/rewrite/test_environment.py",
    ),
    Mutation(
        "compiled/targets.py",
        "if word not in TARGETS:",
        "if False:",
        "tests/tools/test_estimate.py",
    ),
    Mutation(
        "training/low_params.py",
        "key = jax.random.fold_in(jax.random.key(state.seed), state.step)",
        "key = jax.random.key(state.seed)",
        "tests/training/test_low_params.py",
    ),
    Mutation(
        "training/optax.py",
        "jnp.array(-0.0, u.dtype)",
        "jnp.array(0.0, u.dtype)",
        "tests/training/test_optax.py",
    ),
    Mutation(
        "training/debug.py",
        "return () if failing is not None else self._needed(found)",
        "return () if failing is not None else tuple(found)",
        "tests/training/test_debug.py",
    ),
    Mutation(
        "training/low_params.py",
        "jnp.array(widen(leaf), copy=True)",
        "widen(leaf)",
        "tests/training/test_optax.py tests/training/test_low_params.py",
    ),
    Mutation(
        "found/algebra.py",
        "if abs(total) <= _NEGLIGIBLE * abs(number):",
        "if False:",
        "tests/found/attention/test_spellings.py",
    ),
    Mutation(
        "found/algebra.py",
        "self.masks_again |= is_met and",
        "self.masks_again |= False and",
        "tests/found/attention/test_accuracy.py",
    ),
    Mutation(
        "found/attention/match.py",
        "if not all(self._is_of_pairs(other.factor, product, keys) for other in others):",
        "if False:",
        "tests/found/attention/test_words.py",
    ),
    Mutation(
        "compiled/hlo.py",
        '"S(1)" in (layout or "")',
        "False",
        "tests/project/test_deviceless.py",
    ),
    Mutation(
        "compiled/contractions.py",
        "flops /= _dilation(module, line.input(0))",
        "flops /= 1",
        "tests/tools/test_estimate.py",
    ),
    Mutation(
        "compiled/traffic.py",
        "yield from max(options, key=",
        "yield from min(options, key=",
        "tests/project/test_deviceless.py",
    ),
    Mutation(
        "inspect/walk.py",
        "most = max(range(len(taken))",
        "most = min(range(len(taken))",
        "tests/inspect/test_report.py",
    ),
    Mutation(
        "inspect/equation.py",
        "self._roundings |= {(eqn.outvars[0], p) for p in roundings if p}",
        "pass",
        "tests/inspect/test_report.py",
    ),
    Mutation(
        "inspect/walk.py",
        "if (var, precision) in known:",
        "if False:",
        "tests/inspect/test_report.py",
    ),
    Mutation(
        "jaxprs/contracted.py",
        "for axis in contracted) // groups",
        "for axis in contracted) // 1",
        "tests/inspect/test_report.py",
    ),
    Mutation(
        "interop/flax_nnx.py",
        "for v in changed if not v._can_update]",
        "for v in changed if False]",
        "tests/interop/test_flax.py",
    ),
    Mutation(
        "interop/haliax.py",
        "if axis_mapping is not None:",
        "if False:",
        "tests/interop/test_haliax.py",
    ),
    Mutation(
        "interop/equinox.py",
        'hasattr(fn, "__wrapped__") or hasattr(fn, "__self__")',
        "False",
        "tests/interop/test_equinox.py",
    ),
    Mutation(
        "tools/serving/served_model.py",
        "if oldest <= version <= newest:",
        "if True:",
        "tests/tools/test_serving.py",
    ),
    Mutation(
        "tools/estimate.py",
        "list(dict.fromkeys([_BASE, policy, *map(PrecisionPolicy.parse, more)]))",
        "[_BASE, policy, *map(PrecisionPolicy.parse, more)]",
        "tests/tools/test_estimate.py",
    ),
    Mutation(
        "tools/tune/sensitivity.py",
        "limited = jnp.clip(fixed, -precision.max, precision.max)",
        "limited = fixed",
        "tests/tools/test_tune.py",
    ),
    Mutation(
        "tools/tune/tuning.py",
        'scope=f"/{self.scope}/" if self.scope else "/",',
        "scope=self.scope or None,",
        "tests/tools/test_tune.py",
    ),
)


def missing(mutation: Mutation) -> str | None:
    """Say what is wrong with the text to replace, None if it occurs once."""
    path = ROOT / "jaxamp" / mutation.file
    count = path.read_text().count(mutation.before) if path.exists() else 0
    return None if count == 1 else f"{mutation.file}: {count} times {mutation.before!r}"


def noticed(mutation: Mutation, copy: Path) -> str:
    """Run the tests with the mutation in place; the first that fails, empty if none does."""
    path = copy / "jaxamp" / mutation.file
    text = path.read_text()
    path.write_text(text.replace(mutation.before, mutation.after))
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *shlex.split(mutation.tests)],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy), "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
        )
    finally:
        path.write_text(text)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode not in (0, 1, 2):
        raise RuntimeError(f"pytest {mutation.tests}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return failed[0].partition(" - ")[0] if failed else ""


def _copied(folder: Path) -> Path:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def main() -> int:
    """Run the mutations that the command line chooses; the number that is not noticed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="files with TEXT in their path")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if options.only in m.file]
    console = Console(soft_wrap=True)
    if wrong := [*filter(None, map(missing, chosen))]:
        console.print("\n".join(wrong), markup=False)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        copies: queue.Queue[Path] = queue.Queue()
        for index in range(options.workers):
            (place := Path(folder) / str(index)).mkdir()
            copies.put(_copied(place))

        def run(mutation: Mutation) -> str:
            copy = copies.get()
            try:
                found = noticed(mutation, copy)
            finally:
                copies.put(copy)
            console.print(f"{mutation.file}: {found or 'not noticed'}", markup=False)
            return found

        with ThreadPoolExecutor(options.workers) as pool:
            results = list(pool.map(run, chosen))
    table = Table("file", "instead of", "is written", "noticed by")
    for mutation, found in zip(chosen, results, strict=True):
        table.add_row(mutation.file, mutation.before, mutation.after, found or "nothing")
    console.print(table)
    console.print(f"{sum(map(bool, results))} of {len(results)} noticed", highlight=False)
    return results.count("")


if __name__ == "__main__":
    sys.exit(main())
