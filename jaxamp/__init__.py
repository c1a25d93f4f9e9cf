"""jaxamp: automatic mixed precision for JAX.

>>> import jax.numpy as jnp
>>> import jaxamp
>>> @jaxamp.amp
... def layer(x, w):
...     return jnp.tanh(x @ w)
>>> layer(jnp.ones((2, 3)), jnp.ones((3, 4))).shape
(2, 4)

Errors are in ``jaxamp.errors``, loss scales, gradients and optimizers in ``jaxamp.training``.
"""

__version__ = "0.1.0"  # the build reads it

import importlib
import sys
from typing import TYPE_CHECKING, Any

import jax

from jaxamp import errors

try:
    import jaxamp.core.jax_compat  # first: it alone asks JAX for private names
except (AttributeError, ImportError) as error:
    raise ImportError(
        f"jaxamp {__version__} does not run on JAX {jax.__version__}: {error}. Install a JAX from "
        f"0.10.2 to {errors.NEWEST_JAX}, or a newer jaxamp."
    ) from None
import jaxamp.interop  # noqa: F401  registers what it knows, and imports no library
from jaxamp import installed
from jaxamp.core.features import absent
from jaxamp.core.formats import CastConfig, Precision
from jaxamp.core.guards import Guard
from jaxamp.core.keep_precision import keep_precision
from jaxamp.core.taxonomy import OpKind, register_op_kind
from jaxamp.policy.context import policy_scope
from jaxamp.policy.policy import RESOLVED, PrecisionPolicy
from jaxamp.policy.rules import Rule
from jaxamp.run.amp import amp, plan_of

if TYPE_CHECKING:
    from jaxamp import training
    from jaxamp.inspect.diff import diff
    from jaxamp.inspect.explain import explain
    from jaxamp.inspect.report import report
    from jaxamp.numerics.probe import probe
    from jaxamp.quantized.scaling import Scaling
    from jaxamp.tools.estimate import estimate
    from jaxamp.tools.serving import serve
    from jaxamp.tools.tune import tune
    from jaxamp.training.auto_policy import auto_policy

# Imported when they are first used: a program that only calls `amp` needs none of them.
_LAZY = {
    "Scaling": "quantized.scaling",
    "auto_policy": "training.auto_policy",
    "diff": "inspect.diff",
    "estimate": "tools.estimate",
    "explain": "inspect.explain",
    "probe": "numerics.probe",
    "report": "inspect.report",
    "serve": "tools.serving",
    "tune": "tools.tune",
}

__all__ = [
    "CastConfig",
    "Guard",
    "OpKind",
    "Precision",
    "PrecisionPolicy",
    "Rule",
    "Scaling",
    "amp",
    "auto_policy",
    "diff",
    "errors",
    "estimate",
    "explain",
    "keep_precision",
    "plan_of",
    "policy_scope",
    "probe",
    "register_op_kind",
    "report",
    "serve",
    "training",
    "tune",
]

# The word "auto", which times a product on a CPU, is imported when a policy is first called so.
installed.enter()
RESOLVED["auto"] = lambda: _imported("auto", "training.auto_policy", errors.PolicyError).resolve()


def __getattr__(name: str) -> Any:
    """Import a name of `_LAZY`, or the training pieces, when first used."""
    if name not in _LAZY and name != "training":
        raise _lacking(name)
    module = _imported(name, _LAZY.get(name, "training"), AttributeError)
    value = globals()[name] = module if name == "training" else getattr(module, name)
    return value


def _imported(word: str, module: str, lacking: type[Exception]) -> Any:
    """Import a module for a word, or raise an error that names the feature that is not here."""
    try:
        return importlib.import_module(f"jaxamp.{module}")
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("jaxamp."):
            raise
        raise lacking(absent(word, str(error.name).split(".")[1])) from error


def _lacking(name: str) -> Exception:
    """Return the error that says what to write instead of a name that is not here."""
    message = f"module 'jaxamp' has no attribute {name!r}."
    if name.startswith("_"):  # who asks whether a module has it
        return AttributeError(message, name=name)
    cure = _cure(name)
    if cure and sys._getframe(2).f_code.co_name == "_handle_fromlist":
        # ``from jaxamp import name``: Python's own error, which an AttributeError here becomes,
        # says no more than that it cannot (CPython 3.11 to 3.14).
        return ImportError(f"cannot import name {name!r} from 'jaxamp'. {cure}", name="jaxamp")
    cure = cure or errors.likely(name, [*__all__, *_ELSEWHERE])
    return AttributeError(f"{message} {cure}".rstrip(), name=name)


def _cure(name: str) -> str:
    """Return what people who look for a name here mean by it."""
    if name in _OF_JAX:
        return (
            f"Keep JAX's and put amp around it: amp(jax.{name}(fn)), or jax.{name}(amp(fn)). "
            f"With a loss scale it is jaxamp.training.scaled_{name}."
            if "grad" in name
            else f"Keep JAX's: jax.{name}(amp(fn))."
        )
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    try:
        training = importlib.import_module("jaxamp.training")
    except ModuleNotFoundError:  # taken out
        return ""
    return f"It is jaxamp.training.{name}." if hasattr(training, name) else ""


_OF_JAX = "value_and_grad", "grad", "jit", "vmap", "pmap", "checkpoint", "remat", "scan"
_ELSEWHERE = {
    "filter_value_and_grad": "It is jaxamp.training.scaled_filter_value_and_grad.",
    "filter_grad": "It is jaxamp.training.scaled_filter_grad.",
    "autocast": "Wrap the function that is to be in mixed precision: amp(train_step, 'bf16').",
    "GradScaler": "In float16: jaxamp.training.DynamicLossScale; bfloat16 needs none.",
    "Policy": "It is jaxamp.PrecisionPolicy, and a word will do: amp(fn, 'bf16').",
    "get_policy": "It is jaxamp.PrecisionPolicy.parse, and a word will do: amp(fn, 'bf16').",
    "LossScale": "It is jaxamp.training.LossScale.",
}


def __dir__() -> list[str]:
    """Return the names that one uses, without the folders that they come from."""
    return [*__all__, "__version__"]
