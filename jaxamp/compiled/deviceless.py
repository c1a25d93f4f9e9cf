"""From a call to its program as the compiler of a chip that is not there has made it.

A vendor's plugin takes over the process that finds it, so each lives in an environment of its own,
outside the project's. Only the compiler is used: no driver, no chip.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from jaxamp.compiled import compiler
from jaxamp.compiled.hlo import Module, parse
from jaxamp.compiled.targets import Target
from jaxamp.core import jax_compat
from jaxamp.core.taxonomy import Trait, op_of
from jaxamp.errors import InspectionError, JaxAmpError
from jaxamp.jaxprs.nested import nested
from jaxamp.kernels.jax_compat.cudnn_calls import cudnn_checks
from jaxamp.kernels.target_gpu import described_gpu
from jaxamp.trace.arguments import split

ROOT = Path(
    os.environ.get("JAXAMP_DEVICELESS", Path.home() / ".cache" / "jaxamp-deviceless")
).expanduser()

_EXTRAS = {"gpu": "cuda13", "tpu": "tpu"}  # of JAX, with a vendor's compiler and libraries
# What the benchmarks' models need too, where it is installed here.
_SHARED = ("dm-haiku", "equinox", "flax", "flatbuffers", "jmp", "numpy", "optax", "rich")


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
        packages = [f"jax[{_EXTRAS[self.name]}]=={version('jax')}"]
        for package in _SHARED:
            with contextlib.suppress(PackageNotFoundError):
                packages.append(f"{package}=={version(package)}")
        return packages

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


def flattened(
    fn: Any, wrap: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., list[Any]], list[jax.ShapeDtypeStruct]]:
    """Flatten a call to a function of its arrays alone, and their types; the rest is built in."""
    arrays, rest = split((fn, args, kwargs), abstract=True)

    def flat(*arrays: Any) -> list[Any]:
        function, positional, named = rest.join(arrays)
        return split(wrap(function)(*positional, **named))[0]

    return flat, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]


def exported(
    fn: Any,
    wrap: Callable[[Any], Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    platform: str,
) -> bytes:
    """Return a call for a platform, serialized; anything but arrays, in `fn` too, is built in."""
    flat, specs = flattened(fn, wrap, args, kwargs)
    compiled = jax.jit(flat)
    checks = cudnn_checks() if described_gpu() else ()
    jaxpr = compiled.trace(*specs).jaxpr.jaxpr
    try:
        made = jax.export.export(compiled, platforms=[platform], disabled_checks=checks)(*specs)
        return serialized(made)
    except (NotImplementedError, ValueError) as error:
        eqn = next(_callbacks(jaxpr), None)
        if eqn is None:
            raise
        raise InspectionError(
            f"The program calls back to the host: {eqn.primitive.name} at "
            f"{jax_compat.user_line(eqn.source_info)}. JAX compiles that only where it runs. "
            "Leave it out to ask about another chip."
        ) from error


def serialized(program: jax.export.Exported) -> bytes:
    """Return an exported program as bytes; JAX needs a package for it that it does not declare."""
    try:
        return bytes(program.serialize())
    except ImportError:
        raise JaxAmpError(
            "JAX exports programs with flatbuffers, and does not install it: run "
            "`pip install flatbuffers`."
        ) from None


def _callbacks(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        if op_of(eqn.primitive).trait is Trait.CALLBACK:
            yield eqn
        for inner in nested(eqn):
            yield from _callbacks(inner.jaxpr)


def compile_all(
    target: Target, programs: Sequence[bytes], options: dict[str, Any] | None = None
) -> list[tuple[Module, dict[str, Any]]]:
    """Compile what `exported` gave for a chip; return each program and the compiler's facts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        names = [f"program{index}" for index in range(len(programs))]
        for program, data in zip(names, programs, strict=True):
            (folder / f"{program}.bin").write_bytes(data)
        job = {
            "platform": target.platform,
            "topology": target.topology,
            "description": target.description,
            "programs": names,
            "options": options,
        }
        (folder / "job.json").write_text(json.dumps(job))
        ENVIRONMENTS[target.environment].run(compiler.__file__, name, quiet=True)
        modules = [parse((folder / f"{program}.hlo").read_text()) for program in names]
        facts = [json.loads((folder / f"{program}.json").read_text()) for program in names]
        return list(zip(modules, facts, strict=True))
