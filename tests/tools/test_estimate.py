"""Estimates: what is read from a compiled program, and the model on top of it."""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback

import jaxamp
from jaxamp import PrecisionPolicy
from jaxamp.compiled import deviceless, hlo, roofline, traffic
from jaxamp.compiled.deviceless import compile_all, exported
from jaxamp.compiled.targets import TARGETS
from jaxamp.errors import InspectionError, PolicyError
from jaxamp.tools.estimate import Compiled, Estimate
from tests.inspect.programs import MLP, PROGRAMS, convolution, mlp_loss, spec

GEMM = """HloModule gemm

ENTRY %main.1 (a.1: {dtype}[64,1024], b.1: {dtype}[1024,32]) -> f32[64,32] {{
  %a.1 = {dtype}[64,1024]{{1,0}} parameter(0)
  %b.1 = {dtype}[1024,32]{{1,0}} parameter(1)
  ROOT %dot.1 = f32[64,32]{{1,0}} dot(%a.1, %b.1), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}{more}
}}
"""  # noqa: E501
FLOPS = 2 * 64 * 1024 * 32
FP8 = """HloModule call

ENTRY %main.1 (a.1: f8e4m3fn[16,32], b.1: f8e4m3fn[8,32], s.1: f32[]) -> bf16[16,8] {
  %a.1 = f8e4m3fn[16,32]{1,0} parameter(0)
  %b.1 = f8e4m3fn[8,32]{1,0} parameter(1)
  %s.1 = f32[] parameter(2)
  ROOT %call.1 = (bf16[16,8]{1,0}, s8[4096]{0}) custom-call(%a.1, %b.1, %s.1, %s.1), custom_call_target="__cublas$lt$matmul$f8", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}}}
}
"""  # noqa: E501
PADDED = """HloModule padded

%pad.1 (x.1: bf16[1,4,4,8]) -> bf16[1,9,9,8] {
  %x.1 = bf16[1,4,4,8]{3,2,1,0} parameter(0)
  %zero.1 = bf16[] constant(0)
  ROOT %pad.2 = bf16[1,9,9,8]{3,2,1,0} pad(%x.1, %zero.1), padding=0_0x1_1_1x1_1_1x0_0
}

ENTRY %main.1 (y.1: bf16[1,4,4,8], k.1: bf16[16,3,3,8]) -> bf16[1,7,7,16] {
  %y.1 = bf16[1,4,4,8]{3,2,1,0} parameter(0)
  %k.1 = bf16[16,3,3,8]{3,2,1,0} parameter(1)
  %padded.1 = bf16[1,9,9,8]{3,2,1,0} fusion(%y.1), kind=kLoop, calls=%pad.1
  ROOT %conv.1 = (bf16[1,7,7,16]{3,2,1,0}, u8[0]{0}) custom-call(%padded.1, %k.1), window={size=3x3}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward"
}
"""  # noqa: E501
SLICED = """HloModule sliced

%part.1 (x.1: bf16[64,32]) -> f32[64,8] {
  %x.1 = bf16[64,32]{1,0} parameter(0)
  %wide.1 = f32[64,32]{1,0} convert(%x.1)
  %twice.1 = f32[64,32]{1,0} add(%wide.1, %wide.1)
  ROOT %slice.1 = f32[64,8]{1,0} slice(%twice.1), slice={[0:64], [0:8]}
}

%whole.1 (x.2: bf16[64,32]) -> f32[64,32] {
  %x.2 = bf16[64,32]{1,0} parameter(0)
  ROOT %wide.2 = f32[64,32]{1,0} convert(%x.2)
}

ENTRY %main.1 (y.1: bf16[64,32]) -> (f32[64,8], f32[64,32]) {
  %y.1 = bf16[64,32]{1,0} parameter(0)
  %part.2 = f32[64,8]{1,0} fusion(%y.1), kind=kLoop, calls=%part.1
  %whole.2 = f32[64,32]{1,0} fusion(%y.1), kind=kLoop, calls=%whole.1
  ROOT %both.1 = (f32[64,8]{1,0}, f32[64,32]{1,0}) tuple(%part.2, %whole.2)
}
"""


def _gemm(dtype: str, more: str = "") -> hlo.Module:
    return hlo.parse(GEMM.format(dtype=dtype, more=more))


def test_a_kernel_reads_what_it_slices_though_it_computes_first():
    part, whole = traffic.kernels(hlo.parse(SLICED))
    assert part.moved == 64 * 8 * (2 + 4)
    assert whole.moved == 64 * 32 * (2 + 4)


def test_flops_of_a_compiled_dot():
    """From its shapes and contracted axes."""
    assert traffic.measure(_gemm("bf16")).flops == FLOPS


def test_fp8_products_of_a_library_are_found():
    """The call's operands say so, whatever the program claimed."""
    module = hlo.parse(FP8)
    assert traffic.measure(module).dots == {"f8_e4m3": 1}
    assert traffic.measure(module).flops == 2 * 16 * 8 * 32


def test_zeros_put_between_inputs_do_not_count():
    """A convolution over an image that was padded inside has a quarter of its multiplications."""
    assert traffic.measure(hlo.parse(PADDED)).flops == 2 * (7 * 7 * 16) * (3 * 3 * 8) / 4


@pytest.mark.parametrize("name", TARGETS)
def test_a_kernel_takes_the_longer_of_its_two_times(name: str):
    """Bytes over bandwidth or FLOPs over the rate, at the share that is reached, and its start."""
    target, module = TARGETS[name], _gemm("bf16")
    reached = target.reached
    moving = traffic.measure(module).bytes / target.bandwidth / reached.bandwidth
    multiplying = FLOPS / target.rates["bf16"] / reached.products
    found = roofline.roofline(module, target)
    assert found.seconds == pytest.approx(max(moving, multiplying) + reached.start)
    assert found.seconds == found.by_memory + found.by_products + found.by_starts


def test_what_is_published_is_never_exceeded():
    """The model is slower than the published numbers, and equal to them where nothing was timed."""
    for target in TARGETS.values():
        assert 0 < target.reached.bandwidth <= 1 >= target.reached.products > 0
        assert (target.reached.start > 0) == (target.gpu is not None)


def test_full_precision_is_slower_than_the_default():
    """An f32 product that may not be rounded first leaves the fast units."""
    target = TARGETS["h200"]
    (plain,), (exact,) = (
        next(traffic.kernels(m)).contractions(m)
        for m in (_gemm("f32"), _gemm("f32", ", operand_precision={highest,highest}"))
    )
    ratio = roofline.rate_of(target, plain) / roofline.rate_of(target, exact)
    assert ratio == pytest.approx(494.5 / 67)


def test_a_format_without_units_runs_in_a_wider_one():
    """An A100 has no FP8: the product runs at the rate of bf16."""
    (dot,) = next(traffic.kernels(hlo.parse(FP8))).contractions(hlo.parse(FP8))
    assert roofline.rate_of(TARGETS["a100"], dot) == TARGETS["a100"].rates["bf16"]
    assert roofline.rate_of(TARGETS["h200"], dot) == TARGETS["h200"].rates["f8"]


def test_an_unknown_target_is_refused_at_once():
    """With the nearest that there is."""
    with pytest.raises(InspectionError, match="Did you mean 'h200'"):
        jaxamp.estimate(mlp_loss, target="h2000")


@pytest.mark.parametrize("one", ["auto_mixed", PrecisionPolicy.AUTO_MIXED])
def test_one_other_policy_needs_no_list(one, monkeypatch, tmp_path):
    """It is not taken apart into letters; a word that is not a policy is refused at once."""
    monkeypatch.setattr(deviceless, "ROOT", tmp_path)
    with pytest.raises(InspectionError, match="--install"):  # so the policies were understood
        jaxamp.estimate(mlp_loss, others=one)(*MLP)
    with pytest.raises(PolicyError, match="Unknown policy 'auto_mixd'"):
        jaxamp.estimate(mlp_loss, others="auto_mixd")


def test_a_policy_that_is_named_twice_is_compiled_once(monkeypatch):
    """With a compiler that makes one product of everything."""
    facts = {"temporary": 0, "arguments": 0, "outputs": 0}
    compiled = [(_gemm("bf16"), facts)]
    compilers = sys.modules["jaxamp.tools.estimate"]
    monkeypatch.setattr(compilers, "compile_all", lambda _, programs: len(programs) * compiled)
    found = jaxamp.estimate(mlp_loss, "mixed_f16", others=["always_f32", "half"])(*MLP)
    assert [row.policy for row in found.compiled] == ["always_f32", "mixed_f16"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Powers:
    """A configuration that JAX would take apart."""

    count: int
    flip: bool


def _power(x, config):
    for _ in range(config.count):
        x = x @ x
    return -x if config.flip else x


def test_static_arguments_are_those_of_the_call(monkeypatch):
    """A configuration that amp or jit declares static reaches the program as it is."""
    square = spec(8, 8)
    text = jax.jit(lambda x: x @ x).lower(square).compile().as_text()
    facts = {"temporary": 0, "arguments": 0, "outputs": 0}
    made = [(hlo.parse(text), facts)] * 2
    monkeypatch.setattr("jaxamp.tools.estimate.compile_all", lambda chip, programs: made)
    for fn in (
        jaxamp.amp(_power, static_argnums=1),
        jax.jit(jaxamp.amp(_power), static_argnums=1),
        jaxamp.amp(jax.jit(_power, static_argnums=1)),
    ):
        found = jaxamp.estimate(fn)(square, Powers(2, True))
        assert sum(found.compiled[1].planned.values()) == 2


def test_a_missing_compiler_is_an_error_that_says_what_to_install(monkeypatch, tmp_path):
    """The command, the size and the place."""
    monkeypatch.setattr(deviceless, "ROOT", tmp_path)
    with pytest.raises(InspectionError, match="estimate --install tpu") as caught:
        jaxamp.estimate(mlp_loss, target="v6e")(*MLP)
    assert "GB" in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def _printing(x):
    jax.debug.print("here")
    return x @ x


CALLING = {
    "debug_print": jax.jit(_printing),
    "pure_callback": lambda x: jax.pure_callback(lambda x: x, x, x @ x),
    "io_callback": lambda x: io_callback(lambda x: x, x, x @ x, ordered=True),
}


@pytest.mark.parametrize("name", CALLING)
def test_a_callback_is_an_error_that_says_where(name):
    """JAX lowers callbacks for the devices at hand alone, and serializes none."""
    for platform in ("cpu", "cuda"):
        with pytest.raises(InspectionError, match=rf"{name} at .*test_estimate.py:\d+") as caught:
            exported(CALLING[name], jaxamp.amp, (jnp.ones((4, 4)),), {}, platform)
        assert "back to the host" in str(caught.value)


def test_an_exported_program_has_arrays_as_inputs_and_nothing_else():
    """Numbers that choose a shape are built in; arrays inside of a module are inputs."""
    import equinox as eqx

    linear = eqx.nn.Linear(4, 3, key=jax.random.key(0))
    data = exported(lambda m, x, n: m(x)[:n], jaxamp.amp, (linear, spec(4), 2), {}, "cuda")
    program = jax.export.deserialize(bytearray(data))
    assert [aval.shape for aval in program.in_avals] == [(3, 4), (3,), (4,)]
    assert [aval.shape for aval in program.out_avals] == [(2,)]


STEPS = {
    "mlp": (
        jax.value_and_grad(mlp_loss),
        ({"w1": spec(512, 1024), "w2": spec(1024, 256)}, spec(256, 512), spec(256, 256)),
    ),
    "attention": (jax.grad(PROGRAMS["attention"][0]), (spec(512, 256), spec(256, 768))),
    "scanned": (jax.grad(PROGRAMS["scanned"][0], 1), (spec(128, 256), spec(5, 256, 256))),
    "convolution": (jax.grad(convolution, (0, 1)), (spec(8, 32, 32, 64), spec(3, 3, 64, 128))),
}


@pytest.mark.deviceless("b200")
def test_a_library_multiplies_what_xlas_first_choice_does_not_fit():
    """That choice needs more shared memory than a B200 has; on a device XLA would time others."""
    q, k, v, x = (jax.ShapeDtypeStruct((4, 2048, 4096), jnp.bfloat16) for _ in range(4))

    def gradient(q, k, v, x):
        joined = jnp.concatenate([q, k, v], -1)
        return jnp.einsum("btn,btm->mn", joined, x, preferred_element_type=jnp.float32)

    program = exported(gradient, lambda f: f, (q, k, v, x), {}, "cuda")
    ((module, _),) = compile_all(TARGETS["b200"], [program])
    assert traffic.measure(module).dots == {"bf16": 1}
    assert "__cublas$lt$matmul" in {k.instruction.target for k in traffic.kernels(module)}


@pytest.mark.deviceless
@pytest.mark.parametrize("target", ["h200", "b200"])
def test_reports_agree_with_the_compiler(target: str):
    """Dots per precision exactly, and their FLOPs within 1 %, in the optimized program."""
    names = [(name, policy) for name in STEPS for policy in ("always_f32", "auto_mixed_bf16")]
    programs = [
        exported(STEPS[n][0], lambda f, p=p: jaxamp.amp(f, p), STEPS[n][1], {}, "cuda")
        for n, p in names
    ]
    for (name, policy), (module, _) in zip(
        names, compile_all(TARGETS[target], programs), strict=True
    ):
        fn, args = STEPS[name]
        found = jaxamp.report(fn, policy)(*args)
        assert found.dots() == traffic.measure(module).dots, (name, policy)
        flops = sum(o.tally.flops for o in found.contractions)
        assert traffic.measure(module).flops == pytest.approx(flops, rel=0.01), (name, policy)


@pytest.mark.deviceless
@pytest.mark.parametrize("target", TARGETS)
def test_every_target_compiles(target: str):
    """Facts for float32 and a policy; a TPU keeps so small a program's values on the chip."""
    fn, args = STEPS["mlp"]
    found = jaxamp.estimate(fn, "auto_mixed_bf16", target)(*args)
    plain, mixed = found.compiled
    assert mixed.dots == mixed.planned == {"bf16": 5}
    assert plain.flops == mixed.flops == 939524096
    assert mixed.bytes > 0
    assert mixed.time.seconds > 0
    if TARGETS[target].gpu:
        assert mixed.bytes < plain.bytes
        # Without the starts of kernels: so small a program starts more of them in bf16.
        working = [c.time.seconds - c.time.by_starts for c in (plain, mixed)]
        assert working[1] < working[0]
    assert "facts" in str(found)
    assert "a model" in str(found)
    assert json.loads(found.to_json())["compiled"][1]["policy"] == "mixed_bf16"


@pytest.mark.deviceless("h200")
def test_an_amped_function_is_compared_with_float32():
    """As it was written, and under its own policy."""
    fn, args = STEPS["mlp"]
    step = jax.jit(jaxamp.amp(fn, "auto_mixed"))
    plain, mixed = jaxamp.estimate(step, target="h200")(*args).compiled
    assert (plain.dots, mixed.dots) == ({"f32": 5}, {"f16": 5})


def test_the_table_says_what_is_fact_and_what_is_model():
    """Two tables under their own names; dots that were planned and not made stand out."""
    rows = [
        Compiled(
            policy=policy, bytes=size, kernels=3, temporary=0, arguments=8, outputs=4, dots=dots,
            planned={"f8_e4m3": 2}, flops=64.0, unknown_loops=0,
            time=roofline.Roofline(2e-6, 2e-6, 0.0),
        )
        for policy, size, dots in (
            ("always_f32", 4096, {"f8_e4m3": 2}),
            ("mine", 1024, {"bf16": 2}),
        )
    ]  # fmt: skip
    shown = Estimate(program="net", target="h200", title="a chip", compiled=tuple(rows))
    text = str(shown)
    facts, model = text.index("compiled: facts"), text.index("roofline: a model")
    assert facts < text.index("bytes moved") < model < text.index("2.0 µs")
    assert "1.0 KiB  0.25×" in text
    assert "0, planned 2" in text
