"""Serving: a trained model whose parameters are cast once, not at every call."""

from __future__ import annotations

import dataclasses
import json
import os
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jaxamp.compiled.deviceless import serialized
from jaxamp.errors import NotCallableError, OutputError, PolicyError, ServingError, shown
from jaxamp.run.amp import AmpFunction, amp, under
from jaxamp.tools.serving.narrow import narrow_dtypes, run_narrow
from jaxamp.trace.arguments import is_array, split

_FORMAT = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Served:
    """A model ready for serving; made by ``serve``. Called with all arguments but the parameters.

    Attributes:
      params: the parameters as they are stored, in the structure that was given.
      apply: the pure function of the parameters' arrays, in the order of ``jax.tree.leaves``, and
        the arguments; to be compiled, mapped or sharded by those who want more than a call.
      arrays: the parameters' arrays.
      stored_bytes: size of the stored parameters.
      original_bytes: size of the parameters that were given.
    """

    params: Any
    apply: Any  # a function that jax.jit has wrapped
    arrays: list[jax.Array]
    stored_bytes: int
    original_bytes: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled model."""
        return self.apply(self.arrays, *args, **kwargs)

    def export(self, *args: Any, **options: Any) -> export.Exported:
        """Export the model for arguments of these shapes.

        Args:
          *args: arrays or ``jax.ShapeDtypeStruct``, also with symbolic dimensions.
          **options: as for ``jax.export.export``, e.g. ``platforms=["tpu", "cuda"]``.

        Returns:
          An exported function of the flat parameter arrays and the arguments.
        """
        return export.export(self.apply, **options)(self.arrays, *args)

    def save(self, path: str | os.PathLike[str], *args: Any, **options: Any) -> None:
        """Write program and parameters to one file, which ``load_served`` reads.

        Args:
          path: the file.
          *args: as for ``export``.
          **options: as for ``export``.
        """
        exported = self.export(*args, **options)
        arrays = [np.asarray(array) for array in self.arrays]
        types = [{"dtype": a.dtype.name, "shape": a.shape} for a in arrays]
        with zipfile.ZipFile(path, "w") as file:
            manifest = {"format": _FORMAT, "jax": jax.__version__, "params": types}
            file.writestr("manifest.json", json.dumps(manifest))
            file.writestr("program.bin", serialized(exported))
            for index, array in enumerate(arrays):
                file.writestr(f"params/{index}", array.tobytes())

    def __repr__(self) -> str:
        name = getattr(self.apply, "__name__", "function")
        return f"<Served {name}: {self.stored_bytes} of {self.original_bytes} bytes of parameters>"


def serve(fn: Callable[..., Any], params: Any, *args: Any, policy: Any = None) -> Served:
    """Prepare a trained model for serving: what ``amp`` would cast at every call is cast now.

    A parameter is stored narrow when every use of it is the same cast; the results are then those
    of ``amp(fn, policy)(params, ...)``, bit for bit. Parameters that are needed in f32, such as
    the scales of norms, stay as they are.

    Args:
      fn: a function whose first argument is the parameters: ``model.apply`` of linen,
        ``lambda model, x: jax.vmap(model)(x)`` for equinox, a function of an nnx state.
      params: the parameters, any tree; leaves that are not arrays are kept as they are.
      *args: example arguments, arrays or ``jax.ShapeDtypeStruct``; other shapes may follow. Flags
        and other constants belong in `fn`: ``functools.partial(fn, train=False)``.
      policy: as for ``amp``; by default that of an amped `fn`, else `mixed_bf16`.

    Returns:
      A ``Served``: call it with all arguments but the parameters, ``save`` it or ``export`` it.

    Raises:
      PolicyError: the policy is not understood, or cannot be computed here.
      OutputError: `fn` returns something that is not an array.

    >>> params = {"w": jnp.ones((4, 2)), "b": jnp.ones(2)}
    >>> served = serve(lambda p, x: jax.nn.softmax(x @ p["w"] + p["b"]), params, jnp.ones((3, 4)))
    >>> served.params["w"].dtype, served.params["b"].dtype, served(jnp.ones((5, 4))).dtype
    (dtype(bfloat16), dtype('float32'), dtype('float32'))
    """
    amped = _amped(fn, policy)
    given, rest = split(params)
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in given]

    def wide(arrays: Sequence[Any], args: Any, kwargs: Any) -> Any:
        return _checked(amped(rest.join(arrays), *args, **kwargs))

    def apply(arrays: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        closed, shape = jax.make_jaxpr(wide, return_shape=True)(types, args, kwargs)
        results = run_narrow(closed, *arrays, *jax.tree.leaves((args, kwargs)))
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    apply.__name__ = apply.__qualname__ = getattr(amped, "__name__", "function")
    dtypes = narrow_dtypes(jax.make_jaxpr(wide)(types, args, {}), len(types))
    stored = [jnp.asarray(a, d or a.dtype) for a, d in zip(given, dtypes, strict=True)]
    sizes = (sum(array.nbytes for array in arrays) for arrays in (stored, given))
    return Served(rest.join(stored), jax.jit(apply), stored, *sizes)


@dataclasses.dataclass(frozen=True, eq=False)
class Loaded:
    """A model that was saved by ``Served.save``; needs neither its code nor jaxamp's planner.

    Attributes:
      params: the flat parameter arrays.
      exported: the program.
    """

    params: list[jax.Array]
    exported: export.Exported
    _compiled: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """Call the compiled model with arguments like those of the call that was exported.

        Raises:
          ServingError: other arguments, shapes, dtypes or devices than it was saved for.
        """
        try:
            return self._compiled(self.params, *args)
        except (TypeError, ValueError) as error:
            raise ServingError(self._mismatch(args, error)) from None

    def _mismatch(self, args: Sequence[Any], error: Exception) -> str:
        (_, *saved), _ = jax.tree.unflatten(self.exported.in_tree, self.exported.in_avals)
        if _listed(saved) == _listed(args):  # the platform, say
            return f"This model cannot run here: {error}"
        message = f"This model was saved for {_listed(saved)}, and called with {_listed(args)}."
        if _kinds(saved) != _kinds(args):
            return message
        return f"{message} Save it with jax.export.symbolic_shape for any size of an axis. {error}"

    def __repr__(self) -> str:
        size = sum(array.nbytes for array in self.params)
        return f"<Loaded {self.exported.fun_name}: {size} bytes of parameters>"


def load_served(path: str | os.PathLike[str]) -> Loaded:
    """Read what ``Served.save`` wrote.

    Args:
      path: the file.

    Returns:
      The model, to be called with arguments of the shapes and dtypes that it was saved for.

    Raises:
      ServingError: it is not such a file, or its program was written by a JAX that this one does
        not understand. JAX reads what it wrote in the last six months.

    >>> import tempfile
    >>> x = jnp.ones((3, 4))
    >>> served = serve(lambda p, x: jnp.tanh(x @ p["w"]), {"w": jnp.eye(4)}, x)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     served.save(f"{folder}/model.jaxamp", x)
    ...     loaded = load_served(f"{folder}/model.jaxamp")
    >>> bool((loaded(x) == served(x)).all())
    True
    """
    try:
        with zipfile.ZipFile(path) as file:
            manifest = _manifest(file)
            params = [
                np.frombuffer(file.read(f"params/{n}"), jnp.dtype(t["dtype"])).reshape(t["shape"])
                for n, t in enumerate(manifest["params"])
            ]
            exported = _program(file.read("program.bin"), manifest.get("jax", "0.10"))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ServingError(
            f"{os.fspath(path)!r} is not a served model: {error}. Write it with Served.save."
        ) from None
    return Loaded(list(map(jnp.asarray, params)), exported, jax.jit(exported.call))


def _listed(args: Sequence[Any]) -> str:
    return ", ".join(map(shown, args)) or "no arguments"


def _kinds(args: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Describe arguments, all but the sizes of their axes."""
    leaves, treedef = jax.tree.flatten(list(args))
    return treedef, [(getattr(x, "dtype", type(x)), np.ndim(x)) for x in leaves]


def _manifest(file: zipfile.ZipFile) -> dict[str, Any]:
    manifest = json.loads(file.read("manifest.json"))
    if manifest["format"] != _FORMAT:
        raise ServingError(
            f"This served model has format {manifest['format']}; this jaxamp reads {_FORMAT}."
        )
    return manifest


def _program(content: bytes, written_by: str) -> export.Exported:
    """Deserialize a program; JAX fails in many ways on what a later one wrote."""
    try:
        exported = export.deserialize(bytearray(content))
        version = exported.calling_convention_version
        oldest = export.minimum_supported_calling_convention_version
        newest = export.maximum_supported_calling_convention_version
        if oldest <= version <= newest:
            return exported
        reason = f"it calls functions in version {version}, and this JAX in {oldest} to {newest}"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    raise ServingError(
        f"This model's program was written by JAX {written_by} and cannot be read by JAX "
        f"{jax.__version__}: {reason}. Load it with the JAX that wrote it, or write it again with "
        "this one."
    ) from None


def _amped(fn: Callable[..., Any], policy: Any) -> AmpFunction[..., Any]:
    is_kept = policy is None and isinstance(fn, AmpFunction)
    amped: Any = fn if is_kept else amp(*under(fn, policy))
    if getattr(amped, "takes_history", False):
        raise PolicyError(
            f"serve has no steps, and so no history for {amped.policy}. Choose 'fp8_current'."
        )
    if not isinstance(amped, AmpFunction):
        raise NotCallableError(
            f"serve needs a function of the parameters, and got the module {type(fn).__name__}. "
            "Write serve(lambda model, x: model(x), model, x); for flax nnx, split the model "
            "and merge it inside: serve(lambda state, x: nnx.merge(graph, state)(x), state, x)."
        )
    return amped


def _checked(results: Any) -> Any:
    for leaf in jax.tree.leaves(results):
        if not (is_array(leaf) or isinstance(leaf, int | float | complex)):
            raise OutputError(f"A served model returns arrays, and {shown(leaf)} is not an array.")
    return results
