"""Dtypes by their role.

Library code that is to work under any policy names the role of a dtype, ``"compute"``, ``"param"``
or ``"output"``, and leaves it to the policy in force what dtype that is.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxamp.core.formats import Precision
from jaxamp.core.keep_precision import KEEPABLE, keep_precision
from jaxamp.errors import PolicyError, accepted
from jaxamp.policy.context import current_policy, in_amp
from jaxamp.policy.context import policy_scope as policy_scope
from jaxamp.policy.policy import PrecisionPolicy

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])


class SemanticDType(enum.StrEnum):
    """A dtype by its role; members are texts, so that the words can be used as well.

    >>> SemanticDType("parameter") is SemanticDType.PARAM
    True
    """

    COMPUTE = "compute"  # what matrix products are computed in
    PARAM = "param"  # what parameters are stored in
    OUTPUT = "output"  # what results are handed over in

    @classmethod
    def _missing_(cls, value: object) -> SemanticDType | None:
        return _role(value)

    def precision(self, policy: Any = None) -> Precision:
        """Return the precision of the role under a policy.

        Args:
          policy: whatever is accepted as a policy; left out, the one in force.

        >>> SemanticDType.COMPUTE.precision("mixed_f16"), SemanticDType.PARAM.precision()
        (<Precision.F16: 'float16'>, <Precision.F32: 'float32'>)
        """
        parsed = current_policy() if policy is None else PrecisionPolicy.parse(policy)
        if self is SemanticDType.COMPUTE:
            return parsed.base
        own = parsed.param_dtype if self is SemanticDType.PARAM else parsed.output_dtype
        return own or Precision.F32


DTypeish: TypeAlias = (
    DTypeLike
    | Precision
    | SemanticDType
    | Literal["compute", "param", "params", "parameter", "output"]
)
"""A dtype, its name, or its role."""


def resolve_dtype(dtypeish: DTypeish, policy: Any = None) -> np.dtype:
    """Return the dtype that a dtype, its name or its role stands for.

    Args:
      dtypeish: a dtype, a ``Precision``, their names, or a role.
      policy: what gives a role its dtype; left out, the policy in force.

    Returns:
      A numpy dtype.

    Raises:
      PolicyError: it names neither a role nor a float format.

    >>> resolve_dtype("compute", "p=f32,c=bf16,o=f32"), resolve_dtype("half", "mixed_f16")
    (dtype(bfloat16), dtype('float16'))
    """
    return _precision(dtypeish, policy).dtype


def cast_floating(tree: _T, dtypeish: DTypeish | None, policy: Any = None) -> _T:
    """Return the tree with its float arrays in another dtype; all else as it is.

    Args:
      tree: any tree of arrays, ``jax.ShapeDtypeStruct`` included; numpy arrays stay numpy arrays,
        and Python numbers are left alone.
      dtypeish: a dtype, its name or its role; ``None`` changes nothing.
      policy: what gives a role its dtype; left out, the policy in force.

    Returns:
      A tree of the same structure.

    Raises:
      PolicyError: `dtypeish` names neither a role nor a float format.

    >>> tree = {"w": jnp.ones(2), "steps": jnp.arange(3)}
    >>> with policy_scope("mixed_bf16"):
    ...     low = cast_floating(tree, "compute")
    >>> low["w"].dtype, low["steps"].dtype
    (dtype(bfloat16), dtype('int32'))
    """
    if dtypeish is None:
        return tree
    dtype = resolve_dtype(dtypeish, policy)
    return jax.tree.map(lambda leaf: _cast(leaf, dtype), tree)


def in_compute_dtype(method: _F) -> _F:
    """Return a method of a module, run in the module's own ``compute_dtype`` where it has one.

    The attribute is a dtype, its name or its role; ``None`` leaves the method as it is. Under
    ``amp`` it marks a region that keeps this precision. Elsewhere the module and its arguments are
    cast, and the results have the dtype that the arguments had; so the module must be a pytree,
    such as those of equinox and haliax.

    Args:
      method: a function whose first argument is the module.

    Returns:
      A method with the same name and arguments. It raises ``PolicyError`` if ``compute_dtype`` is
      neither a role nor a float format.

    >>> import equinox as eqx
    >>> class Head(eqx.Module):
    ...     weight: jax.Array
    ...     compute_dtype: str | None = eqx.field(static=True, default=None)
    ...     @in_compute_dtype
    ...     def __call__(self, x):
    ...         return self.weight @ x
    >>> head = Head(jnp.full((1, 1), 1.001), compute_dtype="bf16")
    >>> head(jnp.ones(1))
    Array([1.], dtype=float32)
    """

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = getattr(self, "compute_dtype", None)
        if wanted is None:
            return method(self, *args, **kwargs)
        precision = _precision(wanted, None)
        if not in_amp():
            module, low, named = cast_floating((self, args, kwargs), precision)
            return cast_floating(method(module, *low, **named), _widest((args, kwargs)))
        if precision is SemanticDType.COMPUTE.precision():
            return method(self, *args, **kwargs)  # what amp does anyway, with its guards
        with keep_precision(precision):
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]


def _precision(dtypeish: DTypeish, policy: Any) -> Precision:
    role = _role(dtypeish)
    if role is not None:
        return role.precision(policy)
    try:
        return Precision.parse(dtypeish)  # type: ignore[arg-type]
    except PolicyError:
        words = [*_ROLES, *(p.short for p in KEEPABLE)]
        raise PolicyError(
            f"{dtypeish!r} is neither a float dtype nor a role. {accepted(dtypeish, words)}"
        ) from None


def _role(word: object) -> SemanticDType | None:
    return _ROLES.get(word.strip().lower()) if isinstance(word, str) else None


_ROLES = {
    **{role.value: role for role in SemanticDType},
    "params": SemanticDType.PARAM,
    "parameter": SemanticDType.PARAM,
}


def _widest(tree: Any) -> np.dtype | None:
    dtypes = [kind for leaf in jax.tree.leaves(tree) if (kind := _float_dtype(leaf)) is not None]
    return jnp.result_type(*dtypes) if dtypes else None


def _float_dtype(leaf: Any) -> np.dtype | None:
    kind = getattr(leaf, "dtype", None)
    return kind if kind is not None and jnp.issubdtype(kind, jnp.floating) else None


def _cast(leaf: Any, dtype: np.dtype) -> Any:
    if _float_dtype(leaf) in (None, dtype):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(dtype=dtype)
    return leaf.astype(dtype)
