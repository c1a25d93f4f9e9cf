"""Dtypes by role, and the policy in force: in threads, in asyncio tasks, under jit, under amp."""

import asyncio
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

import jaxamp
from jaxamp import Precision, PrecisionPolicy, amp, policy_scope
from jaxamp.errors import PolicyError
from jaxamp.policy.context import current_policy
from jaxamp.training.dtype_roles import (
    SemanticDType,
    cast_floating,
    in_compute_dtype,
    resolve_dtype,
)

ROLES = "p=f32,c=bf16,o=f16"


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("compute", "bfloat16"),
        (SemanticDType.COMPUTE, "bfloat16"),
        ("param", "float32"),
        ("Parameter", "float32"),
        ("output", "float16"),
        (jnp.float16, "float16"),
        ("f32", "float32"),
        (Precision.BF16, "bfloat16"),
    ],
)
@pytest.mark.parametrize("policy", [ROLES, jmp.get_policy(ROLES), PrecisionPolicy.parse(ROLES)])
def test_dtypeish_resolves_to_a_dtype(word, name, policy):
    """Roles, names and dtypes mean the same under every form of one policy."""
    assert resolve_dtype(word, policy).name == name


@pytest.mark.parametrize("word", ["computer", "int32", jnp.int32, float, 3])
def test_what_is_no_dtypeish_is_refused(word):
    """The message lists roles and formats."""
    with pytest.raises(PolicyError, match="neither a float dtype nor a role"):
        resolve_dtype(word)


def test_cast_floating_touches_float_arrays_only():
    """Integers, keys, None, functions and Python numbers stay; numpy arrays stay numpy arrays."""
    key = jax.random.key(0)
    tree = {
        "jax": jnp.ones(2),
        "numpy": np.ones(2, np.float32),
        "shape": jax.ShapeDtypeStruct((2,), jnp.float32),
        "int": jnp.arange(2),
        "key": key,
        "rest": (None, 1.5, jnp.tanh, "text"),
    }
    cast = cast_floating(tree, "compute", ROLES)
    assert {cast[name].dtype for name in ("jax", "numpy", "shape")} == {jnp.dtype("bfloat16")}
    assert isinstance(cast["numpy"], np.ndarray)
    assert cast["int"] is tree["int"]
    assert cast["key"] is key
    assert cast["rest"] == tree["rest"]
    assert cast_floating(tree, None) is tree


def test_cast_floating_agrees_with_jmp():
    """The three roles cast as the three methods of the jmp policy do."""
    theirs = jmp.get_policy(ROLES)
    tree = {"w": jnp.linspace(0, 1, 5), "n": jnp.arange(3)}
    for role, cast in (
        ("compute", theirs.cast_to_compute),
        ("param", theirs.cast_to_param),
        ("output", theirs.cast_to_output),
    ):
        pairs = zip(
            jax.tree.leaves(cast_floating(tree, role, theirs)),
            jax.tree.leaves(cast(tree)),
            strict=True,
        )
        for ours, other in pairs:
            assert ours.dtype == other.dtype
            np.testing.assert_array_equal(ours, other)


def test_scopes_nest_and_end_also_by_an_error():
    """The innermost scope counts, and what was before comes back."""
    assert current_policy() is PrecisionPolicy.ALWAYS_F32
    scope = policy_scope("mixed_f16")
    with scope as outer, policy_scope("mixed_bf16"):
        assert str(current_policy()) == "mixed_bf16"
        with scope:  # the same object again
            assert current_policy() is outer
        with pytest.raises(ZeroDivisionError), scope:
            _ = 1 / 0
        assert str(current_policy()) == "mixed_bf16"
    assert current_policy() is PrecisionPolicy.ALWAYS_F32


def test_a_scope_belongs_to_its_thread():
    """A new thread starts with no scope, also one that gets a copy of the context."""
    seen = []
    with policy_scope("mixed_f16"):
        thread = threading.Thread(target=lambda: seen.append(current_policy()))
        thread.start()
        thread.join()
        seen.append(current_policy())
    assert list(map(str, seen)) == ["always_f32", "mixed_f16"]

    async def in_other_thread():
        with policy_scope("mixed_f16"):
            return await asyncio.to_thread(current_policy)

    assert str(asyncio.run(in_other_thread())) == "always_f32"


def test_asyncio_tasks_have_scopes_of_their_own():
    """Two tasks that take turns inside of their scopes do not see each other's."""

    async def task(policy):
        seen = []
        with policy_scope(policy):
            for _ in range(3):
                seen.append(str(current_policy()))
                await asyncio.sleep(0)
        return {*seen, str(current_policy())}

    async def main():
        return await asyncio.gather(task("mixed_f16"), task("mixed_bf16"))

    assert asyncio.run(main()) == [{"mixed_f16", "always_f32"}, {"mixed_bf16", "always_f32"}]


TRACED = []


@jax.jit
def by_role(x):
    """Library code that asks for the policy."""
    TRACED.append(x)
    return cast_floating(x, "compute")


def test_jit_compiles_once_for_each_policy():
    """A compiled function never answers with the dtype of another scope."""
    x = jnp.ones(3)
    TRACED.clear()
    for _ in range(2):
        for policy, dtype in (("mixed_f16", "float16"), ("mixed_bf16", "bfloat16")):
            with policy_scope(policy):
                assert by_role(x).dtype == dtype
        assert by_role(x).dtype == "float32"
    assert len(TRACED) == 3


def test_jit_in_asyncio_answers_rightly_or_not_at_all():
    """In a block that a task may leave halfway nothing is compiled; decorated, it is right."""
    x = jnp.ones(3)

    async def task(policy, dtype):
        decorated = policy_scope(policy)(jax.jit(lambda y: cast_floating(y, "compute")))
        with policy_scope(policy):
            await asyncio.sleep(0)
            assert cast_floating(x, "compute").dtype == dtype  # nothing is traced here
            with pytest.raises(PolicyError, match="Decorate the compiled function"):
                jax.jit(lambda y: cast_floating(y, "compute"))(x)
            await asyncio.sleep(0)
            for _ in range(2):
                assert decorated(x).dtype == dtype
                assert policy_scope(policy)(by_role)(x).dtype == dtype
                await asyncio.sleep(0)

    async def main():
        await asyncio.gather(task("mixed_f16", "float16"), task("mixed_bf16", "bfloat16"))

    asyncio.run(main())
    assert by_role(x).dtype == "float32"


def test_a_with_block_that_awaits_nothing_is_seen_by_jit_in_a_task():
    """Cells of a notebook run in a task; a block entered by a call may be left, and is refused."""
    x, cell = jnp.ones(3), {"by_role": by_role, "policy_scope": policy_scope, "x": jnp.ones(3)}
    source = "with policy_scope('mixed_f16'):\n    y = by_role(x)"

    def entered_by_a_call():
        scope = policy_scope("mixed_bf16")
        scope.__enter__()
        try:
            return jax.jit(lambda y: cast_floating(y, "compute"))(x)
        finally:
            scope.__exit__(None, None, None)

    async def other():
        with policy_scope("mixed_bf16"):
            for _ in range(3):
                await asyncio.sleep(0)

    async def main():
        task = asyncio.create_task(other())
        await asyncio.sleep(0)
        exec(compile(source, "<cell>", "exec"), cell)
        with pytest.raises(PolicyError, match="Decorate the compiled function"):
            entered_by_a_call()
        await task

    asyncio.run(main())
    assert cell["y"].dtype == "float16"
    assert by_role(x).dtype == "float32"


def test_a_coroutine_can_be_decorated():
    """The policy is in force while the coroutine runs, not while it is made."""

    @policy_scope("mixed_f16")
    async def main():
        await asyncio.sleep(0)
        return str(current_policy())

    assert asyncio.run(main()) == "mixed_f16"


def test_a_generator_cannot_be_decorated():
    """Its body would run outside of the scope."""

    def generator():
        yield current_policy()

    with pytest.raises(PolicyError, match="inside the generator"):
        policy_scope("mixed_f16")(generator)


def test_inside_of_amp_its_policy_is_in_force():
    """Innermost wins, as with scopes; also for the identity policy and in an inner jit."""
    seen = []

    @jax.jit
    def inner(x):
        seen.append(str(current_policy()))
        return x

    def f(x):
        seen.append(str(current_policy()))
        return amp(inner, "always_f32")(inner(x))

    with policy_scope("mixed_bf16"):
        amp(f, "mixed_f16")(jnp.ones(2))
        assert str(current_policy()) == "mixed_bf16"
    assert seen == ["mixed_f16", "mixed_f16", "always_f32"]


class Head(eqx.Module):
    """A layer with a compute dtype of its own."""

    weight: jax.Array
    compute_dtype: str | None = eqx.field(static=True, default=None)

    @in_compute_dtype
    def __call__(self, x):
        return self.weight @ x


@pytest.mark.parametrize(
    ("override", "dots"),
    [(None, "bf16"), ("compute", "bf16"), ("param", "f32"), ("f32", "f32"), ("f16", "f16")],
)
def test_a_module_overrides_its_compute_dtype_under_amp(override, dots):
    """Its products are planned in its own dtype; results have the program's dtype."""
    head = Head(jnp.ones((8, 8)), override)

    def f(head, x):
        return head(jnp.tanh(head.weight @ x))

    plan = jaxamp.plan_of(f, "mixed_bf16")(head, jnp.ones(8))
    products = [d.operand for d in plan.decisions() if d.primitive == "dot_general"]
    assert products == [Precision.BF16, Precision.parse(dots)]
    assert amp(f, "mixed_bf16")(head, jnp.ones(8)).dtype == "float32"


@pytest.mark.parametrize(
    ("override", "dots"),
    [(None, "f32"), ("compute", "f16"), ("param", "f32"), ("bf16", "bf16")],
)
def test_a_module_overrides_its_compute_dtype_without_amp(override, dots):
    """Where nothing rewrites the program, module and arguments are cast; results as before."""
    with policy_scope("mixed_f16"):
        jaxpr, shape = jax.make_jaxpr(Head.__call__, return_shape=True)(
            Head(jnp.ones((2, 2)), override), jnp.ones(2)
        )
    assert f":{dots}[2] = dot_general" in str(jaxpr)
    assert shape.dtype == "float32"
