"""Estimates of what policies save on a chip that is not there: compiled facts, modelled times."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from jaxamp.compiled.deviceless import compile_all, exported
from jaxamp.compiled.roofline import Roofline, roofline
from jaxamp.compiled.targets import target_named
from jaxamp.compiled.traffic import Traffic, measure
from jaxamp.inspect.displayable import Displayable
from jaxamp.inspect.report import report
from jaxamp.policy.policy import PrecisionPolicy
from jaxamp.run.amp import amp, under
from jaxamp.trace.target import Target as Call

_BASE = PrecisionPolicy.ALWAYS_F32


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled(Traffic):
    """A program under one policy, compiled.

    All but `time` is fact: read from what the compiler emitted.

    Attributes:
      policy: the policy's name.
      bytes: that its kernels read and write.
      kernels: that it starts.
      temporary: bytes of memory besides arguments and results.
      arguments: bytes of the arguments.
      outputs: bytes of the results.
      dots: dots and convolutions by the precision of their operands, in the compiled program.
      planned: the same as ``jaxamp.report`` counts them; a compiler may merge some, and runs a
        format that the chip lacks in another.
      flops: of these.
      unknown_loops: loops whose trips the program does not tell: they count once.
      time: by the roofline model.
    """

    policy: str
    temporary: int
    arguments: int
    outputs: int
    planned: dict[str, int]
    time: Roofline


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Estimate(Displayable):
    """Estimates of several policies on one target; ``print`` shows them.

    Attributes:
      program: the function's name.
      target: the word for the chip.
      title: what the chip is.
      compiled: float32 first, then the policy that was asked about, then the others.
    """

    program: str
    target: str
    title: str
    compiled: tuple[Compiled, ...]


def estimate(
    fn: Any, policy: Any = None, target: str = "h200", *, others: Any = ()
) -> Callable[..., Estimate]:
    """Estimate what a policy would give on a chip that you do not have.

    The vendor's own compiler makes the program, in a process and an environment of its own, which
    ``python -m jaxamp estimate --install gpu`` (or ``tpu``) creates once. Bytes, kernels, memory
    and dots are read from what it emitted: facts. The time is a model, see
    ``jaxamp.compiled.roofline``; trust its ratios rather than its seconds.

    Args:
      fn: whatever ``amp`` takes, or what it returned; arrays inside of a module are inputs.
      policy: what is asked about; by default that of an amped `fn`, else `mixed_bf16`.
      target: ``h200``, ``h100``, ``a100``, ``b200``, ``v5e``, ``v5p``, ``v6e`` or ``7x``.
      others: more policies to compare with; one, or a sequence of them.

    Returns:
      A function of the same arguments as `fn`, in which ``jax.ShapeDtypeStruct`` may stand for an
      array. It returns an ``Estimate``.

    Raises:
      InspectionError: the target is unknown, or its compiler is not installed or fails.
      PolicyError: a policy is not understood.

    >>> estimate(lambda x: x @ x, target="h2000")
    Traceback (most recent call last):
    ...
    jaxamp.errors.InspectionError: No target 'h2000' is known. Did you mean 'h200'? Accepted: ...
    """
    chip = target_named(target)
    plain, policy = under(fn, policy)
    is_one = isinstance(others, str) or not isinstance(others, Iterable)
    more = (others,) if is_one else others
    policies = list(dict.fromkeys([_BASE, policy, *map(PrecisionPolicy.parse, more)]))
    name = Call.of(plain).name

    @functools.wraps(fn, updated=())
    def made(*args: Any, **kwargs: Any) -> Estimate:
        wraps = [functools.partial(amp, policy=p.stateless) for p in policies]
        with chip.described():
            programs = [exported(plain, wrap, args, kwargs, chip.platform) for wrap in wraps]
            plans = [report(fn, p)(*args, **kwargs).dots() for p in policies]
        found = zip(policies, plans, compile_all(chip, programs), strict=True)
        rows = [
            Compiled(
                policy=str(asked),
                planned=planned,
                time=roofline(module, chip),
                **{size: facts[size] for size in ("temporary", "arguments", "outputs")},
                **asdict(measure(module)),
            )
            for asked, planned, (module, facts) in found
        ]
        return Estimate(program=name, target=target, title=chip.title, compiled=tuple(rows))

    return made
