"""How many spellings of attention are found, in both orders.

python -m tests.found.attention  the counts, and what is not found, with the reasons given
  --all       a line for each program
  --accuracy  the accuracy of every program of the corpus, in both formats; --once runs each in one
              format and order, in turn
  --random N  as many random spellings held to float64; --seed draws others
"""

from __future__ import annotations

import argparse

from hypothesis import Phase, given, seed, settings
from rich.console import Console
from rich.table import Table

import tests.flags  # noqa: F401 - sets the XLA flags, before JAX starts
from tests.found.attention import near_misses, of_packages, spellings  # noqa: F401
from tests.found.attention.accuracy import CASES, ONCE, Case
from tests.found.attention.accuracy import check as check_accuracy
from tests.found.attention.corpus import EXTRA_TERMS, NEAR_MISSES, SPELLINGS
from tests.found.attention.finding import FORWARD, JOINT, ORDERS, Found, found
from tests.found.attention.recipes import Recipe, check, recipes


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.found.attention", description=__doc__)
    parser.add_argument("--all", action="store_true", help="a line for each program")
    parser.add_argument("--accuracy", action="store_true", help="accuracy instead; an hour")
    parser.add_argument("--random", type=int, metavar="N", help="random spellings instead")
    parser.add_argument("--seed", type=int, default=0, help="with --random")
    parser.add_argument("--once", action="store_true", help="with --accuracy: a case a program")
    parser.add_argument("--start", type=int, default=0, help="with --accuracy: the first case")
    parser.add_argument("--stop", type=int, help="with --accuracy: the case to end before")
    options = parser.parse_args()
    if options.random:
        return random(options.random, options.seed)
    if options.accuracy:
        return accuracy((ONCE if options.once else CASES)[options.start : options.stop])
    shown = Table("program", "attentions", *ORDERS, "refused")
    counts = dict.fromkeys(ORDERS, 0)
    present = [p for p in SPELLINGS.values() if not p.missing]
    for program in present:
        results = {order: found(program, order) for order in ORDERS}
        right = {order: r.count >= program.count for order, r in results.items()}
        for order in ORDERS:
            counts[order] += right[order]
        if options.all or not all(right.values()):
            shown.add_row(program.name, str(program.count), *_cells(results))
    for table in (NEAR_MISSES, EXTRA_TERMS):
        for program in table.values():
            results = {order: found(program, order) for order in ORDERS}
            if options.all or any(r.any for r in results.values()):
                shown.add_row(
                    program.name,
                    "near miss" if program.count == 0 else "and more",
                    *_cells(results),
                )
    console = Console(width=140)
    console.print(shown)
    for program in SPELLINGS.values():
        if program.missing:
            console.print(f"{program.name}: {program.missing}")
    share = ", ".join(f"{counts[o]} found {o} ({counts[o] / len(present):.0%})" for o in ORDERS)
    console.print(f"{len(present)} spellings: {share}")


def random(count: int, start: int) -> None:
    """Check so many random spellings, those of a seed; print what misses."""
    outcomes: list[bool | None] = []

    @seed(start)
    @settings(max_examples=count, deadline=None, database=None, phases=[Phase.generate])
    @given(recipes())
    def run(recipe: Recipe) -> None:
        try:
            outcomes.append(check(recipe))
        except Exception as error:  # the others are wanted too
            outcomes.append(None)
            print(f"{recipe}: {type(error).__name__}: {error}", flush=True)

    run()
    failed = outcomes.count(None)
    print(
        f"{len(outcomes)} random spellings: {outcomes.count(True)} found in both orders, "
        f"{failed} failed"
    )


def accuracy(cases: list[Case]) -> None:
    """Check the accuracy of programs, with kernels as they round; print what misses."""
    missed = 0
    for program, dtype, order in cases:
        try:
            check_accuracy(program, dtype, order)
        except AssertionError as error:
            missed += 1
            print(f"{program.name}, {dtype}, {order}: {error}", flush=True)
    print(f"{len(cases) - missed} passed, {missed} failed")


def _cells(results: dict[str, Found]) -> list[str]:
    reasons = dict.fromkeys(results[FORWARD].refused + results[JOINT].refused)
    return [*(str(results[order].count) for order in ORDERS), "; ".join(reasons)]


if __name__ == "__main__":
    main()
