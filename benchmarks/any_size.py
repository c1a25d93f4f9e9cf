"""FP8 for small models: products of any size are scaled."""

from __future__ import annotations

from jaxamp import PrecisionPolicy


def of_any_size(policy: PrecisionPolicy) -> PrecisionPolicy:
    """Scale products of any size, first and last ones too, where a policy scales any."""
    return policy.replace(scaling=policy.scaling.replace(small=(), ends=True))
