"""Registration of rewrite rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from jaxamp.core import jax_compat
from jaxamp.rewrite import rewrites
from jaxamp.rewrite.registry import RuleContext


def rule(context: RuleContext, *operands: Any) -> Sequence[Any]:
    """Emit an equation as it is."""
    return jax_compat.bind(context.eqn, operands)


@pytest.mark.parametrize("primitive", ["dot_general", "scan", "custom_vjp_call"])
def test_a_second_rule_is_refused(primitive: str) -> None:
    """Which of two rules holds would depend on the order of imports."""
    with pytest.raises(ValueError, match=primitive):
        rewrites(primitive)(rule)
