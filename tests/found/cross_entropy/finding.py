"""What is found of the corpus, and programs with it against those without."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

import jaxamp
from jaxamp.found.cross_entropy.losses import chunk_losses
from jaxamp.found.replace_regions import Replaced
from tests.found.attention.corpus import Program, gradient

ORDERS = ("forward", "joint")
"""The program as it is, for `grad(amp(f))`; the program with its gradient, for `amp(grad(f))`."""

CHUNKED = jaxamp.PrecisionPolicy.MIXED_BF16.replace(loss_in_chunks=True)

_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def replaced(program: Program, order: str) -> tuple[Any, Replaced, list[Any]]:
    """The program in one of `ORDERS`, with its losses replaced, and its arguments."""
    fn, args = program.built
    if order == "joint":
        fn, args = gradient(fn, args)
    closed = jax.make_jaxpr(fn)(*args)
    return closed, chunk_losses(closed, CHUNKED), jax.tree.leaves(args)


def agree(closed: Any, found: Replaced, args: list[Any]) -> None:
    """Hold float32 results of the replaced program to those of the other, NaN for NaN."""
    assert found.found
    runs = [
        jax.jit(jaxpr_as_fun(jaxpr), compiler_options=_QUICK)(*args)
        for jaxpr in (closed, found.jaxpr)
    ]
    for want, got in zip(*runs, strict=True):
        size = np.max(np.abs(np.nan_to_num(want, posinf=0, neginf=0)), initial=0)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5 * size)
