"""The chips: how their compiler calls them, and what their makers say that they can do."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from jaxamp.compiled.compiler import compile_on, one_device
from jaxamp.errors import InspectionError, accepted
from jaxamp.kernels.target_gpu import TargetGpu, lowering_for

_TERA = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """Shares of the published numbers that kernels reach, and the time that each costs besides."""

    bandwidth: float = 1.0  # share of the memory's bandwidth
    products: float = 1.0  # share of the rate of matrix products
    # Seconds that each kernel takes besides: to be started, to fill the chip and to end.
    start: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One device as JAX sees it."""

    name: str  # the word for it
    title: str  # what it is
    bandwidth: float  # of its memory, bytes per second, as published
    # Of dense matrix products, FLOPs per second by precision of the operands, as published.
    rates: Mapping[str, float] = field(hash=False)
    highest: float  # how many times slower an f32 product is that must not be rounded first
    gpu: tuple[int, int] | None = None  # the compute capability of a GPU
    # What the compiler must be told of a GPU, which it reads from a driver elsewhere.
    description: str = ""
    topology: str = "1x1x1"  # how the compiler calls it
    kind: str = ""  # JAX's word for a TPU, the ``device_kind`` of its devices
    # What kernels reach of `bandwidth` and `rates`; all of it where nothing was timed.
    reached: Reached = Reached()

    @property
    def environment(self) -> str:
        """Name of the environment with its compiler, ``"gpu"`` or ``"tpu"``."""
        return "gpu" if self.gpu else "tpu"

    @property
    def platform(self) -> str:
        """JAX's name of its platform."""
        return "cuda" if self.gpu else "tpu"

    def rate(self, word: str) -> float:
        """Return the FLOPs per second of products in a format, or in the next wider one."""
        family, _, _ = word.partition("_")
        return self.rates.get(family, self.rates["bf16"])

    def described(self) -> AbstractContextManager[None]:
        """Lower programs for this chip: with the kernels that it takes."""
        if self.gpu is None:
            return lowering_for(self.kind)
        major, minor, patch = _CUDNN
        version = 10_000 * major + 100 * minor + patch
        return lowering_for(TargetGpu(self.gpu, version))


# Chosen on four training steps, timed on one H200 on 23 November 2026; in most others they are off
# by 12 % at most (docs/lab-notebook.md, "Times by the model"). No other GPU has been timed.
_GPU_REACHES = Reached(bandwidth=0.8, products=0.7, start=6e-6)

# Of every GPU that is not there; cuDNN in its own numbering.
_CUDNN = (9, 12, 0)


def target_named(word: str) -> Target:
    """Return a chip by its word."""
    if word not in TARGETS:
        raise InspectionError(f"No target {word!r} is known. {accepted(word, TARGETS)}")
    return TARGETS[word]


def compile_for(target: Target, fn: Any, args: Any, options: dict[str, Any] | None = None) -> Any:
    """Return the compiled program of a function; only where the target's compiler is."""
    place = one_device(target.platform, target.topology, target.description)
    with target.described():
        return compile_on(place, fn, args, options)


_DESCRIPTION = """\
platform_name: "CUDA"
device_description_str: "{device}"
gpu_device_info {{
  cuda_compute_capability {{ major: {capability[0]} minor: {capability[1]} }}
  core_count: {cores}
  fpus_per_core: {lanes}
  clock_rate_ghz: {clock}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {shared_per_block}
  shared_memory_per_core: {shared}
  l2_cache_size: {cache}
  memory_bandwidth: {moves}
  device_memory_size: {memory}
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "{cudnn[0]}.{cudnn[1]}.{cudnn[2]}"
}}
dnn_version_info {{ major: {cudnn[0]} minor: {cudnn[1]} patch: {cudnn[2]} }}
"""

# NVIDIA, "H100 Tensor Core GPU" and "H200 Tensor Core GPU" data sheets, SXM, without sparsity: the
# two have the same matrix units. An f32 product is TF32 unless more is asked for; then it runs
# outside of the matrix units, at 67 TFLOP/s.
_HOPPER = {
    "capability": (9, 0), "cores": 132, "lanes": 128, "clock": 1.98, "shared": 233472,
    "shared_per_block": 232448, "cache": 52428800,
}  # fmt: skip
_HOPPER_RATES = {"f64": 67, "f32": 494.5, "f16": 989.5, "bf16": 989.5, "f8": 1979}


def _chip(bandwidth: float, rates: dict[str, float], **words: Any) -> Target:
    """Return a chip, its speeds given in T/s."""
    published = {word: rate * _TERA for word, rate in rates.items()}
    return Target(bandwidth=bandwidth * _TERA, rates=published, **words)


def _gpu(
    name: str, title: str, bandwidth: float, highest: float, rates: dict[str, float], **facts: Any
) -> Target:
    """Return a GPU, with the facts of its description."""
    described = _DESCRIPTION.format(**facts, cudnn=_CUDNN)
    return _chip(
        bandwidth, rates, name=name, title=f"NVIDIA {title}", highest=highest,
        gpu=facts["capability"], description=described, reached=_GPU_REACHES,
    )  # fmt: skip


def _tpu(
    name: str, title: str, kind: str, topology: str, bandwidth: float, **rates: float
) -> Target:
    """Return a TPU: a product of f32 is one of bf16, or six if it must."""
    rates |= {"f32": rates["bf16"]}
    words = {"name": name, "title": f"Google {title}", "kind": kind, "topology": topology}
    return _chip(bandwidth, rates, highest=6, **words)


_ALL = (
    _gpu(
        "h200", "H200 SXM", 4.8, 494.5 / 67, _HOPPER_RATES, **_HOPPER,
        device="NVIDIA H200", memory=151397597184, moves=4800000000000,
    ),
    _gpu(
        "h100", "H100 SXM", 3.35, 494.5 / 67, _HOPPER_RATES, **_HOPPER,
        device="NVIDIA H100 80GB HBM3", memory=84942979072, moves=3352320000000,
    ),
    # NVIDIA, "A100 Tensor Core GPU" data sheet, SXM with 80 GB, without sparsity.
    _gpu(
        "a100", "A100 SXM 80 GB", 2.039, 156 / 19.5,
        {"f64": 19.5, "f32": 156, "f16": 312, "bf16": 312},
        device="NVIDIA A100-SXM4-80GB", memory=85100068864, moves=2039040000000,
        capability=(8, 0), cores=108, lanes=64, clock=1.41, shared=167936,
        shared_per_block=166912, cache=41943040,
    ),
    # NVIDIA, "Blackwell Architecture Technical Brief", HGX B200, each GPU, without sparsity.
    _gpu(
        "b200", "B200", 8, 1100 / 80,
        {"f64": 40, "f32": 1100, "f16": 2250, "bf16": 2250, "f8": 4500},
        device="NVIDIA B200", memory=191514411008, moves=7672320000000,
        capability=(10, 0), cores=148, lanes=128, clock=1.965, shared=233472,
        shared_per_block=232448, cache=132644864,
    ),
    # Google Cloud TPU documentation, pages "TPU v5e", "TPU v5p", "TPU v6e" and "TPU7x (Ironwood)".
    _tpu("v5e", "TPU v5e", "TPU v5 lite", "v5e:2x2", 0.819, bf16=197),
    _tpu("v5p", "TPU v5p", "TPU v5", "v5p:2x2x1", 2.765, bf16=459),
    _tpu("v6e", "TPU v6e", "TPU v6 lite", "v6e:2x2", 1.638, bf16=918),
    # A chip is two devices to JAX: half of what is published for the chip.
    _tpu(
        "7x", "TPU7x, one of a chip's two devices", "TPU7x", "tpu7x:2x2x1", 7.38 / 2,
        bf16=2307 / 2, f8=4614 / 2,
    ),
)  # fmt: skip
TARGETS = {target.name: target for target in _ALL}
