"""A Llama-shaped MLP block and what is needed to compare policies on it."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxamp import PrecisionPolicy


def policy(name, **scaling):
    """A recipe that scales small dots too."""
    return PrecisionPolicy.parse(name).replace(scaling={"small": (), **scaling})


def mlp(params, x):
    """Gated MLP: two products side by side, one after them."""
    hidden = jax.nn.silu(x @ params["gate"]) * (x @ params["up"])
    return hidden @ params["down"]


def mlp_inputs(tokens=64, width=128, hidden=256):
    """Parameters, an input and a target, of about unit variance."""
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    params = {
        name: jax.random.normal(key, shape) / np.sqrt(shape[0])
        for key, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    x, target = (jax.random.normal(key, (tokens, width)) for key in keys[3:])
    return params, x, target


def mlp_loss(params, x, target):
    """Squared error."""
    return jnp.mean((mlp(params, x) - target) ** 2)


def sqnr(reference, value):
    """Ratio of signal to the noise that was added, in dB."""
    reference, value = np.asarray(reference, np.float64), np.asarray(value, np.float64)
    noise = ((reference - value) ** 2).sum()
    return 10 * np.log10((reference**2).sum() / noise) if noise else np.inf


def worst(references, values):
    """The smallest of the ratios over the leaves of a tree."""
    return min(jax.tree.leaves(jax.tree.map(sqnr, references, values)))
