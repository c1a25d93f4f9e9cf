"""Replace losses over many words by loops over chunks of tokens."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxamp.core import jax_compat
from jaxamp.core.features import Outcome, Replaced
from jaxamp.core.formats import Precision
from jaxamp.found.cross_entropy.chunks import Division, as_written
from jaxamp.found.cross_entropy.explicit_mesh import Emitted, as_typed
from jaxamp.found.cross_entropy.find_passes import Search, Stays
from jaxamp.found.cross_entropy.logits import Logits, before_exponentials, logits_of
from jaxamp.found.cross_entropy.one_number import differentiated, one_number
from jaxamp.found.cross_entropy.passes import Pass
from jaxamp.found.cross_entropy.worth import MATTERS, Sizes, chunks_for, products_of
from jaxamp.found.levels import Level, Unit, numbers
from jaxamp.found.places import NARROW, told_otherwise, words_of
from jaxamp.found.region import Region
from jaxamp.found.replace_regions import replace_regions
from jaxamp.jaxprs.known_arrays import KnownArrays
from jaxamp.kernels.target_gpu import described_platform, on_chip_memory
from jaxamp.policy.policy import PrecisionPolicy
from jaxamp.policy.rules import scope_matches

KIND = "loss"
_LARGE = "large product"


@dataclass(frozen=True, slots=True)
class Loss(Outcome):
    """A loss whose logits, and their cotangents, are never all stored."""

    chunks: int = 1  # how many chunks its tokens are divided into


def chunk_losses(closed: ClosedJaxpr, policy: PrecisionPolicy) -> Replaced:
    """Return a float32 program with its losses over many words in loops over chunks of tokens.

    >>> import jax, jax.numpy as jnp
    >>> def loss(x, head):
    ...     return jax.nn.logsumexp(x @ head, axis=-1).sum()
    >>> x, head = jnp.ones((64, 8)), jnp.ones((8, 512))
    >>> policy = PrecisionPolicy.MIXED_BF16.replace(loss_in_chunks=True)
    >>> chunked = chunk_losses(jax.make_jaxpr(jax.value_and_grad(loss))(x, head), policy)
    >>> [found.chunks for found in chunked.found]
    [4]
    """
    losses = _Losses(policy, closed.jaxpr)
    if policy.base not in NARROW or {*losses.words.values()} == {False}:
        return Replaced(closed)
    return replace_regions(closed, losses)


@dataclass(eq=False)
class _Region(Region):
    """One pass over the tokens of a loss."""

    computed: Pass  # what is computed
    emitted: Emitted  # computes it, of what reads a value of the program
    outcome: Outcome  # what reports say of it

    @property
    def made(self) -> frozenset[int]:
        """The values of the program that it makes."""
        return frozenset(self.computed.outputs)

    @property
    def needed(self) -> frozenset[int]:
        """The values of the program that it reads."""
        return frozenset(value for value, _ in self.computed.inputs)

    def emission(self, read: Callable[[int], Any], wanted: set[int]) -> Any:
        """Return what emits it, all at once, each equation with its own names."""

        @functools.cache
        def made() -> Mapping[int, Any]:
            with jax_compat.without_names():
                return self.emitted(read)

        return SimpleNamespace(forward=[], value=lambda value: made()[value])


class _Losses:
    """Losses under a policy."""

    crosses = False
    parts = frozenset({_LARGE})

    def __init__(self, policy: PrecisionPolicy, program: Jaxpr) -> None:
        self.policy, word = policy, policy.loss_in_chunks
        self.words: dict[str, Any] = dict(word) if isinstance(word, tuple) else {"*": word}
        self.products = functools.cache(functools.partial(products_of, program))

    def word(self, eqn: JaxprEqn) -> str:
        """Return whether it is a product so large that not to store its result matters."""
        is_product = eqn.primitive.name == "dot_general"
        return _LARGE if is_product and self._is_large(eqn.outvars[0].aval) else ""

    def _is_large(self, aval: Any) -> bool:
        size = aval.size
        is_known = isinstance(size, int | np.integer)  # of an exported program it may not be
        return is_known and (True in self.words.values() or 4 * size >= MATTERS)

    def find(self, level: Level, known: KnownArrays) -> tuple[list[_Region], list[Outcome]]:
        """Return the losses of a level, and what looks like one."""
        regions: list[_Region] = []
        refused: list[Outcome] = []
        taken: dict[int, Pass] = {}
        for unit in before_exponentials(level):
            if not self._is_large(unit.eqn.outvars[0].aval):
                continue
            try:
                found = self._regions(unit, level, known, taken)
            except Stays as why:
                refused.append(Outcome(KIND, *words_of(unit), str(why)))
                continue
            regions += found
            for region in found:
                taken |= dict.fromkeys(region.computed.values, region.computed)
        return regions, refused

    def _regions(
        self, unit: Unit, level: Level, known: KnownArrays, taken: dict[int, Pass]
    ) -> list[_Region]:
        """Return the passes of the loss of a product; raise `Stays` where they are not emitted."""
        why: Stays | None = None
        for logits in logits_of(unit, level):
            try:
                start = dict.fromkeys(numbers(unit.outs), logits.rows)
                passes = Search(level, known, logits, taken, start).passes()
            except Stays as reason:
                why = why or reason
                continue
            if passes:
                return self._worthwhile(logits, passes, level)
        if why is not None:
            raise why
        return []

    def _word(self, unit: Unit) -> Any:
        """Return the policy's word for a product."""
        if (told := told_otherwise(unit, self.policy, "dot_general")) is not None:
            raise Stays(told)
        words = (w for scope, w in self.words.items() if scope_matches(scope, words_of(unit)[0]))
        if (word := next(words, None)) is False:
            raise Stays("loss_in_chunks is False here")
        return word

    def _number(self, passes: list[Pass], level: Level) -> int | None:
        """Return the result whose gradients are computed with it, if there is one."""
        is_one = len(passes) == 1 and not passes[0].backward and self.policy.base is Precision.BF16
        number = one_number(passes[0], level) if is_one else None
        # No loop of chunks keeps the forward mode of such a rule.
        if number is None and any(made.count("custom_jvp_call") for made in passes):
            raise Stays("its softmax has a rule for tangents, and it is not one number")
        return number

    def _worthwhile(self, logits: Logits, passes: list[Pass], level: Level) -> list[_Region]:
        """Return the passes as they are emitted."""
        number = self._number(passes, level)
        word, devices = self._word(logits.unit), self._devices(logits)
        if word is None and devices > 1 and jax.default_backend() == "cpu":
            raise Stays("there are several devices, and a CPU would add up over them in each chunk")
        backward = any(made.backward for made in passes)
        out: Any = logits.unit.eqn.outvars[0].aval
        tokens = out.size // logits.words
        again = len(passes) - (backward or number is not None)
        program = self.products(backward=backward) / devices
        sums = [aval.size for made in passes for _, aval in made.sums()]
        is_trained = not backward or logits.matrix.size in sums
        shape = -(-tokens // devices), logits.width, logits.words
        own = logits.heads, passes[0].count("tanh"), on_chip_memory()
        sizes = Sizes(*shape, again, is_trained, devices, *own)
        chunks = chunks_for(sizes, word, program)
        if isinstance(chunks, str):
            raise Stays(chunks)
        chunks = min(chunks, logits.rows.length)
        in_rows = devices == 1  # axes that devices divide stay apart
        if word == "memory" and in_rows and logits.matrix.ndim == 2 and again < len(passes):
            sizes = sizes.in_slices(chunks)
        saved, slower = sizes.saved(chunks), sizes.slower(chunks, program)
        words = logits.words if sizes.slices == 1 else 0  # no device has a part of what is cut
        division = Division(logits.rows.length, chunks, words, in_rows, sizes.slices)
        told = {"backward": backward, "saved": saved, "slower": slower, "chunks": chunks}
        outcome = Loss(KIND, *words_of(logits.unit), **told)
        emitted: Any = functools.partial(as_written, again=not backward)
        if number is not None:
            emitted = functools.partial(differentiated, number=number)
        typed = functools.partial(as_typed, logits=out, avals=level.avals)
        return [
            _Region(made, typed(functools.partial(emitted, made, division)), outcome)
            for made in passes
        ]

    def _devices(self, logits: Logits) -> int:
        """Return over how many devices logits are divided, or may be where types do not say."""
        aval: Any = logits.unit.eqn.outvars[0].aval
        if jax_compat.has_typed_sharding(aval):
            if jax_compat.is_partly_manual():  # JAX 0.10.2 differentiates no such loop
                raise Stays("a shard_map leaves axes of an explicit mesh to XLA")
            return aval.size // math.prod(aval.sharding.shard_shape(aval.shape))
        return 1 if jax_compat.varies_over(aval) or described_platform() else jax.device_count()
