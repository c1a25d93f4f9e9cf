"""The dots and convolutions of a compiled program: their dtypes and FLOPs, whatever made them.

A dot may be an instruction, a part of a fused kernel or a call of a library; a convolution too, and
on a TPU a dot is one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from jaxamp.compiled.hlo import Array, Instruction, Module

LIBRARY = re.compile(r"__cublas|__cudnn|__triton_gemm")
_CONTRACTED = re.compile(r"lhs_contracting_dim(?:ension)?s\"?[=:][{\[]([^}\]]*)[}\]]")
_LABELS = re.compile(r"dim_labels=([\w?]+)_([\w?]+)->([\w?]+)")
_DILATED = re.compile(r"lhs_dilate=([\dx]+)")
_INTERIOR = re.compile(r"\d+_\d+_(\d+)")
_HIGHEST = re.compile(r"operand_precision\W+highest", re.IGNORECASE)
_SAME_ELEMENTS = ("bitcast", "convert", "copy", "reshape", "transpose")


@dataclass(frozen=True, slots=True)
class Contraction:
    """One dot or convolution, in one run: dtypes, and FLOPs but for zeros between its inputs.

    It is ``highest`` where the full precision of its operands was asked for.
    """

    operands: tuple[str, str]
    result: str
    flops: float
    highest: bool

    def __str__(self) -> str:
        return "×".join(self.operands) + "→" + self.result


def contractions(module: Module, line: Instruction) -> Iterator[Contraction]:
    """Return the dots and convolutions in one kernel."""
    if line.op in ("dot", "convolution") or LIBRARY.search(line.target):
        yield _contraction(module, line)
    elif line.op == "fusion":
        for nested in module.inside(line).instructions:
            yield from contractions(module, nested)


def _contraction(module: Module, line: Instruction) -> Contraction:
    lhs, rhs = (line.input(n).results[0] for n in range(2))
    labels = _LABELS.search(line.attributes)
    if "__cudnn$fmha" in line.target:
        flops = _attention(line)
    elif labels:
        flops = _convolution(line, lhs, rhs, labels.groups())
        flops /= _dilation(module, line.input(0))
    else:
        flops = _dot(line, lhs)
    return Contraction(
        operands=(lhs.dtype, rhs.dtype),
        result=line.results[0].dtype,
        flops=flops,
        highest=bool(_HIGHEST.search(line.attributes)),
    )


def _dot(line: Instruction, lhs: Array) -> float:
    found = _CONTRACTED.search(line.attributes)
    axes = [int(n) for n in re.findall(r"\d+", found.group(1))] if found else []
    return 2.0 * prod(line.results[0].dims) * prod(lhs.dims[axis] for axis in axes)


def _attention(line: Instruction) -> float:
    """Read cuDNN's attention, in the layout BTNH: two products forward, and five backward."""
    q, k, v = (line.input(n).results[0].dims for n in range(3))
    heads, values = (3, 2) if "Backward" in line.target else (1, 1)
    return 2.0 * prod(q[:-1]) * k[1] * (heads * q[-1] + values * v[-1])


def _convolution(line: Instruction, lhs: Array, rhs: Array, labels: tuple[str, ...]) -> float:
    """Read a convolution, or one of the library's two derivatives, which swap its arrays."""
    kernel, image = rhs, line.results[0]
    if "BackwardFilter" in line.target:
        kernel, image = line.results[0], rhs
    elif "BackwardInput" in line.target:
        image = lhs
    features = kernel.dims[labels[1].index("o")]
    dilated = _DILATED.search(line.attributes)
    zeros = prod(int(n) for n in dilated.group(1).split("x")) if dilated else 1
    return 2.0 * prod(image.dims) * prod(kernel.dims) / max(features, 1) / zeros


def _dilation(module: Module, line: Instruction) -> int:
    """Return how many times larger an operand is for the zeros put between its elements."""
    if line.op == "fusion":
        line = module.inside(line).root
        while line.op in _SAME_ELEMENTS:
            line = line.input(0)
    if line.op != "pad":
        return 1
    _, _, padding = line.attributes.partition("padding=")
    interior = _INTERIOR.findall(padding.partition(",")[0])
    return prod(int(n) + 1 for n in interior)
