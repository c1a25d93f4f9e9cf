"""Compiles products of blocks for several absent GPUs; run inside the environment of the compiler.

python -m tests.quantized.kernels.divided_products TARGET FOLDER: writes FOLDER/found.json, for each
way to place a product's operands its custom calls and how often it sends what.
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

DEVICES, SIZE = 4, 4096
PLACES: dict[str, tuple[Any, Any]] = {
    "data": ("data", None),  # examples over devices, weights on each
    "parts": ("data", "data"),  # weights in parts, by the axis that is summed over
}


def main(name: str, folder: Path) -> None:
    """Compiles for one target."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    from jaxamp import PrecisionPolicy, amp
    from jaxamp.compiled.compiler import absent_devices
    from jaxamp.compiled.targets import TARGETS

    chip, found = TARGETS[name], {}
    devices = absent_devices(chip.platform, f"1x1x{DEVICES}", chip.description)
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    product = amp(jnp.dot, PrecisionPolicy.MXFP8)
    gradient = jax.jit(jax.grad(lambda w, x: jnp.sum(jnp.tanh(product(x, w))), (0, 1)))
    for title, places in PLACES.items():
        x, w = (
            jax.ShapeDtypeStruct(
                (SIZE, SIZE), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(place))
            )
            for place in places
        )
        with chip.described():
            text = gradient.lower(w, x).compile().as_text()
        sent = re.findall(r" (all-gather|all-reduce)(?:-start)?\(", text)
        found[title] = {
            "calls": re.findall(r'custom_call_target="([^"]+)"', text),
            "sent": Counter(sent),
        }
    (folder / "found.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
