"""Spellings that are not found yet, in which order and why. What is found leaves this list."""

from tests.attention import of_packages, spellings  # noqa: F401
from tests.attention.corpus import SPELLINGS
from tests.attention.finding import ORDERS

NOT_FOUND: dict[tuple[str, str], str] = {
    (name, order): "nothing looks for attention yet" for name in SPELLINGS for order in ORDERS
}
