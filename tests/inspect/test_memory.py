"""Nothing that looks at a program keeps it, what it captured, or what it was given."""

from __future__ import annotations

import functools
import gc
import weakref

import jax.numpy as jnp
import pytest

import jaxamp
from jaxamp import amp, training
from jaxamp.quantized.fp8_products import verify_lowering

LARGE = 1e4  # a product of such numbers is infinite in float16
ASKED = {
    "plan_of": lambda fn, x: jaxamp.plan_of(fn)(x),
    "report": lambda fn, x: jaxamp.report(fn)(x),
    "explain": lambda fn, x: jaxamp.explain(fn)(x),
    "diff": lambda fn, x: jaxamp.diff("mixed_f16", "always_f32")(fn)(x),
    "probe": lambda fn, x: jaxamp.probe(fn)(x),
    "probe of what is infinite": lambda fn, x: jaxamp.probe(fn, "mixed_f16")(x * LARGE),
    "explain_nonfinite": lambda fn, x: training.explain_nonfinite(amp(fn, "mixed_f16"))(x * LARGE),
    "debug_step": lambda fn, x: training.debug_step(amp(fn, "mixed_f16"))(x * LARGE),
    "tune": lambda fn, x: jaxamp.tune(fn, (x,)),
    "verify_lowering": lambda fn, x: verify_lowering(fn, "fp8_current")(x),
}


@pytest.mark.product("ask", every=3)
@pytest.mark.parametrize("ask", ASKED)
def test_a_dropped_program_dies(ask):
    """A captured weight, an object in a partial, the function and the argument, once dropped."""

    class Model:
        def __init__(self):
            self.scale = 2.0

        def __call__(self, x, w):
            return jnp.tanh(x @ w) @ w * self.scale

    def call():
        model, w, x = Model(), jnp.eye(4) * 3, jnp.ones((4, 4)) + 1

        def program(model, x):
            return model(x, w)

        answer = ASKED[ask](functools.partial(program, model), x)
        assert str(answer)
        return [weakref.ref(thing) for thing in (model, w, x, program)]

    references = call()
    gc.collect()
    assert [reference() for reference in references] == [None] * 4
