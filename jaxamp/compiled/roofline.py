"""The time of a compiled program, by a model: each kernel at a share of the published speed.

A kernel takes the longer of two times: that of moving its bytes at the memory's bandwidth, and that
of its dots at the rate of the matrix units. Of both numbers a good kernel reaches a share, and each
kernel also takes a while to start and to end, whatever it does (`Reached`). Kernels run one after
the other. Elementwise arithmetic is free here, for it hides behind the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxamp.compiled.contractions import Contraction
from jaxamp.compiled.hlo import Module
from jaxamp.compiled.targets import Target
from jaxamp.compiled.traffic import WORDS, kernels


@dataclass(frozen=True, slots=True)
class Roofline:
    """Modelled seconds."""

    seconds: float  # of the whole program
    by_memory: float  # of the kernels that wait for memory
    by_products: float  # of those that wait for the matrix units
    by_starts: float = 0.0  # of starting and ending kernels


def roofline(module: Module, target: Target) -> Roofline:
    """Return the model's time of a program on a target."""
    by_memory = by_products = by_starts = 0.0
    reached = target.reached
    for kernel in kernels(module):
        moving = kernel.moved / (target.bandwidth * reached.bandwidth)
        dots = kernel.contractions(module)
        multiplying = kernel.runs * sum(dot.flops / rate_of(target, dot) for dot in dots)
        multiplying /= reached.products
        if multiplying > moving:
            by_products += multiplying
        else:
            by_memory += moving
        by_starts += kernel.runs * reached.start
    return Roofline(by_memory + by_products + by_starts, by_memory, by_products, by_starts)


def rate_of(target: Target, dot: Contraction) -> float:
    """Return the published FLOPs per second of a dot."""
    word = WORDS.get(dot.operands[0], dot.operands[0])
    return target.rate(word) / (target.highest if word == "f32" and dot.highest else 1.0)
