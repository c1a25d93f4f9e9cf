"""Programs with one planted fault each, in the line that says so.

A fault is an infinity or a NaN that reaches a result, or numbers that vanish because the format is
too narrow. Programs are small; most run in float16 under the policy's own decisions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

MARK = "# planted"


@dataclasses.dataclass(frozen=True)
class Fault:
    """A program, its arguments, and what is to be found.

    Attributes:
      fn: the program.
      args: its arguments.
      kind: ``"infinity"``, ``"NaN"`` or ``"underflow"``.
      policy: what it runs under.
      scope: the scope that is to be named.
      backward: whether the fault is in the backward pass.
      iterations: the iteration that is to be named.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kind: str = "infinity"
    policy: str = "mixed_f16"
    scope: str = ""
    backward: bool = False
    iterations: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The program's name."""
        return self.fn.__name__


FAULTS: list[Fault] = []
EYE = jnp.eye(4, dtype=jnp.float32)
ONES = jnp.ones((4, 4), jnp.float32)


def fault(*args: Any, **facts: Any) -> Callable[[Any], Any]:
    """Enters a program in the list."""

    def enter(fn: Any) -> Any:
        FAULTS.append(Fault(fn, args, **facts))
        return fn

    return enter


def layers(x: Any, w: Any, bad: int, fail: Callable[[Any], Any]) -> Any:
    """Twelve residual layers, one of them with a fault."""
    for index in range(12):
        with jax.named_scope(f"layer{index}"):
            x = x + (fail(x) if index == bad else 0.1 * jnp.tanh(x @ w))
    return x


@fault(0.1 * ONES, 0.1 * ONES, 1e6, scope="layer7", backward=True)
def backward_overflow_in_layer_7_of_12(x, w, large):
    """Small on the way forward; on the way back the cotangent is multiplied first."""

    def steep(x):
        return (jnp.tanh((x / large) @ w) @ w) * large  # planted

    def loss(x):
        return jnp.sum(layers(x, w, 7, steep))

    return jax.grad(loss)(x)


@fault(ONES * 0.5, 0.1 * ONES, 3e6, scope="layer4")
def forward_overflow_in_layer_4(x, w, large):
    """A factor above 65504, in one layer only."""

    def fail(x):
        return x @ (w * large)  # planted

    return layers(x, w, 4, fail)


@fault(ONES * 0.25, EYE, scope="head")
def wide_product(x, w):
    """A matrix product whose result does not fit."""
    with jax.named_scope("head"):
        y = (x * 1e3) @ (w * 1e3)  # planted
        return jnp.tanh(y @ w) @ w


@fault(ONES * 12, ONES)
def exponential_before_a_product(x, w):
    """An exponential that f32 holds and f16 does not."""
    y = jnp.exp(x)
    return y @ w  # planted


@fault(ONES * 300, ONES)
def squares_before_a_product(x, w):
    """A square that f16 does not hold."""
    y = x * x
    return y @ w  # planted


@fault(ONES * 1e5, ONES)
def large_input(x, w):
    """An input that f16 does not hold."""
    return x @ w  # planted


@fault(ONES, ONES * 7e4)
def large_weight(x, w):
    """A weight that f16 does not hold."""
    return x @ w  # planted


@fault(jnp.zeros(4), kind="NaN")
def zero_over_zero(x):
    """A normalization of nothing."""
    total = jnp.sum(x)
    return x / total  # planted


@fault(jnp.zeros(4))
def one_over_zero(x):
    """A reciprocal of nothing."""
    return 1 / x + 2  # planted


@fault(jnp.array([0.5, 0.0, 1.0]))
def logarithm_of_zero(p):
    """A cross entropy without an epsilon."""
    return -jnp.sum(jnp.log(p))  # planted


@fault(-jnp.ones(3), kind="NaN")
def root_of_a_negative(x):
    """A variance that came out negative."""
    return jnp.sqrt(x) + 1  # planted


@fault(jnp.zeros(3))
def gradient_of_a_root_at_zero(x):
    """The derivative of a square root at zero, which JAX computes on the way forward."""

    def loss(x):
        return jnp.sum(jnp.sqrt(x))  # planted

    return jax.grad(loss)(x)


@fault(jnp.zeros(3))
def gradient_of_a_norm_at_zero(x):
    """Infinity times zero, in the derivative of a norm."""

    def loss(x):
        squares = x * x
        return jnp.sqrt(jnp.sum(squares))  # planted

    return jax.grad(loss)(x)


@fault(-jnp.ones(3), kind="NaN")
def fully_masked_softmax(x):
    """All scores are masked out."""
    scores = jnp.where(x > 0, x, -jnp.inf)
    return jax.nn.softmax(scores)  # planted


@fault(ONES * 0.1, ONES, iterations=(37,))
def scan_iteration_37(w, x):
    """A scan that divides by zero in one iteration."""
    steps = jnp.arange(64.0)

    def body(carry, step):
        scaled = (1 + carry * carry) / (step - 37)  # planted
        return scaled @ w, None

    return lax.scan(body, x, steps)[0]


@fault(ONES * 0.1, ONES, jnp.ones(50).at[37].set(3e5), iterations=(37,))
def scan_overflow_in_iteration_37(w, x, scales):
    """A product that overflows f16 in one iteration alone."""

    def body(carry, scale):
        large = (1 + jnp.tanh(carry)) * scale  # planted
        return carry + large @ w, None

    return lax.scan(body, x, scales)[0]


@fault(ONES * 1e-9, ONES * 0.25, jnp.ones(8).at[4].set(1e6), backward=True, iterations=(3,))
def backward_of_a_scan(x, w, scales):
    """One cotangent is large; going backward, the fifth step of eight is the fourth."""

    def loss(x):
        def body(carry, scale):
            return (jnp.tanh(carry) @ w) * scale, None  # planted

        return jnp.sum(lax.scan(body, x, scales)[0])

    return jax.grad(loss)(x)


@fault(ONES * 2.5, ONES, iterations=(5,))
def while_loop(w, x):
    """Ten times as much in each iteration; the sixth cannot read what the fifth has made."""

    def body(state):
        count, carry = state
        return count + 1, carry @ w  # planted

    return lax.while_loop(lambda state: state[0] < 7, body, (0, x))[1] @ w


@fault(ONES, iterations=(1, 2))
def scan_in_a_scan(x):
    """The third step of the second round."""

    def inner(carry, y):
        return carry / y, None  # planted

    def outer(carry, ys):
        return lax.scan(inner, carry, ys)[0], None

    return lax.scan(outer, x, jnp.ones((3, 4)).at[1, 2].set(0))[0]


@fault(ONES, iterations=(1,))
def reversed_scan(x):
    """The last but one entry, which a reversed scan meets second."""

    def body(carry, y):
        return carry, carry / y  # planted

    return lax.scan(body, x, jnp.array([1.0, 2.0, 0.0, 3.0]), reverse=True)[1]


@fault(ONES, ONES, 1e5)
def taken_branch(x, w, large):
    """The fault is in the branch that is taken."""

    def bad(x):
        y = x * large
        return y @ w  # planted

    return lax.cond(jnp.sum(x) > 0, bad, lambda x: x @ w, x)


@fault(jnp.int32(2), ONES * 30)
def third_of_four_branches(index, x):
    """The third branch overflows float32 itself."""

    def bad(x):
        return jnp.exp(x * 5)  # planted

    return lax.switch(index, [jnp.sin, jnp.cos, bad, jnp.tanh], x)


@fault(ONES * 400, ONES)
def rematerialized(x, w):
    """Inside a checkpoint, differentiated."""

    @jax.checkpoint
    def block(x):
        y = x * x
        return y @ w  # planted

    return jax.value_and_grad(lambda x: jnp.sum(jax.nn.relu(block(x))))(x)


@jax.custom_vjp
def _clipped(x):
    return jnp.clip(x, -1, 1)


def _clipped_forward(x):
    return _clipped(x), x


def _clipped_backward(x, cotangent):
    scale = jnp.sum(x) * 0
    return (cotangent / scale,)


_clipped.defvjp(_clipped_forward, _clipped_backward)


@fault(ONES * 0.5, backward=True)
def custom_vjp_backward(x):
    """The user's own backward rule divides by zero: JAX gives that the line of the call."""
    return jax.grad(lambda x: jnp.sum(_clipped(x) + x))(x)  # planted


@jax.custom_vjp
def _product(x, w, large):
    return x @ w


def _product_backward(saved, cotangent):
    x, w, large = saved
    grown = cotangent * large
    return grown @ w.T, x.T @ cotangent, jnp.zeros_like(large)


_product.defvjp(lambda x, w, large: (_product(x, w, large), (x, w, large)), _product_backward)


@fault(ONES, ONES, 1e5, backward=True)
def custom_vjp_backward_overflow(x, w, large):
    """The user's own backward rule overflows f16 in a product: its line is that of the call."""
    return jax.grad(lambda x: jnp.sum(_product(x, w, large)))(x)  # planted


@jax.custom_jvp
def _logarithm(x):
    return jnp.log(x)  # planted


@_logarithm.defjvp
def _logarithm_jvp(primals, tangents):
    return _logarithm(*primals), tangents[0] / (primals[0] + 1)


@fault(jnp.zeros(3))
def custom_jvp_forward(x):
    """Inside the function of a custom derivative."""
    return jax.value_and_grad(lambda x: jnp.sum(_logarithm(x)))(x)


@functools.partial(jax.jit, static_argnums=1)
def _power(x, n):
    return x**n  # planted


@fault(ONES * 1e8)
def inside_jit(x):
    """Inside a function that is compiled by itself."""
    return jnp.tanh(_power(x, 6) * 1e-10) + jax.jit(_power, static_argnums=1)(x, 5)


@fault(ONES * 1e3, ONES * 1e3)
def kept_in_a_cell(x, w):
    """Written to a mutable array, and read again."""
    cell = jax.new_ref(jnp.zeros((2, 4, 4)))
    cell[0] = x @ (w @ w)  # planted
    cell[1] = jnp.tanh(x)
    return jnp.sin(cell[...] + 1.0)


@fault(ONES * 1e3, ONES * 1e3)
def frozen_in_a_cell(x, w):
    """Written to a mutable array, which ends as a value and cannot be read after."""
    cell = jax.new_ref(jnp.zeros((4, 4)))
    cell[...] = x @ (w @ w)  # planted
    return jnp.sin(jax.freeze(cell))


@fault(ONES * 1e5, ONES)
def read_from_a_cell(x, w):
    """A mutable array that a loop writes, too large for a product that reads it."""
    cell = jax.new_ref(x)

    def body(i, carry):
        cell[...] = cell[...] + 1.0
        return carry * 0.5

    half = lax.fori_loop(0, 3, body, x)
    return cell[...] @ w + half  # planted


@fault(ONES * 1e5, ONES)
def mapped(x, w):
    """Under vmap."""
    return jax.vmap(lambda row: row @ w)(x)  # planted


@fault(ONES, EYE, kind="underflow")
def small_product(x, w):
    """A product too small for f16, which reads it."""
    y = (x * 1e-4) @ (w * 1e-5)  # planted
    return (y @ w) * 3e4 * 3e4


@fault(ONES, EYE, kind="underflow", backward=True)
def small_gradient(x, w):
    """A gradient without a loss scale."""

    def loss(x):
        hidden = jnp.tanh(x @ w)
        return jnp.mean(hidden @ w) * 1e-7  # planted

    return jax.grad(loss)(x)


@fault(ONES, EYE, kind="underflow", scope="layer9")
def underflow_in_layer_9(x, w):
    """The activations of one layer vanish."""

    def vanish(x):
        y = (x * 1e-5) @ (w * 1e-4)  # planted
        return (y @ w) * 3e4 * 3e4

    return layers(x, w, 9, vanish)


@fault(ONES, EYE, kind="underflow")
def underflow_in_a_scan(x, w):
    """Vanishes a little more in each iteration."""

    def body(carry, _):
        inner = carry @ (w * 0.05)  # planted
        return inner @ w, None

    return lax.scan(body, x, length=9)[0] * 1e9


@fault(ONES * 1e20, EYE, policy="mixed_bf16")
def overflow_of_float32_itself(x, w):
    """Not for want of precision: f32 overflows as well."""
    y = x @ (w * 1e20)  # planted
    return y @ w


@fault(ONES * 3.3995e38, EYE, policy="mixed_bf16")
def overflow_of_bf16(x, w):
    """Between the largest number of bf16 and that of f32."""
    return jnp.max(jnp.abs(x @ w))  # planted
