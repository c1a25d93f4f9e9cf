"""Choose into how many chunks tokens are divided, and whether that pays, by a model of time."""

from __future__ import annotations

from typing import NamedTuple

from jax.extend.core import Jaxpr

from jaxamp.jaxprs.contracted import multiplied, size
from jaxamp.jaxprs.nested import Wiring, loop, nested, wiring

MATTERS = 2**26
"""Bytes of memory that are worth a loop."""

# Fitted to the times of 24 heads, stored and in chunks, by the roofline of what is compiled for an
# H200, as `python -m benchmarks.losses --target h200` has them (JAX 0.10.2, 27 November 2026).
_CHUNK = 2**26  # bytes of logits that a chunk has at least
_BANDWIDTH, _RATE = 3.84e12, 692e12  # bytes and operations per second that kernels of an H200 reach
_START = 6e-6  # seconds that each kernel of a GPU takes besides
_KERNELS = 12  # of a chunk
_AROUND = 4  # kernels that come with a product of a program
_TILES = 132 * 128**2  # results of a product of which each multiprocessor computes some
_LONG = 2048  # tokens of a chunk: to read a sum and add to it takes half as long as the product
_SHORT = 1024  # as long: for those who ask for memory, and where chunks take less time
_SLICES = 8  # of a matrix, at least
_SLOWER = 1.03  # times a program's products; elementwise operations and an optimizer come on top
_NARROW = 2


class Sizes(NamedTuple):
    """Sizes of a head."""

    tokens: int  # how many tokens it is computed for, on each device
    width: int  # how many numbers a token has
    words: int  # how many logits
    again: int = 0  # how many products more than three it takes in chunks, for loss and gradient
    is_trained: bool = True  # whether its matrix has a gradient
    devices: int = 1  # over how many all tokens are divided
    heads: int = 1  # how many matrices there are, each with its own of the tokens
    caps: int = 0  # of how many `tanh` they are read, which XLA:GPU stores in float32 with logits
    on_chip: int = 0  # bytes of logits that stay in a TPU's on-chip memory; 0 elsewhere
    slices: int = 1  # how many the matrix is read in, so that no narrow copy of all is stored

    @property
    def logits(self) -> int:
        """Bytes of all logits, narrow."""
        return _NARROW * self.tokens * self.words

    def saved(self, chunks: int) -> int:
        """Return how many bytes are not stored: of logits, in whose place their cotangents are."""
        each, copy = self.logits // chunks, _NARROW * self.width * self.words
        joined = each * (self.slices > 1)
        return self.logits - each - joined + copy - copy // self.slices

    def in_slices(self, chunks: int) -> Sizes:
        """Return the same with a matrix in slices, if that saves memory where it is the largest."""
        counts = (n for n in range(_SLICES, 4 * _SLICES) if self.words % n == 0)
        cut = self._replace(slices=next(counts, 1))
        return cut if cut.saved(chunks) - self.saved(chunks) >= MATTERS else self

    def time(self, chunks: int) -> float:
        """Return the seconds that it takes in chunks, or with all logits stored for one.

        Logits are read for the maximum, for the sum and for the cotangents, which are written.
        """
        is_stored = chunks == 1
        again = 0 if is_stored else self.again
        matrix, each = self.heads * self.width * self.words, self.logits / chunks
        each *= each > self.on_chip  # times no byte of those that stay on the chip
        moved = [each + _NARROW * matrix] * (2 + again)
        if self.is_trained:  # the gradient is in float32; chunks add to it, from zeros on
            moved.append(each + (4 if is_stored else 8) * matrix)
        arithmetic = 2 * self.tokens / chunks * self.width * self.words / _RATE
        products = sum(max(arithmetic, size / _BANDWIDTH) for size in moved)
        if is_stored:
            caps = 0 if self.on_chip else self.caps
            return products + 4 * (1 + caps) * each / _BANDWIDTH
        softmax = (4 + 2 * again) * each
        starts = 0 if self.on_chip else _KERNELS * self.slices * _START
        if starts and self.words % 16 and self.tokens / chunks * self.width < _TILES:
            softmax += 2 * each + 2 * _NARROW * matrix  # XLA:GPU copies and pads what it splits
        if self.slices > 1:  # each slice is copied twice, those of logits are joined
            softmax += 6 * each + 6 * matrix * (2 + again)
        beside = 8 * self.tokens * self.width + 4 * matrix * self.is_trained
        return chunks * (products + softmax / _BANDWIDTH + starts) + beside / _BANDWIDTH

    def slower(self, chunks: int, program: float) -> float:
        """Return how many times as long a program takes in chunks as with all logits stored.

        The program is given as the seconds that `products_of` returns.
        """
        program += 4 * self.logits / _BANDWIDTH  # of a stored softmax, as in `time`
        return 1 + (self.time(chunks) - self.time(1)) / program


def products_of(jaxpr: Jaxpr, *, backward: bool, again: bool = False) -> float:
    """Return the seconds that a program's products take with its gradient, on one device.

    Loops count as often as they run. What a product reads and writes is moved by what is around
    it, too: its arithmetic and its bytes take time after one another. If the program has not its
    gradient, each product is three, and one more if a checkpoint around computes it `again`.
    """
    total = 0.0
    for eqn in jaxpr.eqns:
        avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
        ins, out = avals[: len(eqn.invars)], avals[len(eqn.invars) :][:1]
        numbers = multiplied(eqn.primitive.name, eqn.params, ins, *out) if out else None
        if numbers is not None:
            moved = _NARROW * sum(map(size, avals)) / _BANDWIDTH
            each = 2 * numbers / _RATE + moved + _AROUND * _START
            total += each if backward else (3 + again) * each
        times = (loop(eqn).trips or 1) if wiring(eqn) is Wiring.SCAN else 1
        inner = again or eqn.primitive.name in ("remat2", "checkpoint")
        inside = [products_of(b.jaxpr, backward=backward, again=inner) for b in nested(eqn)]
        total += times * (max(inside) if wiring(eqn) is Wiring.BRANCHES else sum(inside))
    return total


def chunks_for(sizes: Sizes, word: bool | str | None, program: float) -> int | str:
    """Return how many chunks pay for a head, or why none do.

    The word is `PrecisionPolicy.loss_in_chunks`; the program is what `products_of` gives for all.

    >>> chunks_for(Sizes(tokens=4096, width=1536, words=65536), None, 0.02)
    2
    >>> chunks_for(Sizes(tokens=4096, width=1536, words=512), "memory", 0.02)
    'too few words: 512 for 1536 numbers of a token'
    """
    if sizes.words <= 2 * sizes.width:
        return f"too few words: {sizes.words} for {sizes.width} numbers of a token"
    tokens = sizes.tokens // sizes.heads
    chunks = min(tokens // _SHORT, -(-sizes.logits // _CHUNK))
    if word is True:
        chunks = min(max(chunks, 4), sizes.tokens * sizes.devices)
    if chunks < 2:
        each = f" on each of {sizes.devices} devices" if sizes.devices > 1 else ""
        return f"too few tokens: {sizes.tokens} × {sizes.words} words{each}"
    if word is not True and sizes.saved(chunks) < MATTERS:
        return f"too little memory is saved: {sizes.saved(chunks) / 2**20:.1f} MiB"
    while word is None:
        slower = sizes.slower(chunks, program)
        if slower < (_SLOWER if tokens // chunks >= _LONG else 1.0):
            break
        if sizes.saved(chunks // 2) < MATTERS:
            return f"a step would take {slower:.2f} times as long"
        chunks //= 2
    return chunks
