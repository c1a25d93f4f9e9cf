"""Ctrl-C at any moment of a trace: the next call gives what it would have given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest

from jaxamp import amp
from jaxamp.policy.context import current_policy
from tests.calls import entered
from tests.faults.programs import inputs, loss, same

MOMENTS = 5  # spread over the calls that jaxamp makes while it traces


def _fresh() -> Callable[..., Any]:
    """A function that no cache has seen."""
    return lambda params, x: loss(params, x)


@pytest.mark.long
def test_an_interrupted_trace_leaves_nothing_behind() -> None:
    """Wherever the interrupt falls, the function works afterwards, and no policy stays in force."""

    def wrap(f: Callable[..., Any]) -> Callable[..., Any]:
        return jax.value_and_grad(amp(f))  # its rules are planned when JAX differentiates

    args, policy = inputs(), current_policy()
    want = wrap(_fresh())(*args)
    total = entered(lambda: wrap(_fresh())(*args))  # the caches are warm by now
    assert total > 20 * MOMENTS
    for moment in range(1, int(0.95 * total), total // MOMENTS):
        stepped = wrap(_fresh())
        with pytest.raises(KeyboardInterrupt):
            entered(lambda f=stepped: f(*args), until=moment)
        assert current_policy() == policy
        same(stepped(*args), want)


@pytest.mark.parametrize("place", ["body", "inner_jit", "scan", "backward_rule"])
def test_an_interrupt_in_the_users_code(place: str) -> None:
    """An interrupt, or any other exception, that the user's own code meets while it is traced."""
    raising: list[BaseException] = [KeyboardInterrupt(), MemoryError(), RuntimeError("mine")]

    def maybe(here: str) -> None:
        if here == place and raising:
            raise raising.pop()

    @jax.custom_vjp
    def identity(x: Any) -> Any:
        return x

    def backward(_: Any, g: Any) -> Any:
        maybe("backward_rule")
        return (g,)

    identity.defvjp(lambda x: (x, None), backward)

    @jax.jit
    def inner(x: Any) -> Any:
        maybe("inner_jit")
        return x * 2

    def body(c: Any, _: Any) -> Any:
        maybe("scan")
        return c * 0.5, None

    def f(params: Any, x: Any) -> Any:
        maybe("body")
        x = jax.lax.scan(body, inner(identity(x @ params["w"])), None, length=2)[0]
        return x.sum()

    args, step = inputs(), jax.value_and_grad(amp(f))
    for error in reversed([*raising]):
        with pytest.raises(type(error)):
            step(*args)
    same(step(*args), jax.value_and_grad(amp(lambda *a: f(*a)))(*args))
