"""From a call to its program as the compiler of a chip that is not there has made it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from jaxamp.compiled import compiler
from jaxamp.compiled.environments import ENVIRONMENTS
from jaxamp.compiled.hlo import Module, parse
from jaxamp.compiled.targets import Target
from jaxamp.core import jax_compat
from jaxamp.core.taxonomy import Trait, op_of
from jaxamp.errors import InspectionError, JaxAmpError
from jaxamp.jaxprs.nested import nested
from jaxamp.kernels.jax_compat.cudnn_calls import cudnn_checks
from jaxamp.kernels.target_gpu import described_gpu
from jaxamp.trace.arguments import split


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
            "JAX writes programs with flatbuffers, which it does not install: "
            "pip install flatbuffers"
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
        return [
            (
                parse((folder / f"{program}.hlo").read_text()),
                json.loads((folder / f"{program}.json").read_text()),
            )
            for program in names
        ]
