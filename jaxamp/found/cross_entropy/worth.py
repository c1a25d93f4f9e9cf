"""Choose into how many chunks tokens are divided, and whether that pays, by bytes and time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jax.extend.core import Jaxpr

from jaxamp.jaxprs.contracted import multiplied, size
from jaxamp.jaxprs.nested import Wiring, loop, nested, wiring
from jaxamp.plan.dataflow.regions import LONGEST_ROW

MATTERS = 2**26
"""Bytes of memory that are worth a loop."""

_CHUNK = 2**26  # bytes of logits that a chunk has at least
_BALANCE = 144  # operations of products in the time of a byte: 692 TFLOP/s, 4.8 TB/s (H200)
_LONG = 2048  # tokens of a chunk, where time counts: reading and adding to a sum takes half as long
_SHORT = 1024  # where memory counts: it takes as long as the products
_LONGER = 0.02  # of a program's time
_MORE = 0.05  # of a program's bytes
_STARTS = 3e8  # bytes that are moved while the kernels of a chunk start: 12 of 5 µs, at 4.8 TB/s
_NARROW = 2


class Cost(NamedTuple):
    """Time and bytes that loss and gradient take.

    Attributes:
      time: in bytes that are moved meanwhile.
      moved: bytes that are moved.
    """

    time: float
    moved: float

    def more(self, than: Cost, program: Cost) -> Cost:
        """Return how much more they are than others, as parts of a program's."""
        return Cost(*((a - b) / c for a, b, c in zip(self, than, program, strict=True)))


class Sizes(NamedTuple):
    """Sizes of a head.

    Attributes:
      tokens: how many tokens it is computed for, on each device.
      width: how many numbers a token has.
      words: how many logits.
      again: how many products more than three it takes in chunks, for loss and gradient.
      is_trained: whether its matrix has a gradient.
      devices: over how many all tokens are divided.
      heads: how many matrices there are, each with its own of the tokens.
    """

    tokens: int
    width: int
    words: int
    again: int = 0
    is_trained: bool = True
    devices: int = 1
    heads: int = 1

    @property
    def logits(self) -> int:
        """Bytes of all logits, narrow."""
        return _NARROW * self.tokens * self.words

    def saved(self, chunks: int) -> int:
        """Return how many bytes of logits are not stored; their cotangents take their place."""
        return self.logits - self.logits // chunks

    def cost(self, chunks: int) -> Cost:
        """Return what it takes in chunks, or with all logits stored for one."""
        is_stored = chunks == 1
        matrix, each = self.heads * self.width * self.words, self.logits / chunks
        products = [each + _NARROW * matrix] * (2 if is_stored else 2 + self.again)
        if self.is_trained:  # the gradient is in float32; chunks add to it, from zeros on
            products.append(each + (4 if is_stored else 8) * matrix)
        zeros = 4 * matrix if self.is_trained else 0
        activations = 16 * self.tokens * self.width  # in float32, to chunks and back
        beside = 0 if is_stored else zeros + activations
        arithmetic = 2 * self.tokens / chunks * self.width * self.words / _BALANCE
        softmax = self.softmax(is_stored) * each
        if self.words % 8 and not is_stored:  # XLA:GPU copies and pads what products read
            softmax += 2 * each + 2 * _NARROW * matrix
        time = sum(max(arithmetic, moved) for moved in products) + softmax
        starts = (chunks - 1) * _STARTS
        return Cost(chunks * time + beside + starts, chunks * (sum(products) + softmax) + beside)

    def softmax(self, is_stored: bool) -> int:
        """Return how often the softmax and its cotangent read or write logits, in narrow passes.

        Both need the maximum and the sum, which a chunk has from one pass each; then logits are
        read once more, and cotangents written. Stored logits are read anew for the cotangents, and
        the logarithms that labels are looked up in are stored where one kernel makes a row of them.
        """
        if is_stored:
            return 5 if self.words <= LONGEST_ROW else 7
        return 4 + 2 * self.again


def products_of(jaxpr: Jaxpr, *, backward: bool, devices: int = 1) -> Cost:
    """Return what a program's products take with its gradient, on each device.

    Loops count as often as they run. What a product reads and writes is moved by what is around
    it, too: its arithmetic and its bytes take time after one another.

    Args:
      jaxpr: the program.
      backward: whether it has its gradient; each product is three otherwise, or four where a
        checkpoint computes one of them again.
      devices: over how many they are divided.
    """
    each, again = (1, 1) if backward else (3, 4)
    arithmetic, moved = _products(jaxpr, each, again) / devices
    return Cost(arithmetic + moved, moved)


def _products(jaxpr: Jaxpr, each: int, again: int) -> np.ndarray:
    """Return the time of products' arithmetic, and the bytes that they move."""
    total = np.zeros(2)
    for eqn in jaxpr.eqns:
        avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
        ins, out = avals[: len(eqn.invars)], avals[len(eqn.invars) :][:1]
        numbers = multiplied(eqn.primitive.name, eqn.params, ins, *out) if out else None
        if numbers is not None:
            total += each * np.array([2 * numbers / _BALANCE, _NARROW * sum(map(size, avals))])
        times = (loop(eqn).trips or 1) if wiring(eqn) is Wiring.SCAN else 1
        inner = again if eqn.primitive.name in ("remat2", "checkpoint") else each
        inside = [_products(body.jaxpr, inner, again) for body in nested(eqn)]
        if wiring(eqn) is Wiring.BRANCHES:
            inside = [max(inside, key=sum)]
        total += times * sum(inside, np.zeros(2))
    return total


def chunks_for(sizes: Sizes, word: bool | str | None, program: Cost) -> int | str:
    """Return how many chunks pay for a head, or why none do.

    Args:
      sizes: of the head.
      word: `PrecisionPolicy.loss_in_chunks`.
      program: what products take, of loss and gradient of the whole program, on each device.

    >>> chunks_for(Sizes(tokens=4096, width=1536, words=65536), None, Cost(7e10, 3e10))
    2
    >>> chunks_for(Sizes(tokens=4096, width=1536, words=512), "memory", Cost(7e10, 3e10))
    'too few words: 512 for 1536 numbers of a token'
    """
    if sizes.words <= 2 * sizes.width:
        return f"too few words: {sizes.words} for {sizes.width} numbers of a token"
    tokens = sizes.tokens // sizes.heads
    chunks = min(tokens // (_SHORT if word else _LONG), -(-sizes.logits // _CHUNK))
    if word is True:
        chunks = min(max(chunks, 4), sizes.tokens * sizes.devices)
    if chunks < 2:
        each = f" on each of {sizes.devices} devices" if sizes.devices > 1 else ""
        return f"too few tokens: {sizes.tokens} × {sizes.words} words{each}"
    if word is not True and sizes.saved(chunks) < MATTERS:
        return f"too little memory is saved: {sizes.saved(chunks) / 2**20:.1f} MiB"
    softmax = sizes.softmax(is_stored=True) * sizes.logits
    program = Cost(program.time + softmax, program.moved + softmax)
    while word is None:
        more = sizes.cost(chunks).more(sizes.cost(1), program)
        if more.time <= _LONGER and more.moved <= _MORE:
            break
        if sizes.saved(chunks // 2) < MATTERS:
            if more.time > _LONGER:
                return f"a step would take {1 + more.time:.2f} times as long"
            return f"a step would move {1 + more.moved:.2f} times the bytes"
        chunks //= 2
    return chunks
