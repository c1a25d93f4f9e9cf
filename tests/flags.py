"""XLA's flags for tests: exact rounding and eight fake CPU devices; in place before JAX starts."""

import os
from importlib.metadata import version

from benchmarks import roundings

HAS_OLDER_EMITTERS = version("jaxlib").startswith("0.10.")
"""Whether XLA has older emitters for the CPU too, which ``xla_cpu_use_fusion_emitters=false``
chooses. For a flag that it does not know, as that of JAX 0.12 does not know this one, it ends the
process; for such an option of one program it raises an error."""


def add(*flags: str) -> None:
    """Adds the flags that are not set yet."""
    missing = [flag for flag in flags if flag.partition("=")[0] not in given()]
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *missing]).strip()


def given() -> set[str]:
    """The names of the flags that are set."""
    words = os.environ.get("XLA_FLAGS", "").split()
    return {word.partition("=")[0] for word in words}


os.environ.setdefault("JAX_PLATFORMS", "cpu")
add(*roundings.FLAGS, "--xla_force_host_platform_device_count=8")
