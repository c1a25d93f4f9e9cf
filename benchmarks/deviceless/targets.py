"""Compile for a chip that is not there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@dataclass(frozen=True, slots=True)
class Target:
    """A chip: the environment whose compiler knows it, and how that compiler calls it."""

    name: str
    environment: str
    topology: str


TARGETS = {
    "h200": Target("h200", "gpu", "1x1x1"),
    "v5e": Target("v5e", "tpu", "v5e:2x2"),
    "v5p": Target("v5p", "tpu", "v5p:2x2x1"),
    "v6e": Target("v6e", "tpu", "v6e:2x2"),
}


def one_device(target: Target) -> NamedSharding:
    """The sharding that puts an array on one absent device of the target."""
    if target.environment == "gpu":
        description = Path(__file__).with_name(f"{target.name}.txtpb").read_text()
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="", topology=target.topology, target_config=description
        )
    else:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=target.topology)
    return NamedSharding(Mesh(np.array(topology.devices[:1]), ("x",)), PartitionSpec())


def compile_for(target: Target, fn: Any, args: Any, options: dict[str, Any] | None = None) -> Any:
    """The compiled program of ``fn``.

    Args:
        target: where it would run.
        fn: a function of arrays.
        args: a pytree of shapes and dtypes for each argument.
        options: the compiler's own flags.
    """
    place = one_device(target)
    placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), args)
    return jax.jit(fn).lower(*placed).compile(options)
