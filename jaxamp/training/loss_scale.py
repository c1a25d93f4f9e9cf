"""Loss scales: what a loss is multiplied by, so that no gradient is too small for float16."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxamp.core.keep_precision import keep_precision
from jaxamp.errors import TrainingError, shown
from jaxamp.training.trees import as_flag, map_floats, widen

_T = TypeVar("_T")

LARGEST = 2.0**126  # the inverse of more is subnormal in float32, which XLA may take for zero


class LossScale(Protocol):
    """Protocol of loss scales, which jmp's objects follow and your own may.

    Attributes:
      loss_scale: the factor.
    """

    @property
    def loss_scale(self) -> Any:
        """The factor, a scalar."""
        ...

    def scale(self, tree: Any) -> Any:
        """Multiply the floating leaves by the factor."""
        ...

    def unscale(self, tree: Any) -> Any:
        """Divide the floating leaves by the factor."""
        ...

    def adjust(self, grads_finite: Any) -> Any:
        """Return the loss scale for the next step."""
        ...


def _register(children: Sequence[str], static: Sequence[str] = ()) -> Any:
    """Make a dataclass a pytree, whose leaves may be anything once it is taken apart."""

    def flatten_with_keys(scale: Any) -> Any:
        leaves = [(jax.tree_util.GetAttrKey(name), getattr(scale, name)) for name in children]
        return leaves, tuple(getattr(scale, name) for name in static)

    def decorate(cls: Any) -> Any:
        def unflatten(meta: Any, leaves: Any) -> Any:
            scale = object.__new__(cls)
            vars(scale).update(zip((*children, *static), (*leaves, *meta), strict=True))
            return scale

        jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten)
        return cls

    return decorate


_AT_ONE: ContextVar[bool] = ContextVar("jaxamp_scales_at_one", default=False)


@contextmanager
def scales_at_one() -> Iterator[None]:
    """Let loss scales multiply and divide by one inside the block, to see what they do."""
    token = _AT_ONE.set(True)
    try:
        yield
    finally:
        _AT_ONE.reset(token)


class _Factor:
    """A loss scale whose factor is the attribute ``loss_scale``."""

    loss_scale: Any

    @keep_precision("f32")
    def scale(self, tree: _T) -> _T:
        """Multiply the floating leaves, in float32 or wider; other leaves stay as they are."""
        factor = 1 if _AT_ONE.get() else self.loss_scale
        return map_floats(lambda leaf: widen(leaf) * factor, tree)

    @keep_precision("f32")
    def unscale(self, tree: _T) -> _T:
        """Divide the floating leaves, in float32 or wider; other leaves stay as they are.

        Unscale with the object that scaled, not with the one that ``adjust`` returned.
        """
        # The inverse of a power of two is one, so this is exact; XLA would divide in the same way.
        inverse = 1 / jnp.asarray(1 if _AT_ONE.get() else self.loss_scale, jnp.float32)
        return map_floats(lambda leaf: widen(leaf) * inverse, tree)

    def adjust(self, grads_finite: Any) -> Self:
        """Return the loss scale itself."""
        return self


@_register(())
@dataclasses.dataclass(frozen=True)
class NoOpLossScale(_Factor):
    """The loss scale of programs that need none: float32 and bfloat16.

    >>> NoOpLossScale().scale(3.0)
    3.0
    """

    loss_scale: ClassVar[Any] = 1

    def scale(self, tree: _T) -> _T:
        """Return the tree itself."""
        return tree

    def unscale(self, tree: _T) -> _T:
        """Return the tree itself."""
        return tree


@_register(("loss_scale",))
@dataclasses.dataclass(frozen=True)
class StaticLossScale(_Factor):
    """A loss scale that never changes.

    Attributes:
      loss_scale: the factor, f32[]; a power of two makes scaling and unscaling exact.

    Raises:
      TrainingError: the factor is not positive, or above 2¹²⁶.

    >>> scale = StaticLossScale(1024)
    >>> float(scale.unscale(scale.scale(0.1))) == float(np.float32(0.1))
    True
    """

    loss_scale: Any

    def __post_init__(self) -> None:
        vars(self).update(loss_scale=_factor("loss_scale", self.loss_scale))


@_register(
    ("loss_scale", "counter", "min_loss_scale", "max_loss_scale"), ("period", "factor", "backoff")
)
@dataclasses.dataclass(frozen=True)
class DynamicLossScale(_Factor):
    """A loss scale that looks for the largest factor under which gradients stay finite.

    It grows by `factor` after `period` finite steps in a row, and shrinks, the count starting anew,
    after every step that was not finite. Everything happens on the device. It is a pytree: carry it
    through ``jit`` and ``scan``, save it in checkpoints.

    Attributes:
      loss_scale: the factor, f32[]; 2¹⁵ by default, which float16 can still hold.
      counter: finite steps in a row since the last change, i32[].
      period: finite steps before the scale grows; 2000 by default.
      factor: what it grows by; 2 by default. Powers of two keep scaling and unscaling exact.
      min_loss_scale: the floor, f32[]; 1 by default.
      max_loss_scale: the ceiling, f32[]; 2¹²⁶ by default, the largest that float32 can invert.
      backoff: what it is multiplied by after an overflow; by default ``1 / factor``.

    Raises:
      TrainingError: a number makes no sense, or the floor is above the ceiling.

    >>> scale = DynamicLossScale(period=2)
    >>> for finite in (True, True, False):
    ...     scale = scale.adjust(jnp.bool_(finite))
    ...     print(float(scale.loss_scale), int(scale.counter))
    32768.0 1
    65536.0 0
    32768.0 0
    """

    loss_scale: Any = 2.0**15
    counter: Any = 0
    period: int = 2000
    factor: float = 2
    min_loss_scale: Any = 1.0
    max_loss_scale: Any = LARGEST
    backoff: float | None = None

    def __post_init__(self) -> None:
        vars(self).update(
            loss_scale=_factor("loss_scale", self.loss_scale),
            counter=_as(np.int32, self.counter),
            min_loss_scale=_factor("min_loss_scale", self.min_loss_scale, zero=True),
            max_loss_scale=_factor("max_loss_scale", self.max_loss_scale),
        )
        self._check()

    def adjust(self, grads_finite: Any) -> Self:
        """Return the loss scale for the next step.

        Args:
          grads_finite: whether this step's gradients are finite, bool[].

        Raises:
          TrainingError: `grads_finite` is not a boolean scalar.
        """
        finite = as_flag(grads_finite)
        scale, counter = jnp.asarray(self.loss_scale), jnp.asarray(self.counter)
        full = counter + 1 >= self.period
        kept = jnp.where(full, self._grown(scale), scale)
        adjusted = copy.copy(self)
        vars(adjusted).update(
            loss_scale=jnp.where(finite, kept, self._shrunk(scale)),
            counter=jnp.where(finite & ~full, counter + 1, 0).astype(counter.dtype),
        )
        return adjusted

    def _check(self) -> None:
        backoff, ends = self.backoff, (self.min_loss_scale, self.max_loss_scale)
        wrong = ""
        if not self.period >= 1:
            wrong = f"period counts steps, 1 or more; {self.period!r} was given."
        elif not (math.isfinite(self.factor) and self.factor >= 1):
            wrong = f"factor multiplies a scale that grows: 1 or more, not {self.factor!r}."
        elif backoff is not None and not 0 < backoff <= 1:
            wrong = f"backoff shrinks the scale: above 0, at most 1, not {backoff!r}."
        elif all(isinstance(end, np.ndarray) for end in ends) and ends[0] > ends[1]:
            wrong = f"The floor {ends[0]} of the loss scale is above its ceiling {ends[1]}."
        if wrong:
            raise TrainingError(wrong)

    @keep_precision("f32")
    def _grown(self, scale: jax.Array) -> jax.Array:
        grown = jnp.minimum(widen(scale) * self.factor, widen(self.max_loss_scale))
        grown = grown.astype(scale.dtype)
        return jnp.where(jnp.isfinite(grown), grown, scale)  # a narrow scale may not hold it

    @keep_precision("f32")
    def _shrunk(self, scale: jax.Array) -> jax.Array:
        wide = widen(scale)
        shrunk = wide / self.factor if self.backoff is None else wide * self.backoff
        return jnp.maximum(shrunk, widen(self.min_loss_scale)).astype(scale.dtype)


def as_loss_scale(scale: Any) -> Any:
    """Return a loss scale as it is, and one that does nothing for ``None``.

    Args:
      scale: one of ours, one of jmp's, any object with their methods, or ``None`` for none.

    Raises:
      TrainingError: none of these.

    >>> as_loss_scale(None)
    NoOpLossScale()
    """
    if scale is None:
        return NoOpLossScale()
    if isinstance(scale, type):
        raise TrainingError(f"A loss scale is an object, not the class: write {scale.__name__}().")
    if all(callable(getattr(scale, name, None)) for name in ("scale", "unscale", "adjust")):
        return scale
    raise TrainingError(
        f"{shown(scale)} is not a loss scale. Give a NoOpLossScale, StaticLossScale or "
        "DynamicLossScale, of jaxamp or jmp, or an object with scale, unscale and adjust."
    )


def _as(dtype: Any, value: Any) -> Any:
    """Cast `value` to `dtype`: concrete numbers stay on the host, arrays where they are."""
    if isinstance(value, jax.Array):
        return value.astype(dtype)
    return np.asarray(value, dtype)


def _factor(name: str, value: Any, *, zero: bool = False) -> Any:
    """Clip `value`, as float32, to what is positive and can be inverted, or zero where allowed."""
    factor = _as(np.float32, value)
    if isinstance(factor, np.ndarray):
        good = factor.shape == () and (0 < factor <= LARGEST or (zero and factor == 0))
        if not good:
            raise TrainingError(f"{name} is a positive number up to 2**126, not {value!r}.")
    return factor
