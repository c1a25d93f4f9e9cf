"""Throw-away environments that hold a vendor's compiler, one for each kind of target.

A plugin takes over the process that finds it, so each lives in an environment of its own, outside
the project's. Only the compiler is used: no driver, no chip.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from jaxamp.errors import InspectionError

ROOT = Path(
    os.environ.get("JAXAMP_DEVICELESS", Path.home() / ".cache" / "jaxamp-deviceless")
).expanduser()

# What the benchmarks' models need too, where it is installed here.
_SHARED = ("dm-haiku", "equinox", "flax", "flatbuffers", "jmp", "numpy", "optax", "rich")
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


def _is_here(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Environment:
    """One environment: its name, the packages it needs, and roughly what it takes on the disk."""

    name: str
    size: str

    @property
    def folder(self) -> Path:
        """Folder that it is in."""
        return ROOT / self.name

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def ready(self) -> bool:
        """Return whether it has been installed."""
        return (self.folder / ".installed").exists()

    @property
    def packages(self) -> list[str]:
        """Packages to install, pinned to the versions that the calling environment has."""
        jax = version("jax")
        shared = [f"{package}=={version(package)}" for package in _SHARED if _is_here(package)]
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
        """Return the environment variables that let the plugin start without its chip."""
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}
        if self.name == "gpu":
            return quiet | {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
        # Compiling alone, several may use the library at once.
        alone = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
        return quiet | alone | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

    def run(self, *command: str, quiet: bool = False) -> None:
        """Run Python with arguments inside; if quiet, the error alone has what it says."""
        if not self.ready:
            raise InspectionError(
                f"The compiler for {self.name.upper()} is not installed ({self.size}). Run "
                f"`python -m jaxamp estimate --install {self.name}` once; it goes to {self.folder}."
            )
        done = subprocess.run(
            [str(self.python), *command],
            env=os.environ | self.variables(),
            capture_output=quiet,
            text=True,
        )
        if done.returncode:
            said = done.stderr.strip().splitlines()[-1] if quiet else "what it said is above"
            raise InspectionError(f"The compiler for {self.name.upper()} failed: {said}")


ENVIRONMENTS = {
    "gpu": Environment("gpu", "about 4.6 GB, most of it CUDA 13 libraries"),
    "tpu": Environment("tpu", "about 1 GB, most of it libtpu"),
}
