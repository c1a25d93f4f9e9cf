"""Train the character transformer in bf16 and with quantized dots, from the same weights.

    python -m examples.fp8_char_transformer
    python -m examples.fp8_char_transformer --steps 1000

The network of ``char_transformer`` is small, so its dots would stay in bf16: `SMALL_TOO` says that
they are to be quantized as well. The table says how far gradients are from those in bf16, and the
picture how far the losses are.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from examples.char_transformer import QUICK, SEED, Corpus, Size, Transformer, loss_fn
from examples.char_transformer import make_train_step as train_step_under
from jaxamp import PrecisionPolicy, amp

matplotlib.use("agg")
import matplotlib.pyplot as plt

SMALL_TOO = {"small": ()}
NAMES = ("mixed_bf16", "fp8_current", "fp8_block", "mxfp8")
POLICIES = {n: PrecisionPolicy.parse(n).replace(scaling=SMALL_TOO) for n in NAMES}


@dataclass(frozen=True)
class Run:
    """What came out of training under one policy."""

    name: str
    losses: np.ndarray
    worst: float  # the smallest signal-to-noise ratio of a parameter's gradient, in dB

    @property
    def final(self) -> float:
        """The mean loss of the last tenth of the steps."""
        return float(self.losses[-max(1, len(self.losses) // 10) :].mean())


def network(corpus: Corpus, size: Size) -> Transformer:
    """The same network for everyone."""
    key = jax.random.key(SEED)
    return Transformer(len(corpus.alphabet), size.width, size.heads, size.depth, key=key)


def gradients(policy: PrecisionPolicy, corpus: Corpus, size: Size) -> list[np.ndarray]:
    """The gradient of every parameter before the first step."""
    (batch,) = corpus.batches(1, size.batch, size.length, SEED)
    model = network(corpus, size)
    grads = eqx.filter_jit(eqx.filter_grad(amp(loss_fn, policy)))(model, jnp.asarray(batch))
    return [np.asarray(g, np.float64) for g in jax.tree.leaves(grads)]


def sqnr(reference: np.ndarray, value: np.ndarray) -> float:
    """The ratio of a signal to the noise that was added to it, in dB."""
    noise = float(((reference - value) ** 2).sum())
    return 10 * np.log10(float((reference**2).sum()) / noise) if noise else np.inf


def train(
    policy: PrecisionPolicy, corpus: Corpus, size: Size, on_step: Callable[[float], None]
) -> np.ndarray:
    """The losses of every step."""
    model = network(corpus, size)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-3, size.steps // 10, size.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    step = jax.jit(train_step_under(optimizer, policy), donate_argnums=(0, 1))
    losses = []
    for batch in corpus.batches(size.steps, size.batch, size.length, SEED):
        model, opt_state, loss = step(model, opt_state, batch)
        losses.append(float(loss))
        on_step(losses[-1])
    return np.array(losses)


def results_table(runs: Sequence[Run]) -> Table:
    """Final losses, and how far gradients are from those in bf16."""
    table = Table(title="Mean loss of the last tenth of the steps (nats per character)")
    for column in ("policy", "final loss", "against bf16", "worst gradient (dB)"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for run in runs:
        apart = run.final / runs[0].final - 1
        table.add_row(run.name, f"{run.final:.4f}", f"{apart:+.2%}", f"{run.worst:.1f}")
    return table


def smooth(losses: np.ndarray, window: int) -> np.ndarray:
    """The mean over a window of steps."""
    return np.convolve(losses, np.ones(window) / window, "valid")


def plot(runs: Sequence[Run], path: Path) -> None:
    """Losses above, their distance from bf16 below."""
    window = max(1, len(runs[0].losses) // 20)
    steps = np.arange(window, len(runs[0].losses) + 1)
    figure, (curves, apart) = plt.subplots(2, sharex=True, figsize=(8, 7), height_ratios=(2, 1))
    base = smooth(runs[0].losses, window)
    for run in runs:
        line = smooth(run.losses, window)
        curves.plot(steps, line, label=run.name, linewidth=1.2)
        apart.plot(steps, 100 * (line / base - 1), linewidth=1.2)
    curves.set_ylabel("nats per character")
    curves.set_title(f"Training loss, mean of {window} steps")
    curves.legend(frameon=False)
    apart.set_ylabel("% above bf16")
    apart.set_xlabel("step")
    apart.axhspan(-2, 2, color="0.93", zorder=0)
    for axes in (curves, apart):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> list[Run]:
    """Train under every policy, and compare."""
    parser = argparse.ArgumentParser(description="Character-level transformer in bf16 and FP8.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--quick", action="store_true", help="a tiny network for three steps")
    parser.add_argument("--picture", type=Path, default=Path("fp8_char_transformer.png"))
    options = parser.parse_args(argv)
    size = QUICK if options.quick else Size(steps=options.steps)

    console, corpus = Console(), Corpus.load()
    reference = gradients(POLICIES[NAMES[0]], corpus, size)
    runs = []
    with Progress(console=console) as progress:
        for name, policy in POLICIES.items():
            task = progress.add_task(name, total=size.steps)

            def on_step(loss: float, task=task, name=name) -> None:
                progress.update(task, advance=1, description=f"{name} loss {loss:.3f}")

            pairs = zip(reference, gradients(policy, corpus, size), strict=True)
            worst = min(sqnr(*pair) for pair in pairs)
            runs.append(Run(name, train(policy, corpus, size, on_step), worst))
    console.print(results_table(runs))
    plot(runs, options.picture)
    console.print(f"curves: {options.picture}")
    return runs


if __name__ == "__main__":
    main()
