"""Who is compared, what each needs, and what its user changes."""

from __future__ import annotations

import dataclasses

from benchmarks import roundings


@dataclasses.dataclass(frozen=True)
class Peer:
    """A library, or a way to do without one.

    Attributes:
      name: as the table has it.
      adapter: the function of `adapters.py` that applies it.
      packages: what its environment has, the newest pair of versions that still runs.
      programs: what it is asked to run: plain functions, or a library's modules.
      lines: of the user's program that change, counted in the adapter.
      script: what is run in its environment.
    """

    name: str
    adapter: str
    packages: tuple[str, ...]
    programs: tuple[str, ...]
    lines: int
    script: str = "inside.py"

    @property
    def is_here(self) -> bool:
        """Whether it runs where jaxamp itself is installed."""
        return self.adapter in ("f32", "ours", "ours_around", "ours_fp8")

    @property
    def flags(self) -> str:
        """What XLA is told: to keep no more precision than was written."""
        is_old = "jaxlib==0.4.30" in self.packages  # it knows no fusions of products
        return roundings.NO_EXCESS if is_old else " ".join(roundings.FLAGS)


FUNCTIONS = ("block", "scanned", "whitened")
FLAX = ("flax",)
HALIAX = ("haliax",)
ALL = FUNCTIONS + FLAX + HALIAX
JAX = "jax==0.10.2"
COMMON = (JAX, "numpy>=2", "flatbuffers", "setuptools")
OF_FLAX = ("flax==0.12.8", *COMMON)
OF_HALIAX = ("haliax==1.4.dev453", "jmp==0.0.4", *COMMON)
OF_2024 = ("jax==0.4.30", "jaxlib==0.4.30", "equinox==0.11.4", "numpy<2", "flatbuffers", "absl-py")

PEERS = (
    Peer("float32", "f32", (), ALL, 0),
    Peer("jaxamp, grad(amp(f))", "ours", (), ALL, 1),
    Peer("jaxamp, amp(grad(f))", "ours_around", (), ALL, 1),
    Peer("jmp 0.0.4", "jmp", ("jmp==0.0.4", *OF_FLAX), FUNCTIONS + FLAX, 3),
    Peer("mpx 0.1.8", "mpx", ("mixed-precision-for-jax==0.1.8", *COMMON), FUNCTIONS, 3),
    Peer("grampax 0.1.0", "grampax", ("grampax==0.1.0", "quax==0.3.9", *COMMON), FUNCTIONS, 1),
    Peer(
        "jaxamp 0.0.4 (2023)",
        "jaxamp_of_2023",
        ("jaxamp==0.0.4", *OF_2024, "setuptools"),
        FUNCTIONS,
        1,
    ),
    Peer(
        "PyTorch 2.13, autocast",
        "torch_autocast",
        ("torch==2.13.0", "numpy>=2"),
        ("block", "whitened"),
        1,
        script="torch_inside.py",
    ),
    Peer("flax dtype=bfloat16", "flax_dtype", OF_FLAX, FLAX, 1),
    Peer("jaxamp, fp8_current", "ours_fp8", (), FLAX + HALIAX, 2),
    Peer("flax fp8 ops", "flax_fp8", OF_FLAX, FLAX, 2),
    Peer("qwix 0.1.8, fp8", "qwix", ("qwix==0.1.8", *OF_FLAX), FLAX, 3),
    Peer("haliax, a jmp policy", "jmp", OF_HALIAX, HALIAX, 3),
    Peer("haliax fp8", "haliax_fp8", OF_HALIAX, HALIAX, 3),
)
