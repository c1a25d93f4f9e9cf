"""Objects of flax nnx where gradients are taken: what a call changes in them would be lost."""

from __future__ import annotations

import sys
from typing import Any

import jax

from jaxamp.errors import TrainingError, article


def refuse_nnx(tree: Any) -> None:
    """Raise an error where arguments hold modules or random streams of flax nnx.

    To JAX's ``grad`` they are trees of arrays: it differentiates copies, whose batch statistics
    and keys nobody sees, and takes statistics for parameters.

    Args:
      tree: the arguments of a call.

    Raises:
      TrainingError: it holds such an object.
    """
    nnx = sys.modules.get("flax.nnx")  # whoever has such an object has imported it
    if nnx is None:
        return
    kinds = (nnx.Module, nnx.Rngs)
    for leaf in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds)):
        if isinstance(leaf, kinds):
            raise TrainingError(
                f"What a call changes in {article(type(leaf).__name__)} of flax nnx, batch "
                "statistics and random keys, would be lost here. Put amp around a step that takes "
                "nnx.value_and_grad. A loss scale is kept by the optimizer: "
                "nnx.Optimizer(net, jaxamp.training.with_loss_scale(...), wrt=nnx.Param); scale "
                "the loss by optimizer.opt_state.loss_scale.scale(loss)."
            )
