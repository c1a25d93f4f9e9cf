"""The one door to JAX internals: every private import and every version test is in here."""

# fmt: off

import jax

if jax.__version_info__ < (0, 10, 2):  # before anything below asks JAX for what it has not
    raise ImportError("it is too old")

from jaxamp.core.jax_compat.avals import (
    ShapedArray, Zero, has_typed_sharding, is_castable, is_partly_manual, is_plain_array, is_ref,
    is_symbolic_zero, lie_alike, symbolic_zero_like, to_cotangent_aval, varies_over, vary_alike,
    writes_to_ref, zero_cotangent,
)
from jaxamp.core.jax_compat.binding import (
    bind, computed, convert, emitting, evaluating, scan_layout, scan_with_invariants,
)
from jaxamp.core.jax_compat.checkpoints import define_checkpoint, is_saved, read_by_recomputation
from jaxamp.core.jax_compat.checks import check_like, check_nans
from jaxamp.core.jax_compat.derivative_rules import (
    backward_results, bind_custom_jvp, bind_custom_vjp, jvp_rule, linearize_by, refuse_captured,
    transpose,
)
from jaxamp.core.jax_compat.lowering import (
    before_barrier, is_for_gpu, is_for_tpu, is_partitioned, lower_checkpoints,
)
from jaxamp.core.jax_compat.name_stacks import (
    CommonNames, boundary, calls, common_names, drop_common_names, drop_frames, functions,
    hide_frames, keep_common_names, origin, user_frames, user_level, user_line, with_scope,
    without_names,
)
from jaxamp.core.jax_compat.release import (
    JAX, has_module, indexed_for_load, is_gpu_interpreter, note_release,
)
from jaxamp.core.jax_compat.tracing import (
    DropVar, host_placement, is_staging, is_tracing, literal_value, result_avals, static_parameters,
    trace_to_jaxpr, weakref_lru_cache, within, without_constvars,
)
