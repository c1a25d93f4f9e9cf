"""python inside.py FOLDER: one peer on its programs, run by path in the peer's environment.

Reads FOLDER/job.json: the adapter, the programs, the platforms. Writes FOLDER/result.json, the
gradients as NAME.npz, and NAME-PLATFORM.bin, the exported value and gradient at the large size.
Needs JAX and what the adapter imports. With a second argument it writes float64's gradients.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from adapters import BUILT, WRAPPED, f32
from data import LARGE, SMALL, Sizes, make_params, make_words
from programs import FUNCTIONS

COMPILED = ("block", "flax", "haliax")


def program(adapter: str, name: str, size: Sizes) -> tuple[Any, tuple[Any, ...]]:
    """Value and gradient of a program under an adapter, and its arguments."""
    if name == "flax":
        import flax_modules

        loss, *args = flax_modules.make(size, **BUILT.get(adapter, dict)())
    elif name == "haliax":
        import haliax_modules

        loss, *args = haliax_modules.make(size)
    else:
        loss, args = FUNCTIONS[name](size["heads"]), (make_params(size), make_words(size))
    return WRAPPED.get(adapter, f32)(loss), tuple(args)


def run(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Every program of a job; what fails is recorded with its first line."""
    results: dict[str, Any] = {"jax": jax.__version__, "python": sys.version.split()[0]}
    for name in job["programs"]:
        try:
            fn, args = program(job["adapter"], name, SMALL)
            value, grads = jax.jit(fn)(*args)
        except Exception as error:
            results[name] = {"error": first_line(error)}
            continue
        save(folder / f"{name}.npz", grads)
        results[name] = {"value": float(value), "finite": bool(np.isfinite(value))}
        for platform in job["platforms"] if name in COMPILED else ():
            problem = export(job["adapter"], name, folder, platform)
            if problem:
                results[name][f"not exported for {platform}"] = problem
    return results


def first_line(error: Exception) -> str:
    """What went wrong, in a line."""
    line = (str(error).strip().splitlines() or [""])[0][:160]
    return f"{type(error).__name__}: {line}"


def save(path: Path, grads: Any) -> None:
    """Writes the leaves of a tree of gradients in float64."""
    leaves = jax.tree_util.tree_leaves(grads)
    np.savez(path, *[np.asarray(leaf, np.float64) for leaf in leaves])


def export(adapter: str, name: str, folder: Path, platform: str) -> str:
    """Writes the program at its large size for a platform; an empty word, or what went wrong."""
    try:
        from jax import export as jax_export

        fn, args = program(adapter, name, LARGE)
        leaves, tree = jax.tree_util.tree_flatten(args)

        def flat(*arrays: Any) -> Any:  # the compilers' side knows no trees
            return jax.tree_util.tree_leaves(fn(*jax.tree_util.tree_unflatten(tree, arrays)))

        types = [
            jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)) for x in leaves
        ]
        made = jax_export.export(jax.jit(flat), platforms=[platform])(*types)
        (folder / f"{name}-{platform}.bin").write_bytes(made.serialize())
        return ""
    except Exception as error:
        return first_line(error)


def reference(folder: Path) -> None:
    """Gradients in float64, for the errors, of the weights that float32 begins with."""
    made = {name: program("f32", name, SMALL) for name in (*FUNCTIONS, "flax", "haliax")}
    jax.config.update("jax_enable_x64", True)
    for name, (fn, args) in made.items():
        save(folder / f"{name}.npz", jax.jit(fn)(*jax.tree_util.tree_map(_widened, args))[1])


def _widened(x: Any) -> Any:
    return np.float64(x) if jnp.issubdtype(x.dtype, jnp.floating) else np.asarray(x)


if __name__ == "__main__":
    where = Path(sys.argv[1])
    if len(sys.argv) > 2:
        reference(where)
    else:
        found = run(json.loads((where / "job.json").read_text()), where)
        (where / "result.json").write_text(json.dumps(found))
