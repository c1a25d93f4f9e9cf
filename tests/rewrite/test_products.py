"""Programs × transforms × presets: types, structure, where products run, values."""

from __future__ import annotations

import collections
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from jaxamp import amp
from tests import audit, products
from tests.products import Case
from tests.programs import PROGRAMS, effects
from tests.tolerances import BY_ORDER, CLASSES
from tests.transforms import TRANSFORMS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

BF16 = products.every_case("auto_mixed_bf16")
REFUSED = [case for case in BF16 if case.refusal is not None]
LOWERED = products.lowering_sample()
VALUES = products.value_sample()


@pytest.mark.product("case.program", every=4)
@pytest.mark.parametrize("case", LOWERED, ids=str)
def test_composition_traces_and_lowers(case: Case) -> None:
    """Types, weak types and structure stay, the jaxpr is valid, products run low."""
    products.check_lowering(case)


@pytest.mark.product("case.transform")
@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_refusal_is_of_jax_itself(case: Case) -> None:
    """What the table calls refused is refused by JAX for the plain function too."""
    products.check_refused(case)


@pytest.mark.product("case.program", every=7)
@pytest.mark.parametrize("case", VALUES, ids=str)
def test_values_agree_with_float32(case: Case) -> None:
    """Values are within the table's tolerance of the float32 ones."""
    products.check_values(case)


@pytest.mark.product("name", every=3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_always_f32_is_the_identity(name: str) -> None:
    """The all-float32 policy gives the same jaxpr back."""
    program = PROGRAMS[name]
    plain = jax.make_jaxpr(program.fn)(*program.args)
    amped = jax.make_jaxpr(amp(program.fn, "always_f32"))(*program.args)
    assert _primitives(amped) == _primitives(plain)


def _primitives(closed: core.ClosedJaxpr) -> list[str]:
    return [e.primitive.name for e in audit.equations(closed.jaxpr)]


@pytest.mark.parametrize("name", ["sgd_step", "adamw_step", "clipped_momentum_step", "train_scan"])
def test_master_weights_are_not_rounded(name: str) -> None:
    """New parameters carry all their 24 bits, and the model's products still run low."""
    program = PROGRAMS[name]
    amped = jax.jit(amp(program.fn, "auto_mixed_bf16"))
    params = amped(*program.args)[0]
    values = np.concatenate([np.ravel(p) for p in jax.tree.leaves(params)])
    assert np.mean(values == values.astype(jnp.bfloat16).astype(np.float32)) < 0.1
    jaxpr = jax.make_jaxpr(amped)(*program.args).jaxpr
    assert all(p.is_low for p in audit.products(jaxpr))


@pytest.mark.parametrize("name", [n for n, p in PROGRAMS.items() if "callback" in p.tags])
def test_host_calls_run_once_in_order(name: str) -> None:
    """The host sees the same calls as without amp, in order, with float32 arrays."""
    program = PROGRAMS[name]
    expected, seen = (_host_calls(f, program.args) for f in (program.fn, amp(program.fn)))
    assert expected
    assert [tag for tag, _ in seen] == [tag for tag, _ in expected]
    np.testing.assert_allclose([v for _, v in seen], [v for _, v in expected], rtol=0.1, atol=0.5)


def _host_calls(fn: Any, args: Any) -> list[tuple[str, float]]:
    effects.LOG.clear()
    jax.block_until_ready(jax.jit(fn)(*args))
    jax.effects_barrier()
    return list(effects.LOG)


def test_samples_cover_every_pair() -> None:
    """The default samples meet each pair of preset and transform, and every program."""
    pairs = collections.Counter((c.preset, c.transform) for c in VALUES)
    presets = ("auto_mixed_bf16", "auto_mixed", "auto_mixed_conservative")
    assert all(pairs[p, t] for p in presets for t in TRANSFORMS)
    assert {c.program for c in VALUES} == set(PROGRAMS)
    assert {c.program for c in LOWERED} == set(PROGRAMS)
    assert min(collections.Counter(c.transform for c in LOWERED).values()) > 40
    refused = {(c.program, c.transform) for c in REFUSED}
    samples = {
        (c.program, c.transform) for first in range(3) for c in products.lowering_sample(first)
    }
    assert samples.isdisjoint(refused)
    assert samples | refused == set(itertools.product(PROGRAMS, TRANSFORMS))


def test_programs_are_many_and_described() -> None:
    """At least sixty programs, each with a docstring and a row of the tolerance table."""
    assert len(PROGRAMS) >= 60
    for program in PROGRAMS.values():
        assert program.fn.__doc__, program.name
        assert program.tolerance in CLASSES
    assert {t.order for t in TRANSFORMS.values()} == set(BY_ORDER)
