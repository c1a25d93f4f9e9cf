"""XLA's flags for tests: exact rounding and eight fake CPU devices; in place before JAX starts."""

import os

from benchmarks import roundings


def add(*flags: str) -> None:
    """Adds the flags that are not set yet."""
    words = os.environ.get("XLA_FLAGS", "").split()
    names = {word.partition("=")[0] for word in words}
    missing = [flag for flag in flags if flag.partition("=")[0] not in names]
    os.environ["XLA_FLAGS"] = " ".join([*words, *missing])


os.environ.setdefault("JAX_PLATFORMS", "cpu")
add(*roundings.FLAGS, "--xla_force_host_platform_device_count=8")
