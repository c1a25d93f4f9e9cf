"""Choose into how many chunks tokens are divided, and whether that pays, by bytes and time."""

from __future__ import annotations

from typing import NamedTuple

from jax.extend.core import Jaxpr

from jaxamp.jaxprs.contracted import multiplied, size
from jaxamp.jaxprs.nested import Wiring, nested, wiring

MATTERS = 2**26
"""Bytes of memory that are worth a loop."""

_CHUNK = 2**26  # bytes of logits that a chunk has at least
_BALANCE = 144  # operations of products in the time of a byte: 692 TFLOP/s, 4.8 TB/s (H200)
_LONG = 2048  # tokens of a chunk, where time counts: reading and adding to a sum takes half as long
_SHORT = 1024  # where memory counts: it takes as long as the products
_LONGER = 0.02  # of a program's time
_STARTS = 3e8  # bytes that are moved while the kernels of a chunk start: 12 of 5 µs, at 4.8 TB/s
_STORED = 2  # passes over logits that storing them all adds (a Llama-like model, H200)
_NARROW = 2


class Sizes(NamedTuple):
    """Sizes of a head.

    Attributes:
      tokens: how many tokens it is computed for.
      width: how many numbers a token has.
      words: how many logits.
      again: how many products more than three it takes in chunks, for loss and gradient.
    """

    tokens: int
    width: int
    words: int
    again: int

    @property
    def logits(self) -> int:
        """Bytes of all logits, narrow."""
        return _NARROW * self.tokens * self.words

    def saved(self, chunks: int) -> int:
        """Return how many bytes of logits are not stored; their cotangents take their place."""
        return self.logits - self.logits // chunks

    def longer(self, chunks: int) -> float:
        """Return how much more time loss and gradient take in chunks, in bytes that are moved."""
        activations = 16 * self.tokens * self.width  # in float32, to chunks and back
        more = activations + (chunks - 1) * _STARTS - _STORED * self.logits
        return self._time(chunks, self.again) - self._time(1, 0) + more

    def _time(self, chunks: int, again: int) -> float:
        """Return a time in bytes: of each product the larger of arithmetic and what it moves."""
        matrix, each = self.width * self.words, self.logits / chunks
        arithmetic = 2 * self.tokens / chunks * matrix / _BALANCE
        products = (2 + again) * max(arithmetic, each + _NARROW * matrix)
        summed = max(arithmetic, each + (8 if chunks > 1 else 4) * matrix)
        zeros = 4 * matrix if chunks > 1 else 0
        return chunks * (products + summed + 3 * each) + zeros


def products_of(jaxpr: Jaxpr, *, backward: bool) -> float:
    """Return the time of a program's products with its gradient, in bytes.

    Loops count as often as they run, and what a product reads and writes is moved by what is around
    it, too.

    Args:
      jaxpr: the program.
      backward: whether it has its gradient; each product is three otherwise, or four where a
        checkpoint computes one of them again.
    """
    return _products(jaxpr, 1 if backward else 3, 1 if backward else 4)


def _products(jaxpr: Jaxpr, each: int, again: int) -> float:
    total = 0.0
    for eqn in jaxpr.eqns:
        avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
        ins, out = avals[: len(eqn.invars)], avals[len(eqn.invars) :][:1]
        numbers = multiplied(eqn.primitive.name, eqn.params, ins, *out) if out else None
        if numbers is not None:
            total += each * (2 * numbers / _BALANCE + _NARROW * sum(map(size, avals)))
        times = eqn.params.get("length", 1) if wiring(eqn) is Wiring.SCAN else 1
        inner = again if eqn.primitive.name in ("remat2", "checkpoint") else each
        inside = [_products(body.jaxpr, inner, again) for body in nested(eqn)]
        total += times * (max(inside) if wiring(eqn) is Wiring.BRANCHES else sum(inside))
    return total


def chunks_for(sizes: Sizes, word: bool | str | None, program: float) -> int | str:
    """Return how many chunks pay for a head, or why none do.

    Args:
      sizes: of the head.
      word: `PrecisionPolicy.loss_in_chunks`.
      program: time of loss and gradient in the whole program, in bytes.

    >>> chunks_for(Sizes(tokens=4096, width=1536, words=65536, again=0), None, 7e10)
    2
    >>> chunks_for(Sizes(tokens=4096, width=1536, words=512, again=0), "memory", 7e10)
    'too few words: 512 for 1536 numbers of a token'
    """
    if sizes.words <= 2 * sizes.width:
        return f"too few words: {sizes.words} for {sizes.width} numbers of a token"
    chunks = min(sizes.tokens // (_SHORT if word else _LONG), -(-sizes.logits // _CHUNK))
    if word is True:
        chunks = min(max(chunks, 4), sizes.tokens)
    if chunks < 2:
        return f"too few tokens: {sizes.tokens} × {sizes.words} words"
    if word is not True and sizes.saved(chunks) < MATTERS:
        return f"too little memory is saved: {sizes.saved(chunks) / 2**20:.1f} MiB"
    while word is None and sizes.longer(chunks) > _LONGER * program:
        if sizes.saved(chunks // 2) < MATTERS:
            return f"a step would take {1 + sizes.longer(chunks) / program:.2f} times as long"
        chunks //= 2
    return chunks
