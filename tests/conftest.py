"""Settings that must be in place before JAX starts: exact rounding and eight fake CPU devices."""

import os

_FLAGS = {
    # Otherwise XLA may skip the roundings to bfloat16 that the tests are about.
    "--xla_allow_excess_precision": "false",
    "--xla_cpu_experimental_ynn_fusion_type": "",  # the same, of products with what surrounds them
    "--xla_force_host_platform_device_count": "8",
}


def _with_flags(flags: str) -> str:
    """The words of `flags` plus those of ours that it does not set."""
    missing = [f"{name}={value}" for name, value in _FLAGS.items() if name not in flags]
    return " ".join([*flags.split(), *missing])


os.environ["XLA_FLAGS"] = _with_flags(os.environ.get("XLA_FLAGS", ""))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
