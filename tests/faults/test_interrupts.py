"""Ctrl-C at any moment of a trace: the next call gives what it would have given."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxamp
from jaxamp import amp
from jaxamp.policy.context import current_policy
from tests.faults.programs import inputs, loss, same

OURS = str(Path(jaxamp.__file__).parent)
MOMENTS = 5  # spread over the calls that jaxamp makes while it traces


def _interrupted_at(count: int, call: Callable[[], Any]) -> int:
    """Make `call`, interrupted when jaxamp enters its function number `count`; how many it did."""
    entered = 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal entered
        code = frame.f_code
        if event != "call" or code.co_flags & inspect.CO_GENERATOR:
            return  # a generator is entered once more when it is dropped, where nobody can raise
        if code.co_filename.startswith(OURS):
            entered += 1
            if entered == count:
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


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
    total = _interrupted_at(-1, lambda: wrap(_fresh())(*args))  # the caches are warm by now
    assert total > 20 * MOMENTS
    for moment in range(1, int(0.95 * total), total // MOMENTS):
        stepped = wrap(_fresh())
        with pytest.raises(KeyboardInterrupt):
            _interrupted_at(moment, lambda f=stepped: f(*args))
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
