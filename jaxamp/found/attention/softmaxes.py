"""Jaxprs that may hold an attention: an exponential between two products, as they are in order."""

from __future__ import annotations

from jax.extend.core import Jaxpr

from jaxamp.jaxprs.nested import Wiring, nested, wiring

_Steps = tuple[int, int, int, int]
"""How far an attention has come after a part of a program, if it was as far as the index before.

It is a product, an exponential and a product: three steps.
"""

_NONE: _Steps = (0, 1, 2, 3)
_STEPS: dict[str, _Steps] = {
    "dot_general": (1, 1, 3, 3),
    "exp": (0, 2, 2, 3),
    "exp2": (0, 2, 2, 3),
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
        self._found: dict[Jaxpr, _Steps] = {}  # alive, so that no later one has its identity

    def __contains__(self, jaxpr: Jaxpr) -> bool:
        return self._of(jaxpr)[0] == 3

    def _of(self, jaxpr: Jaxpr) -> _Steps:
        if jaxpr not in self._found:
            steps = _NONE
            for eqn in jaxpr.eqns:
                steps = _then(steps, _STEPS.get(eqn.primitive.name, _NONE))
                for body in nested(eqn):
                    for _ in range(3 if wiring(eqn) in _LOOPS else 1):
                        steps = _then(steps, self._of(body.jaxpr))
            self._found[jaxpr] = steps
        return self._found[jaxpr]


def _then(first: _Steps, second: _Steps) -> _Steps:
    return tuple(second[step] for step in first)  # type: ignore[return-value]
