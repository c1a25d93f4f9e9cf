"""What a hostile case is, and the one list that all of them join."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tests.programs.registry import Args, Draw, enter


@dataclasses.dataclass(frozen=True)
class Case:
    """A float32 program that low precision easily ruins.

    Attributes:
        name: the function's name, unique.
        family: the file that it is in.
        stake: what goes wrong where it is lowered carelessly: the function's docstring.
        fn: the program, a pure function of `args`.
        args: positional arguments.
        per_element: whether each result element is measured against its own magnitude.
        keeps_products: whether rounding the products' operands is itself the harm; then that is no
            excuse, and the products have to stay float32.
        after: what is done to the function, and to the mixed-precision one: nothing, or `jax.grad`.
    """

    name: str
    family: str
    stake: str
    fn: Callable[..., Any]
    args: Args
    per_element: bool
    keeps_products: bool
    after: Callable[..., Any]

    def __str__(self) -> str:
        return f"{self.family}.{self.name}"


CASES: dict[str, Case] = {}


def hostile(
    args: Callable[[Draw], Args],
    *,
    per_element: bool = False,
    keeps_products: bool = False,
    after: Callable[..., Any] = lambda fn: fn,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter the decorated function into `CASES`.

    Args:
        args: makes the arguments from a `Draw`.
        per_element: see `Case`.
        keeps_products: see `Case`.
        after: see `Case`.

    Raises:
        ValueError: if two cases have one name.
    """

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        name, family = fn.__name__, fn.__module__.rpartition(".")[2]
        stake, drawn = (fn.__doc__ or "").strip(), args(Draw(name))
        case = Case(name, family, stake, fn, drawn, per_element, keeps_products, after)
        enter(CASES, name, case)
        return fn

    return decorate
