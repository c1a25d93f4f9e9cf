"""Where products dominate, compiled for a chip that is not here: fewer bytes than in float32.

At the sizes at which such models are used; only shapes are needed. At the toy sizes of
`trained.py` a kernel's own workspace outweighs what it multiplies.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxamp

KEY = jax.random.key(0)


def _array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _classified(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _haiku() -> tuple[Any, ...]:
    """hk.nets.ResNet18 on 32 pictures of 64 x 64."""
    import haiku as hk

    net = hk.transform_with_state(lambda x: hk.nets.ResNet18(1000)(x, is_training=True))
    images = _array(32, 64, 64, 3)
    params, state = jax.eval_shape(net.init, KEY, images)

    def loss(params: Any, state: Any, images: Any, labels: Any) -> Any:
        return _classified(net.apply(params, state, None, images)[0], labels)

    return loss, params, state, images, _array(32, dtype=jnp.int32)


def _transformers() -> tuple[Any, ...]:
    """FlaxGPT2LMHeadModel, two layers of GPT-2's width, 8 x 256 words."""
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    net: Any = FlaxGPT2LMHeadModel(GPT2Config(n_layer=2), _do_init=False)
    params = jax.eval_shape(lambda key: net.init_weights(key, (1, 8)), KEY)

    def loss(params: Any, ids: Any) -> Any:
        logits = net(ids, params=params, train=False).logits
        return _classified(logits[:, :-1], ids[:, 1:])

    return loss, params, _array(8, 256, dtype=jnp.int32)


def _equinox() -> tuple[Any, ...]:
    """eqx.nn.MultiheadAttention and an MLP, width 512, 8 x 256 words."""
    import equinox as eqx

    def make(key: Any) -> Any:
        attention = eqx.nn.MultiheadAttention(8, 512, key=key)
        return attention, eqx.nn.LayerNorm(512), eqx.nn.MLP(512, 512, 2048, 1, key=key)

    params, static = eqx.partition(eqx.filter_eval_shape(make, KEY), eqx.is_array_like)
    params, static = eqx.partition(eqx.combine(params, static), lambda x: hasattr(x, "dtype"))

    def loss(params: Any, x: Any) -> Any:
        attention, norm, mlp = eqx.combine(params, static)
        y = x + jax.vmap(lambda x: attention(x, x, x))(x)
        return jnp.mean(jax.vmap(jax.vmap(lambda y: y + mlp(norm(y))))(y) ** 2)

    return loss, params, _array(8, 256, 512)


NETS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "haiku": _haiku,
    "transformers": _transformers,
    "equinox": _equinox,
}
MOST = 0.85  # of float32's bytes


@pytest.mark.deviceless
@pytest.mark.parametrize("target", ["h200"])
@pytest.mark.parametrize("package", NETS)
def test_a_gradient_is_smaller(package: str, target: str) -> None:
    """The vendor's compiler makes a program that moves fewer bytes, in less memory."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} not installed: pip install '.[models]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss, *args = NETS[package]()
        found = jaxamp.estimate(jax.value_and_grad(loss), target=target)(*args)
    plain, amped = found.compiled
    ratios = amped.bytes / plain.bytes, amped.temporary / plain.temporary
    print(f"{package} {target}: {ratios[0]:.3f} of the bytes, {ratios[1]:.3f} of the memory")
    assert ratios[0] < MOST
    assert ratios[1] < 1
