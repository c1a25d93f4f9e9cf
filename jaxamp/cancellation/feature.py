"""The feature: products that others nearly cancel keep float32 operands."""

from __future__ import annotations

from jaxamp.core.features import Feature, Work


def _work() -> Work:
    from jaxamp.cancellation.cancelled_products import find_cancelled_products

    return Work(keep=find_cancelled_products)


FEATURE = Feature(name="cancellation", work=_work)
