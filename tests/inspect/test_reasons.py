"""Every reason that a plan gives is in the glossary, in the words that reports print."""

import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxamp import PrecisionPolicy, plan_of
from tests.fields.measure import FIELD_PROGRAMS
from tests.numerics.measure import CASES

PAGE = Path(__file__).parents[2] / "docs/explanation/glossary.md"
POLICIES = ("mixed_bf16", "mixed_f16", "fp8_current", "always_f16")
WILD = {
    r"(bf16|f16|f32)\b": r"(bf16|f16|f32|f8\\w+)",
    r"\d+": r"\\d+",
    "'highest'": r"'\\w+'",
    r"model\\.py:\\d\+": r"\\S+",
    "…": ".*",
}
"""What stands for others of its kind in the glossary."""


def entries(text):
    """What the table of reasons explains, as patterns."""
    section = text.partition("## Reasons that reports print")[2].partition("\n## ")[0]
    rows = (line.split(" | ")[0].strip("| ") for line in section.splitlines()[4:])
    for entry in (e for row in rows for e in row.split("; ") if e):
        pattern = re.escape(entry).replace("\\ ", " ").replace("\\…", "…")
        for what, wild in WILD.items():
            pattern = re.sub(what, wild, pattern)
        yield pattern


KNOWN = re.compile("|".join(entries(PAGE.read_text())))


def unexplained(reason):
    """The clauses of a reason that are not in the glossary; what a rule says is the user's."""
    clauses = () if reason.startswith(("rule: ", "kept in ")) else reason.split("; ")
    return [clause for clause in clauses if not KNOWN.fullmatch(clause)]


def reasons(fn, args, policies=POLICIES):
    """What plans say of a program."""
    plans = (plan_of(fn, policy)(*args) for policy in policies)
    return {d.reason for plan in plans for d in plan.decisions()}


def test_reasons_are_in_the_glossary():
    """Of a sample of programs that are hard to plan, under four policies."""
    found = set()
    for case in itertools.islice(CASES.values(), 0, None, 12):
        found |= reasons(case.fn, case.args)
    assert len(found) > 20
    assert {clause for reason in found for clause in unexplained(reason)} == set()


def test_reasons_of_quantized_products_are_in_the_glossary():
    """Of a step that updates a matrix by a gradient of 8-bit operands."""

    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.tanh(jnp.tanh(x @ w) @ w).sum())(w)

    every = PrecisionPolicy.FP8_CURRENT.replace(scaling={"small": (), "ends": True})
    found = reasons(step, (jnp.ones((32, 32)), jnp.ones((32, 32))), (every,))
    assert any("coarser" in reason for reason in found)
    assert {clause for reason in found for clause in unexplained(reason)} == set()


@pytest.mark.long
@pytest.mark.parametrize("part", range(8))
def test_all_reasons_are_in_the_glossary(part):
    """Of all programs that are hard to plan, and of those of many fields."""
    programs = [*CASES.values(), *FIELD_PROGRAMS.values()]
    found = {r for p in programs[part::8] for r in reasons(p.fn, p.args)}
    assert {clause for reason in found for clause in unexplained(reason)} == set()


def test_reasons_of_many_devices_are_in_the_glossary():
    """What only programs of several devices are told."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def step(w, v, x):
        def loss(w, v):
            whole = jax.lax.all_gather(w, "d", tiled=True)
            return jnp.mean(jnp.sin(jax.lax.psum(jnp.sin(x @ whole) @ v, "d") @ whole))

        return jax.grad(loss, (0, 1))(w, v)

    specs = {"in_specs": (spec("d"), spec(), spec("d")), "out_specs": (spec("d"), spec())}
    fn = jax.shard_map(step, mesh=mesh, **specs)
    args = jnp.ones((16, 16)), jnp.ones((16, 16)), jnp.ones((16, 16))
    low = PrecisionPolicy.MIXED_BF16.replace(allreduce="bf16")
    found = reasons(fn, args, (low, *POLICIES))
    assert any("over devices" in reason for reason in found)
    assert any("sent in" in reason for reason in found)
    assert {clause for reason in found for clause in unexplained(reason)} == set()


@pytest.mark.parametrize("reason", ["dense in bf16", "operands in bf16; a frobbed carry"])
def test_an_unknown_word_is_found(reason):
    """The check can fail."""
    assert unexplained(reason)
