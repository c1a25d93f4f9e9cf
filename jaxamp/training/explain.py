"""Which operation made the first number that is not finite: a search in the program that made it.

The program is run equation by equation, outside of any compilation. From a result that is not
finite the search goes back over the values that are not finite either, to the earliest equation
that made such a value from finite ones. Where that equation is a call, a loop or a branch, the
search goes on in its body.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxprs_in_params

from jaxamp import _compat
from jaxamp.rules import clean_scope
from jaxamp.taxonomy import Trait, lookup
from jaxamp.training.trees import is_array, is_float, leaf_name

INFINITY, NAN = "infinity", "NaN"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Nonfinite:
    """Where the first infinity or NaN of a program came from.

    Attributes:
      output: the first result that is not finite, by its path in what the function returned.
      kind: ``"infinity"`` or ``"NaN"``, whichever the operation made.
      primitive: the operation; ``"input"`` if the function was given such a number.
      dtype: dtype of what the operation made.
      largest: largest magnitude among the finite numbers that the operation took.
      source: the user's source line.
      scope: the scope path, as the user wrote it.
      backward: whether it is in a backward pass.
      iterations: which iteration of the loops around it, outermost first.
    """

    output: str
    kind: str
    primitive: str
    dtype: str
    largest: float
    source: str
    scope: str
    backward: bool
    iterations: tuple[int, ...]

    def __str__(self) -> str:
        if self.primitive == "input":
            return f"{self.output} is not finite because an input holds {self.kind}: {self.source}"
        where = f" in {self.scope}" if self.scope else ""
        when = ", in the backward pass" if self.backward else ""
        loops = f", iteration {', '.join(map(str, self.iterations))}" if self.iterations else ""
        return (
            f"{self.output} is not finite. The first {self.kind} was made by {self.primitive} in "
            f"{self.dtype}{where}, at {self.source}{when}{loops}, from operands of at most "
            f"{self.largest:.4g}."
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Culprit:
    """An equation, the operands it had, and how it was reached."""

    eqn: JaxprEqn
    operands: Sequence[Any]
    kind: str
    scope: str
    iterations: tuple[int, ...] = ()

    def inside(self, scope: str, *iteration: int) -> _Culprit:
        """The same equation as seen from around the equation that holds it."""
        joined = "/".join(filter(None, (scope, self.scope)))
        return dataclasses.replace(self, scope=joined, iterations=iteration + self.iterations)


class _Origin(NamedTuple):
    """The culprit, and where in a jaxpr the equation is that is or holds it."""

    position: int
    culprit: _Culprit


def explain_nonfinite(fun: Callable[..., Any]) -> Callable[..., Nonfinite | None]:
    """Which operation of `fun` made the first infinity or NaN that reached a result.

    Runs `fun` once more, operation by operation and so slowly: ask when a flag was `False`.

    Args:
      fun: any function of arrays: what ``jaxamp.value_and_grad`` returned, a loss, a train step.

    Returns:
      A function of `fun`'s arguments, which returns ``None`` if all results are finite.

    >>> import jaxamp
    >>> def loss_fn(w, x):
    ...     return jnp.sum((x @ w) * 3.0)
    >>> step = jaxamp.value_and_grad(loss_fn, policy="auto_mixed", loss_scale=None)
    >>> found = explain_nonfinite(step)(jnp.full((2, 2), 300.0), jnp.full((2, 2), jnp.inf))
    >>> found.kind, found.primitive
    ('infinity', 'input')
    >>> found = explain_nonfinite(lambda x: {"y": jnp.log(x - 1)})(jnp.ones(3))
    >>> found.output, found.kind, found.primitive, found.largest
    ("['y']", 'infinity', 'log', 0.0)
    """

    @functools.wraps(fun, updated=())
    def explain(*args: Any, **kwargs: Any) -> Nonfinite | None:
        leaves, treedef = jax.tree.flatten((args, kwargs))
        traced = [index for index, leaf in enumerate(leaves) if is_array(leaf)]
        outputs: Any = None

        def flat(*arrays: Any) -> list[Any]:
            nonlocal outputs
            values = dict(zip(traced, arrays, strict=True))
            given = [values.get(index, leaf) for index, leaf in enumerate(leaves)]
            call_args, call_kwargs = jax.tree.unflatten(treedef, given)
            outputs = fun(*call_args, **call_kwargs)
            return [leaf for leaf in jax.tree.leaves(outputs) if is_array(leaf)]

        jaxpr = jax.make_jaxpr(flat)(*(leaves[index] for index in traced))
        operands = [jnp.asarray(leaves[index]) for index in traced]
        found = _explained(jaxpr, operands, _array_names(outputs))
        if found is None or found.primitive != "input":
            return found
        culprit = next(i for i in traced if _kind(leaves[i]) == found.kind)
        return dataclasses.replace(found, source=leaf_name((args, kwargs), culprit))

    return explain


def _explained(
    closed: ClosedJaxpr, operands: Sequence[Any], names: Sequence[str]
) -> Nonfinite | None:
    run = _Run(closed.jaxpr, closed.consts, operands)
    made = {var for eqn in closed.jaxpr.eqns for var in eqn.outvars}
    outvars = closed.jaxpr.outvars
    bad = [i for i, v in enumerate(outvars) if v in made and run.kind(v)]
    if not bad:
        return None
    name = names[bad[0]]
    culprit = run.search([outvars[i] for i in bad])
    if culprit is None:
        kind = next(filter(None, map(_kind, operands)), NAN)
        return Nonfinite(
            output=name, kind=kind, primitive="input", dtype="", largest=0.0, source="", scope="",
            backward=False, iterations=(),
        )  # fmt: skip
    return Nonfinite(
        output=name,
        kind=culprit.kind,
        primitive=culprit.eqn.primitive.name,
        dtype=_dtype(culprit.eqn),
        largest=max((_largest(x) for x in culprit.operands), default=0.0),
        source=_compat.user_line(culprit.eqn.source_info),
        scope=clean_scope(culprit.scope),
        backward="transpose(" in culprit.scope,
        iterations=culprit.iterations,
    )


class _Run:
    """One jaxpr, run once, with what is not finite in it."""

    def __init__(self, jaxpr: Jaxpr, consts: Sequence[Any], operands: Sequence[Any]) -> None:
        self.jaxpr = jaxpr
        self.env: dict[Any, Any] = {}
        self.kinds: dict[Any, str | None] = {}
        self._write(jaxpr.constvars, consts)
        self._write(jaxpr.invars, operands)
        for eqn in jaxpr.eqns:
            self._write(eqn.outvars, _compat.bind(eqn, self.read(eqn)))

    def _write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        for var, value in zip(variables, values, strict=True):
            self.env[var] = value
            self.kinds[var] = _kind(value)

    def read(self, eqn: JaxprEqn) -> list[Any]:
        """The operands of an equation."""
        return [_compat.read_atom(self.env, atom) for atom in eqn.invars]

    def kind(self, atom: Any) -> str | None:
        """Whether a value holds a NaN, or else an infinity."""
        return _kind(atom.val) if isinstance(atom, Literal) else self.kinds[atom]

    def search(self, wanted: Sequence[Any]) -> _Culprit | None:
        """The equation that made what is wrong with the wanted values; ``None``: an input."""
        infinities = self._origin([v for v in wanted if self.kind(v) == INFINITY], INFINITY)
        nans = self._origin([v for v in wanted if self.kind(v) == NAN], NAN)
        if nans is None or (infinities and infinities.position < nans.position):
            return infinities and infinities.culprit
        # What made the NaN may have been given an infinity that something before it made.
        given = [v for v in self.jaxpr.eqns[nans.position].invars if self.kind(v) == INFINITY]
        before = self._origin([v for v in given if not isinstance(v, Literal)], INFINITY)
        inside = nans.culprit.kind == INFINITY
        return nans.culprit if inside or before is None else before.culprit

    def _origin(self, wanted: Sequence[Any], kind: str) -> _Origin | None:
        """The earliest equation that made a `kind` on the way to the wanted, from none."""
        needed, found = set(wanted), None
        for position, eqn in reversed(list(enumerate(self.jaxpr.eqns))):
            made = [i for i, v in enumerate(eqn.outvars) if v in needed and self.kind(v) == kind]
            if not made:
                continue
            given = [v for v in eqn.invars if self.kind(v) == kind]
            needed.update(v for v in given if not isinstance(v, Literal))
            if not given:
                found = position, eqn, made
        if found is None:
            return None
        position, eqn, made = found
        return _Origin(position, _entered(eqn, self.read(eqn), made, kind))


def _entered(eqn: JaxprEqn, operands: list[Any], wanted: list[int], kind: str) -> _Culprit:
    """The culprit inside an equation, or that equation itself."""
    scope = str(eqn.source_info.name_stack)
    for closed, inputs, iteration in _bodies(eqn, operands):
        run = _Run(closed.jaxpr, closed.consts, inputs)
        outvars = closed.jaxpr.outvars
        if len(iteration) == 0:
            outvars = [outvars[i] for i in wanted]
        bad = [v for v in outvars if not isinstance(v, Literal) and run.kind(v) == kind]
        if bad:
            culprit = run.search(bad)
            if culprit is not None:
                return culprit.inside(scope, *iteration)
    return _Culprit(eqn, operands, kind, scope)


def _bodies(eqn: JaxprEqn, operands: list[Any]) -> Iterator[tuple[ClosedJaxpr, list[Any], Any]]:
    """The jaxprs that an equation runs, in order, with their inputs and iteration."""
    op = lookup(eqn.primitive)
    trait = op.trait if op else None
    if eqn.primitive.name == "scan":
        yield from _scan_bodies(eqn, operands)
    elif eqn.primitive.name == "while":
        yield from _while_bodies(eqn, operands)
    elif trait is Trait.BRANCH:
        branches = eqn.params["branches"]
        yield branches[int(np.clip(operands[0], 0, len(branches) - 1))], operands[1:], ()
    elif trait is Trait.CALL:
        for jaxpr in list(jaxprs_in_params(eqn.params))[:1]:
            if len(jaxpr.invars) == len(operands):
                yield _closed(eqn, jaxpr), operands, ()


def _closed(eqn: JaxprEqn, jaxpr: Jaxpr) -> ClosedJaxpr:
    for value in eqn.params.values():
        if isinstance(value, ClosedJaxpr) and value.jaxpr is jaxpr:
            return value
    return ClosedJaxpr(jaxpr, [])


def _scan_bodies(
    eqn: JaxprEqn, operands: list[Any]
) -> Iterator[tuple[ClosedJaxpr, list[Any], Any]]:
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    consts, carries = _compat.scan_layout(eqn)
    fixed, carry = operands[:consts], operands[consts : consts + carries]
    for step in range(length):
        index = length - 1 - step if eqn.params["reverse"] else step
        inputs = [*fixed, *carry, *(x[index] for x in operands[consts + carries :])]
        yield body, inputs, (step,)
        carry = eval_jaxpr(body.jaxpr, body.consts, *inputs)[:carries]


def _while_bodies(
    eqn: JaxprEqn, operands: list[Any]
) -> Iterator[tuple[ClosedJaxpr, list[Any], Any]]:
    test, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    tests, bodies = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    of_test, of_body = operands[:tests], operands[tests : tests + bodies]
    carry, step = operands[tests + bodies :], 0
    while bool(eval_jaxpr(test.jaxpr, test.consts, *of_test, *carry)[0]):
        yield body, [*of_body, *carry], (step,)
        carry = eval_jaxpr(body.jaxpr, body.consts, *of_body, *carry)
        step += 1


def _dtype(eqn: JaxprEqn) -> str:
    avals: list[Any] = [var.aval for var in eqn.outvars]
    return next((str(aval.dtype) for aval in avals if is_float(aval)), "")


def _kind(value: Any) -> str | None:
    """The worst that a value holds: a NaN, an infinity or neither."""
    if not is_float(value):
        return None
    if bool(jnp.isnan(value).any()):
        return NAN
    return INFINITY if bool(jnp.isinf(value).any()) else None


def _largest(value: Any) -> float:
    if not is_float(value) or jnp.size(value) == 0:
        return 0.0
    return float(jnp.abs(jnp.where(jnp.isfinite(value), value, 0)).max())


def _array_names(outputs: Any) -> list[str]:
    pairs = jax.tree_util.tree_flatten_with_path(outputs)[0]
    return [jax.tree_util.keystr(path) or "the result" for path, leaf in pairs if is_array(leaf)]
