"""Who is compared, what each needs, and what its user changes."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Peer:
    """A library, or a way to do without one.

    Attributes:
      name: as the table has it.
      adapter: the function of `inside.py` that applies it.
      packages: what its environment has, the newest pair of versions that still runs.
      programs: what it is asked to run: plain functions, or flax modules.
      lines: of the user's program that change, counted in the adapter.
    """

    name: str
    adapter: str
    packages: tuple[str, ...]
    programs: tuple[str, ...]
    lines: int


FUNCTIONS = ("block", "scanned", "whitened")
MODULES = ("module",)
JAX = "jax==0.10.2"
COMMON = ("numpy>=2", "flatbuffers", "setuptools")

PEERS = (
    Peer("float32", "f32", (JAX, "flax", *COMMON), FUNCTIONS + MODULES, 0),
    Peer("jaxamp, grad(amp(f))", "ours", (JAX, "flax", *COMMON), FUNCTIONS + MODULES, 1),
    Peer("jaxamp, amp(grad(f))", "ours_around", (JAX, "flax", *COMMON), FUNCTIONS + MODULES, 1),
    Peer("jmp 0.0.4", "jmp", (JAX, "jmp==0.0.4", *COMMON), FUNCTIONS, 3),
    Peer("mpx 0.1.8", "mpx", (JAX, "mixed-precision-for-jax==0.1.8", *COMMON), FUNCTIONS, 3),
    Peer("grampax 0.1.0", "grampax", (JAX, "grampax==0.1.0", *COMMON), FUNCTIONS, 1),
    Peer(
        "jaxamp 0.0.4 (2023)",
        "jaxamp_of_2023",
        (
            "jax==0.4.30",
            "jaxlib==0.4.30",
            "equinox==0.11.4",
            "jaxamp==0.0.4",
            "numpy<2",
            "setuptools",
        ),
        FUNCTIONS,
        1,
    ),
    Peer("flax dtype=bfloat16", "flax_dtype", (JAX, "flax", *COMMON), MODULES, 1),
    Peer("flax fp8 ops", "flax_fp8", (JAX, "flax", *COMMON), MODULES, 2),
    Peer("qwix 0.1.8, fp8", "qwix", (JAX, "flax", "qwix==0.1.8", *COMMON), MODULES, 3),
)
