"""Settings that must be in place before JAX starts: exact rounding and eight fake CPU devices."""

import os

from benchmarks import roundings

_FLAGS = (*roundings.FLAGS, "--xla_force_host_platform_device_count=8")


def _with_flags(flags: str) -> str:
    """The words of `flags` plus those of ours that it does not set."""
    missing = [flag for flag in _FLAGS if flag.partition("=")[0] not in flags]
    return " ".join([*flags.split(), *missing])


os.environ["XLA_FLAGS"] = _with_flags(os.environ.get("XLA_FLAGS", ""))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
