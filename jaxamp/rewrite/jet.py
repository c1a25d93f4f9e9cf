"""Define Taylor rules of the primitives in rewritten programs, for ``jax.experimental.jet``.

A series is a list of terms, the first of which belongs to order one. A linear primitive is applied
to each term; the terms of order n of a product are sums of products whose orders add up to n.

See: https://docs.jax.dev/en/latest/jax.experimental.jet.html
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental import jet

from jaxamp.rewrite.primitives.accumulate import accumulate_p, split_originals
from jaxamp.rewrite.primitives.quantized_dot import quantized_dot_p
from jaxamp.xla.primitives.checkpoint_barriers import recomputation_barrier_p
from jaxamp.xla.primitives.label_gather import label_gather_p
from jaxamp.xla.primitives.rounded_cotangent import rounded_cotangent_p
from jaxamp.xla.primitives.rounding_barrier import rounding_barrier_p

Series = Sequence[Any]


def _product(
    multiply: Callable[[Any, Any], Any], primals: Series, series: Sequence[Series]
) -> tuple[Any, list[Any]]:
    """Return the product of the first two operands, and the terms of its series."""
    lhs, rhs = ([value, *terms] for value, terms in zip(primals[:2], series[:2], strict=True))
    orders = range(len(lhs))
    sums = ([multiply(lhs[k], rhs[n - k]) for k in range(n + 1)] for n in orders)
    out, *terms = (sum(products[1:], products[0]) for products in sums)
    return out, terms


def _accumulated(primals: Series, series: Sequence[Series], *, rounded: Any, **params: Any) -> Any:
    (_, _, *others), _ = split_originals(primals, rounded)

    def multiply(x: Any, y: Any) -> Any:
        return accumulate_p.bind(x, y, *others, rounded=(), **params)

    return _product(multiply, primals, series)


def _quantized(primals: Series, series: Sequence[Series], **params: Any) -> Any:
    return _product(lambda x, y: quantized_dot_p.bind(x, y, **params), primals, series)


def _added(primals: Series, series: Sequence[Series], **params: Any) -> Any:
    terms = [rounded_cotangent_p.bind(x, y, **params) for x, y in zip(*series, strict=True)]
    return rounded_cotangent_p.bind(*primals, **params), terms


def _gathered(primals: Series, series: Sequence[Series], **params: Any) -> Any:
    table, indices = primals
    terms = [label_gather_p.bind(term, indices, **params) for term in series[0]]
    return label_gather_p.bind(table, indices, **params), terms


def _barriered(primals: Series, series: Sequence[Series]) -> Any:
    return rounding_barrier_p.bind(*primals), [rounding_barrier_p.bind(term) for term in series[0]]


def _recomputed(primals: Series, series: Sequence[Series], **params: Any) -> Any:
    return recomputation_barrier_p.bind(*primals, **params), series


jet.jet_rules[accumulate_p] = _accumulated
jet.jet_rules[quantized_dot_p] = _quantized
jet.jet_rules[rounded_cotangent_p] = _added
jet.jet_rules[label_gather_p] = _gathered
jet.jet_rules[rounding_barrier_p] = _barriered
jet.jet_rules[recomputation_barrier_p] = _recomputed
