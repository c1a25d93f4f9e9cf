"""Compiles the kernel for a chip that is not there; run inside the environment of its compiler.

python -m tests.kernels.deviceless TARGET FOLDER: writes FOLDER/found.json, a row for each program.
"""

import itertools
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ARRAYS = tuple[tuple[tuple[int, ...], str], ...]


def programs(gpu: bool) -> Iterator[tuple[str, Any, ARRAYS]]:
    """Name, function and arrays of every form of the kernel; none is made of whole tiles."""
    from jaxamp import CastConfig
    from jaxamp.quantized.kernels import block_quantize

    blocks = ((1, 128), (128, 128), (1, 64), (1, 32))
    forms = [(*form, "bfloat16") for form in itertools.product(blocks, (False, True))]
    forms += [((1, 128), False, "float32")] + ([((1, 128), True, "float16")] if gpu else [])
    for block, transposed, dtype in forms:
        if gpu and transposed and block[1] < 64:
            continue  # the one form that falls back
        cast = CastConfig("f8_e4m3", block, round_sf=block[0] == 1)
        yield (
            f"block_quantize {cast} {dtype}{' transposed' if transposed else ''}",
            lambda x, c=cast, t=transposed: block_quantize(x, c, transposed=t),
            (((1000, 1000), dtype),),
        )


def facts_of_ptx(folder: Path) -> dict[str, Any]:
    """What the one kernel that was dumped last became."""
    ptx = max(folder.glob("*.ptx"), key=lambda path: path.stat().st_mtime_ns)
    said = ptx.with_suffix(".ptxas").read_text()
    text = ptx.read_text()
    return {
        "spilled": [int(n) for n in re.findall(r"(\d+) bytes spill", said)],
        "registers": [int(n) for n in re.findall(r"Used (\d+) registers", said)],
        "converts": sorted(set(re.findall(r"cvt\.rn\.satfinite\.\w+\.f32", text))),
    }


def main(name: str, folder: Path) -> None:
    """Compiles for one target."""
    dump = folder / "dump"
    dump.mkdir()
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(dump)
    os.environ["MOSAIC_GPU_DUMP_PTX"] = os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    import jax

    from jaxamp.compiled.targets import TARGETS, compile_for
    from jaxamp.kernels import KernelConfig, kernel_config

    warnings.simplefilter("error")  # no fallback passes for a kernel
    target, found = TARGETS[name], {}
    for title, fn, arrays in programs(target.gpu is not None):
        avals = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in arrays)
        with kernel_config(KernelConfig(backend="pallas")):
            compiled = compile_for(target, fn, avals)
        calls = re.findall(r'custom_call_target="(\w+)"', compiled.as_text())
        found[title] = {"calls": calls} | (facts_of_ptx(dump) if target.gpu else {})
    (folder / "found.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
