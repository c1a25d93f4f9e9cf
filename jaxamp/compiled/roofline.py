"""The time of a compiled program, by a model: each kernel at the speed that its maker publishes.

A kernel takes the longer of two times: that of moving its bytes at the memory's full bandwidth, and
that of its dots at the full rate of the matrix units. Kernels run one after the other. Real kernels
reach neither, and small ones also wait to be started: the truth is slower, by a factor that is much
the same for similar programs. Elementwise arithmetic is free here, for it hides behind the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxamp.compiled.contractions import Contraction
from jaxamp.compiled.hlo import Module
from jaxamp.compiled.targets import Target
from jaxamp.compiled.traffic import WORDS, kernels


@dataclass(frozen=True, slots=True)
class Roofline:
    """Modelled seconds.

    Attributes:
      seconds: of the whole program.
      by_memory: of the kernels that wait for memory.
      by_products: of those that wait for the matrix units.
    """

    seconds: float
    by_memory: float
    by_products: float


def roofline(module: Module, target: Target) -> Roofline:
    """Return the model's time of a program on a target."""
    by_memory = by_products = 0.0
    for kernel in kernels(module):
        moving = kernel.moved / target.bandwidth
        dots = kernel.contractions(module)
        multiplying = kernel.runs * sum(dot.flops / rate_of(target, dot) for dot in dots)
        if multiplying > moving:
            by_products += multiplying
        else:
            by_memory += moving
    return Roofline(by_memory + by_products, by_memory, by_products)


def rate_of(target: Target, dot: Contraction) -> float:
    """Return FLOPs per second of a dot, by the next wider format that the matrix units have."""
    word = WORDS.get(dot.operands[0], dot.operands[0])
    family = "f8" if word.startswith("f8") else word
    for name in (family, "bf16"):
        if name in target.rates:
            slower = target.highest if name == "f32" and dot.highest else 1.0
            return target.rates[name] / slower
    raise AssertionError(f"{target.name} has no rate for bf16")
