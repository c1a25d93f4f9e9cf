"""Threads that use jaxamp at once do not disturb each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

import jaxamp
from jaxamp import PrecisionPolicy, Rule, amp, register_op_kind
from jaxamp.policy.context import current_policy
from tests.faults.programs import inputs, loss, same

THREADS = 6
POLICIES = ("auto_mixed_bf16", "auto_mixed", "always_f32")


def _together(*calls: Any) -> list[Any]:
    """The results of calls that threads make at the same time."""
    with ThreadPoolExecutor(THREADS) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@pytest.mark.long
def test_one_function_many_policies_and_shapes() -> None:
    """Each thread gets the answer of its policy and shape, forward and backward."""

    def f(params: Any, x: Any) -> Any:
        return loss(params, x)

    cases = [*((policy, inputs(4)) for policy in POLICIES), (POLICIES[0], inputs(6))]

    def call(policy: str, args: Any, fn: Any = f) -> Any:
        return amp(jax.value_and_grad(fn), policy)(*args)

    got = _together(*(lambda case=case: call(*case) for case in cases * 2))
    want = [call(*case, lambda *a: loss(*a)) for case in cases] * 2
    for one, other in zip(got, want, strict=True):
        same(one, other)
    values = [float(value) for value, _ in got]
    assert len(set(values)) == len(cases)  # no thread ran under the policy of another


def test_reports_do_not_touch_what_others_run() -> None:
    """plan_of, report, explain, probe and calls at once; each says what it says alone."""
    args = inputs(5)

    def f(params: Any, x: Any) -> Any:
        return loss(params, x)

    asks = [
        lambda: str(jaxamp.plan_of(f, "auto_mixed")(*args)),
        lambda: jaxamp.report(f)(*args).to_json(),
        lambda: str(jaxamp.explain(f)(*args)),
        lambda: str(jaxamp.probe(f)(*args)),
        lambda: float(amp(f)(*args)),
        lambda: jax.tree.map(lambda x: x.tolist(), jax.grad(amp(f, "auto_mixed"))(*args)),
    ]
    alone = [ask() for ask in asks]
    assert _together(*asks) == alone


def test_registering_while_others_trace() -> None:
    """Kinds are registered and policies made while other threads trace."""

    def register(index: int) -> None:
        register_op_kind(Primitive(f"made_by_thread_{index}"), "elementwise")

    def call(index: int) -> Any:
        rule = Rule(precision="f32", scope=f"layer{index}")
        policy = PrecisionPolicy.AUTO_MIXED.with_rules(rule)
        assert current_policy().name == "always_f32"  # that of no scope at all
        return amp(lambda x: jnp.tanh(x @ x), policy)(jnp.eye(3) * index)

    calls = [lambda i=i: register(i) if i % 2 else call(i) for i in range(2 * THREADS)]
    for index, result in enumerate(_together(*calls)):
        if index % 2 == 0:
            same(result, jnp.tanh(jnp.eye(3) * index @ (jnp.eye(3) * index)))


def test_host_callbacks_are_outside() -> None:
    """A host callback runs on another thread and is in no policy's scope."""
    seen = []

    def host(x: Any) -> Any:
        seen.append(current_policy().name)
        return np.asarray(x) * 2

    def f(x: Any) -> Any:
        y = x @ x
        return jax.pure_callback(host, jax.ShapeDtypeStruct(y.shape, y.dtype), y)

    x = jnp.eye(4)
    same(amp(f, "auto_mixed")(x), 2 * x)
    assert seen == ["always_f32"]
