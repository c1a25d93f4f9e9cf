"""The policy "auto": what it picks for which device, and that it says why."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import pytest

from jaxamp import PrecisionPolicy, amp, auto_policy, plan_of
from jaxamp.training import DynamicLossScale, NoOpLossScale
from jaxamp.training import auto_policy as auto


@dataclasses.dataclass(frozen=True)
class Device:
    """As much of a JAX device as the choice depends on."""

    platform: str
    device_kind: str
    compute_capability: str = ""


@pytest.mark.parametrize(
    ("device", "policy", "reason"),
    [
        (Device("tpu", "TPU v2"), "mixed_bf16", "every TPU"),
        (Device("tpu", "TPU v6 lite"), "mixed_bf16", "every TPU"),
        (Device("gpu", "Tesla P100", "6.0"), "mixed_f16", "f16 storage"),
        (Device("gpu", "Tesla V100", "7.0"), "mixed_f16", "loss scale"),
        (Device("gpu", "Tesla T4", "7.5"), "mixed_f16", "starts at 8.0"),
        (Device("gpu", "NVIDIA A100", "8.0"), "mixed_bf16", "capability 8.0"),
        (Device("gpu", "NVIDIA GeForce RTX 4090", "8.9"), "mixed_bf16", "8.9"),
        (Device("gpu", "NVIDIA H200", "9.0"), "mixed_bf16", "9.0"),
        (Device("cuda", "NVIDIA GB200", "10.0"), "mixed_bf16", "10.0"),
        (Device("rocm", "AMD Instinct MI250", "gfx90a"), "mixed_bf16", "gfx90a"),
        (Device("rocm", "Radeon VII", "gfx906"), "always_f32", "not known"),
        (Device("gpu", "mystery"), "always_f32", "not understood"),
        (Device("METAL", "Apple M2"), "always_f32", "METAL"),
    ],
)
def test_choice_by_device(device, policy, reason):
    """Generation decides, and the reason names what was decisive."""
    choice = auto_policy(device)
    assert str(choice.policy) == policy
    assert reason in choice.reason
    assert str(choice).startswith(f"policy 'auto' is {policy} on {device.device_kind}: ")


@pytest.mark.parametrize(
    ("speedup", "policy"), [(0.4, "always_f32"), (1.1, "always_f32"), (2.0, "mixed_bf16")]
)
def test_a_cpu_is_measured(monkeypatch, speedup, policy):
    """The CPU stays f32 unless bf16 is clearly faster on this machine."""
    monkeypatch.setattr(auto, "bf16_speedup_on_cpu", lambda: speedup)
    choice = auto_policy(jax.devices("cpu")[0])
    assert str(choice.policy) == policy
    assert f"{1 / speedup:.2f} of the time" in choice.reason


def test_the_measurement_is_made_once_and_outside_of_traces():
    """Asked for under jit, it leaves nothing in the program."""
    auto.bf16_speedup_on_cpu.cache_clear()

    def f(x):
        assert auto.bf16_speedup_on_cpu() > 0
        return x + 1

    jaxpr = jax.make_jaxpr(f)(1.0)
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["add"]
    before = auto.bf16_speedup_on_cpu.cache_info().misses
    assert auto.bf16_speedup_on_cpu() > 0
    assert auto.bf16_speedup_on_cpu.cache_info().misses == before == 1


def test_auto_is_a_policy_wherever_one_is_taken(monkeypatch, caplog):
    """`amp` and `plan_of` take the word, and the choice is said once."""
    monkeypatch.setattr(auto, "bf16_speedup_on_cpu", lambda: 3.0)
    auto._say.cache_clear()
    x = jnp.ones((4, 4))
    with caplog.at_level(logging.WARNING, logger="jaxamp"):
        assert amp(jnp.dot, "Auto")(x, x).dtype == jnp.float32
        assert plan_of(jnp.dot, "auto")(x, x).policy is PrecisionPolicy.MIXED_BF16
    assert [record.getMessage() for record in caplog.records] == [f"jaxamp: {auto_policy()}"]


def test_the_default_device_of_jax_decides(monkeypatch):
    """Where JAX is told to compute on another device, that one is asked."""
    monkeypatch.setattr(auto, "bf16_speedup_on_cpu", lambda: 1.0)
    with jax.default_device(jax.devices("cpu")[1]):
        assert auto._default_device() == jax.devices("cpu")[1]
    with jax.default_device("cpu"):
        assert auto_policy().policy is PrecisionPolicy.ALWAYS_F32


def test_the_loss_scale_belongs_to_the_choice():
    """f16 needs one that adapts, the range of bf16 and f32 does not."""
    volta, ampere = (auto_policy(Device("gpu", "any", c)) for c in ("7.0", "8.0"))
    assert isinstance(volta.loss_scale(), DynamicLossScale)
    assert isinstance(ampere.loss_scale(), NoOpLossScale)
