"""The one door to JAX internals: every private import and every version test is in here."""

import jax

if jax.__version_info__ < (0, 10, 2):  # before anything below asks JAX for what it has not
    raise ImportError("it is too old")

from jaxamp.core.jax_compat.avals import ShapedArray as ShapedArray
from jaxamp.core.jax_compat.avals import Zero as Zero
from jaxamp.core.jax_compat.avals import has_typed_sharding as has_typed_sharding
from jaxamp.core.jax_compat.avals import is_castable as is_castable
from jaxamp.core.jax_compat.avals import is_partly_manual as is_partly_manual
from jaxamp.core.jax_compat.avals import is_plain_array as is_plain_array
from jaxamp.core.jax_compat.avals import is_ref as is_ref
from jaxamp.core.jax_compat.avals import is_symbolic_zero as is_symbolic_zero
from jaxamp.core.jax_compat.avals import lie_alike as lie_alike
from jaxamp.core.jax_compat.avals import symbolic_zero_like as symbolic_zero_like
from jaxamp.core.jax_compat.avals import to_cotangent_aval as to_cotangent_aval
from jaxamp.core.jax_compat.avals import varies_over as varies_over
from jaxamp.core.jax_compat.avals import vary_alike as vary_alike
from jaxamp.core.jax_compat.avals import writes_to_ref as writes_to_ref
from jaxamp.core.jax_compat.avals import zero_cotangent as zero_cotangent
from jaxamp.core.jax_compat.binding import bind as bind
from jaxamp.core.jax_compat.binding import computed as computed
from jaxamp.core.jax_compat.binding import convert as convert
from jaxamp.core.jax_compat.binding import emitting as emitting
from jaxamp.core.jax_compat.binding import evaluating as evaluating
from jaxamp.core.jax_compat.binding import scan_layout as scan_layout
from jaxamp.core.jax_compat.binding import scan_with_invariants as scan_with_invariants
from jaxamp.core.jax_compat.checkpoints import define_checkpoint as define_checkpoint
from jaxamp.core.jax_compat.checkpoints import is_saved as is_saved
from jaxamp.core.jax_compat.checkpoints import read_by_recomputation as read_by_recomputation
from jaxamp.core.jax_compat.checkpoints import split_by_operand as split_by_operand
from jaxamp.core.jax_compat.checks import check_like as check_like
from jaxamp.core.jax_compat.checks import check_nans as check_nans
from jaxamp.core.jax_compat.derivative_rules import backward_results as backward_results
from jaxamp.core.jax_compat.derivative_rules import bind_custom_jvp as bind_custom_jvp
from jaxamp.core.jax_compat.derivative_rules import bind_custom_vjp as bind_custom_vjp
from jaxamp.core.jax_compat.derivative_rules import jvp_rule as jvp_rule
from jaxamp.core.jax_compat.derivative_rules import linearize_by as linearize_by
from jaxamp.core.jax_compat.derivative_rules import refuse_captured as refuse_captured
from jaxamp.core.jax_compat.derivative_rules import transpose as transpose
from jaxamp.core.jax_compat.lowering import before_barrier as before_barrier
from jaxamp.core.jax_compat.lowering import is_for_gpu as is_for_gpu
from jaxamp.core.jax_compat.lowering import is_for_tpu as is_for_tpu
from jaxamp.core.jax_compat.lowering import is_partitioned as is_partitioned
from jaxamp.core.jax_compat.lowering import lower_checkpoints as lower_checkpoints
from jaxamp.core.jax_compat.name_stacks import CommonNames as CommonNames
from jaxamp.core.jax_compat.name_stacks import boundary as boundary
from jaxamp.core.jax_compat.name_stacks import calls as calls
from jaxamp.core.jax_compat.name_stacks import common_names as common_names
from jaxamp.core.jax_compat.name_stacks import drop_common_names as drop_common_names
from jaxamp.core.jax_compat.name_stacks import drop_frames as drop_frames
from jaxamp.core.jax_compat.name_stacks import functions as functions
from jaxamp.core.jax_compat.name_stacks import hide_frames as hide_frames
from jaxamp.core.jax_compat.name_stacks import keep_common_names as keep_common_names
from jaxamp.core.jax_compat.name_stacks import origin as origin
from jaxamp.core.jax_compat.name_stacks import user_frames as user_frames
from jaxamp.core.jax_compat.name_stacks import user_level as user_level
from jaxamp.core.jax_compat.name_stacks import user_line as user_line
from jaxamp.core.jax_compat.name_stacks import with_scope as with_scope
from jaxamp.core.jax_compat.name_stacks import without_names as without_names
from jaxamp.core.jax_compat.release import JAX as JAX
from jaxamp.core.jax_compat.release import has_module as has_module
from jaxamp.core.jax_compat.release import indexed_for_load as indexed_for_load
from jaxamp.core.jax_compat.release import is_gpu_interpreter as is_gpu_interpreter
from jaxamp.core.jax_compat.release import note_release as note_release
from jaxamp.core.jax_compat.tracing import DropVar as DropVar
from jaxamp.core.jax_compat.tracing import host_placement as host_placement
from jaxamp.core.jax_compat.tracing import is_staging as is_staging
from jaxamp.core.jax_compat.tracing import is_tracing as is_tracing
from jaxamp.core.jax_compat.tracing import kept_with as kept_with
from jaxamp.core.jax_compat.tracing import literal_value as literal_value
from jaxamp.core.jax_compat.tracing import result_avals as result_avals
from jaxamp.core.jax_compat.tracing import static_parameters as static_parameters
from jaxamp.core.jax_compat.tracing import trace_to_jaxpr as trace_to_jaxpr
from jaxamp.core.jax_compat.tracing import within as within
from jaxamp.core.jax_compat.tracing import without_constvars as without_constvars
