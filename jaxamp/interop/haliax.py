"""haliax: named axes, their mesh and the precision policy in one environment.

haliax's models are equinox modules, so ``amp`` takes them as they are. What is here puts haliax's
own resources, the mapping from named axes to a mesh, in force together with a policy, so that
``amp`` and code that asks for the policy (``cast_floating(x, "compute")``) agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import haliax
from jax.sharding import Mesh

from jaxamp.policy.context import current_policy, policy_scope
from jaxamp.policy.policy import PrecisionPolicy


@contextmanager
def resource_env(
    axis_mapping: Mapping[str, str | Sequence[str]] | None = None,
    policy: Any = None,
    mesh: Mesh | None = None,
) -> Iterator[PrecisionPolicy]:
    """Enter Haliax's axis mapping and mesh with a policy, for a ``with`` block or a function.

    Args:
      axis_mapping: named axes to axes of the mesh; left out, the mapping in force.
      policy: whatever is accepted as a policy; left out, the one in force.
      mesh: the devices; left out, the mesh in force.

    Yields:
      The policy.

    Raises:
      PolicyError: the policy is not understood.

    >>> import jax, jaxamp
    >>> from jaxamp.training.dtype_roles import cast_floating
    >>> In, Out = haliax.make_axes(inputs=3, outputs=2)
    >>> linear = haliax.nn.Linear.init(In, Out, key=jax.random.key(0))
    >>> with resource_env(policy="mixed_bf16") as policy:
    ...     amped = jaxamp.amp(linear, policy)(haliax.ones(In))
    ...     by_role = cast_floating((linear, haliax.ones(In)), "compute")
    >>> amped.dtype, by_role[0](by_role[1]).dtype
    (dtype('float32'), dtype(bfloat16))
    """
    parsed = current_policy() if policy is None else PrecisionPolicy.parse(policy)
    with ExitStack() as stack:
        stack.enter_context(policy_scope(parsed))
        if mesh is not None:
            stack.enter_context(haliax.partitioning.set_mesh(mesh))
        if axis_mapping is not None:
            stack.enter_context(haliax.axis_mapping(dict(axis_mapping)))
        yield parsed
