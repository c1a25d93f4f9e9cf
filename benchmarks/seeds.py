"""Five seeds of each example in f32, bf16 and f16: is the difference one of seeds?

    python -m benchmarks.seeds              the table, and JSON under out/
    python -m benchmarks.seeds --only nnx

The final loss (mean of the last 22 steps) and the accuracy on data that is held out; for the
character model that of the next character. Each is the mean over the seeds. The spread is the
largest of float32's seeds less the smallest; a policy is off by the difference of the means, and
seed by seed, from the same weights on the same batches, by at most the largest difference.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from examples import char_transformer, digits, equinox_cnn, linen_cnn, nnx_cnn

POLICIES = ("always_f32", "auto_mixed_bf16", "auto_mixed")
TAIL = 22  # steps of the digits' epoch
Score = tuple[float, float]


def of_cnn(example: ModuleType) -> Callable[[str, int], Score]:
    """A library's convolutional network, eight epochs."""

    def score(policy: str, seed: int) -> Score:
        _, losses, accuracy = example.train(policy, 8, seed)
        return float(np.mean(losses[-TAIL:])), accuracy

    return score


def of_digits(policy: str, seed: int) -> Score:
    """The attention network on the digits, as `make demo` trains it."""
    run = digits.train(policy, digits.Digits.load(seed), 20, seed, lambda loss: None)
    return float(run.losses[-TAIL:].mean()), run.accuracy


def of_characters(policy: str, seed: int) -> Score:
    """The character-level transformer, at half its width and depth."""
    size = char_transformer.Size(steps=500, width=64, depth=2, sample=8)
    corpus = char_transformer.Corpus.load()
    run = char_transformer.train(policy, corpus, size, lambda loss: None, seed)
    return float(run.losses[-TAIL:].mean()), run.accuracy


EXAMPLES: dict[str, Callable[[str, int], Score]] = {
    "equinox_cnn": of_cnn(equinox_cnn),
    "nnx_cnn": of_cnn(nnx_cnn),
    "linen_cnn": of_cnn(linen_cnn),
    "digits": of_digits,
    "char_transformer": of_characters,
}


def measure(score: Callable[[str, int], Score], seeds: int) -> dict[str, np.ndarray]:
    """Final loss and accuracy for every policy: arrays of shape (seeds, 2)."""
    return {p: np.array([score(p, seed) for seed in range(seeds)]) for p in POLICIES}


def rows(scores: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """What is said of every policy, for the loss and for the accuracy."""
    reference = scores[POLICIES[0]]
    return [
        {
            "policy": policy,
            "mean": found.mean(axis=0).tolist(),
            "spread": np.ptp(reference, axis=0).tolist(),
            "off": np.abs(found.mean(axis=0) - reference.mean(axis=0)).tolist(),
            "at_most": np.abs(found - reference).max(axis=0).tolist(),
        }
        for policy, found in scores.items()
    ]


def table(results: dict[str, list[dict[str, Any]]]) -> Table:
    """One line for each example and policy."""
    told = ("mean", "off", "at_most", "spread")
    columns = [f"{what} {word}" for what in ("loss", "accuracy") for word in told]
    result = Table("example", "policy", *(c.replace("_", " ") for c in columns))
    for name, lines in results.items():
        for line in lines:
            cells = [f"{line[word][which]:.4f}" for which in range(2) for word in told]
            result.add_row(name, line["policy"], *cells)
        result.add_section()
    return result


def main(argv: Sequence[str] | None = None) -> None:
    """Train everything and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.seeds",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="words of the example's name")
    parser.add_argument("--json", type=Path, default=Path("out/seeds.json"))
    options = parser.parse_args(argv)
    results = {}
    for name, score in EXAMPLES.items():
        if options.only in name:
            results[name] = rows(measure(score, options.seeds))
            print(name, json.dumps(results[name]), flush=True)
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    Console(width=130).print(table(results))


if __name__ == "__main__":
    main()
