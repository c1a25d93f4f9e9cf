"""The kind of each primitive, which policies name, and the traits of its arithmetic.

``TABLE`` is the one list of primitives in the project: every primitive that JAX registers, one a
line; ``INSTRUCTIONS`` of kernels, which no program holds, are a word each. The planner reads it and
``register_op_kind`` adds to it; nothing else classifies by name.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.extend.core import Primitive

from jaxamp.core.enum_words import member
from jaxamp.core.intervals import (
    Interval,
    added,
    anywhere,
    arc_cosine,
    arc_sine,
    arc_tangent,
    clamped,
    divided,
    falling,
    hull,
    inverse_root,
    larger,
    logistic,
    magnitude,
    multiplied,
    multiplied_into,
    nearest,
    negated,
    one_minus_squared,
    picked,
    product_of_many,
    raised,
    remainder,
    rising,
    scattered,
    selected,
    smaller,
    squared,
    subtracted,
    sum_of_any,
    within,
)
from jaxamp.core.semantics import (
    UNKNOWN,
    Pole,
    Semantics,
    bounded,
    cancelling,
    choice,
    fold,
    mild,
    product,
    quotient,
    steep,
    total,
    wave,
)
from jaxamp.errors import PolicyError, accepted


class OpKind(enum.Enum):
    """The five kinds of operation; a policy gives a precision to each.

    >>> OpKind("DataMovement")
    <OpKind.DATA_MOVEMENT: 'DataMovement'>
    """

    COMPUTE = "Compute"
    REDUCTION = "Reduction"
    ELEMENTWISE = "Elementwise"
    DATA_MOVEMENT = "DataMovement"
    BOUNDARY = "Boundary"

    __hash__ = object.__hash__  # Enum's own goes through the name, in Python

    @classmethod
    def parse(cls, word: OpKind | str) -> OpKind:
        """Read a kind: a member, or its name in any case.

        Raises:
          PolicyError: the word names no kind.

        >>> OpKind.parse("data_movement"), OpKind.parse("DataMovement")
        (<OpKind.DATA_MOVEMENT: 'DataMovement'>, <OpKind.DATA_MOVEMENT: 'DataMovement'>)
        """
        return member(cls, word)


class Trait(enum.Enum):
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
    SHAPE = "shape"  # moves each operand by itself; result i has the dtype of operand i
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
    INTEGER = "integer"  # integers and booleans only
    GENERATOR = "generator"  # result not computed from floats
    CALLBACK = "callback"  # leaves the program for the host or foreign code
    STATE = "state"  # mutable cells, whose dtype is fixed
    TOKEN = "token"  # orders effects
    KERNEL = "kernel"  # an instruction inside a Pallas or Mosaic kernel

    __hash__ = object.__hash__  # Enum's own goes through the name, in Python


@dataclass(frozen=True, slots=True)
class Op:
    """One line of the table.

    Attributes:
      kind: the kind whose precision a policy gives to the primitive.
      trait: what its arithmetic does.
      dtype_params: equation parameters that fix a float dtype (a dtype, an aval, a typed jaxpr or
        a thunk of one), which a rewrite rule of the primitive has to change. Those that
        only ever hold integer dtypes (``index_dtype``) are not among them.
      semantics: what it does to roundings, and where results lie. For primitives that neither are
        elementwise nor reduce or order the trait is enough.
      addends: of a contraction, per number of operands, the one that is added to its products.

    >>> lookup("iota")
    Op(kind=<OpKind.BOUNDARY: 'Boundary'>, trait=<Trait.GENERATOR: 'generator'>,
       dtype_params=('dtype',))
    """

    kind: OpKind
    trait: Trait
    dtype_params: tuple[str, ...] = ()
    semantics: Semantics = field(default=UNKNOWN, repr=False, compare=False)
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


# Keyed by name, as equations print it. Pallas has primitives of its own called gather, scatter,
# swap, load and bitcast; they stay inside kernels, so the public ones own these names.
# "since" and "until" name the first and last release line of JAX that has the primitive, where
# that is not all of 0.10.2, 0.11 and 0.12.
def _arithmetic(kind: OpKind) -> Callable[..., Op]:
    """Return what makes a line of a primitive whose trait alone is not enough."""

    def line(trait: Trait, semantics: Semantics, dtype_params: tuple[str, ...] = ()) -> Op:
        return Op(kind, trait, dtype_params, semantics)

    return line


_elementwise, _reduction = _arithmetic(OpKind.ELEMENTWISE), _arithmetic(OpKind.REDUCTION)
_movement = _arithmetic(OpKind.DATA_MOVEMENT)
_MASK = bounded(within(0, 1), whole=True)

TABLE: dict[str, Op] = {
    # Compute: multiply-accumulate.
    "dot_general": Op(OpKind.COMPUTE, Trait.CONTRACTION, ("preferred_element_type",)),
    "conv_general_dilated": Op(OpKind.COMPUTE, Trait.CONTRACTION, ("preferred_element_type",)),
    "ragged_dot_general": Op(OpKind.COMPUTE, Trait.CONTRACTION, ("preferred_element_type",)),
    # Reduction: sums.
    "reduce_sum": _reduction(Trait.SUM, total(multiplied)),
    "reduce_window_sum": _reduction(Trait.SUM, total(sum_of_any)),
    "select_and_scatter_add": _reduction(Trait.SUM, total(sum_of_any)),
    "scatter-add": _reduction(Trait.SUM, total(scattered(added)), ("update_jaxpr",)),
    "scatter-sub": _reduction(Trait.SUM, total(scattered(subtracted)), ("update_jaxpr",)),
    # Adds two cotangents, but a chain of them is one long sum.
    # Cotangents: no program subtracts them from each other.
    "add_any": _reduction(Trait.SUM, total(added)),
    # Reduction: sums over devices.
    "psum": _reduction(Trait.ALLREDUCE, total(multiplied)),
    "psum_invariant": _reduction(Trait.ALLREDUCE, total(multiplied)),
    "unreduced_psum": _reduction(Trait.ALLREDUCE, total(multiplied)),
    "reduce_scatter": _reduction(Trait.ALLREDUCE, total(multiplied)),
    "unreduced_reduce_scatter": _reduction(Trait.ALLREDUCE, total(multiplied)),
    # Reduction: running folds along an axis.
    "cumsum": _reduction(Trait.PREFIX, fold(lambda x, terms: hull(x, multiplied(x, terms)))),
    "cumprod": _reduction(Trait.PREFIX, fold(product_of_many, decays=True)),
    "cumlogsumexp": _reduction(Trait.PREFIX, fold(lambda x, terms: Interval(x.low, math.inf))),
    # Reduction: products, and folds by a function of the user's.
    "reduce_prod": _reduction(Trait.PRODUCT, fold(product_of_many, decays=True)),
    "scatter-mul": _reduction(Trait.PRODUCT, fold(multiplied_into), ("update_jaxpr",)),
    "reduce": _reduction(Trait.PRODUCT, fold(), ("jaxpr", "computation")),
    "reduce_window": _reduction(Trait.PRODUCT, fold(), ("jaxpr",)),
    "select_and_scatter": _reduction(Trait.PRODUCT, fold(), ("select_jaxpr", "scatter_jaxpr")),
    # Reduction: picks one of its operands, exactly.
    "reduce_max": _reduction(Trait.EXTREMUM, choice()),
    "reduce_min": _reduction(Trait.EXTREMUM, choice()),
    "argmax": _reduction(Trait.EXTREMUM, bounded(within(0, math.inf))),
    "argmin": _reduction(Trait.EXTREMUM, bounded(within(0, math.inf))),
    "cummax": _reduction(Trait.EXTREMUM, choice()),
    "cummin": _reduction(Trait.EXTREMUM, choice()),
    "reduce_window_max": _reduction(Trait.EXTREMUM, choice()),
    "reduce_window_min": _reduction(Trait.EXTREMUM, choice()),
    "scatter-max": _reduction(Trait.EXTREMUM, choice(picked), ("update_jaxpr",)),
    "scatter-min": _reduction(Trait.EXTREMUM, choice(picked), ("update_jaxpr",)),
    # Adds nothing despite its name: it picks tangents, in the derivative of max pooling.
    "select_and_gather_add": _reduction(Trait.EXTREMUM, choice()),
    "pmax": _reduction(Trait.EXTREMUM, choice()),
    "pmin": _reduction(Trait.EXTREMUM, choice()),
    "unreduced_pmax": _reduction(Trait.EXTREMUM, choice()),  # since 0.11
    "unreduced_pmin": _reduction(Trait.EXTREMUM, choice()),  # since 0.11
    # Elementwise: never rounds.
    "abs": _elementwise(Trait.EXACT, mild(magnitude, whole=True)),
    "neg": _elementwise(Trait.EXACT, choice(negated)),
    "sign": _elementwise(Trait.EXACT, bounded(rising(np.sign, bottom=-1, top=1), whole=True)),
    "max": _elementwise(Trait.EXACT, choice(larger)),
    "min": _elementwise(Trait.EXACT, choice(smaller)),
    "clamp": _elementwise(Trait.EXACT, choice(clamped)),
    "select_n": _elementwise(Trait.EXACT, choice(selected)),
    "copy": _elementwise(Trait.EXACT, choice()),
    "stop_gradient": _elementwise(Trait.EXACT, choice()),
    "is_finite": _elementwise(Trait.EXACT, _MASK),
    "eq": _elementwise(Trait.EXACT, _MASK),
    "ne": _elementwise(Trait.EXACT, _MASK),
    "lt": _elementwise(Trait.EXACT, _MASK),
    "le": _elementwise(Trait.EXACT, _MASK),
    "gt": _elementwise(Trait.EXACT, _MASK),
    "ge": _elementwise(Trait.EXACT, _MASK),
    "eq_to": _elementwise(Trait.EXACT, _MASK),
    "lt_to": _elementwise(Trait.EXACT, _MASK),
    "le_to": _elementwise(Trait.EXACT, _MASK),
    # Elementwise: the exact result, rounded once.
    "add": _elementwise(Trait.ROUNDED, cancelling(added)),
    "sub": _elementwise(Trait.ROUNDED, cancelling(subtracted)),
    "mul": _elementwise(Trait.ROUNDED, product(multiplied), ("out_dtype",)),
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
    "atan": _elementwise(Trait.SMOOTH, bounded(arc_tangent)),
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
    "integer_pow": _elementwise(Trait.SENSITIVE, mild(raised)),
    # Rounded once, but it doubles the exponent: float16 overflows at 256, underflows below 2e-4.
    "square": _elementwise(Trait.SENSITIVE, mild(squared)),
    "rsqrt": _elementwise(Trait.SENSITIVE, mild(inverse_root, Pole.ZERO)),
    "cbrt": _elementwise(Trait.SENSITIVE, mild(rising(np.cbrt))),
    # Exact, but it jumps: a rounded operand may end up on the other side.
    "rem": _elementwise(Trait.SENSITIVE, wave(remainder)),
    "sin": _elementwise(Trait.SENSITIVE, wave(within(-1, 1))),
    "cos": _elementwise(Trait.SENSITIVE, wave(within(-1, 1))),
    "tan": _elementwise(Trait.SENSITIVE, wave()),
    "sinh": _elementwise(Trait.SENSITIVE, steep(rising(math.sinh))),
    "cosh": _elementwise(Trait.SENSITIVE, steep(within(1, math.inf))),
    "asin": _elementwise(Trait.SENSITIVE, steep(arc_sine, Pole.NUMBER)),
    "acos": _elementwise(Trait.SENSITIVE, steep(arc_cosine, Pole.NUMBER)),
    "acosh": _elementwise(Trait.SENSITIVE, steep(within(0, math.inf), Pole.NUMBER)),
    "atanh": _elementwise(Trait.SENSITIVE, steep(pole=Pole.NUMBER)),
    "atan2": _elementwise(Trait.SENSITIVE, steep(within(-math.pi, math.pi))),
    "erfc": _elementwise(Trait.SENSITIVE, steep(falling(math.erfc, -math.inf, 2, 0), decays=True)),
    "erf_inv": _elementwise(Trait.SENSITIVE, steep(pole=Pole.NUMBER)),
    "log2": _elementwise(Trait.SENSITIVE, steep(rising(math.log2, 0), Pole.ZERO)),  # since 0.11
    "one_minus_square": _elementwise(Trait.SENSITIVE, steep(one_minus_squared)),  # since 0.11
    "polynomial": _elementwise(Trait.SENSITIVE, steep()),  # since 0.12
    "lgamma": _elementwise(Trait.SENSITIVE, steep(pole=Pole.ZERO)),
    "digamma": _elementwise(Trait.SENSITIVE, steep(pole=Pole.ZERO)),
    "polygamma": _elementwise(Trait.SENSITIVE, steep()),
    "zeta": _elementwise(Trait.SENSITIVE, steep()),
    "igamma": _elementwise(Trait.SENSITIVE, steep(within(0, 1))),
    "igammac": _elementwise(Trait.SENSITIVE, steep(within(0, 1))),
    "igamma_grad_a": _elementwise(Trait.SENSITIVE, steep()),
    "regularized_incomplete_beta": _elementwise(Trait.SENSITIVE, steep(within(0, 1))),
    # Data movement: one array at a time, values unchanged.
    "broadcast_in_dim": Op(OpKind.DATA_MOVEMENT, Trait.SHAPE),
    "broadcast_to": Op(OpKind.DATA_MOVEMENT, Trait.SHAPE),
    "reshape": Op(OpKind.DATA_MOVEMENT, Trait.SHAPE),
    "transpose": Op(OpKind.DATA_MOVEMENT, Trait.SHAPE),
    "squeeze": Op(OpKind.DATA_MOVEMENT, Trait.SHAPE),
    "rev": Op(OpKind.DATA_MOVEMENT, Trait.SHAPE),
    "slice": Op(OpKind.DATA_MOVEMENT, Trait.SHAPE),
    "dynamic_slice": Op(OpKind.DATA_MOVEMENT, Trait.SHAPE),
    "gather": Op(OpKind.DATA_MOVEMENT, Trait.SHAPE),
    "split": Op(OpKind.DATA_MOVEMENT, Trait.SHAPE),
    "unstack": Op(OpKind.DATA_MOVEMENT, Trait.SHAPE),
    "tile": Op(OpKind.DATA_MOVEMENT, Trait.SHAPE),
    "name": Op(OpKind.DATA_MOVEMENT, Trait.SHAPE),
    "device_put": Op(OpKind.DATA_MOVEMENT, Trait.SHAPE),
    # Puts a constant on the device.
    "stage": Op(OpKind.DATA_MOVEMENT, Trait.SHAPE),
    "layout_constraint": Op(OpKind.DATA_MOVEMENT, Trait.SHAPE),
    "sharding_constraint": Op(OpKind.DATA_MOVEMENT, Trait.SHAPE),
    "reshard": Op(OpKind.DATA_MOVEMENT, Trait.SHAPE),
    # The next three take several operands, each with a dtype of its own.
    "shard_alike": Op(OpKind.DATA_MOVEMENT, Trait.SHAPE),  # until 0.10
    "optimization_barrier": Op(OpKind.DATA_MOVEMENT, Trait.SHAPE),
    "tie": Op(OpKind.DATA_MOVEMENT, Trait.SHAPE),
    "xla_metadata_value": Op(OpKind.DATA_MOVEMENT, Trait.SHAPE),
    "preduced": Op(OpKind.DATA_MOVEMENT, Trait.SHAPE),
    "reduced_vary_cast_p": Op(OpKind.DATA_MOVEMENT, Trait.SHAPE),  # until 0.11
    "vary_unreduced_cast_p": Op(OpKind.DATA_MOVEMENT, Trait.SHAPE),  # until 0.11
    "vary_unreduced_cast": Op(OpKind.DATA_MOVEMENT, Trait.SHAPE),  # since 0.12
    "reduced_vary_cast": Op(OpKind.DATA_MOVEMENT, Trait.SHAPE),  # since 0.12
    "relayout": Op(OpKind.DATA_MOVEMENT, Trait.SHAPE),  # since 0.11
    # Data movement: several arrays become one.
    "concatenate": Op(OpKind.DATA_MOVEMENT, Trait.MERGE),
    "stack": Op(OpKind.DATA_MOVEMENT, Trait.MERGE),
    "pad": Op(OpKind.DATA_MOVEMENT, Trait.MERGE),
    "dynamic_update_slice": Op(OpKind.DATA_MOVEMENT, Trait.MERGE),
    "scatter": Op(OpKind.DATA_MOVEMENT, Trait.MERGE, ("update_jaxpr",)),
    # Data movement: order by comparing.
    "sort": _movement(Trait.EXTREMUM, choice()),
    "top_k": _movement(Trait.EXTREMUM, choice()),
    "approx_top_k": _movement(Trait.EXTREMUM, choice()),
    # Data movement: between devices.
    "all_gather": Op(OpKind.DATA_MOVEMENT, Trait.COLLECTIVE),
    "all_gather_invariant": Op(OpKind.DATA_MOVEMENT, Trait.COLLECTIVE),
    "all_gather_reduced": Op(OpKind.DATA_MOVEMENT, Trait.COLLECTIVE),
    "all_to_all": Op(OpKind.DATA_MOVEMENT, Trait.COLLECTIVE),
    "ragged_all_to_all": Op(OpKind.DATA_MOVEMENT, Trait.COLLECTIVE),
    "ppermute": Op(OpKind.DATA_MOVEMENT, Trait.COLLECTIVE),
    "pbroadcast": Op(OpKind.DATA_MOVEMENT, Trait.COLLECTIVE),
    "pbroadcast_dynamic": Op(OpKind.DATA_MOVEMENT, Trait.COLLECTIVE),  # since 0.12
    "pvary": Op(OpKind.DATA_MOVEMENT, Trait.VARY),
    # Boundary: an explicit cast of the user's program.
    "convert_element_type": Op(OpKind.BOUNDARY, Trait.CONVERT, ("new_dtype",)),
    # Boundary: transparent calls. Thunks hold rules of differentiation, typed like the body.
    "jit": Op(OpKind.BOUNDARY, Trait.CALL, ("jaxpr",)),
    "call": Op(OpKind.BOUNDARY, Trait.CALL, ("call_jaxpr",)),  # until 0.10
    "closed_call": Op(OpKind.BOUNDARY, Trait.CALL, ("call_jaxpr",)),  # until 0.10
    "eval_jaxpr": Op(OpKind.BOUNDARY, Trait.CALL, ("jaxpr", "call_jaxpr")),
    "remat2": Op(OpKind.BOUNDARY, Trait.CALL, ("jaxpr",)),
    "custom_jvp_call": Op(OpKind.BOUNDARY, Trait.CALL, ("call_jaxpr", "jvp_jaxpr_fun")),
    "custom_vjp_call": Op(OpKind.BOUNDARY, Trait.CALL, ("call_jaxpr", "fwd_jaxpr_thunk", "bwd")),
    # Boundary: control flow.
    "cond": Op(OpKind.BOUNDARY, Trait.BRANCH, ("branches",)),
    "scan": Op(OpKind.BOUNDARY, Trait.LOOP, ("jaxpr",)),
    "while": Op(OpKind.BOUNDARY, Trait.LOOP, ("cond_jaxpr", "body_jaxpr")),
    "shard_map": Op(OpKind.BOUNDARY, Trait.MANUAL, ("jaxpr",)),
    "custom_linear_solve": Op(OpKind.BOUNDARY, Trait.SOLVER, ("jaxprs",)),
    # Boundary: other carriers of one jaxpr, whose signature is kept.
    "composite": Op(OpKind.BOUNDARY, Trait.NESTED, ("jaxpr", "call_jaxpr")),
    "compute_on": Op(OpKind.BOUNDARY, Trait.NESTED, ("jaxpr",)),
    "custom_vmap_call": Op(OpKind.BOUNDARY, Trait.NESTED, ("call",)),
    "program_order": Op(OpKind.BOUNDARY, Trait.NESTED, ("call_jaxpr",)),  # since 0.11
    "fused_call": Op(OpKind.BOUNDARY, Trait.NESTED, ("jaxpr",)),
    "xla_metadata_call": Op(OpKind.BOUNDARY, Trait.NESTED, ("jaxpr",)),
    # Boundary: factorisations and solves.
    "cholesky": Op(OpKind.BOUNDARY, Trait.LINALG),
    "cholesky_update": Op(OpKind.BOUNDARY, Trait.LINALG),
    "eig": Op(OpKind.BOUNDARY, Trait.LINALG),
    "eigh": Op(OpKind.BOUNDARY, Trait.LINALG),
    "geqp3": Op(OpKind.BOUNDARY, Trait.LINALG),
    "geqrf": Op(OpKind.BOUNDARY, Trait.LINALG),
    "hessenberg": Op(OpKind.BOUNDARY, Trait.LINALG),
    "householder_product": Op(OpKind.BOUNDARY, Trait.LINALG),
    "lu": Op(OpKind.BOUNDARY, Trait.LINALG),
    "ormqr": Op(OpKind.BOUNDARY, Trait.LINALG),
    "qr": Op(OpKind.BOUNDARY, Trait.LINALG),
    "schur": Op(OpKind.BOUNDARY, Trait.LINALG),
    "svd": Op(OpKind.BOUNDARY, Trait.LINALG),
    # The next two run in 16 bits on some backends, where they also accumulate in 16.
    "symmetric_product": Op(OpKind.BOUNDARY, Trait.LINALG),
    "triangular_solve": Op(OpKind.BOUNDARY, Trait.LINALG),
    "tridiagonal": Op(OpKind.BOUNDARY, Trait.LINALG),
    "tridiagonal_solve": Op(OpKind.BOUNDARY, Trait.LINALG),
    "spsolve": Op(OpKind.BOUNDARY, Trait.LINALG),
    # Boundary: no 16-bit implementation, or none worth having.
    "fft": Op(OpKind.BOUNDARY, Trait.NO_KERNEL),
    # There is no complex number of two 16-bit halves.
    "complex": Op(OpKind.BOUNDARY, Trait.NO_KERNEL),
    "real": Op(OpKind.BOUNDARY, Trait.NO_KERNEL),
    "imag": Op(OpKind.BOUNDARY, Trait.NO_KERNEL),
    "conj": Op(OpKind.BOUNDARY, Trait.NO_KERNEL, ("input_dtype",)),
    "random_gamma": Op(OpKind.BOUNDARY, Trait.NO_KERNEL),
    # Boundary: meaning lies in the bits, random ones included.
    "bitcast_convert_type": Op(OpKind.BOUNDARY, Trait.BITS, ("new_dtype",)),
    "nextafter": Op(OpKind.BOUNDARY, Trait.BITS),
    "reduce_precision": Op(OpKind.BOUNDARY, Trait.BITS),
    "rng_bit_generator": Op(OpKind.BOUNDARY, Trait.BITS),
    "rng_uniform": Op(OpKind.BOUNDARY, Trait.BITS),
    "random_bits": Op(OpKind.BOUNDARY, Trait.BITS),
    "random_clone": Op(OpKind.BOUNDARY, Trait.BITS),
    "random_fold_in": Op(OpKind.BOUNDARY, Trait.BITS),
    "random_seed": Op(OpKind.BOUNDARY, Trait.BITS),
    "random_split": Op(OpKind.BOUNDARY, Trait.BITS),
    "random_unwrap": Op(OpKind.BOUNDARY, Trait.BITS),
    "random_wrap": Op(OpKind.BOUNDARY, Trait.BITS),
    "threefry2x32": Op(OpKind.BOUNDARY, Trait.BITS),
    "threefry4x32": Op(OpKind.BOUNDARY, Trait.BITS),
    "philox2x32": Op(OpKind.BOUNDARY, Trait.BITS),
    "philox4x32": Op(OpKind.BOUNDARY, Trait.BITS),
    "iota_2x32_shape": Op(OpKind.BOUNDARY, Trait.BITS),
    "from_edtype": Op(OpKind.BOUNDARY, Trait.BITS, ("dtype",)),
    "to_edtype": Op(OpKind.BOUNDARY, Trait.BITS, ("edtype",)),
    "consume": Op(OpKind.BOUNDARY, Trait.BITS),
    "assert_consumed_value": Op(OpKind.BOUNDARY, Trait.BITS),
    # Boundary: integers and booleans only.
    "and": Op(OpKind.BOUNDARY, Trait.INTEGER),
    "or": Op(OpKind.BOUNDARY, Trait.INTEGER),
    "xor": Op(OpKind.BOUNDARY, Trait.INTEGER),
    "not": Op(OpKind.BOUNDARY, Trait.INTEGER),
    "shift_left": Op(OpKind.BOUNDARY, Trait.INTEGER),
    "shift_right_arithmetic": Op(OpKind.BOUNDARY, Trait.INTEGER),
    "shift_right_logical": Op(OpKind.BOUNDARY, Trait.INTEGER),
    "population_count": Op(OpKind.BOUNDARY, Trait.INTEGER),
    "clz": Op(OpKind.BOUNDARY, Trait.INTEGER),
    "mulhi": Op(OpKind.BOUNDARY, Trait.INTEGER),
    "reduce_and": Op(OpKind.BOUNDARY, Trait.INTEGER),
    "reduce_or": Op(OpKind.BOUNDARY, Trait.INTEGER),
    "reduce_xor": Op(OpKind.BOUNDARY, Trait.INTEGER),
    "lu_pivots_to_permutation": Op(OpKind.BOUNDARY, Trait.INTEGER),
    "axis_index": Op(OpKind.BOUNDARY, Trait.INTEGER),
    "platform_index": Op(OpKind.BOUNDARY, Trait.INTEGER),
    "dim_as_value": Op(OpKind.BOUNDARY, Trait.INTEGER),
    "dimension_size": Op(OpKind.BOUNDARY, Trait.INTEGER),
    "shape_assertion": Op(OpKind.BOUNDARY, Trait.INTEGER),
    # Boundary: made from nothing.
    "iota": Op(OpKind.BOUNDARY, Trait.GENERATOR, ("dtype",)),
    "empty": Op(OpKind.BOUNDARY, Trait.GENERATOR, ("dtype",)),
    "empty2": Op(OpKind.BOUNDARY, Trait.GENERATOR, ("dtype",)),
    "zeros_like": Op(OpKind.BOUNDARY, Trait.GENERATOR),
    # Boundary: leaves the program.
    "pure_callback": Op(OpKind.BOUNDARY, Trait.CALLBACK, ("result_avals",)),
    "io_callback": Op(OpKind.BOUNDARY, Trait.CALLBACK, ("result_avals",)),
    "buffer_callback": Op(OpKind.BOUNDARY, Trait.CALLBACK, ("result_avals",)),
    "ffi_call": Op(OpKind.BOUNDARY, Trait.CALLBACK, ("result_avals",)),
    "debug_callback": Op(OpKind.BOUNDARY, Trait.CALLBACK),
    "debug_print": Op(OpKind.BOUNDARY, Trait.CALLBACK),
    "inspect_sharding": Op(OpKind.BOUNDARY, Trait.CALLBACK),
    # Boundary: Refs and other mutable things, whose dtype is fixed.
    "new_ref": Op(OpKind.BOUNDARY, Trait.STATE),
    "empty_ref": Op(OpKind.BOUNDARY, Trait.STATE, ("ty",)),
    "free_ref": Op(OpKind.BOUNDARY, Trait.STATE),
    "freeze": Op(OpKind.BOUNDARY, Trait.STATE),
    "get": Op(OpKind.BOUNDARY, Trait.STATE),
    "swap": Op(OpKind.BOUNDARY, Trait.STATE),
    "addupdate": Op(OpKind.BOUNDARY, Trait.STATE),
    "accum_grad_in_ref": Op(OpKind.BOUNDARY, Trait.STATE),
    "create_linear": Op(OpKind.BOUNDARY, Trait.STATE, ("ty",)),
    "pin": Op(OpKind.BOUNDARY, Trait.STATE),
    "unpin": Op(OpKind.BOUNDARY, Trait.STATE),
    "run_state": Op(OpKind.BOUNDARY, Trait.STATE, ("jaxpr",)),
    "new_box": Op(OpKind.BOUNDARY, Trait.STATE),  # until 0.10
    "box_get": Op(OpKind.BOUNDARY, Trait.STATE, ("avals",)),  # until 0.10
    "box_set": Op(OpKind.BOUNDARY, Trait.STATE),  # until 0.10
    "new_log": Op(OpKind.BOUNDARY, Trait.STATE),  # until 0.10
    "log_extend": Op(OpKind.BOUNDARY, Trait.STATE),  # until 0.10
    "log_read": Op(OpKind.BOUNDARY, Trait.STATE),  # until 0.10
    # Boundary: opaque; operands go back to the dtypes they were written for.
    "pallas_call": Op(OpKind.BOUNDARY, Trait.OPAQUE, ("jaxpr", "out_avals")),
    "core_map": Op(OpKind.BOUNDARY, Trait.OPAQUE, ("jaxpr",)),  # until 0.10
    "mpmd_map": Op(OpKind.BOUNDARY, Trait.OPAQUE, ("jaxprs", "out_avals")),
    "mosaic_gpu_p": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "thunky.call_thunky_nested": Op(OpKind.BOUNDARY, Trait.OPAQUE, ("jaxpr",)),  # since 0.12
    "tpu_custom_call": Op(OpKind.BOUNDARY, Trait.OPAQUE, ("out_avals",)),
    "with_memory_space_constraint": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "custom_fusion": Op(OpKind.BOUNDARY, Trait.OPAQUE, ("jaxpr", "pallas_jaxpr")),
    "fusible": Op(OpKind.BOUNDARY, Trait.OPAQUE, ("jaxpr",)),  # until 0.10
    "cudnn_fusion": Op(OpKind.BOUNDARY, Trait.OPAQUE, ("jaxpr",)),
    "custom_partitioning": Op(OpKind.BOUNDARY, Trait.OPAQUE, ("call",)),
    "call_exported": Op(OpKind.BOUNDARY, Trait.OPAQUE, ("exported",)),
    "call_hi_primitive": Op(OpKind.BOUNDARY, Trait.OPAQUE, ("_prim",)),
    "call_hi_primitive_linearized": Op(OpKind.BOUNDARY, Trait.OPAQUE, ("_prim",)),
    "linear_call": Op(OpKind.BOUNDARY, Trait.OPAQUE, ("callee",)),
    "remat_opt": Op(OpKind.BOUNDARY, Trait.CALL, ("fwd_jaxpr", "fun_jaxpr_thunk")),
    "custom_jvp_call_jaxpr": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "custom_lin": Op(OpKind.BOUNDARY, Trait.OPAQUE, ("out_avals",)),
    "unreachable": Op(OpKind.BOUNDARY, Trait.OPAQUE, ("out_avals",)),
    "check": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "dce_sink": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "host_local_array_to_global_array": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "global_array_to_host_local_array": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "rnn_fwd": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "rnn_bwd": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    # Fused attention and block-scaled dots: the caller chose the narrow formats already.
    "dot_product_attention_fwd": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "dot_product_attention_fwd_wrapper": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "dot_product_attention_bwd": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "dot_product_attention_bwd_wrapper": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "dot_product_attention_fp8_fwd": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "dot_product_attention_fp8_fwd_wrapper": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "dot_product_attention_fp8_bwd": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "dot_product_attention_fp8_bwd_wrapper": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "scaled_dot": Op(OpKind.BOUNDARY, Trait.OPAQUE, ("preferred_element_type",)),
    "scaled_matmul": Op(OpKind.BOUNDARY, Trait.OPAQUE, ("preferred_element_type",)),
    "scaled_matmul_wrapper": Op(OpKind.BOUNDARY, Trait.OPAQUE, ("preferred_element_type",)),
    # Split-phase collectives: a future ties the start to its end.
    "all_gather_start": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "all_gather_reduced_start": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "all_gather_done": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "all_to_all_start": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "all_to_all_done": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "pbroadcast_start": Op(OpKind.BOUNDARY, Trait.OPAQUE),  # until 0.10
    "pbroadcast_done": Op(OpKind.BOUNDARY, Trait.OPAQUE),  # until 0.10
    "ppermute_start": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "ppermute_done": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "psum_start": Op(OpKind.BOUNDARY, Trait.OPAQUE),  # until 0.10
    "psum_invariant_start": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "unreduced_psum_start": Op(OpKind.BOUNDARY, Trait.OPAQUE),  # until 0.10
    "psum_done": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "reduce_scatter_start": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "unreduced_reduce_scatter_start": Op(OpKind.BOUNDARY, Trait.OPAQUE),  # until 0.10
    "reduce_scatter_done": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "psend": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "precv": Op(OpKind.BOUNDARY, Trait.OPAQUE, ("out_shape",)),
    # Sparse formats: dots here demand equal dtypes of data and dense operand, so they stay.
    "bcoo_dot_general": Op(OpKind.BOUNDARY, Trait.OPAQUE, ("preferred_element_type",)),
    "bcoo_dot_general_sampled": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "bcoo_spdot_general": Op(OpKind.BOUNDARY, Trait.OPAQUE, ("preferred_element_type",)),
    "bcoo_extract": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "bcoo_fromdense": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "bcoo_sort_indices": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "bcoo_sum_duplicates": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "bcoo_todense": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "bcoo_transpose": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "bcsr_dot_general": Op(OpKind.BOUNDARY, Trait.OPAQUE, ("preferred_element_type",)),
    "bcsr_extract": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "bcsr_fromdense": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "bcsr_todense": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "coo_fromdense": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "coo_todense": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "coo_matmat": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "coo_matvec": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "coo_spmm": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "coo_spmv": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "csr_fromdense": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "csr_todense": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "csr_matmat": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "csr_matvec": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "csr_spmm": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "csr_spmv": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    "todense": Op(OpKind.BOUNDARY, Trait.OPAQUE),
    # Boundary: tokens.
    "after_all": Op(OpKind.BOUNDARY, Trait.TOKEN),
    "create_token": Op(OpKind.BOUNDARY, Trait.TOKEN),
}

# Instructions of Pallas, Mosaic and thunk kernels, never met outside one, by the remark of a line.
INSTRUCTIONS = {
    "": """
        add_dependency all_reduce_ffs all_reduce_population_count async_copy_scales_to_tmem
        async_copy_smem_to_tmem async_copy_sparse_metadata_to_tmem async_load async_prefetch
        async_store_smem async_store_tmem atomic_cas atomic_rmw barrier barrier_arrive barrier_test
        barrier_wait bitcast commit_group commit_smem commit_tmem copy_gmem_to_smem
        copy_smem_to_gmem _copysign delay dma_start dma_wait einshape_lo emit_pipeline
        get_barrier_semaphore get_global griddepcontrol_launch_dependents griddepcontrol_wait
        layout_cast load masked_cummax masked_cummin masked_cumsum masked_load masked_sort
        masked_swap matmul_acc_lhs matmul_pop matmul_push_rhs max_contiguous mgpu_atomic_store
        multimem_load_reduce multimem_store multiple_of num_programs pack pack_dtype
        pack_elementwise parallel_loop pipeline_body print_layout prng_join prng_random_bits
        prng_seed prng_split program_id query_cluster_cancel reciprocal remove_memory_space roll
        run_scoped sc_fetch_and_add semaphore_read semaphore_signal semaphore_signal_multicast
        semaphore_signal_parallel semaphore_wait stochastic_round tcgen05_commit_arrive tcgen05_mma
        trace_value try_cluster_cancel unpack unpack_dtype unpack_elementwise wait_load_tmem
        wait_smem_to_gmem wgmma wgmma_ref wgmma_wait
    """,
    "since 0.11": """
        conv matmul_lhs_fifo matmul_pop_fifo mma scan_count wait_gmem_to_smem
    """,
    "since 0.12": """
        barrier_arrive_and_wait debug_barrier elementwise_inline_asm has_memory_space inline_mgpu
        mosaic_gpu_reduce_max mosaic_gpu_reduce_min mosaic_gpu_reduce_prod mosaic_gpu_reduce_sum
        set_max_registers store thunky.all_gather thunky.all_reduce thunky.all_to_all
        thunky.async_done thunky.async_start thunky.call_jax thunky.collective_group
        thunky.collective_permute thunky.cond thunky.copy thunky.custom_call thunky.inline_constant
        thunky.memset thunky.memzero thunky.ptx_kernel thunky.reduce_scatter thunky.while
        wgmma_accumulator_deref wgmma_accumulator_store
    """,
    "until 0.10": """
        jaxpr_call unique
    """,
    "until 0.11": """
        debug_barrier_p elementwise_inline_asm_p inline_mgpu_p set_max_registers_p
        wgmma_accumulator_deref_p wgmma_accumulator_store_p
    """,
}
TABLE |= {
    name: Op(OpKind.BOUNDARY, Trait.KERNEL)
    for names in INSTRUCTIONS.values()
    for name in names.split()
}

_DEFAULT_TRAITS = {
    OpKind.COMPUTE: Trait.CONTRACTION,
    OpKind.REDUCTION: Trait.SUM,
    OpKind.ELEMENTWISE: Trait.SMOOTH,
    OpKind.DATA_MOVEMENT: Trait.MERGE,
    OpKind.BOUNDARY: Trait.OPAQUE,
}

_UNKNOWN = Op(OpKind.BOUNDARY, Trait.OPAQUE)

_REGISTERED_SEMANTICS = {
    Trait.SUM: total(anywhere),
    Trait.ALLREDUCE: total(anywhere),
    Trait.EXTREMUM: choice(anywhere),
    Trait.EXACT: mild(anywhere),
    Trait.ROUNDED: mild(anywhere),
    Trait.SMOOTH: bounded(anywhere),
}

_registered: dict[str, Op] = {}

version = 0
"""A number that grows with each change by ``register_op_kind``, for the keys of caches."""


def lookup(primitive: Primitive | str) -> Op | None:
    """Return the entry of a primitive; what was registered comes before the table.

    Args:
      primitive: a primitive or its name.

    Returns:
      Its entry, or None for an unknown primitive.

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
