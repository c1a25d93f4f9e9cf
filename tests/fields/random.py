"""Random programs with large offsets, in the shapes in which small differences get lost.

A sum that is returned or read as a difference; a state to which a network adds little, for some
turns; a lookup at a computed place. A program is plain data, so that what hypothesis prints is a
reproduction: `check(Drawn(shape="increments", offset=1e5, turns=5))`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import Array, lax

from tests.fields.measure import ORDERS, compared, ordered, run
from tests.fields.oracle import Oracle, evaluated
from tests.fields.registry import FieldProgram
from tests.numerics.ulps import LOW

BATCH, WIDTH = 8, 16


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A program as data.

    Attributes:
        shape: a key of `SHAPES`.
        offset: of the values that are added to.
        step: the size of what is added.
        turns: how often.
        loop: a key of `LOOPS`.
        shared: whether all turns have one matrix.
        read: a key of `READS`.
        returned: whether the state is an auxiliary output.
        low: the format.
        order: of `amp` and the derivative; `amp` runs it forward.
    """

    shape: str = "sum"
    offset: float = 1500.0
    step: float = 1.0
    turns: int = 1
    loop: str = "python"
    shared: bool = True
    read: str = "difference"
    returned: bool = False
    low: str = "bf16"
    order: str = ORDERS[0]


Step = Callable[[Array, Array], Array]


def _in_python(step: Step, c: Array, ws: Array) -> Array:
    for w in ws:
        c = step(c, w)
    return c


def _in_a_scan(step: Step, c: Array, ws: Array) -> Array:
    return lax.scan(lambda c, w: (step(c, w), None), c, ws)[0]


def _in_a_counted_loop(step: Step, c: Array, ws: Array) -> Array:
    return lax.fori_loop(0, len(ws), lambda i, c: step(c, ws[i]), c)


LOOPS = {"python": _in_python, "scan": _in_a_scan, "fori": _in_a_counted_loop}

READS: dict[str, Callable[[Array, Array, float], Array]] = {
    "difference": lambda c, m, step: (c - m) / step,
    "constant": lambda c, m, step: (c - jnp.mean(m)) / step,
    "ratio": lambda c, m, step: (c / m - 1) * (jnp.mean(m) / step),
    "logarithm": lambda c, m, step: jnp.log(c / m) * (jnp.mean(m) / step),
    "norm": lambda c, m, step: (c - c.mean(-1, keepdims=True)) / (c.std(-1, keepdims=True) + step),
}
"""How what is added is read from the sum."""


def _sum(drawn: Drawn, p: Any, x: Array, m: Array) -> tuple[Array, Array]:
    h = m + drawn.step * (x @ p["w"][0])
    return READS[drawn.read](h, m, drawn.step) @ p["v"], h


def _increments(drawn: Drawn, p: Any, x: Array, m: Array) -> tuple[Array, Array]:
    def step(c: Array, w: Array) -> Array:
        return c + drawn.step * jnp.tanh(READS[drawn.read](c, m, drawn.step) @ w)

    ws = p["w"][:1].repeat(drawn.turns, 0) if drawn.shared else p["w"][: drawn.turns]
    c = LOOPS[drawn.loop](step, m + drawn.step * x, ws)
    return READS[drawn.read](c, m, drawn.step) @ p["v"], c


def _interpolated(drawn: Drawn, p: Any, x: Array, m: Array) -> tuple[Array, Array]:
    """A smooth curve over as many knots as the offset says, read at computed places."""
    knots = int(min(drawn.offset, 2000.0))
    grid = jnp.arange(float(knots))
    curve = jnp.sin(grid * (6.0 / knots))
    place = jnp.clip(knots / 2 + drawn.step * knots / 30 * (x @ p["w"][0]), 0.0, knots - 1.001)
    if drawn.read in ("difference", "constant"):
        value = jnp.interp(place, grid, curve)
    else:
        low = jnp.floor(place)
        i = low.astype(jnp.int32)
        value = curve[i] + (place - low) * (curve[i + 1] - curve[i])
    return value @ p["v"], place


def _durations(drawn: Drawn, p: Any, x: Array, m: Array) -> tuple[Array, Array]:
    """Durations are summed; frames find their token and their place within it."""
    long = min(drawn.offset, 2000.0) / WIDTH
    duration = long * jnp.exp(0.1 * drawn.step * jnp.tanh(x @ p["w"][0]))
    end = jnp.cumsum(duration, -1)
    frames = jnp.linspace(0.02, 0.7, 24) * long * WIDTH
    index = jax.vmap(lambda e: jnp.searchsorted(e, frames))(lax.stop_gradient(end))
    index = jnp.minimum(index, WIDTH - 1)
    start = jnp.take_along_axis(end - duration, index, -1)
    within = (frames - start) / jnp.take_along_axis(duration, index, -1)
    # The bump is zero where one token ends and the next begins: rounding makes no jumps.
    value = jnp.take_along_axis(x, index, -1) * within * (1 - within)
    return value[:, :WIDTH] @ p["v"], end


SHAPES = {
    "sum": _sum,
    "increments": _increments,
    "interpolated": _interpolated,
    "durations": _durations,
}


def programs() -> st.SearchStrategy[Drawn]:
    """Programs of all shapes."""
    return st.builds(
        Drawn,
        shape=st.sampled_from(list(SHAPES)),
        offset=st.sampled_from([30.0, 288.0, 1500.0, 1e4, 1e5]),
        step=st.sampled_from([0.3, 1.0, 10.0]),
        turns=st.integers(1, 10),
        loop=st.sampled_from(list(LOOPS)),
        shared=st.booleans(),
        read=st.sampled_from(list(READS)),
        returned=st.booleans(),
        low=st.sampled_from(list(LOW)),
        order=st.sampled_from([*ORDERS, "amp"]),
    )


def program(drawn: Drawn) -> FieldProgram:
    """Build the function and the arguments that a random program stands for."""

    def fn(p: Any, x: Array, m: Array) -> Any:
        out, state = SHAPES[drawn.shape](drawn, p, x, m)
        value = out if forward else jnp.mean(out**2)
        return (value, {"out": out, "state": state}) if drawn.returned else value

    forward = drawn.order == "amp"
    rng = np.random.default_rng(5)
    normal = lambda *shape, scale=1.0: (scale * rng.normal(size=shape)).astype(np.float32)  # noqa: E731
    p = {"w": normal(10, WIDTH, WIDTH, scale=WIDTH**-0.5), "v": normal(WIDTH, 4, scale=0.25)}
    m = drawn.offset * (1 + normal(BATCH, WIDTH, scale=1e-3))
    args = p, normal(BATCH, WIDTH), m.astype(np.float32)
    return FieldProgram(drawn.shape, "random", fn, args, forward, aux=drawn.returned)


def check(drawn: Drawn) -> None:
    """Hold a random program to the bound of the fields.

    Raises:
        AssertionError: if `amp` loses more.
    """
    random_program = program(drawn)
    oracles = [Oracle(np.float64), Oracle(np.float32, LOW[drawn.low])]
    reference, rounded = evaluated(ordered(random_program, ORDERS[1]), random_program.args, oracles)
    got = run(ordered(random_program, drawn.order, drawn.low), random_program.args)
    wrong = [leaf for leaf in compared(got, reference, rounded) if leaf.decided]
    wrong = [leaf for leaf in wrong if not leaf.excess <= 1.0]
    assert not wrong, wrong
