"""Read the text of a compiled program: its computations, their instructions, shapes and sizes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

_BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4,
    "s64": 8, "u64": 8, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16,
    "f8e4m3fn": 1, "f8e5m2": 1, "f8e8m0fnu": 1, "f4e2m1fn": 0.5,
}  # fmt: skip
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
# A line that begins with a brace may also end the configuration of a TPU's kernel.
_COMPUTATION = re.compile(
    r"^(ENTRY )?%?([\w.\-]+) .*\{\n((?:.*\n)*?)\}(?:, execution_thread=.*)?$", re.M
)


@dataclass(frozen=True, slots=True)
class Array:
    """One array of an instruction's result: element type, dimensions, whether in on-chip memory."""

    dtype: str
    dims: tuple[int, ...]
    on_chip: bool = False

    @property
    def bytes(self) -> int:
        """Bytes in memory."""
        return int(_BYTES[self.dtype] * prod(self.dims))

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def arrays(text: str) -> tuple[Array, ...]:
    """Return the arrays named in a shape or tuple of shapes; tokens and opaque values have none."""
    return tuple(
        Array(dtype, tuple(int(n) for n in dims.split(",") if n), "S(1)" in (layout or ""))
        for dtype, dims, layout in _ARRAY.findall(text)
        if dtype in _BYTES
    )


@dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation, its home."""

    home: Computation = field(repr=False)
    name: str
    shape: str
    op: str
    arguments: str
    attributes: str
    root: bool

    @cached_property
    def results(self) -> tuple[Array, ...]:
        """The arrays of its result."""
        return arrays(self.shape)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The instructions whose results it takes."""
        return tuple(_NAME.findall(self.arguments))

    def input(self, position: int) -> Instruction:
        """Return the instruction that makes one of its operands."""
        return self.home.by_name[self.operands[position]]

    def attribute(self, key: str) -> str:
        """Return the name that an attribute has, such as ``channel_id``; empty without it."""
        return self._first(rf"\b{key}=%?([\w.\-]+)")

    def _first(self, pattern: str) -> str:
        found = re.search(pattern, self.attributes)
        return found.group(1) if found else ""

    @property
    def branches(self) -> list[str]:
        """The computations that a conditional chooses from."""
        keys = "true_computation", "false_computation"
        named = self._first(r"branch_computations=\{([^}]*)\}")
        return _NAME.findall(named) or list(filter(None, map(self.attribute, keys)))

    @property
    def target(self) -> str:
        """Name that a custom call calls; empty for every other instruction."""
        return self._first(r'custom_call_target="([^"]*)"')

    @property
    def source(self) -> str:
        """The JAX name stack and primitive that the instruction comes from."""
        return self._first(r'op_name="((?:[^"\\]|\\.)*)"')

    @property
    def known_trips(self) -> int | None:
        """Number of iterations of a loop, where the compiler says it."""
        trips = self._first(r'"known_trip_count":\{"n":"(\d+)"\}')
        return int(trips) if trips else None


@dataclass(frozen=True, eq=False)
class Computation:
    """A named list of instructions, in the order in which they run."""

    name: str
    instructions: list[Instruction]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Its instructions by name."""
        return {line.name: line for line in self.instructions}

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Its parameters by index."""
        lines = (line for line in self.instructions if line.op == "parameter")
        return {int(line.arguments): line for line in lines}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that take each one's result."""
        found: dict[str, list[Instruction]] = {name: [] for name in self.by_name}
        for line in self.instructions:
            for operand in dict.fromkeys(line.operands):
                if operand in found:
                    found[operand].append(line)
        return found

    @property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        return next(line for line in self.instructions if line.root)


@dataclass(frozen=True, eq=False)
class Module:
    """A compiled program."""

    entry: Computation
    computations: dict[str, Computation]

    def inside(self, line: Instruction, key: str = "calls") -> Computation:
        """Return the computation that an instruction calls, or that another attribute names."""
        return self.computations[line.attribute(key)]


def _closing(text: str, start: int) -> int:
    """Find the parenthesis that closes the one at ``start``."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position
    raise ValueError(f"unbalanced parentheses in {text[:120]!r}")


def _instruction(line: str, home: Computation) -> Instruction | None:
    head = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if not head:
        return None
    rest = line[head.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    return Instruction(
        home=home,
        name=head.group(2),
        shape=re.sub(r"/\*.*?\*/", "", shape),
        op=rest[:opening],
        arguments=rest[opening + 1 : closing],
        attributes=rest[closing + 1 :],
        root=bool(head.group(1)),
    )


def parse(text: str) -> Module:
    """Parse what ``compiled.as_text()`` returns."""
    entry, computations = None, {}
    for found in _COMPUTATION.finditer(text):
        computation = Computation(found.group(2), [])
        lines = (_instruction(line, computation) for line in found.group(3).splitlines())
        computation.instructions.extend(filter(None, lines))
        computations[computation.name] = computation
        entry = computation if found.group(1) else entry
    if entry is None:
        raise ValueError("the text has no ENTRY computation")
    return Module(entry, computations)
