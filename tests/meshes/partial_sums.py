"""What devices add up and compare in a ``shard_map`` over some axes, compiled and run on a CPU.

    python -m tests.meshes.partial_sums
    python -m tests.meshes.partial_sums psum all_gather     some of them

XLA's CPU compiler ends the process for such sums in bfloat16, so that this is a process of its own.
It prints, as JSON, how far each result is from that of float32, in units of the largest.
"""

from __future__ import annotations

import itertools
import json
import sys
from functools import partial
from typing import Any

import tests.flags  # noqa: F401 - sets the XLA flags, before JAX starts

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxamp import PrecisionPolicy, amp

BF16 = PrecisionPolicy.MIXED_BF16
POLICIES = {"bf16": BF16, "sums in bf16": BF16.replace(allreduce="bf16")}
COLLECTIVES = {
    "psum": lambda h: lax.psum(h, "m"),
    "pmean": lambda h: lax.pmean(h, "m"),
    "pmax": lambda h: h - lax.pmax(lax.stop_gradient(h), "m"),
    "pmin": lambda h: h - lax.pmin(lax.stop_gradient(h), "m"),
    "psum_scatter": lambda h: lax.psum_scatter(h, "m", tiled=True),
    "all_gather": lambda h: lax.all_gather(h, "m", tiled=True).reshape(-1, *h.shape).sum(0),
}


SPECS = P(None, "m"), P("m", None), P(None, None)


def program(collective: Any, check: bool, x: Any, w: Any, v: Any) -> Any:
    """A product, what devices make of it together, and another product."""

    def body(x: Any, w: Any, v: Any) -> Any:
        return lax.psum(jnp.sum(jnp.square(collective(x @ w) @ v)), "m")

    return jax.shard_map(body, in_specs=SPECS, out_specs=P(), axis_names={"m"}, check_vma=check)(
        x, w, v
    )


def distances(loss: Any) -> dict[str, float]:
    """Return how far the gradients of a loss are under each policy, in both orders."""
    rows, columns = np.mgrid[:16, :16]
    drawn = [np.cos(k * rows + columns**2).astype("f") / 4 for k in (1, 2, 3)]
    args = list(map(jax.device_put, drawn, SPECS))
    gradient = partial(jax.grad, argnums=(0, 1, 2))
    want, found = jax.jit(gradient(loss))(*args), {}
    for name, policy in POLICIES.items():
        orders = {
            "amp(grad)": amp(gradient(loss), policy),
            "grad(amp)": gradient(amp(loss, policy)),
        }
        for order, step in orders.items():
            pairs = zip(jax.jit(step)(*args), want, strict=True)
            worst = max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)
            found[f"{name}, {order}"] = worst
    return found


def main(names: list[str]) -> None:
    """Print the distances of some collectives, or of all."""
    found, chosen = {}, {n: how for n, how in COLLECTIVES.items() if n in (names or COLLECTIVES)}
    with jax.set_mesh(jax.make_mesh((2, 4), ("d", "m"), axis_types=(AxisType.Auto,) * 2)):
        for (name, how), check in itertools.product(chosen.items(), (True, False)):
            each = distances(partial(program, how, check))
            found |= {f"{name}, {check=}, {k}": v for k, v in each.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
