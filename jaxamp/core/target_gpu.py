"""The GPU that a program is lowered for: one at hand, or one that is described."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class TargetGpu:
    """Properties of a GPU that libraries of kernels ask for.

    Attributes:
      capability: compute capability, (9, 0) for Hopper.
      cudnn: version of cuDNN in its own numbering, 91200 for 9.12.0; ``None`` without it.
    """

    capability: tuple[int, int]
    cudnn: int | None


_described: Any = jax.make_user_context(None)  # what was lowered for another GPU is of no use


def described_gpu() -> TargetGpu | None:
    """Return the GPU that `lowering_for` describes."""
    return _described.value


@contextmanager
def lowering_for(gpu: TargetGpu | None) -> Iterator[None]:
    """Lower programs for a GPU that is not here, or not the one that is.

    Kernels are then chosen as that GPU takes them, also in programs that are exported: JAX promises
    nothing for their calls, so that its ``disabled_checks`` have to name them.

    >>> with lowering_for(TargetGpu((9, 0), 91200)):
    ...     described_gpu()
    TargetGpu(capability=(9, 0), cudnn=91200)
    """
    with _described(gpu):
        yield
