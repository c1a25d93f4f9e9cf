"""The first screen of a report: what a policy does to a program, for the program's owner."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator

import jax

from jaxamp.compiled.targets import TARGETS
from jaxamp.core.features import Outcome, works
from jaxamp.core.guards import Guard
from jaxamp.display.lines import Line, Part, amount, sentence, share, storage, table
from jaxamp.errors import counted
from jaxamp.inspect.operation import Operation, common_scope, grouped, numberless, total
from jaxamp.inspect.report import WIDE, Report
from jaxamp.plan.dataflow.constraints import CAST

COLORS = {
    "f32": "cyan", "f64": "blue", "bf16": "green", "f16": "yellow",
    "f8_e4m3": "magenta", "f8_e5m2": "magenta",
}  # fmt: skip
_FEW = 5  # rows of each table
_LONG = 34  # characters of a module that a row has room for
_CLOCK = TARGETS["h200"]  # the chip of which the time to start a kernel has been measured


def report_lines(report: Report) -> Iterator[Line]:
    """Yield the first screen: totals, regions, products, what stays wide, what to do next."""
    yield ((report.program or "program", "bold"), f" under {report.policy}: {report.headline}")
    yield from _totals(report)
    notes = report.notes
    for note in notes[:3]:
        yield from sentence(note, "yellow")
    if len(notes) > 3:
        yield ((f"and {counted(len(notes) - 3, 'more note')}", "yellow"),)
    yield from _small(report)
    for work in works():
        for kind, absent in work.kinds.items():
            yield from _regions(kind, [r for r in report.regions if r.kind == kind], absent)
    yield from _products(report)
    yield from _wide(report)
    yield from _next(report)


def _totals(report: Report) -> Iterator[Line]:
    products, whole = total(_products_of(report)), report.total
    if products.flops:
        words = (
            f"Matrix products are {share(products.flops, whole.flops)} of the program's "
            f"{amount(whole.flops, 'FLOP')}."
        )
        if products.saved > 0:
            words += (
                f" They move {share(products.saved, products.bytes_f32)} fewer bytes than in "
                f"float32; {share(products.bytes_narrow, products.bytes)} of these are in 16 bits "
                "or fewer."
            )
        yield from sentence(words)
    kept, wide = (
        sum(getattr(r, name) for r in report.residuals) for name in ("bytes", "bytes_f32")
    )
    if kept:
        less = f"{share(wide - kept, wide)} less than the same values take in float32"
        yield from sentence(
            f"Kept for the backward pass: {storage(kept)}, {less if wide > kept else 'as written'}."
        )


def _small(report: Report) -> Iterator[Line]:
    """Warn where a kernel takes longer to start than any product in float32."""
    start, reached = _CLOCK.reached.start, _CLOCK.reached
    flops = start * _CLOCK.rates["f32"] * reached.products
    moved = start * _CLOCK.bandwidth * reached.bandwidth
    dots = _products_of(report)
    if not dots or any(o.each.flops > flops or o.each.bytes_f32 > moved for o in dots):
        return
    largest = max(dots, key=lambda o: o.each.flops)
    side = 64 * round((flops / 2) ** (1 / 3) / 64)
    yield from sentence(
        f"Small products: the largest, {_shapes(largest)}, has {amount(largest.each.flops, 'FLOP')}"
        f". An {_CLOCK.name.upper()} takes {start * 1e6:.0f} µs to start a kernel, as long as to "
        f"multiply {side} × {side} × {side} in float32: below that size fewer bits save memory, "
        "not time."
    )


def _regions(kind: str, regions: list[Outcome], absent: str) -> Iterator[Line]:
    name = kind.capitalize()
    if not regions:
        yield from sentence(f"{name}: none in this program: {absent}.")
        return
    if fused := [r for r in regions if not r.obstacle]:
        one, saved = len(fused) == 1, sum(r.saved for r in fused)
        does = f"run{'s' * one} as one kernel{'' if one else ' each'}"
        if saved:
            does = f"{'is' if one else 'are'} divided, and {storage(saved)} never stored"
            does += f", for {100 * (max(r.slower for r in fused) - 1):.1f} % more time as predicted"
        of = f"{len(fused)} of {counted(len(regions), 'region')}"
        yield from sentence(f"{name}: {of} {does}.")
    stay = grouped((r for r in regions if r.obstacle), lambda r: r.obstacle)
    for obstacle, those in list(stay.items())[:2]:
        where = numberless(those[0].scope) or _file_and_line(those[0].source)
        yield from sentence(
            f"{name}: {counted(len(those), 'region')} ({where}) stay{'s' * (len(those) == 1)} as "
            f"written: {obstacle}."
        )


def _file_and_line(source: str) -> str:
    """Return the place in a line of JAX's own about one, ``model.py:71``."""
    return ":".join(os.path.basename(source.partition(" (")[0]).split(":")[:2])


def _products(report: Report) -> Iterator[Line]:
    whole = total(_products_of(report)).flops
    found = grouped(_products_of(report), lambda o: (_module(o), o.arithmetic)).values()
    groups = sorted(found, key=lambda group: -total(group).flops)
    rows: list[list[Part]] = []
    for group in groups[:_FEW]:
        first = max((o for o in group), key=lambda o: (not o.backward, o.each.flops))
        word = first.arithmetic
        ways = {o.backward: "backward" if o.backward else "forward" for o in group}
        way = "" if len(ways) == 2 else "".join(ways.values())
        flops = share(total(group).flops, whole)
        rows.append([flops, (word, COLORS.get(word, "")), _where(group), _shapes(first), way])
    if rows:
        yield (("Matrix products by module, share of their FLOPs:", "bold"),)
        yield from table(rows, right=[0])
        yield from _rest(groups, lambda group: f"{share(total(group).flops, whole)}")


def _wide(report: Report) -> Iterator[Line]:
    """Show what is in memory in float32: products by module, the others by reason."""
    whole = report.total
    wide = [o for o in report.operations if o.runs and o.arithmetic in WIDE]
    inside = [o for o in wide if o.guard == Guard.REDUCTION_ISLAND.value or o.stored not in WIDE]
    stays = [o for o in wide if o not in inside]
    found = grouped(stays, lambda o: (o.reason, _module(o) if o.contraction else "")).values()

    def shares(group: list[Operation]) -> tuple[float, float]:
        tally = total(group)
        moved = tally.bytes - tally.bytes_narrow
        return tally.flops / max(whole.flops, 1), moved / max(whole.bytes, 1)

    groups = sorted((g for g in found if max(shares(g)) >= 5e-4), key=lambda g: -max(shares(g)))
    rows: list[list[Part]] = []
    for group in groups[:_FEW]:
        flops, moved = (share(part, 1) for part in shares(group))
        what = "products of " * group[0].contraction
        rows.append([flops, moved, what + _where(group), group[0].reason])
    if rows:
        yield (("In float32, share of all FLOPs and of all bytes before fusion:", "bold"),)
        yield from table(rows, right=[0, 1])
        yield from _rest(groups, lambda g: share(total(g).flops, whole.flops))
    if inside:
        yield from sentence(
            f"Computed in float32 inside kernels, at no cost in bytes: "
            f"{counted(len(inside), 'operation')} of softmax, norms, activations and the like."
        )


def _next(report: Report) -> Iterator[Line]:
    yield (("Next", "bold"),)
    name = report.program if report.program.isidentifier() else "f"
    wide = [o for o in _products_of(report) if o.arithmetic in WIDE]
    steps: list[str] = []
    if any(o.guard == Guard.NO_GAIN.value or o.reason == CAST.reason for o in wide):
        steps.append(
            "narrow all the same: policy.with_rules(jaxamp.Rule(precision='bf16', kind='compute'))"
        )
    if any(r.kind == "loss" and "as long" in r.obstacle for r in report.regions):
        steps.append("less memory for logits all the same: policy.replace(loss_in_chunks='memory')")
    if "f16" in report.dots() and report.residuals:
        steps.append("train with a loss scale: jaxamp.training.scaled_value_and_grad")
    steps.append(f"each line of your code, with reasons: jaxamp.explain({name})(*args)")
    if jax.default_backend() == "cpu":
        steps.append(
            "memory and time on a chip that is not here (a CPU gains nothing): "
            f"jaxamp.estimate({name}, target='h200')(*args)"
        )
    steps.append(
        "everything: print(report.full()), report.save('report.html'); "
        "on the command line --all, --html"
    )
    for step in steps:
        yield from sentence(f"  {step}", width=110)


def _products_of(report: Report) -> list[Operation]:
    return [o for o in report.contractions if o.runs]


def _rest(groups: list[list[Operation]], cost: Callable[[list[Operation]], str]) -> Iterator[Line]:
    if len(groups) > _FEW:
        left = [o for group in groups[_FEW:] for o in group]
        yield (f"  and {len(groups) - _FEW} more, {cost(left)}",)


def _module(operation: Operation) -> str:
    """Return the module of an operation without numbers, or its line where it is in none."""
    return numberless(operation.scope) or operation.place.short or "(no line)"


def _where(group: list[Operation]) -> str:
    """Return the module of most of the cost, and how many others there are."""
    costs: Counter[str] = Counter()
    for o in group:
        costs[_module(o)] += o.tally.bytes
    (name, _), *_ = costs.most_common(1)
    scopes = [o.scope for o in group if _module(o) == name]
    word = common_scope(scopes) if scopes[0] else name
    times = f" × {layers}" if (layers := len(set(scopes))) > 1 else ""
    others = f" and {len(costs) - 1} more" if len(costs) > 1 else ""
    return _short(word) + times + others


def _short(scope: str) -> str:
    """Return the last parts of a long path, without the classes that a library's own scopes name.

    >>> _short("ViT/blocks/0/attention/query_proj/eqx.nn.MultiheadAttention/eqx.nn.Linear")
    'ViT/blocks/0/attention/query_proj'
    """
    if len(scope) > _LONG:
        scope = "/".join(part for part in scope.split("/") if "." not in part) or scope
    parts = scope.split("/")
    while len(parts) > 2 and len("/".join(parts)) > _LONG:
        parts = parts[1:]
    return "/".join(parts) if len(parts) == len(scope.split("/")) else "…/" + "/".join(parts)


def _shapes(operation: Operation) -> str:
    """Return the shapes of a product, ``[2,3] × [3,4]``."""
    return " × ".join(re.sub(r"^\w+", "", word) for word in operation.operands[:2])
