"""What the lowered programs of kernels say, for chips that are not here."""

import base64
import enum
import json
import re
from collections.abc import Mapping
from typing import Any

import jax
from jax.interpreters.mlir import make_ir_context
from jaxlib.mlir import ir
from jaxlib.mosaic.python import mosaic_gpu, tpu


def plain(value: Any) -> Any:
    """A field's value in words: enums by name, maps as dicts, tuples as lists."""
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def lower(fn: Any, *avals: Any, platform: str) -> Any:
    """The StableHLO module of a function, lowered for an absent platform."""
    return jax.jit(fn).trace(*avals).lower(lowering_platforms=(platform,)).compiler_ir()


def custom_calls(module: Any, target: str) -> list[Any]:
    """The custom calls to a target."""
    found: list[Any] = []

    def visit(op: Any) -> Any:
        if op.name == "stablehlo.custom_call":
            name = ir.StringAttr(op.attributes["call_target_name"]).value
            found.extend([op.operation] if name == target else [])
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def _text(bytecode: bytes) -> str:
    """A module of dialects that are not at hand, in generic form."""
    context = make_ir_context()
    tpu.register_dialect(context)
    mosaic_gpu.register_dialect(context)
    context.load_all_available_dialects()
    context.allow_unregistered_dialects = True
    with context:
        return ir.Module.parse(bytecode).operation.get_asm(print_generic_op_form=True)


class TpuKernel:
    """The one TPU kernel of a program: its configuration, its body and the operation."""

    def __init__(self, fn: Any, *avals: Any) -> None:
        self._module = lower(fn, *avals, platform="tpu")  # what an operation points into
        (self.op,) = custom_calls(self._module, "tpu_custom_call")
        self.config = json.loads(ir.StringAttr(self.op.attributes["backend_config"]).value)
        body = self.config["custom_call_config"].pop("body")
        self.body = _text(base64.b64decode(body))

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration, flat."""
        return self.config | self.config["custom_call_config"]


class GpuKernel:
    """The one Mosaic GPU kernel of a program."""

    def __init__(self, fn: Any, *avals: Any) -> None:
        module = lower(fn, *avals, platform="cuda")  # held: the operation points into it
        (op,) = custom_calls(module, "mosaic_gpu_v2")
        self.config = ir.DictAttr(op.attributes["mhlo.backend_config"])
        self.body = _text(ir.StringAttr(self.config["module"]).value_bytes)

    def count(self, op: str) -> int:
        """How many operations of a name it has."""
        return len(re.findall(rf'"[\w.]*\b{re.escape(op)}"', self.body))

    @property
    def launch(self) -> list[int]:
        """Grid, size of a program, and bytes of shared memory."""
        operands = re.search(r'gpu\.launch"\((.*?)\)', self.body)[1]
        return [self._constant(name) for name in operands.split(", ")[1:]]

    @property
    def grid(self) -> tuple[int, ...]:
        """How many programs run, by axis."""
        return tuple(self.launch[:3])

    @property
    def shared_memory(self) -> int:
        """Bytes that a program asks for when it starts."""
        return self.launch[-1]

    def _constant(self, name: str) -> int:
        return int(re.search(rf"{name} = .*?value = (\d+)", self.body)[1])
