"""Files that a newer JAX or a newer jaxamp wrote: an error that names both, and what to do."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export

from jaxamp import PrecisionPolicy, serve
from jaxamp.errors import PolicyError, ServingError
from jaxamp.tools.serving import load_served

X = jnp.ones((3, 4))


def _saved(path: Path, change: Callable[[dict[str, Any], bytes], bytes]) -> Path:
    """A served model's file, with its manifest and its program changed."""
    serve(lambda p, x: jnp.tanh(x @ p), jnp.eye(4), X).save(path, X)
    with zipfile.ZipFile(path) as file:
        content = {name: file.read(name) for name in file.namelist()}
    manifest = json.loads(content["manifest.json"])
    assert manifest["jax"] == jax.__version__
    content["program.bin"] = change(manifest, content["program.bin"])
    content["manifest.json"] = json.dumps(manifest).encode()
    with zipfile.ZipFile(path, "w") as file:
        for name, data in content.items():
            file.writestr(name, data)
    return path


def _of_the_future(manifest: dict[str, Any], program: bytes) -> bytes:
    """A file of a JAX that lays programs out as none does yet."""
    manifest["jax"] = "9.9.9"
    return program[:64] + bytes(len(program) - 64)


def test_a_program_that_this_jax_cannot_read(tmp_path: Path) -> None:
    """The error has both versions and says what to do."""
    path = _saved(tmp_path / "model", _of_the_future)
    words = rf"written by JAX 9\.9\.9 and cannot be read by JAX {jax.__version__}.*write it again"
    with pytest.raises(ServingError, match=words):
        load_served(path)


def test_a_calling_convention_that_this_jax_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would fail at the first call, with an error of the compiler, is found on loading."""
    path = _saved(tmp_path / "model", lambda _, program: program)
    assert (load_served(path)(X) == jnp.tanh(X)).all()
    monkeypatch.setattr(export, "maximum_supported_calling_convention_version", 0)
    with pytest.raises(ServingError, match="this JAX in"):
        load_served(path)


def test_files_from_before_the_version_was_written(tmp_path: Path) -> None:
    """A manifest without JAX's version is read as ever."""

    def older(manifest: dict[str, Any], program: bytes) -> bytes:
        del manifest["jax"]
        return program

    assert load_served(_saved(tmp_path / "model", older))(X).shape == X.shape


def test_a_policy_of_a_newer_jaxamp() -> None:
    """A policy's JSON names its version; a later one is refused, not half understood."""
    data = json.loads(PrecisionPolicy.AUTO_MIXED.to_json())
    data["version"] += 1
    with pytest.raises(PolicyError, match=str(data["version"])):
        PrecisionPolicy.from_json(json.dumps(data))
