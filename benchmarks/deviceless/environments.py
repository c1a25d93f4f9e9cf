"""Throw-away environments that hold a vendor's compiler, one for each kind of target.

A plugin takes over the process that finds it, so each lives in an environment of its own, outside
the project's. Only the compiler is used: no driver, no chip.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(
    os.environ.get("JAXAMP_DEVICELESS", Path.home() / ".cache" / "jaxamp-deviceless")
).expanduser()

_SHARED = ("equinox", "flax", "jmp", "numpy", "optax", "rich")
_CUDA_LIBRARIES = (
    "nvidia-cublas",
    "nvidia-cuda-cupti",
    "nvidia-cuda-nvcc",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime",
    "nvidia-cudnn-cu13",
    "nvidia-cufft",
    "nvidia-cusolver",
    "nvidia-cusparse",
    "nvidia-nccl-cu13",
    "nvidia-nvjitlink",
    "nvidia-nvshmem-cu13",
    "nvidia-nvvm",
)


@dataclass(frozen=True, slots=True)
class Environment:
    """One environment: its name, the packages it needs, and roughly what it takes on the disk."""

    name: str
    size: str

    @property
    def folder(self) -> Path:
        return ROOT / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def ready(self) -> bool:
        return (self.folder / ".installed").exists()

    @property
    def packages(self) -> list[str]:
        """What to install, pinned to the versions that the calling environment has."""
        jax = version("jax")
        shared = [f"{package}=={version(package)}" for package in _SHARED]
        if self.name == "tpu":
            return [f"jax[tpu]=={jax}", *shared]
        plugin = [f"jax-cuda13-{part}=={jax}" for part in ("plugin", "pjrt")]
        return [f"jax=={jax}", *plugin, *_CUDA_LIBRARIES, *shared]

    def install(self) -> None:
        """Create the environment, or bring it up to date."""
        print(f"installing {self.name} ({self.size}) into {self.folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(self.folder)], check=True)
        pip = [str(self.python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *self.packages], check=True)
        (self.folder / ".installed").touch()

    def variables(self) -> dict[str, str]:
        """The process environment that lets the plugin start on a machine without its chip."""
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}
        if self.name == "gpu":
            return quiet | {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
        return quiet | {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}

    def run(self, module: str, *arguments: str) -> None:
        """Run ``python -m module`` inside; raises if that fails or nothing is installed."""
        if not self.ready:
            raise SystemExit(
                f"The {self.name} environment is not installed ({self.size}). "
                f"Run `python -m benchmarks.deviceless --install {self.name}` first."
            )
        command = [str(self.python), "-m", module, *arguments]
        subprocess.run(command, check=True, env=os.environ | self.variables())


ENVIRONMENTS = {
    "gpu": Environment("gpu", "about 4.6 GB, most of it CUDA 13 libraries"),
    "tpu": Environment("tpu", "about 1 GB, most of it libtpu"),
}
