"""Run as a program: fails, and names it, where a rule of JAX's own is another object than before.

With the argument ``plant`` it changes one itself.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import checkify, core, custom_derivatives, source_info_util, traceback_util
from jax._src.interpreters import ad, batching, mlir, partial_eval
from jax._src.state import discharge

TABLES = {
    "lowerings": mlir._lowerings,
    "checkify": checkify.error_checks,
    "jvp": ad.primitive_jvps,
    "linearization": ad.primitive_linearizations,
    "transposition": ad.primitive_transposes,
    "transposition of calls": ad.fancy_transposes,
    "batching": batching.fancy_primitive_batchers,
    "dead code": partial_eval.dce_rules,
    "partial evaluation": partial_eval.custom_partial_eval_rules,
    "partial evaluation of jaxprs": partial_eval.partial_eval_jaxpr_custom_rules,
    "forwarding": partial_eval.forwarding_rules,
    "discharge": discharge._discharge_rules,
    "type checks": core.custom_typechecks,
}
MODULES = (
    *(ad, batching, checkify, core, custom_derivatives, discharge, jax, mlir, partial_eval),
    *(source_info_util, traceback_util),
)
Key = tuple[str, Any, str]


def entries() -> Iterator[tuple[Key, object]]:
    """All rules in JAX's tables, and what stands in JAX's modules."""
    for name, table in TABLES.items():
        yield from (((name, primitive, ""), rule) for primitive, rule in table.items())
    for platform, table in mlir._platform_specific_lowerings.items():
        yield from (((platform, primitive, ""), rule) for primitive, rule in table.items())
    for module in MODULES:
        yield from (((module.__name__, None, name), x) for name, x in vars(module).items())
    for primitive in {key for table in TABLES.values() for key in table}:
        yield from ((("primitive", primitive, name), x) for name, x in vars(primitive).items())


def check(before: dict[Key, object], when: str) -> None:
    """Fail if an entry that was there is gone or another, or a primitive of JAX's has a new one."""
    after = dict(entries())
    known = {primitive for _, primitive, _ in before}
    changed = [key for key, rule in before.items() if after.get(key) is not rule]
    changed += [key for key in after if key not in before and key[1] in known and key[1]]
    if changed:
        sys.exit(f"{when}: {changed}")


def _load_all(package: Any) -> None:
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.startswith(
            ("jaxamp.interop", "jaxamp.quantized.kernels.hopper", "jaxamp.__main__")
        ):
            importlib.import_module(module.name)


def _loss(w: jax.Array, x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ w) + x.sum(0)
    return jnp.take_along_axis(jax.nn.log_softmax(hidden @ w), jnp.zeros((4, 1), int), 1).mean()


def _use(amp: Any) -> None:
    w, fn = jnp.eye(4), amp(_loss)
    step = lambda c, x: (c - 0.1 * jax.grad(fn)(c, x), fn(c, x))  # noqa: E731
    jax.jit(jax.grad(fn))(w, w)
    jax.hessian(lambda w: fn(w, w))(w)
    jax.lax.scan(step, w, jnp.ones((2, 4, 4)))
    jax.vmap(fn, (None, 0))(w, jnp.ones((2, 4, 4)))
    checkify.checkify(jax.grad(fn), checkify.float_checks)(w, w)
    jax.jit(jax.grad(fn)).trace(w, w).lower(lowering_platforms=("cuda",))
    jax.jit(jax.grad(fn)).trace(w, w).lower(lowering_platforms=("tpu",))


def main() -> None:
    """Compare JAX's tables before jaxamp is imported, after that, and after it is used."""
    jax.jit(lambda x: x + 1).lower(1.0)
    before = dict(entries())
    import jaxamp

    check(before, "after the import")
    if "plant" in sys.argv:
        mlir.register_lowering(jax.lax.sin_p, lambda context, x, **_: [x])
    _load_all(jaxamp)
    check(before, "after the import of every module")
    _use(jaxamp.amp)
    jaxamp.probe(jax.grad(_loss))(jnp.eye(4), jnp.eye(4))
    jaxamp.training.explain_nonfinite(jax.grad(_loss))(jnp.eye(4), jnp.eye(4))
    check(before, "after use")


if __name__ == "__main__":
    main()
