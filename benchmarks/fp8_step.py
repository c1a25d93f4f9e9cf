"""A train step of one wide block in FP8 and in bf16, compiled for a chip that is not there.

    python -m benchmarks.fp8_step --target h200             the table, and JSON under out/
    python -m benchmarks.fp8_step --dump out/fp8            the kernels that move most, too
    python -m benchmarks.fp8_step --program network stacked --layers 3
    python -m benchmarks.fp8_step --toy                     trace a small block; compile nothing

The block is Llama's (arXiv:2302.13971, 7B): width 4,096, 32 heads, a gated MLP of 11,008, on four
sequences of 2,048 words. Its attention is cuDNN's kernel in every version, so that only products
with weights differ. It stands for one of many, so its first and last products are scaled too. A
step is the loss, its gradient and AdamW; `gradient` is the step without AdamW, whose bytes no
precision of products can change. `network` is a step of several such blocks behind an embedding,
and `stacked` one of as many in a `scan`.

Each operand is written once in 8 bits or in 16: XLA's own kernels for products take any layout, and
are its first choice without a device. So products read and write fewer bytes, and all else as many.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table

from benchmarks.deviceless import diagnosis
from benchmarks.deviceless.models import fused
from jaxamp import OpKind, PrecisionPolicy, Rule, amp
from jaxamp.compiled import traffic
from jaxamp.compiled.deviceless import compile_all, exported
from jaxamp.compiled.hlo import Array, Computation, Module
from jaxamp.compiled.roofline import roofline
from jaxamp.compiled.targets import TARGETS, Target
from jaxamp.errors import JaxAmpError
from jaxamp.quantized.fp8_products import claims, made

BF16 = jnp.bfloat16
UNMEASURED = "fp8_delayed, unmeasured"  # with the scales of the last step that found magnitudes
CARRIED = "fp8_delayed, carried"  # with parameters in 8 bits from the step that made them
CARRIED_UNMEASURED = f"{CARRIED}, unmeasured"
DELAYED = ("fp8_delayed", UNMEASURED, CARRIED, CARRIED_UNMEASURED)
POLICIES = ("auto_mixed_bf16", "fp8_current", *DELAYED)
PROGRAMS = ("step", "gradient")
NETWORKS = ("network", "stacked")
BACKWARD = "transpose("  # in the name that JAX gives to what it transposes


@dataclass(frozen=True, slots=True)
class Config:
    """The sizes of a block, and of a network of several."""

    width: int = 4096
    heads: int = 32
    hidden: int = 11008
    batch: int = 4
    length: int = 2048
    layers: int = 3
    words: int = 32000


TOY = Config(width=64, heads=4, hidden=160, batch=2, length=16, words=100)


def parameters(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a block's parameters, in float32."""
    width, hidden = config.width, config.hidden
    shapes = {
        "norm1": (width,), "qkv": (width, 3 * width), "out": (width, width),
        "norm2": (width,), "gate": (width, hidden), "up": (width, hidden),
        "down": (hidden, width),
    }  # fmt: skip
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def rms_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def rotated(x: jax.Array) -> jax.Array:
    """Rotary positions (arXiv:2104.09864) of [B, T, N, H]."""
    length, size = x.shape[1], x.shape[-1]
    angles = jnp.arange(length)[:, None] * 1e4 ** (-jnp.arange(0, size, 2) / size)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def block(config: Config, p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """The block as a user writes it, from [B, T, width] to the same."""
    split = (*x.shape[:2], config.heads, config.width // config.heads)
    q, k, v = (part.reshape(split) for part in jnp.split(rms_norm(p["norm1"], x) @ p["qkv"], 3, -1))
    attended = fused.attention(*(y.astype(BF16) for y in (rotated(q), rotated(k), v)), causal=True)
    with jax.named_scope("projected"):
        x = x + attended.reshape(x.shape).astype(x.dtype) @ p["out"]
    y = rms_norm(p["norm2"], x)
    return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]


def programs(config: Config) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Each program with its arguments' shapes."""
    optimizer = optax.adamw(1e-4)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(block(config, params, x) ** 2)

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss, argnums=(0, 1))(params, x)
        updates, state = optimizer.update(grads[0], state, params)
        return optax.apply_updates(params, updates), state, grads[1], value

    def gradient(params: Any, x: jax.Array) -> Any:
        return jax.value_and_grad(loss, argnums=(0, 1))(params, x)

    params = parameters(config)
    x = jax.ShapeDtypeStruct((config.batch, config.length, config.width), jnp.float32)
    state = jax.eval_shape(optimizer.init, params)
    return {
        "step": (step, (params, state, x)),
        "gradient": (gradient, (params, x)),
        "network": _network(config, optimizer, [params] * config.layers),
        "stacked": _network(config, optimizer, _stacked(params, config.layers)),
    }


def _stacked(params: dict[str, jax.ShapeDtypeStruct], layers: int) -> Any:
    return {
        name: jax.ShapeDtypeStruct((layers, *array.shape), array.dtype)
        for name, array in params.items()
    }


def _network(config: Config, optimizer: Any, blocks: Any) -> tuple[Any, tuple[Any, ...]]:
    """A step of blocks behind an embedding, in a loop where they are stacked."""

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        return block(config, p, x), None

    def loss(params: Any, words: jax.Array) -> jax.Array:
        x, blocks = params["embedding"][words], params["blocks"]
        if isinstance(blocks, dict):
            return jnp.mean(jax.lax.scan(layer, x, blocks)[0] ** 2)
        for p in blocks:
            x, _ = layer(x, p)
        return jnp.mean(x**2)

    def step(params: Any, state: Any, words: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, words)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    embedding = jax.ShapeDtypeStruct((config.words, config.width), jnp.float32)
    params = {"embedding": embedding, "blocks": blocks}
    words = jax.ShapeDtypeStruct((config.batch, config.length), jnp.int32)
    return step, (params, jax.eval_shape(optimizer.init, params), words)


def under(
    fn: Callable[..., Any], word: str, args: tuple[Any, ...], config: Config
) -> tuple[Any, tuple[Any, ...]]:
    """The program under a policy, and its arguments: with a history before them if it takes one."""
    policy = PrecisionPolicy.parse(word.partition(",")[0])
    if policy.is_scaled:
        small = () if config == TOY else policy.scaling.small
        carried = "carried" in word
        policy = policy.replace(scaling={"ends": True, "small": small, "carried": carried})
    # What the kernel returns in bf16 was widened; to the planner that is a wish.
    compute = policy.cast_for(OpKind.COMPUTE).out_dtype
    step: Any = amp(
        fn, policy.with_rules(Rule(precision=compute, scope="projected", primitive="dot_general"))
    )
    if not hasattr(step, "init"):
        return step, args
    history = jax.eval_shape(step.init, *args)
    return step.unmeasured if "unmeasured" in word else step, (history, *args)


@dataclass(frozen=True, slots=True)
class Row:
    """A program under a policy, compiled.

    Attributes:
      program: a key of `programs`.
      policy: its name.
      bytes: that its kernels read and write.
      kernels: that it starts.
      temporary: bytes of memory besides arguments and results.
      eligible: products with weights, in both passes.
      kept: bytes that the forward pass writes and the backward pass reads, by dtype.
      claimed: those that jaxamp has quantized.
      found: those that the compiler made of 8-bit operands.
      seconds: by the roofline model.
      causes: the bytes by what the kernels are.
    """

    program: str
    policy: str
    bytes: int
    kernels: int
    temporary: int
    kept: dict[str, int]
    eligible: int
    claimed: int
    found: int
    seconds: float
    causes: dict[str, int]


ELIGIBLE = 15
"""Products of a block with five weights: forward, and for both operands backward."""


def eligible(program: str, config: Config) -> int:
    """Products with weights of a program."""
    return ELIGIBLE * (config.layers if program in NETWORKS else 1)


def cause(kernel: traffic.Kernel, module: Module, weights: set[tuple[int, ...]]) -> str:
    """What a kernel is: a product, or what makes and reads its operands."""
    if "cudnn$fmha" in kernel.instruction.target:
        return "attention"
    if kernel.contractions(module):
        return "products"
    written = [array for array, _ in kernel.written if _matrix(array.dims) in weights]
    if written:
        return "AdamW" if any(array.dtype == "f32" for array in written) else "weights"
    read = [array for array, size in kernel.read if size > 2**20]
    if len(read) == 1 and read[0].dtype.startswith("f8"):
        return "layouts"
    return "between"


def _matrix(dims: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without axes of one element: those of a batch of one, in some products."""
    return tuple(size for size in dims if size > 1)


def weight_shapes(config: Config) -> set[tuple[int, ...]]:
    """Shapes of the matrices among the parameters, in both layouts, and of stacks of them."""
    matrices = {array.shape for array in parameters(config).values() if array.ndim == 2}
    stacks = {(config.layers, *shape) for shape in matrices}
    return matrices | {shape[::-1] for shape in matrices} | stacks | {(config.words, config.width)}


def kept(found: Iterable[traffic.Kernel]) -> dict[str, int]:
    """Bytes of the arrays that the forward pass writes and the backward pass reads, by dtype."""
    written: dict[tuple[str, int], Array] = {}
    read: dict[tuple[str, int], Array] = {}
    for kernel in found:
        line = kernel.instruction
        if BACKWARD in line.source:
            places = (_place(line.home, name) for name in line.operands)
            read |= {place: written[place] for place in places if place in written}
        else:
            written |= {(line.name, index): array for index, array in enumerate(line.results)}
    total: Counter[str] = Counter()
    for array in read.values():
        total[array.dtype] += array.bytes
    return dict(total.most_common())


def _place(home: Computation, name: str) -> tuple[str, int]:
    """The instruction that wrote an array, and which of its results it is."""
    line, index = home.by_name[name], 0
    while line.op in ("bitcast", "get-tuple-element", "tuple"):
        if line.op == "get-tuple-element":
            index = int(line.attributes.partition("index=")[2].partition(",")[0])
        line = home.by_name[line.operands[index if line.op == "tuple" else 0]]
        index = 0 if line.op in ("bitcast", "get-tuple-element") else index
    return line.name, index


def measured(
    program: str,
    policy: str,
    claimed: int,
    module: Module,
    facts: Any,
    chip: Target,
    config: Config,
) -> Row:
    counted = traffic.measure(module)
    causes: Counter[str] = Counter()
    found, weights = list(traffic.kernels(module)), weight_shapes(config)
    for kernel in found:
        causes[cause(kernel, module, weights)] += kernel.moved
    return Row(
        program=program,
        policy=policy,
        bytes=counted.bytes,
        kernels=counted.kernels,
        temporary=facts["temporary"],
        kept=kept(found),
        eligible=eligible(program, config),
        claimed=claimed,
        found=made(module)[0],
        seconds=roofline(module, chip).seconds,
        causes=dict(causes),
    )


def traced(
    config: Config, names: Sequence[str], policies: Sequence[str]
) -> Iterator[tuple[Any, ...]]:
    """Each program under each policy: its name, the policy's, the function and its arguments."""
    for name in names:
        fn, shapes = programs(config)[name]
        for policy in policies:
            if name == "gradient" and "carried" in policy:
                continue  # it returns no parameters
            yield (name, policy, *under(fn, policy, shapes, config))


def compare(
    chip: Target, config: Config, names: Sequence[str], policies: Sequence[str], dump: Path | None
) -> list[Row]:
    """Compile every program under every policy for a chip."""
    with chip.described(), fused.on(chip.platform):
        cases = list(traced(config, names, policies))
        counts = [claims(jax.jit(fn).trace(*args).jaxpr) for _, _, fn, args in cases]
        exports = [exported(fn, lambda f: f, args, {}, chip.platform) for _, _, fn, args in cases]
    rows = []
    compiled = compile_all(chip, exports)
    for (name, policy, *_), count, (module, facts) in zip(cases, counts, compiled, strict=True):
        rows.append(measured(name, policy, count, module, facts, chip, config))
        if dump:
            dump.mkdir(parents=True, exist_ok=True)
            (dump / f"{name}-{policy}.txt").write_text(diagnosis.report(module, "", 80))
    return rows


def show(rows: Sequence[Row], console: Console) -> None:
    """The table, each row against bf16's of the same program."""
    causes = list(dict.fromkeys(cause for row in rows for cause in row.causes))
    table = Table(
        "", "", "GB", "of bf16", "kernels", "of bf16", "temporary GB", "FP8", "ms", *causes
    )
    base = {row.program: row for row in rows if row.policy == POLICIES[0]}
    for row in rows:
        first = base.get(row.program, row)
        table.add_row(
            row.program,
            row.policy,
            f"{row.bytes / 1e9:.2f}",
            f"{row.bytes / first.bytes:.2f}",
            str(row.kernels),
            f"{row.kernels / first.kernels:.2f}",
            f"{row.temporary / 1e9:.2f}",
            f"{row.found} of {row.eligible}",
            f"{row.seconds * 1e3:.2f}",
            *(f"{row.causes.get(cause, 0) / 1e9:.2f}" for cause in causes),
        )
    console.print(table)
    for row in rows:
        parts = ", ".join(f"{size / 1e9:.2f} GB of {dtype}" for dtype, size in row.kept.items())
        console.print(f"{row.program}, {row.policy}: kept for the backward pass {parts}")


def main(argv: Sequence[str] | None = None) -> int:
    """Compile and print; or trace a toy."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fp8_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", choices=TARGETS, default="h200")
    parser.add_argument("--policy", nargs="+", default=[*POLICIES])
    programs = [*PROGRAMS, *NETWORKS]
    parser.add_argument("--program", nargs="+", default=[*PROGRAMS], choices=programs)
    parser.add_argument("--layers", type=int, default=Config().layers, help="blocks of a network")
    parser.add_argument("--toy", action="store_true", help="trace a small block; compile nothing")
    parser.add_argument("--json", type=Path, default=Path("out/fp8_step.json"))
    parser.add_argument("--dump", type=Path, help="folder for the kernels that move most")
    options = parser.parse_args(argv)
    if options.toy:
        for name, policy, fn, args in traced(TOY, options.program, options.policy):
            count = claims(jax.jit(fn).trace(*args).jaxpr)
            of = eligible(name, TOY)
            print(f"{name} under {policy}: {count} of {of} products are quantized")
        return 0
    chip = TARGETS[options.target]
    rows = compare(
        chip, Config(layers=options.layers), options.program, options.policy, options.dump
    )
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    show(rows, Console(width=170))
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except JaxAmpError as error:
        raise SystemExit(str(error)) from None
