"""python docs/pictures.py: draws the pictures of the site into docs/pictures/."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import matplotlib

ROOT = Path(__file__).parent.parent
matplotlib.rcParams["svg.hashsalt"] = "jaxamp"  # the same picture is the same file
FOLDER = ROOT / "docs/pictures"
sys.path.insert(0, str(ROOT))
matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

import jaxamp  # noqa: E402
from examples.block import inputs, loss  # noqa: E402

COLOURS = {"bf16": "#3b6fb6", "f16": "#79d15a", "f32": "#d9822b", "-": "#c9c9c9"}
STAGES = [
    ("trace", "fn → jaxpr", "trace.py"),
    ("plan", "a decision\nper equation", "plan/"),
    ("rewrite", "jaxpr\nwith casts", "rewrite/"),
    ("run", "compiled once,\ncached", "runner.py"),
]


def pipeline(path: Path) -> None:
    """The four stages, and what reads the plan."""
    figure, axes = plt.subplots(figsize=(8.5, 2.6))
    for index, (name, what, where) in enumerate(STAGES):
        _box(axes, 2.5 * index, 1.3, name, what, where)
        if index:
            axes.annotate(
                "", (2.5 * index - 0.05, 1.85), (2.5 * index - 0.65, 1.85), arrowprops=ARROW
            )
    readers = "report · explain · diff · tune"
    axes.text(3.4, 0.35, f"{readers} read the same plan", ha="center", fontsize=10)
    axes.annotate("", (3.4, 0.6), (3.4, 1.25), arrowprops=ARROW)
    axes.set(xlim=(-0.2, 9.6), ylim=(0, 2.6))
    axes.axis("off")
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


ARROW = {"arrowstyle": "-|>", "color": "#555555", "lw": 1.4}


def _box(axes: Axes, x: float, y: float, name: str, what: str, where: str) -> None:
    axes.add_patch(
        plt.Rectangle((x, y), 1.8, 1.1, facecolor="#eef2f8", edgecolor=COLOURS["bf16"], lw=1.4)
    )
    axes.text(x + 0.9, y + 0.88, name, ha="center", va="center", fontsize=11, weight="bold")
    axes.text(x + 0.9, y + 0.5, what, ha="center", va="center", fontsize=9)
    axes.text(x + 0.9, y + 0.14, where, ha="center", va="center", fontsize=8, family="monospace")


def plan(path: Path) -> None:
    """Every operation of a transformer block: what it computes in, and what it stores."""
    decisions = [
        d for d in jaxamp.plan_of(loss)(*inputs()).decisions() if not d.plan.inner and d.outputs
    ]
    figure, axes = plt.subplots(figsize=(9.5, 0.17 * len(decisions) + 1.2))
    for row, decision in enumerate(decisions):
        inside, stored = decision.accumulation, decision.outputs[0]
        read = decision.operand
        for column, precision in enumerate((read, inside, stored)):
            word = precision.short if precision else "-"
            axes.barh(row, 0.94, left=column, color=COLOURS[word], height=0.86)
            label = {"color": "white" if precision else "#666666", "fontsize": 6.5}
            axes.text(column + 0.47, row, word, ha="center", va="center", **label)
        guard = f"  [{decision.guard.value}]" if decision.guard else ""
        axes.text(3.05, row, decision.reason + guard, va="center", fontsize=6.5)
    names = [f"{d.primitive}  " for d in decisions]
    axes.set_yticks(range(len(decisions)), names, fontsize=6.5, family="monospace")
    axes.set_xticks([0.47, 1.47, 2.47], ["reads", "computes", "stores"])
    axes.xaxis.tick_top()
    axes.set(xlim=(0, 6.4), ylim=(len(decisions) - 0.4, -0.6))
    axes.tick_params(length=0)
    axes.set_frame_on(False)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


def losses(path: Path) -> None:
    """The tutorial's training run under three policies."""
    names: dict[str, object] = {}
    page = (ROOT / "docs/tutorial/train.md").read_text()
    blocks = [b.split("```")[0] for b in page.split("```python\n")[1:]]
    for block in blocks[:2]:
        exec(block.split("_, losses")[0], names)
    run, step = names["run"], names["train_step"]
    assert callable(run)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
    runs = {
        policy: run(jax.jit(jaxamp.amp(step, policy)))[1]
        for policy in ("always_f32", "mixed_bf16", "mixed_f16")
    }
    widths = (7, 3.5, 1.2)  # the curves lie on each other: the widest is drawn first
    for (policy, values), width in zip(runs.items(), widths, strict=True):
        short = policy.replace("always_", "").replace("mixed_bf16", "bf16")
        style = {"label": policy, "color": COLOURS[short.replace("mixed_f16", "f16")]}
        left.plot(values, **style, lw=width)
        if policy != "always_f32":
            pairs = zip(values, runs["always_f32"], strict=True)
            right.plot([abs(x - y) for x, y in pairs], **style, lw=1)
    left.set(xlabel="step", ylabel="loss", yscale="log", title="training loss")
    right.set(xlabel="step", yscale="log", title="difference from float32")
    left.legend(frameon=False)
    right.set_ylim(top=2e-2)
    right.legend(frameon=False, loc="upper right")
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    pipeline(FOLDER / "pipeline.svg")
    plan(FOLDER / "plan.png")
    losses(FOLDER / "losses.png")
