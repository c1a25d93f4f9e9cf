"""Replace losses over many words by loops over chunks of tokens."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxamp.core import jax_compat
from jaxamp.core.features import Outcome, Replaced
from jaxamp.core.formats import Precision
from jaxamp.found.cross_entropy.chunks import Division, as_written
from jaxamp.found.cross_entropy.one_number import differentiated, one_number
from jaxamp.found.cross_entropy.passes import (
    Logits,
    Obstacle,
    Pass,
    Search,
    before_exponentials,
    logits_of,
)
from jaxamp.found.cross_entropy.worth import MATTERS, Sizes, chunks_for, products_of
from jaxamp.found.known_numbers import KnownNumbers
from jaxamp.found.levels import Level, Unit
from jaxamp.found.places import NARROW, Place, Scopes
from jaxamp.found.replace_regions import replace_regions
from jaxamp.jaxprs.nested import nested
from jaxamp.kernels.target_gpu import described_platform
from jaxamp.policy.policy import PrecisionPolicy
from jaxamp.policy.rules import scope_matches

KIND = "loss"


@dataclass(frozen=True, slots=True)
class Loss(Outcome):
    """A loss whose logits, and their cotangents, are never all stored.

    Attributes:
      chunks: how many chunks its tokens are divided into.
    """

    chunks: int = 1


def chunk_losses(closed: ClosedJaxpr, policy: PrecisionPolicy) -> Replaced:
    """Return a program with its losses over many words in loops over chunks of tokens.

    Args:
      closed: the program, in float32.
      policy: the policy that it will run under.

    >>> import jax, jax.numpy as jnp
    >>> def loss(x, head):
    ...     return jax.nn.logsumexp(x @ head, axis=-1).sum()
    >>> x, head = jnp.ones((64, 8)), jnp.ones((8, 512))
    >>> policy = PrecisionPolicy.MIXED_BF16.replace(loss_in_chunks=True)
    >>> chunked = chunk_losses(jax.make_jaxpr(jax.value_and_grad(loss))(x, head), policy)
    >>> [found.chunks for found in chunked.found]
    [4]
    """
    if policy.base not in NARROW or {*_words(policy).values()} == {False}:
        return Replaced(closed)
    return replace_regions(closed, _Losses(policy, closed.jaxpr))


def _words(policy: PrecisionPolicy) -> dict[str, Any]:
    """Return the policy's word for losses, by scope."""
    word = policy.loss_in_chunks
    return dict(word) if isinstance(word, tuple) else {"*": word}


@dataclass(eq=False)
class _Region:
    """One pass over the tokens of a loss.

    Attributes:
      made_here: what is computed.
      division: of the tokens.
      again: whether logits are computed again where it is differentiated.
      number: the one result that has a derivative, whose gradients are computed with it; or none.
      outcome: what reports say of it.
      handed: how many arrays a forward pass leaves to a backward one.
    """

    made_here: Pass
    division: Division
    again: bool
    number: int | None
    outcome: Any
    handed: ClassVar[int] = 0

    @property
    def made(self) -> frozenset[int]:
        """The values of the program that it makes."""
        return frozenset(self.made_here.outputs)

    @property
    def needed(self) -> frozenset[int]:
        """The values of the program that it reads."""
        return frozenset(value for value, _ in self.made_here.inputs)

    def follows(self, value: int, *, operands: bool) -> bool:
        """Return whether a value follows from what its operands are."""
        return operands

    def emission(self, read: Callable[[int], Any], wanted: set[int]) -> _Emission:
        """Return what emits it."""
        return _Emission(self, read)


@dataclass(eq=False)
class _Emission:
    """Emission of one pass."""

    region: _Region
    read: Callable[[int], Any]
    forward: list[Any] = field(default_factory=list)

    @functools.cached_property
    def _made(self) -> dict[int, Any]:
        made, division, number = self.region.made_here, self.region.division, self.region.number
        if number is None:
            return as_written(made, division, self.read, again=self.region.again)
        return differentiated(made, division, self.read, number)

    def value(self, value: int) -> Any:
        """Return one of the values that the pass makes."""
        return self._made[value]


class _Losses:
    """Losses under a policy."""

    crosses = False

    def __init__(self, policy: PrecisionPolicy, program: Jaxpr) -> None:
        self.policy, self.program, self.words = policy, program, _words(policy)
        self._held: dict[Jaxpr, bool] = {}

    def may_hold(self, jaxpr: Jaxpr) -> bool:
        """Return whether a product is in a jaxpr that is so large that not to store it matters."""
        if jaxpr not in self._held:
            self._held[jaxpr] = any(
                self._is_large(eqn.outvars[0].aval)
                if eqn.primitive.name == "dot_general"
                else any(self.may_hold(body.jaxpr) for body in nested(eqn))
                for eqn in jaxpr.eqns
            )
        return self._held[jaxpr]

    def _is_large(self, aval: Any) -> bool:
        size = aval.size
        is_known = isinstance(size, int | np.integer)  # of an exported program it may not be
        return is_known and (True in self.words.values() or 4 * size >= MATTERS)

    def find(
        self, level: Level, known: KnownNumbers, scopes: Scopes
    ) -> tuple[list[_Region], list[Outcome]]:
        """Return the losses of a level, and what looks like one."""
        regions: list[_Region] = []
        refused: list[Outcome] = []
        for unit in before_exponentials(level):
            if not self._is_large(unit.eqn.outvars[0].aval):
                continue
            taken = frozenset[int]().union(*(region.made for region in regions))
            found = self._regions(unit, level, known, scopes.place(unit), taken)
            if isinstance(found, str):
                refused.append(Outcome(KIND, *scopes.place(unit).words, found))
            elif found and taken.isdisjoint(frozenset().union(*(r.made for r in found))):
                regions += found
        return regions, refused

    def _regions(
        self,
        unit: Unit,
        level: Level,
        known: KnownNumbers,
        place: Place,
        taken: frozenset[int],
    ) -> list[_Region] | str | None:
        """Return the passes of the loss of a product, or why there are none."""
        why: str | None = None
        for logits in logits_of(unit, level):
            passes = Search(level, known, logits).passes()
            if isinstance(passes, Obstacle):
                why = why or (passes.reason if passes.is_softmax else None)
                continue
            if (told := place.told_otherwise(self.policy, "dot_general")) is not None:
                return told
            word = next(
                (w for at, w in self.words.items() if scope_matches(at, place.words[0])), None
            )
            if word is False:
                return "loss_in_chunks is False here"
            if (divided := self._divided(logits, word)) is not None:
                return divided
            number = None
            if len(passes) == 1 and not passes[0].backward and self.policy.base is Precision.BF16:
                whole = Search(level, known, logits, is_whole=True).passes()
                if not isinstance(whole, Obstacle) and taken.isdisjoint(whole[0].outputs):
                    number = one_number(whole[0], level)
                    passes = passes if number is None else whole
            regions = self._worthwhile(logits, passes, number, place, word)
            is_typed = jax_compat.has_typed_sharding(unit.eqn.outvars[0].aval)
            if isinstance(regions, str) or not is_typed:
                return regions
            return next(filter(None, (_misplaced(region, level) for region in regions)), regions)
        return why

    def _worthwhile(
        self, logits: Logits, passes: list[Pass], number: int | None, place: Place, word: Any
    ) -> list[_Region] | str:
        """Return the passes as they are emitted, or why they are not."""
        backward = any(made.backward for made in passes)
        tokens = int(np.prod(logits.shape)) // logits.words
        again = len(passes) - (backward or number is not None)
        devices = self._devices(logits)
        program = products_of(self.program, backward=backward, devices=devices)
        matrix = logits.heads * logits.width * logits.words
        is_trained = any(made.sums_to(matrix) for made in passes)
        shape = -(-tokens // devices), logits.width, logits.words
        sizes = Sizes(*shape, again, is_trained or not backward, devices, logits.heads)
        chunks = chunks_for(sizes, word, program)
        if isinstance(chunks, str):
            return chunks
        chunks = min(chunks, logits.rows.length)
        slower = 1 + sizes.cost(chunks).more(sizes.cost(1), program).time
        saved = sizes.saved(chunks)
        is_typed = jax_compat.has_typed_sharding(logits.unit.eqn.outvars[0].aval)
        in_rows = devices == 1 and not is_typed  # axes that devices divide stay apart
        division = Division(logits.rows.length, chunks, logits.words, in_rows)
        told = {"backward": backward, "saved": saved, "slower": slower, "chunks": chunks}
        outcome = Loss(KIND, *place.words, **told)
        return [_Region(made, division, not backward, number, outcome) for made in passes]

    def _divided(self, logits: Logits, word: Any) -> str | None:
        """Return why a division of arrays over devices keeps logits stored."""
        if word is None and self._devices(logits) > 1 and jax.default_backend() == "cpu":
            return "there are several devices, and a CPU would add up over them in each chunk"
        return None

    def _devices(self, logits: Logits) -> int:
        """Return over how many devices logits are divided, or may be where types do not say."""
        aval: Any = logits.unit.eqn.outvars[0].aval
        if jax_compat.has_typed_sharding(aval):
            return aval.size // math.prod(aval.sharding.shard_shape(aval.shape))
        return 1 if jax_compat.varies_over(aval) or described_platform() else jax.device_count()


def _misplaced(region: _Region, level: Level) -> str | None:
    """Return why arrays whose types say where they lie cannot lie so in chunks, if they cannot.

    That is JAX's to say, of what is computed and of its derivative.
    """
    values = [*region.needed]
    made = [v for v in region.made if jnp.issubdtype(level.avals[v].dtype, jnp.floating)]

    def emitted(*arrays: Any) -> list[Any]:
        emission = region.emission(dict(zip(values, arrays, strict=True)).__getitem__, set())
        return [emission.value(value) for value in made]

    def pulled(*arrays: Any) -> list[Any]:
        results, pull = jax.vjp(emitted, *arrays)
        pull(results)
        return results

    try:
        types = jax.make_jaxpr(pulled)(*(level.avals[v] for v in values)).out_avals
    except Exception as error:  # of any kind: the program stays as it is
        return f"on its explicit mesh: {str(error).splitlines()[0][:200]}"
    if all(t.sharding == level.avals[v].sharding for t, v in zip(types, made, strict=True)):
        return None
    return "chunks of it would lie elsewhere on its explicit mesh"
