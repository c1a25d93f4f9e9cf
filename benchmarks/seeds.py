"""Five seeds of each library's example in f32, bf16 and f16: is the difference one of seeds?

    python -m benchmarks.seeds

Prints for each example the accuracy on held-out pictures and the mean loss of the last epoch:
their spread over the seeds in f32, and how far the other precisions are from f32, seed by seed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from types import ModuleType

import numpy as np
from rich.console import Console
from rich.table import Table

from examples import equinox_cnn, linen_cnn, nnx_cnn

EXAMPLES = {"equinox": equinox_cnn, "flax nnx": nnx_cnn, "flax linen": linen_cnn}
POLICIES = ("always_f32", "auto_mixed_bf16", "auto_mixed")
STEPS = 22  # of an epoch


def scores(example: ModuleType, policy: str, seeds: int, epochs: int) -> np.ndarray:
    """Final loss and held-out accuracy, for every seed: an array of shape (seeds, 2)."""
    rows = []
    for seed in range(seeds):
        _, losses, accuracy = example.train(policy, epochs, seed)
        rows.append((np.mean(losses[-STEPS:]), accuracy))
    return np.array(rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Train everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args(argv)
    table = Table(
        "example", "policy", "loss", "f32 spread", "off by", "accuracy", "f32 spread", "off by"
    )
    for name, example in EXAMPLES.items():
        reference = scores(example, POLICIES[0], options.seeds, options.epochs)
        spread = np.ptp(reference, axis=0)
        for policy in POLICIES:
            found = reference
            if policy != POLICIES[0]:
                found = scores(example, policy, options.seeds, options.epochs)
            mean = found.mean(axis=0)
            off = np.abs(mean - reference.mean(axis=0))
            cells = [
                (f"{m:.4f}", f"{s:.4f}", f"{o:.4f}")
                for m, s, o in zip(mean, spread, off, strict=True)
            ]
            table.add_row(name, policy, *cells[0], *cells[1])
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
