"""The feature: products of 8 and 4 bits, their recipes, and scales from earlier steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from jaxamp.core.features import Feature, PolicyField, Work
from jaxamp.core.formats import CastConfig
from jaxamp.core.taxonomy import OpKind
from jaxamp.errors import PolicyError, UnsupportedPrecisionError
from jaxamp.quantized.scaling import DEFAULT, VALUES, Scaling


def _read(given: Any, present: Scaling) -> Scaling:
    if isinstance(given, Scaling):
        return given
    if isinstance(given, Mapping):
        return present.replace(**given)
    raise PolicyError(f"The scaling of a policy is a Scaling, not {given!r}.")


def _from_data(data: dict[str, Any]) -> Scaling:
    weight = data.get("weight")
    # What an older version wrote of an option that is gone says nothing where that was off.
    known: dict[str, Any] = {k: v for k, v in data.items() if v or hasattr(DEFAULT, k)}
    known["weight"] = weight and CastConfig.from_data(weight)
    return Scaling(**known)


def _check(policy: Any) -> None:
    """Refuse scaling of another kind than Compute, by the table or by a rule."""
    for kind, cast in policy.kinds:
        if cast.is_scaled and not (kind is OpKind.COMPUTE and cast.out_dtype in VALUES):
            words = ", ".join(sorted(p.short for p in VALUES))
            raise UnsupportedPrecisionError(
                f"{policy!r} asks for blocked scaling ({cast}) of {kind.value}, which amp cannot "
                f"compute: it scales Compute, as {words}. Give it a plain dtype, 'bf16', as "
                "the preset 'fp8_current' does."
            )
    for rule in policy.rules:
        if rule.precision in VALUES and not rule.reaches(OpKind.COMPUTE):
            raise UnsupportedPrecisionError(
                f"The rule `{rule}` asks for {rule.precision.short}, and amp quantizes products "
                "and convolutions alone. Give the rule a 16-bit precision: 'bf16'."
            )


def _presets() -> tuple[Any, ...]:
    from jaxamp.quantized import scaled_presets

    return scaled_presets.ALL


def _wrap(fn: Any, settings: Any) -> Any:
    """Wrap a function to take and return earlier steps' magnitudes, where they give scales."""
    if not (settings.policy.scaling.history and settings.policy.is_scaled):
        return None
    from jaxamp.quantized.delayed_scaling import DelayedFunction

    return DelayedFunction(fn, settings)


def _idle(plan: Any, name: str) -> Iterator[str]:
    from jaxamp.run.idle_policy import commonest

    if not plan.policy.is_scaled:
        return
    dots = [d for d in plan.decisions() if d.kind is OpKind.COMPUTE]
    if any(d.plan.form for d in dots):
        return
    why, cure = "it has no matrix product", ""
    if dots:
        why = commonest(dots)
        cure = " Scaling(...) of the policy says which products are quantized."
    yield (
        f"{plan.policy} quantizes nothing in {name}: {why}. It runs as under mixed_"
        f"{plan.policy.base.short}.{cure}"
    )


def _verify(fn: Any, policy: Any, target: str | None) -> Any:
    """Compare the products of 8 bits that are claimed with those that a compiler makes."""
    from jaxamp.quantized.fp8_products import verify_lowering

    return verify_lowering(fn, policy, target)


def _work() -> Work:
    from jaxamp.quantized.choices.quantized_dots import find_scaled
    from jaxamp.quantized.choices.quantized_results import find_coarse_logistics, narrow_quantized
    from jaxamp.quantized.choices.scaled import Scaled
    from jaxamp.quantized.primitives.quantized_dot import emit_quantized

    def choose(draft: Any) -> dict[Any, Any]:
        """Choose quantization first, then what it makes worth while around quantized products."""
        choices = {**draft.choices}
        for find in (find_scaled, narrow_quantized, find_coarse_logistics):
            choices.update(find(replace(draft, choices=choices)))
        return choices

    return Work(choose=choose, forms={Scaled: emit_quantized}, idle=_idle, verify=_verify)


FEATURE = Feature(
    name="quantized",
    fields=(PolicyField(name="scaling", default=DEFAULT, read=_read, from_data=_from_data),),
    formats=VALUES,
    presets=_presets,
    check=_check,
    wrap=_wrap,
    work=_work,
)
