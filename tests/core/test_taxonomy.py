"""The table is complete for the installed JAX, spells its names right and names every dtype."""

import functools
import json
import pathlib
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive

from jaxamp.core import taxonomy
from jaxamp.core.taxonomy import (
    TABLE,
    Op,
    OpKind,
    Trait,
    is_by_element,
    lookup,
    register_op_kind,
)
from jaxamp.errors import PolicyError
from tests import table_programs

RELEASE = jax.__version_info__[:2]
# Primitives that some release of JAX lacks.
RELEASES = {
    "since 0.11": """
        conv log2 matmul_lhs_fifo matmul_pop_fifo mma one_minus_square program_order relayout
        scan_count unreduced_pmax unreduced_pmin wait_gmem_to_smem
    """,
    "since 0.12": """
        barrier_arrive_and_wait debug_barrier elementwise_inline_asm has_memory_space inline_mgpu
        mosaic_gpu_reduce_max mosaic_gpu_reduce_min mosaic_gpu_reduce_prod mosaic_gpu_reduce_sum
        pbroadcast_dynamic polynomial reduced_vary_cast set_max_registers store thunky.all_gather
        thunky.all_reduce thunky.all_to_all thunky.async_done thunky.async_start thunky.call_jax
        thunky.call_thunky_nested thunky.collective_group thunky.collective_permute thunky.cond
        thunky.copy thunky.custom_call thunky.inline_constant thunky.memset thunky.memzero
        thunky.ptx_kernel thunky.reduce_scatter thunky.while vary_unreduced_cast
        wgmma_accumulator_deref wgmma_accumulator_store
    """,
    "until 0.10": """
        box_get box_set call closed_call core_map fusible jaxpr_call log_extend log_read new_box
        new_log pbroadcast_done pbroadcast_start psum_start shard_alike unique unreduced_psum_start
        unreduced_reduce_scatter_start
    """,
    "until 0.11": """
        debug_barrier_p elementwise_inline_asm_p inline_mgpu_p reduced_vary_cast_p
        set_max_registers_p vary_unreduced_cast_p wgmma_accumulator_deref_p
        wgmma_accumulator_store_p
    """,
}

# Primitives with arithmetic or movement that no public function of JAX reaches on a CPU.
OUT_OF_REACH = {
    "broadcast_to": "bound inside kernels",
    "stage": "bound on host constants only",
    "tie": "nothing binds it",
    "eq_to": "bound while sort is lowered",
    "lt_to": "bound while sort is lowered",
    "le_to": "bound while sort is lowered",
    "select_and_scatter": "its wrapper is private",
    "shard_alike": "gone after 0.10",
    "all_gather_invariant": "its wrapper is private",
    "all_gather_reduced": "takes a reduced mesh axis",
    "preduced": "takes a reduced mesh axis",
    "unreduced_psum": "takes an unreduced mesh axis",
    "unreduced_pmax": "takes an unreduced mesh axis",
    "unreduced_pmin": "takes an unreduced mesh axis",
    "unreduced_reduce_scatter": "takes an unreduced mesh axis",
    "reduced_vary_cast": "takes a reduced mesh axis",
    "reduced_vary_cast_p": "takes a reduced mesh axis",
    "vary_unreduced_cast": "takes an unreduced mesh axis",
    "vary_unreduced_cast_p": "takes an unreduced mesh axis",
    "relayout": "takes a device layout",
    "pbroadcast_dynamic": "GPU only",
    "polynomial": "newer than the programs here",
    "one_minus_square": "newer than the programs here",
}

# A harness passes this one by hand; JAX's own `lax.conj` does not.
HAND_MADE = {("conj", "_input_dtype")}


@functools.cache
def census() -> dict[str, list[str]]:
    """Every primitive of the installed JAX and where it is defined, from a process of its own."""
    command = [sys.executable, "-m", "tests.primitive_census"]
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["primitives"]


@functools.cache
def lacking() -> set[str]:
    """The primitives that the installed JAX lacks."""
    found = set()
    for remark, names in RELEASES.items():
        word, release = remark.split()
        at = tuple(map(int, release.split(".")))
        if at > RELEASE if word == "since" else at < RELEASE:
            found |= {*names.split()}
    return found


def test_every_primitive_of_jax_is_in_the_table():
    """A primitive that JAX registers and the table lacks is listed with its home."""
    missing = [f"  {name}: {', '.join(at)}" for name, at in census().items() if name not in TABLE]
    assert not missing, f"add to TABLE in {taxonomy.__file__}:\n" + "\n".join(missing)


def test_every_line_of_the_table_is_a_primitive_of_some_release():
    """A name that this JAX lacks is misspelt, or not among those that its release lacks."""
    strange = TABLE.keys() - lacking() - census().keys()
    assert not strange, f"not in JAX {jax.__version__}: {strange}"


def bodies(value: Any) -> Iterator[Jaxpr]:
    """The jaxprs in an equation's parameter."""
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from bodies(item)


def fixes_float_dtype(value: Any) -> bool:
    """Whether a parameter holds a float dtype, an aval that has one, or a jaxpr."""
    if isinstance(value, tuple | list):
        return any(map(fixes_float_dtype, value))
    if isinstance(value, jax.ShapeDtypeStruct | jax.core.AbstractValue):
        return fixes_float_dtype(getattr(value, "dtype", None))
    if isinstance(value, np.dtype | type):
        return jnp.issubdtype(value, jnp.inexact)
    return isinstance(value, Jaxpr | ClosedJaxpr)


def sounds_like_dtype(name: str, value: Any) -> bool:
    """Whether a parameter would hold a dtype if it held anything."""
    return value is None and re.search("dtype|element_type", name) is not None


def jaxprs() -> Iterator[Jaxpr]:
    """A sample of JAX's own harnesses and the programs that complete it, traced and not run."""
    from jax._src.internal_test_util import test_harnesses

    groups = defaultdict(list)
    for harness in test_harnesses.all_harnesses:
        groups[harness.group_name].append(harness)
    for group in groups.values():
        for harness in group[:: max(1, len(group) // 8)][:8]:
            args = harness.dyn_args_maker(np.random.RandomState(0))
            yield jax.make_jaxpr(harness.dyn_fun)(*args).jaxpr
    for fn, args in table_programs.PROGRAMS.values():
        yield jax.make_jaxpr(fn)(*args).jaxpr


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Every equation of a jaxpr and of the bodies that a rewriter looks into."""
    for eqn in jaxpr.eqns:
        yield eqn
        op = lookup(eqn.primitive)
        if op is None or op.trait is not Trait.OPAQUE:
            for value in eqn.params.values():
                for body in bodies(value):
                    yield from equations(body)


@functools.cache
def observed() -> dict[str, dict[str, bool]]:
    """By primitive met: its parameters, and whether each was ever seen to concern a dtype."""
    seen: dict[str, dict[str, bool]] = defaultdict(dict)
    for jaxpr in jaxprs():
        for eqn in equations(jaxpr):
            params = seen[eqn.primitive.name]
            for name, value in eqn.params.items():
                concerns = fixes_float_dtype(value) or sounds_like_dtype(name, value)
                params[name] = params.get(name, False) or concerns
    return seen


# What old harnesses warn of is not our business.
@pytest.mark.filterwarnings("ignore")
def test_dtype_params_are_listed():
    """A parameter that was seen to fix a float dtype is in its line of the table."""
    unlisted = [
        f"  {primitive}: {name}"
        for primitive, params in observed().items()
        for name, concerns in params.items()
        if concerns and (primitive, name) not in HAND_MADE
        if name not in getattr(lookup(primitive), "dtype_params", ())
    ]
    assert not unlisted, "dtype_params lacks\n" + "\n".join(unlisted)


@pytest.mark.filterwarnings("ignore")
def test_listed_dtype_params_exist():
    """An equation carries at least one of the parameters that its line of the table names."""
    for primitive, params in observed().items():
        op = TABLE[primitive]
        assert not op.dtype_params or params.keys() & set(op.dtype_params), primitive


@pytest.mark.filterwarnings("ignore")
def test_sample_reaches_all_arithmetic():
    """The two tests above have seen every primitive that a policy can lower."""
    wanted = {n for n, op in TABLE.items() if op.kind is not OpKind.BOUNDARY} - lacking()
    assert wanted - observed().keys() <= OUT_OF_REACH.keys()
    assert not OUT_OF_REACH.keys() & observed().keys()


@pytest.mark.parametrize("kind", OpKind)
def test_kinds_and_traits_agree(kind):
    """A trait belongs to one kind, but for picking by comparison, which also orders arrays."""
    others = {op.trait for op in TABLE.values() if op.kind is not kind} - {Trait.EXTREMUM}
    assert not {op.trait for op in TABLE.values() if op.kind is kind} & others


PLACES = {
    "convert_element_type": lambda x: x.astype(jnp.bfloat16),
    "cumsum": lambda x: jax.lax.cumsum(x, 1),
    "mul": lambda x: 3 * x,
    "name": lambda x: checkpoint_name(x, "x"),
    "reduce_precision": lambda x: jax.lax.reduce_precision(x, 8, 7),
    "rev": lambda x: x[:, ::-1],
    "shift_left": lambda x: x.astype(int) << 1,
    "transpose": lambda x: x.T,
}


@pytest.mark.parametrize("name", PLACES)
def test_what_is_by_element_reads_its_place_alone(name):
    """Another number in one place changes the result there alone."""
    fn, x = PLACES[name], jnp.arange(12.0).reshape(3, 4)
    assert name in [eqn.primitive.name for eqn in jax.make_jaxpr(fn)(x).eqns]
    changed = np.argwhere(fn(x) != fn(x.at[0, 1].set(64)))
    assert is_by_element(name) is (changed.tolist() == [[0, 1]])


def test_every_trait_is_used():
    """No trait is a dead word."""
    assert {op.trait for op in TABLE.values()} == set(Trait)


@pytest.fixture
def empty_registry(monkeypatch):
    """A registry of the test's own."""
    monkeypatch.setattr(taxonomy, "_registered", {})


@pytest.mark.usefixtures("empty_registry")
def test_register_teaches_a_primitive():
    """A registered primitive is found by object and by name, and the version grows once."""
    before = taxonomy.version
    primitive = Primitive("blend")
    assert lookup(primitive) is None
    register_op_kind(primitive, "elementwise", trait="sensitive", dtype_params=("dtype",))
    register_op_kind(primitive, "elementwise", trait="sensitive", dtype_params=("dtype",))
    assert lookup("blend") == Op(OpKind.ELEMENTWISE, Trait.SENSITIVE, ("dtype",))
    assert lookup(primitive) is lookup("blend")
    assert taxonomy.registered() == {"blend": lookup("blend")}
    assert taxonomy.version == before + 1


@pytest.mark.usefixtures("empty_registry")
@pytest.mark.parametrize("kind", OpKind)
def test_default_traits_suit_their_kind(kind):
    """The trait that a kind implies is one that the table uses with it."""
    register_op_kind("blend", kind)
    assert lookup("blend") in {Op(op.kind, op.trait) for op in TABLE.values()}


@pytest.mark.usefixtures("empty_registry")
def test_register_overrides_only_on_request():
    """The table's own entries, and earlier registrations, are replaced only with override."""
    with pytest.raises(PolicyError, match=r"already Elementwise .*override=True"):
        register_op_kind("exp", OpKind.BOUNDARY)
    register_op_kind("exp", OpKind.BOUNDARY, override=True)
    assert lookup("exp") == Op(OpKind.BOUNDARY, Trait.OPAQUE)
    assert TABLE["exp"].kind is OpKind.ELEMENTWISE


@pytest.mark.usefixtures("empty_registry")
@pytest.mark.parametrize(
    ("primitive", "kind", "trait", "words"),
    [
        ("blend", "elementwize", None, "'elementwize' is not an OpKind. Did you mean"),
        ("blend", OpKind.COMPUTE, "sensitive", "Compute has no trait 'sensitive'"),
        ("blend", OpKind.COMPUTE, "tasty", "'tasty' is not a Trait"),
        (jnp.sin, OpKind.COMPUTE, None, "Expected a primitive or its name"),
    ],
)
def test_register_refuses_wrong_words(primitive, kind, trait, words):
    """A wrong word is refused with the right ones, and nothing is registered."""
    with pytest.raises(PolicyError, match=words):
        register_op_kind(primitive, kind, trait=trait)
    assert not taxonomy.registered()
