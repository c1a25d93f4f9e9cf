"""Compare a loss in chunks of tokens, found by jaxamp or written by hand, with logits stored.

    python -m benchmarks.losses --target h200
    python -m benchmarks.losses --target h200 --way "hand, loss in chunks"

Loss and gradient of a Llama-like model, 6 layers of 1,536, 2 x 2,048 tokens, 65,536 words, its
layers scanned under a checkpoint, are compiled for a chip that is not there
(``python -m jaxamp estimate --install gpu``, or ``tpu``).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from rich.console import Console
from rich.table import Table

import jaxamp
from benchmarks.deviceless.models import fused
from jaxamp.compiled import traffic
from jaxamp.compiled.deviceless import compile_all, exported
from jaxamp.compiled.roofline import roofline
from jaxamp.compiled.targets import TARGETS

LAYERS, WIDTH, HEADS, INNER, WORDS, BATCH, LENGTH = 6, 1536, 12, 4096, 65536, 2, 2048
CHUNKS = 8  # of the hand
POLICY = jaxamp.PrecisionPolicy.MIXED_BF16.replace(fused_attention=True)

Attend = Callable[..., jax.Array]


def parameters() -> dict[str, Any]:
    """Shapes of the parameters, float32."""

    def matrix(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    shapes = {
        "qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "gate": (WIDTH, INNER),
        "up": (WIDTH, INNER), "down": (INNER, WIDTH), "norm1": (WIDTH,), "norm2": (WIDTH,),
    }  # fmt: skip
    layers = {name: matrix(LAYERS, *shape) for name, shape in shapes.items()}
    ends = {"words": matrix(WORDS, WIDTH), "head": matrix(WIDTH, WORDS), "norm": matrix(WIDTH)}
    return {"layers": layers, **ends}


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * lax.rsqrt(square + 1e-6) * scale).astype(x.dtype)


def turned(x: jax.Array) -> jax.Array:
    """Rotate by place, [B, T, N, H]."""
    half = x.shape[-1] // 2
    angles = jnp.arange(LENGTH)[:, None, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / jnp.sqrt(q.shape[-1])
    seen = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), v)


def hidden(params: Any, tokens: jax.Array, attend: Attend, dtype: Any) -> jax.Array:
    """Activations before the head, [B, T, D]."""

    @jax.checkpoint
    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        p = jax.tree.map(lambda leaf: leaf.astype(dtype), p)
        heads = jnp.split(norm(x, p["norm1"]) @ p["qkv"], 3, axis=-1)
        q, k, v = (part.reshape(*x.shape[:2], HEADS, -1) for part in heads)
        x = x + attend(turned(q), turned(k), v).reshape(x.shape) @ p["out"]
        y = norm(x, p["norm2"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], None

    x, _ = lax.scan(layer, params["words"].astype(dtype)[tokens], params["layers"])
    return norm(x, params["norm"].astype(dtype))


def loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss, as one writes it in float32."""
    logits = hidden(params, tokens, attention, jnp.float32) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def by_hand(params: Any, tokens: jax.Array, labels: jax.Array, chunks: int) -> jax.Array:
    """The loss in bfloat16, with the attention that an expert calls, in chunks or in one."""
    x = hidden(params, tokens, partial(fused.attention, causal=True), jnp.bfloat16)
    head = params["head"].astype(jnp.bfloat16)

    def of(x: jax.Array, labels: jax.Array) -> jax.Array:
        logits = (x @ head).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()

    if chunks == 1:
        return of(x, labels) / labels.size
    parts = x.reshape(chunks, -1, WIDTH), labels.reshape(chunks, -1)
    each = jax.checkpoint(of)
    zero = jnp.zeros(())
    return lax.scan(lambda sum, part: (sum + each(*part), None), zero, parts)[0] / labels.size


def ways() -> dict[str, Callable[..., Any]]:
    """Value and gradient, by hand and in both orders."""
    gradient = jax.value_and_grad
    made = {
        "hand, logits stored": gradient(partial(by_hand, chunks=1)),
        "hand, loss in chunks": gradient(partial(by_hand, chunks=CHUNKS)),
    }
    for word in (False, None, "memory"):
        policy = POLICY.replace(loss_in_chunks=word)
        made[f"amp(grad(f)), {word}"] = jaxamp.amp(gradient(loss), policy)
        made[f"grad(amp(f)), {word}"] = gradient(jaxamp.amp(loss, policy))
    return made


def main() -> None:
    made = ways()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.losses", description=__doc__)
    parser.add_argument("--target", required=True, choices=TARGETS)
    parser.add_argument("--way", nargs="+", choices=made, default=[*made])
    options = parser.parse_args()
    chip = TARGETS[options.target]
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    args = parameters(), tokens, tokens
    shown = Table("way", "temporary", "bytes moved", "roofline", title=f"for {options.target}")
    with chip.described(), fused.on(chip.platform):
        programs = [
            exported(made[way], lambda f: f, args, {}, chip.platform) for way in options.way
        ]
    for way, (module, facts) in zip(options.way, compile_all(chip, programs), strict=True):
        moved, time = traffic.measure(module).bytes, roofline(module, chip).seconds
        sizes = (f"{n / 1e9:.3f} GB" for n in (facts["temporary"], moved))
        shown.add_row(way, *sizes, f"{time * 1e3:.2f} ms")
    Console(width=100).print(shown)


if __name__ == "__main__":
    main()
