"""The kind of each primitive, which policies name, and the traits of its arithmetic.

``TABLE`` is the one list of primitives in the project: every primitive that JAX registers. The
planner reads it and ``register_op_kind`` adds to it; nothing else classifies by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jax.extend.core import Primitive

from jaxamp.core.enum_words import Word, member
from jaxamp.core.intervals import (
    Interval,
    added,
    anywhere,
    clamped,
    divided,
    hull,
    larger,
    logistic,
    magnitude,
    multiplied,
    nearest,
    negated,
    raised,
    rising,
    selected,
    smaller,
    squared,
    subtracted,
    within,
)
from jaxamp.core.semantics import (
    UNKNOWN,
    Pole,
    Semantics,
    bounded,
    cancelling,
    fold,
    kept,
    mild,
    product,
    quotient,
    steep,
    wave,
)
from jaxamp.errors import PolicyError, accepted


class OpKind(Word):
    """The five kinds of operation; a policy gives a precision to each.

    >>> OpKind("DataMovement")
    <OpKind.DATA_MOVEMENT: 'DataMovement'>
    """

    COMPUTE = "Compute"
    REDUCTION = "Reduction"
    ELEMENTWISE = "Elementwise"
    DATA_MOVEMENT = "DataMovement"
    BOUNDARY = "Boundary"

    @classmethod
    def parse(cls, word: OpKind | str) -> OpKind:
        """Read a kind: a member, or its name in any case.

        Raises:
          PolicyError: the word names no kind.

        >>> OpKind.parse("data_movement"), OpKind.parse("DataMovement")
        (<OpKind.DATA_MOVEMENT: 'DataMovement'>, <OpKind.DATA_MOVEMENT: 'DataMovement'>)
        """
        return member(cls, word)


class Trait(Word):
    """Arithmetic of a primitive, which decides how its kind's precision may be applied.

    The arithmetic traits are promises that the tests measure: the result of an ``EXACT`` one on
    16-bit inputs fits 16 bits, and that of a ``ROUNDED`` one is the float32 result rounded once.

    >>> lookup("add").trait, lookup("exp").trait
    (<Trait.ROUNDED: 'rounded'>, <Trait.SENSITIVE: 'sensitive'>)
    """

    # Compute.
    CONTRACTION = "contraction"  # multiplies and accumulates: dots and convolutions
    # Reduction.
    SUM = "sum"  # adds many terms: the accumulator must be wide
    ALLREDUCE = "allreduce"  # as SUM, over devices
    PREFIX = "prefix"  # as SUM or PRODUCT, and shows every partial result
    PRODUCT = "product"  # multiplies many terms, or folds them by a function we cannot judge
    EXTREMUM = "extremum"  # picks or orders operands by comparing: exact, but ties follow rounding
    # Elementwise.
    EXACT = "exact"  # never rounds: the result is an operand, its negative, 0, ±1 or a boolean
    ROUNDED = "rounded"  # the exact result rounded once: 16-bit equals float32 rounded
    INTEGRAL = "integral"  # float results that are whole numbers
    SMOOTH = "smooth"  # transcendental, bounded slope: harmless error in, harmless error out
    SENSITIVE = "sensitive"  # steep, cancelling or fast-growing: computed in float32
    # Data movement.
    SAME = "same"  # its operand as it is: names, barriers, layouts
    PLACEMENT = "placement"  # as SAME, on the devices that it names
    SHAPE = "shape"  # moves each operand by itself; result i has the dtype of operand i
    PART = "part"  # as SHAPE, and takes only some of the numbers
    MERGE = "merge"  # joins operands that must share one dtype
    COLLECTIVE = "collective"  # moves between devices
    VARY = "vary"  # sends nothing, but its transpose adds up over devices
    # Boundary: higher-order primitives, with a body or several.
    CALL = "call"  # one body, run once, transparent
    BRANCH = "branch"  # one of several bodies
    LOOP = "loop"  # a body run many times over a carry
    MANUAL = "manual"  # a body typed per device
    SOLVER = "solver"  # bodies of an implicit definition
    NESTED = "nested"  # some other primitive with one body, whose signature is kept
    OPAQUE = "opaque"  # never looked into: operands go back to the dtypes it was written for
    # Boundary: the rest.
    CONVERT = "convert"  # an explicit change of dtype
    LINALG = "linalg"  # factorisations and solves: float32 only, and amplify errors of their input
    NO_KERNEL = "no-kernel"  # no 16-bit implementation, or none worth having
    BITS = "bits"  # depends on the bits of a number, or makes random ones
    BITWISE = "bitwise"  # integers and booleans only, element by element
    INTEGER = "integer"  # as BITWISE, but of other elements, too, or of none
    GENERATOR = "generator"  # result not computed from floats
    CALLBACK = "callback"  # leaves the program for the host or foreign code
    STATE = "state"  # mutable cells, whose dtype is fixed
    TOKEN = "token"  # orders effects
    KERNEL = "kernel"  # an instruction inside a Pallas or Mosaic kernel


@dataclass(frozen=True, slots=True)
class Op:
    """One line of the table.

    >>> lookup("iota")
    Op(kind=<OpKind.BOUNDARY: 'Boundary'>, trait=<Trait.GENERATOR: 'generator'>,
       dtype_params=('dtype',))
    """

    kind: OpKind  # the kind whose precision a policy gives to the primitive
    trait: Trait  # what its arithmetic does
    # Equation parameters that fix a float dtype (a dtype, an aval, a typed jaxpr or a thunk of
    # one), which a rewrite rule of the primitive has to change. Those that only ever hold integer
    # dtypes (``index_dtype``) are not among them.
    dtype_params: tuple[str, ...] = ()
    # What it does to roundings, and where results lie. For primitives that neither are elementwise
    # nor reduce or order the trait is enough.
    semantics: Semantics = field(default=UNKNOWN, repr=False, compare=False)
    # Of a contraction, per number of operands, the one that is added to its products.
    addends: tuple[tuple[int, int], ...] = field(default=(), repr=False)

    def multiplied(self, operands: Sequence[Any]) -> Sequence[Any]:
        """Return the operands of a contraction, or what stands for each, but for an addend.

        >>> Op(OpKind.COMPUTE, Trait.CONTRACTION, addends=((4, 3),)).multiplied("qkvb")
        ['q', 'k', 'v']
        """
        if not self.addends:
            return operands
        place = dict(self.addends).get(len(operands))
        return [operand for at, operand in enumerate(operands) if at != place]


def _arithmetic(kind: OpKind) -> Callable[..., Op]:
    return lambda trait, semantics: Op(kind, trait, semantics=semantics)


_elementwise, _reduction = _arithmetic(OpKind.ELEMENTWISE), _arithmetic(OpKind.REDUCTION)
_MASK = bounded(within(0, 1), whole=True)

# Primitives are known by name, as equations print it; in brackets are their `dtype_params`. Some
# releases of JAX lack some. Pallas has primitives of its own called gather, scatter, swap, load and
# bitcast; they stay inside kernels, so the public ones own these names.
_COMPUTED: dict[str, Op] = {
    # Reduction: sums.
    "reduce_sum": _reduction(Trait.SUM, kept(multiplied)),
    "reduce_window_sum select_and_scatter_add": _reduction(Trait.SUM, kept(anywhere)),
    "scatter-add(update_jaxpr) scatter-sub(update_jaxpr)": _reduction(Trait.SUM, kept(anywhere)),
    # Adds two cotangents: a chain of them is one long sum, and no program subtracts any.
    "add_any": _reduction(Trait.SUM, kept(added)),
    # Reduction: sums over devices.
    "psum psum_invariant unreduced_psum reduce_scatter unreduced_reduce_scatter": _reduction(
        Trait.ALLREDUCE, kept(multiplied)
    ),
    # Reduction: running folds along an axis.
    "cumsum": _reduction(Trait.PREFIX, fold(lambda x, terms: hull(x, multiplied(x, terms)))),
    "cumprod": _reduction(Trait.PREFIX, fold(decays=True)),
    "cumlogsumexp": _reduction(Trait.PREFIX, fold(lambda x, terms: Interval(x.low, math.inf))),
    # Reduction: products, and folds by a function of the user's.
    "reduce_prod": _reduction(Trait.PRODUCT, fold(decays=True)),
    "scatter-mul(update_jaxpr)": _reduction(Trait.PRODUCT, fold()),
    "reduce(jaxpr,computation)": _reduction(Trait.PRODUCT, fold()),
    "reduce_window(jaxpr)": _reduction(Trait.PRODUCT, fold()),
    "select_and_scatter(select_jaxpr,scatter_jaxpr)": _reduction(Trait.PRODUCT, fold()),
    # Reduction: picks one of its operands, exactly.
    "reduce_max reduce_min cummax cummin": _reduction(Trait.EXTREMUM, kept()),
    "argmax argmin": _reduction(Trait.EXTREMUM, bounded(within(0, math.inf))),
    "reduce_window_max reduce_window_min": _reduction(Trait.EXTREMUM, kept()),
    "scatter-max(update_jaxpr) scatter-min(update_jaxpr)": _reduction(
        Trait.EXTREMUM, kept(anywhere)
    ),
    # Adds nothing despite its name: it picks tangents, in the derivative of max pooling.
    "select_and_gather_add": _reduction(Trait.EXTREMUM, kept()),
    "pmax pmin unreduced_pmax unreduced_pmin": _reduction(Trait.EXTREMUM, kept()),
    # Elementwise: never rounds.
    "abs": _elementwise(Trait.EXACT, mild(magnitude, whole=True)),
    "neg": _elementwise(Trait.EXACT, kept(negated)),
    "sign": _elementwise(Trait.EXACT, bounded(rising(np.sign, bottom=-1, top=1), whole=True)),
    "max": _elementwise(Trait.EXACT, kept(larger)),
    "min": _elementwise(Trait.EXACT, kept(smaller)),
    "clamp": _elementwise(Trait.EXACT, kept(clamped)),
    "select_n": _elementwise(Trait.EXACT, kept(selected)),
    "copy stop_gradient": _elementwise(Trait.EXACT, kept()),
    "is_finite eq ne lt le gt ge eq_to lt_to le_to": _elementwise(Trait.EXACT, _MASK),
    # Elementwise: the exact result, rounded once.
    "add": _elementwise(Trait.ROUNDED, cancelling(added)),
    "sub": _elementwise(Trait.ROUNDED, cancelling(subtracted)),
    "mul(out_dtype)": _elementwise(Trait.ROUNDED, product(multiplied)),
    "div": _elementwise(Trait.ROUNDED, quotient(divided)),
    "sqrt": _elementwise(Trait.ROUNDED, mild(rising(math.sqrt, 0, 0))),
    # Elementwise: integer-valued results.
    "ceil": _elementwise(Trait.INTEGRAL, steep(rising(np.ceil))),
    "floor": _elementwise(Trait.INTEGRAL, steep(rising(np.floor))),
    "round": _elementwise(Trait.INTEGRAL, steep(nearest)),
    # Elementwise: well-behaved curves.
    "tanh": _elementwise(Trait.SMOOTH, bounded(rising(math.tanh, bottom=-1, top=1))),
    "logistic": _elementwise(Trait.SMOOTH, bounded(logistic, decays=True)),
    "erf": _elementwise(Trait.SMOOTH, bounded(rising(math.erf, bottom=-1, top=1))),
    "atan": _elementwise(Trait.SMOOTH, bounded(within(-math.pi / 2, math.pi / 2))),
    "asinh": _elementwise(Trait.SMOOTH, bounded(rising(math.asinh))),
    "bessel_i0e": _elementwise(Trait.SMOOTH, bounded(within(0, 1))),
    "bessel_i1e": _elementwise(Trait.SMOOTH, bounded(within(-1, 1))),
    # Elementwise: steep, cancelling or fast-growing.
    "exp": _elementwise(Trait.SENSITIVE, steep(rising(math.exp, bottom=0), decays=True)),
    "exp2": _elementwise(Trait.SENSITIVE, steep(rising(lambda x: 2.0**x, bottom=0), decays=True)),
    "expm1": _elementwise(Trait.SENSITIVE, steep(rising(math.expm1, bottom=-1))),
    "log": _elementwise(Trait.SENSITIVE, steep(rising(math.log, 0), Pole.ZERO)),
    "log1p": _elementwise(Trait.SENSITIVE, steep(rising(math.log1p, -1), Pole.NUMBER)),
    "pow": _elementwise(Trait.SENSITIVE, steep(raised)),
    # If the power is small.
    "integer_pow": _elementwise(Trait.SENSITIVE, mild(raised, whole=True)),
    # Rounded once, but it doubles the exponent: float16 overflows at 256, underflows below 2e-4.
    "square": _elementwise(Trait.SENSITIVE, mild(squared, whole=True)),
    "rsqrt": _elementwise(Trait.SENSITIVE, mild(within(0, math.inf), Pole.ZERO)),
    "cbrt": _elementwise(Trait.SENSITIVE, mild(rising(np.cbrt))),
    # Exact, but it jumps: a rounded operand may end up on the other side.
    "rem": _elementwise(Trait.SENSITIVE, wave()),
    "sin cos": _elementwise(Trait.SENSITIVE, wave(within(-1, 1))),
    "tan": _elementwise(Trait.SENSITIVE, wave()),
    "sinh": _elementwise(Trait.SENSITIVE, steep(rising(math.sinh))),
    "cosh": _elementwise(Trait.SENSITIVE, steep(within(1, math.inf))),
    "asin": _elementwise(Trait.SENSITIVE, steep(within(-math.pi / 2, math.pi / 2), Pole.NUMBER)),
    "acos": _elementwise(Trait.SENSITIVE, steep(within(0, math.pi), Pole.NUMBER)),
    "acosh": _elementwise(Trait.SENSITIVE, steep(within(0, math.inf), Pole.NUMBER)),
    "atanh erf_inv": _elementwise(Trait.SENSITIVE, steep(pole=Pole.NUMBER)),
    "atan2": _elementwise(Trait.SENSITIVE, steep(within(-math.pi, math.pi))),
    "erfc": _elementwise(Trait.SENSITIVE, steep(within(0, 2), decays=True)),
    "log2": _elementwise(Trait.SENSITIVE, steep(rising(math.log2, 0), Pole.ZERO)),
    "one_minus_square": _elementwise(Trait.SENSITIVE, steep()),
    "polynomial polygamma zeta igamma_grad_a": _elementwise(Trait.SENSITIVE, steep()),
    "lgamma digamma": _elementwise(Trait.SENSITIVE, steep(pole=Pole.ZERO)),
    "igamma igammac regularized_incomplete_beta": _elementwise(
        Trait.SENSITIVE, steep(within(0, 1))
    ),
    # Data movement that orders by comparing.
    "sort top_k approx_top_k": Op(OpKind.DATA_MOVEMENT, Trait.EXTREMUM, semantics=kept()),
}

# Those whose kind and trait say all.
_PLAIN: dict[OpKind, dict[Trait, str]] = {
    OpKind.COMPUTE: {
        Trait.CONTRACTION: """
            dot_general(preferred_element_type) conv_general_dilated(preferred_element_type)
            ragged_dot_general(preferred_element_type)
        """
    },
    OpKind.DATA_MOVEMENT: {
        # One array, as it is.
        Trait.SAME: """
            name layout_constraint xla_metadata_value preduced relayout reduced_vary_cast
            reduced_vary_cast_p vary_unreduced_cast vary_unreduced_cast_p
        """,
        Trait.PLACEMENT: "sharding_constraint reshard",
        # Arrays one by one, values unchanged, some with several operands.
        Trait.SHAPE: """
            broadcast_in_dim broadcast_to reshape transpose squeeze rev tile device_put stage
            shard_alike optimization_barrier tie
        """,
        Trait.PART: "slice dynamic_slice gather split unstack",
        # Several arrays become one.
        Trait.MERGE: "concatenate stack pad dynamic_update_slice scatter(update_jaxpr)",
        # Between devices.
        Trait.COLLECTIVE: """
            all_gather all_gather_invariant all_gather_reduced all_to_all ragged_all_to_all ppermute
            pbroadcast pbroadcast_dynamic
        """,
        Trait.VARY: "pvary",
    },
    OpKind.BOUNDARY: {
        # An explicit cast of the user's program.
        Trait.CONVERT: "convert_element_type(new_dtype)",
        # Transparent calls. Thunks hold rules of differentiation, typed like the body.
        Trait.CALL: """
            jit(jaxpr) call(call_jaxpr) closed_call(call_jaxpr) eval_jaxpr(jaxpr,call_jaxpr)
            remat2(jaxpr) remat_opt(fwd_jaxpr,fun_jaxpr_thunk)
            custom_jvp_call(call_jaxpr,jvp_jaxpr_fun)
            custom_vjp_call(call_jaxpr,fwd_jaxpr_thunk,bwd)
        """,
        # Control flow.
        Trait.BRANCH: "cond(branches)",
        Trait.LOOP: "scan(jaxpr) while(cond_jaxpr,body_jaxpr)",
        Trait.MANUAL: "shard_map(jaxpr)",
        Trait.SOLVER: "custom_linear_solve(jaxprs)",
        # Other carriers of one jaxpr, whose signature is kept.
        Trait.NESTED: """
            composite(jaxpr,call_jaxpr) compute_on(jaxpr) custom_vmap_call(call,rule)
            program_order(call_jaxpr) fused_call(jaxpr) xla_metadata_call(jaxpr)
        """,
        # Factorisations and solves; backends that have some in 16 bits accumulate in 16, too.
        Trait.LINALG: """
            cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product lu ormqr qr
            schur svd symmetric_product triangular_solve tridiagonal tridiagonal_solve spsolve
        """,
        # No 16-bit implementation, or none worth having; no complex number has 16-bit halves.
        Trait.NO_KERNEL: "fft complex real imag conj(input_dtype) random_gamma",
        # Meaning lies in the bits, random ones included.
        Trait.BITS: """
            bitcast_convert_type(new_dtype) nextafter reduce_precision rng_bit_generator rng_uniform
            random_bits random_clone random_fold_in random_seed random_split random_unwrap
            random_wrap threefry2x32 threefry4x32 philox2x32 philox4x32 iota_2x32_shape
            from_edtype(dtype) to_edtype(edtype) consume assert_consumed_value
        """,
        # Integers and booleans only.
        Trait.BITWISE: """
            and or xor not shift_left shift_right_arithmetic shift_right_logical population_count
            clz mulhi
        """,
        Trait.INTEGER: """
            reduce_and reduce_or reduce_xor lu_pivots_to_permutation axis_index platform_index
            dim_as_value dimension_size shape_assertion
        """,
        # Made from nothing.
        Trait.GENERATOR: "iota(dtype) empty(dtype) empty2(dtype) zeros_like",
        # Leaves the program.
        Trait.CALLBACK: """
            pure_callback(result_avals) io_callback(result_avals) buffer_callback(result_avals)
            ffi_call(result_avals) debug_callback debug_print inspect_sharding
        """,
        # Refs and other mutable things, whose dtype is fixed.
        Trait.STATE: """
            new_ref empty_ref(ty) free_ref freeze get swap addupdate accum_grad_in_ref
            create_linear(ty) pin unpin run_state(jaxpr) new_box box_get(avals) box_set new_log
            log_extend log_read
        """,
        # Operands go back to the dtypes that they were written for. Among these are attention and
        # block-scaled dots, whose caller chose the formats; split-phase collectives, where a
        # future ties the start to its end; and sparse dots, which demand equal dtypes.
        Trait.OPAQUE: """
            pallas_call(jaxpr,out_avals) core_map(jaxpr) mpmd_map(jaxprs,out_avals) mosaic_gpu_p
            thunky.call_thunky_nested(jaxpr) tpu_custom_call(out_avals) with_memory_space_constraint
            custom_fusion(jaxpr,pallas_jaxpr) fusible(jaxpr) cudnn_fusion(jaxpr)
            custom_partitioning(call) call_exported(exported) call_hi_primitive(_prim)
            call_hi_primitive_linearized(_prim) linear_call(callee) custom_jvp_call_jaxpr
            custom_lin(out_avals) unreachable(out_avals) check dce_sink rnn_fwd rnn_bwd
            host_local_array_to_global_array global_array_to_host_local_array

            dot_product_attention_fwd(score_mod_jaxpr) dot_product_attention_fwd_wrapper
            dot_product_attention_bwd(score_mod_jaxpr) dot_product_attention_bwd_wrapper
            dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper
            dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper
            scaled_dot(preferred_element_type) scaled_matmul(preferred_element_type)
            scaled_matmul_wrapper(preferred_element_type)

            all_gather_start all_gather_reduced_start all_gather_done all_to_all_start
            all_to_all_done pbroadcast_start pbroadcast_done ppermute_start ppermute_done psum_start
            psum_invariant_start unreduced_psum_start psum_done reduce_scatter_start
            unreduced_reduce_scatter_start reduce_scatter_done psend precv(out_shape)

            bcoo_dot_general(preferred_element_type) bcoo_dot_general_sampled
            bcoo_spdot_general(preferred_element_type) bcoo_extract bcoo_fromdense bcoo_sort_indices
            bcoo_sum_duplicates bcoo_todense bcoo_transpose bcsr_dot_general(preferred_element_type)
            bcsr_extract bcsr_fromdense bcsr_todense coo_fromdense coo_todense coo_matmat coo_matvec
            coo_spmm coo_spmv csr_fromdense csr_todense csr_matmat csr_matvec csr_spmm csr_spmv
            todense
        """,
        Trait.TOKEN: "after_all create_token",
        # Instructions of Pallas, Mosaic and thunk kernels, never met outside one.
        Trait.KERNEL: """
            add_dependency all_reduce_ffs all_reduce_population_count async_copy_scales_to_tmem
            async_copy_smem_to_tmem async_copy_sparse_metadata_to_tmem async_load async_prefetch
            async_store_smem async_store_tmem atomic_cas atomic_rmw barrier barrier_arrive
            barrier_arrive_and_wait barrier_test barrier_wait bitcast commit_group commit_smem
            commit_tmem conv copy_gmem_to_smem copy_smem_to_gmem _copysign debug_barrier
            debug_barrier_p delay dma_start dma_wait einshape_lo elementwise_inline_asm
            elementwise_inline_asm_p emit_pipeline get_barrier_semaphore get_global
            griddepcontrol_launch_dependents griddepcontrol_wait has_memory_space inline_mgpu
            inline_mgpu_p jaxpr_call layout_cast load masked_cummax masked_cummin masked_cumsum
            masked_load masked_sort masked_swap matmul_acc_lhs matmul_lhs_fifo matmul_pop
            matmul_pop_fifo matmul_push_rhs max_contiguous mgpu_atomic_store mma
            mosaic_gpu_reduce_max mosaic_gpu_reduce_min mosaic_gpu_reduce_prod mosaic_gpu_reduce_sum
            multimem_load_reduce multimem_store multiple_of num_programs pack pack_dtype
            pack_elementwise parallel_loop pipeline_body print_layout prng_join prng_random_bits
            prng_seed prng_split program_id query_cluster_cancel reciprocal remove_memory_space roll
            run_scoped sc_fetch_and_add scan_count semaphore_read semaphore_signal
            semaphore_signal_multicast semaphore_signal_parallel semaphore_wait set_max_registers
            set_max_registers_p stochastic_round store tcgen05_commit_arrive tcgen05_mma
            thunky.all_gather thunky.all_reduce thunky.all_to_all thunky.async_done
            thunky.async_start thunky.call_jax thunky.collective_group thunky.collective_permute
            thunky.cond thunky.copy thunky.custom_call thunky.inline_constant thunky.memset
            thunky.memzero thunky.ptx_kernel thunky.reduce_scatter thunky.while trace_value
            try_cluster_cancel unique unpack unpack_dtype unpack_elementwise wait_gmem_to_smem
            wait_load_tmem wait_smem_to_gmem wgmma wgmma_accumulator_deref wgmma_accumulator_deref_p
            wgmma_accumulator_store wgmma_accumulator_store_p wgmma_ref wgmma_wait
        """,
    },
}


def _named(words: str, op: Op) -> dict[str, Op]:
    """Return the entries of primitives that are alike, but for what is in brackets."""
    split = (word.rstrip(")").partition("(") for word in words.split())
    return {n: replace(op, dtype_params=tuple(re.findall(r"\w+", p))) for n, _, p in split}


TABLE: dict[str, Op] = {}
for _words, _op in _COMPUTED.items():
    TABLE |= _named(_words, _op)
for _kind, _traits in _PLAIN.items():
    for _trait, _words in _traits.items():
        TABLE |= _named(_words, Op(_kind, _trait))

_DEFAULT_TRAITS = {
    OpKind.COMPUTE: Trait.CONTRACTION,
    OpKind.REDUCTION: Trait.SUM,
    OpKind.ELEMENTWISE: Trait.SMOOTH,
    OpKind.DATA_MOVEMENT: Trait.MERGE,
    OpKind.BOUNDARY: Trait.OPAQUE,
}

_UNKNOWN = Op(OpKind.BOUNDARY, Trait.OPAQUE)

_REGISTERED_SEMANTICS = {
    Trait.SUM: kept(anywhere),
    Trait.ALLREDUCE: kept(anywhere),
    Trait.EXTREMUM: kept(anywhere),
    Trait.EXACT: mild(anywhere),
    Trait.ROUNDED: mild(anywhere),
    Trait.SMOOTH: bounded(anywhere),
}

_registered: dict[str, Op] = {}

version = 0
"""A number that grows with each change by ``register_op_kind``, for the keys of caches."""


def lookup(primitive: Primitive | str) -> Op | None:
    """Return the entry of a primitive; what was registered comes before the table.

    >>> lookup("dot_general").kind
    <OpKind.COMPUTE: 'Compute'>
    >>> lookup("never_heard_of") is None
    True
    """
    name = _name(primitive)
    return _registered.get(name) or TABLE.get(name)


def op_of(primitive: Primitive | str) -> Op:
    """Return the entry of a primitive; an unknown one is taken for ``OPAQUE``.

    >>> op_of("scan").trait, op_of("never_heard_of").trait
    (<Trait.LOOP: 'loop'>, <Trait.OPAQUE: 'opaque'>)
    """
    return lookup(primitive) or _UNKNOWN


_IN_PLACE = frozenset({Trait.SAME, Trait.PLACEMENT, Trait.VARY, Trait.CONVERT, Trait.BITWISE})
_IN_PLACE_TOO = ("add_any", "reduce_precision")  # whose traits have primitives that are not


def is_by_element(primitive: Primitive | str) -> bool:
    """Return whether each number of the one result is computed of those in its place alone.

    Operands may be scalars, or of size one along an axis.

    >>> is_by_element("mul"), is_by_element("convert_element_type"), is_by_element("rev")
    (True, True, False)
    """
    op = op_of(primitive)
    is_known = op.kind is OpKind.ELEMENTWISE or op.trait in _IN_PLACE
    return is_known or _name(primitive) in _IN_PLACE_TOO


def register_op_kind(
    primitive: Primitive | str,
    kind: OpKind | str,
    *,
    trait: Trait | str | None = None,
    dtype_params: tuple[str, ...] = (),
    addends: tuple[tuple[int, int], ...] = (),
    override: bool = False,
) -> None:
    """Teach jaxamp a primitive that it has never seen.

    Args:
      primitive: a primitive or its name. Primitives are known by name.
      kind: its kind, e.g. ``OpKind.ELEMENTWISE`` or ``"Elementwise"``.
      trait: what its arithmetic does; by default contraction, sum, smooth, merge or opaque,
        following the kind.
      dtype_params: names of equation parameters that fix a float dtype.
      addends: of a contraction: for a number of operands, which of them is added to the products
        of the others, as a bias is.
      override: replace an entry that is there already.

    Raises:
      PolicyError: for a word that is not a kind or trait, a trait that no primitive of that kind
        has, or a primitive that has another entry already.

    >>> register_op_kind("fused_bias_add", OpKind.ELEMENTWISE, trait=Trait.ROUNDED)
    >>> lookup("fused_bias_add").trait
    <Trait.ROUNDED: 'rounded'>
    """
    global version
    name = _name(primitive)
    kind = OpKind.parse(kind)
    trait = _DEFAULT_TRAITS[kind] if trait is None else member(Trait, trait)
    _check_pair(kind, trait)
    op = Op(kind, trait, tuple(dtype_params), _semantics(name, kind, trait), addends)
    known = lookup(name)
    if known == op:
        return
    if known is not None and not override:
        raise PolicyError(
            f"Primitive {name!r} is already {known.kind.value} ({known.trait.value}), so it cannot "
            f"become {kind.value} ({trait.value}). Pass override=True to replace the entry."
        )
    _registered[name] = op
    version += 1


def _semantics(name: str, kind: OpKind, trait: Trait) -> Semantics:
    """Return those of a primitive that is registered: JAX's own keep theirs."""
    if name in TABLE:
        return TABLE[name].semantics
    is_arithmetic = kind in (OpKind.ELEMENTWISE, OpKind.REDUCTION)
    return _REGISTERED_SEMANTICS.get(trait, UNKNOWN) if is_arithmetic else UNKNOWN


def registered() -> dict[str, Op]:
    """Return the entries that ``register_op_kind`` added, by name (a copy)."""
    return dict(_registered)


def _name(primitive: Primitive | str) -> str:
    if isinstance(primitive, str):
        return primitive
    if isinstance(primitive, Primitive):
        return primitive.name
    raise PolicyError(f"Expected a primitive or its name, got {type(primitive).__name__}.")


def _check_pair(kind: OpKind, trait: Trait) -> None:
    """Check that the table uses only pairs that the planner knows."""
    possible = {op.trait for op in TABLE.values() if op.kind is kind}
    if trait not in possible:
        words = [t.value for t in Trait if t in possible]
        raise PolicyError(
            f"{kind.value} has no trait {trait.value!r}. {accepted(trait.value, words)}"
        )
