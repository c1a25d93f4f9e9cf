"""Jaxprs that may hold an attention: an exponential between two products, as they are in order."""

from __future__ import annotations

from typing import NamedTuple

from jax.extend.core import Jaxpr

from jaxamp.jaxprs.nested import Wiring, nested, wiring


class _Order(NamedTuple):
    """Order of products and exponentials: which come after which in a part of a program."""

    product: bool = False
    exponential: bool = False
    scores: bool = False  # a product, then an exponential
    lookup: bool = False  # an exponential, then a product
    attention: bool = False  # all three

    def then(self, other: _Order) -> _Order:
        """Return the order in both, one after the other."""
        return _Order(
            self.product or other.product,
            self.exponential or other.exponential,
            self.scores or other.scores or (self.product and other.exponential),
            self.lookup or other.lookup or (self.exponential and other.product),
            self.attention
            or other.attention
            or (self.scores and other.product)
            or (self.product and other.lookup),
        )


_ORDERS = {
    "dot_general": _Order(product=True),
    "exp": _Order(exponential=True),
    "exp2": _Order(exponential=True),
}
_LOOPS = (Wiring.SCAN, Wiring.WHILE)


class Softmaxes:
    """Jaxprs in which an exponential comes after a product and before another.

    Every attention has that; each jaxpr is walked once.

    >>> import jax
    >>> def loss(x, w):
    ...     return jax.nn.logsumexp(x @ w)
    >>> x = jax.numpy.ones((8, 8))
    >>> [jax.make_jaxpr(f)(x, x).jaxpr in Softmaxes() for f in (loss, jax.grad(loss))]
    [False, True]
    """

    def __init__(self) -> None:
        self._orders: dict[Jaxpr, _Order] = {}  # alive, so that no later one has its identity

    def __contains__(self, jaxpr: Jaxpr) -> bool:
        return self._of(jaxpr).attention

    def has_exponential(self, jaxpr: Jaxpr) -> bool:
        """Return whether there is an exponential in a jaxpr, or in those within."""
        return self._of(jaxpr).exponential

    def _of(self, jaxpr: Jaxpr) -> _Order:
        if (order := self._orders.get(jaxpr)) is None:
            order = _Order()
            for eqn in jaxpr.eqns:
                if eqn.primitive.name in _ORDERS:
                    order = order.then(_ORDERS[eqn.primitive.name])
                for body in nested(eqn):
                    inner = self._of(body.jaxpr)
                    if wiring(eqn) in _LOOPS:
                        inner = inner.then(inner).then(inner)
                    order = order.then(inner)
            self._orders[jaxpr] = order
        return order
