"""Checkpoints whose config says mxfp4: experts of 4-bit floats, all of a layer in one tensor.

The tensors of a layer are, with E experts and 16 bytes for 32 values, the first in the lower bits:

    experts.gate_up_proj_blocks  uint8 [E, N, K / 32, 16]
    experts.gate_up_proj_scales  uint8 [E, N, K / 32]      ue8m0
    experts.gate_up_proj_bias    [E, N]

and the same of `down_proj`. The matrix of an expert is read as the module `experts.E.down_proj`.
Rows of `gate_up_proj` alternate, gate first; `experts.E.gate_proj` and `up_proj` are its halves.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from humming.checkpoints.config_keys import ConfigKeys
from humming.checkpoints.decisions import Decision, Linear
from humming.checkpoints.module_parts import E8M0, FLOATS, ModuleParts, as_matrix, weight_of
from humming.checkpoints.patterns import holds_components
from humming.checkpoints.scaled import MXFP4, plain_linear
from humming.checkpoints.tensors import TensorSource, matrices
from humming.errors import CheckpointError

_EXPERT = re.compile(r"(.+\.experts)\.(\d{1,6})\.(gate_up_proj|gate_proj|up_proj|down_proj)")
_BLOCK_BYTES = 16
_EVERY_ROW, _GATE_ROWS, _UP_ROWS = slice(None), slice(0, None, 2), slice(1, None, 2)
_ROWS = {
    "gate_proj": ("gate_up_proj", _GATE_ROWS),
    "up_proj": ("gate_up_proj", _UP_ROWS),
    "gate_up_proj": ("gate_up_proj", _EVERY_ROW),
    "down_proj": ("down_proj", _EVERY_ROW),
}


class Mxfp4:
    """Reads checkpoints of 4-bit floats for experts; see `Method`."""

    name = "mxfp4"
    notes: tuple[str, ...] = ()

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        keys = ConfigKeys(config, where)
        self._where = where
        keys.one_of("quant_method", ("mxfp4",))
        self._skipped = keys.strings("modules_to_not_convert")
        keys.ignore("dequantize")
        keys.finish()

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> bool:
        """Whether a config is of this method."""
        return config.get("quant_method") == "mxfp4"

    def decide(self, module: str) -> Decision:
        """What the config says of a module: experts are quantized, all else is not."""
        for entry in self._skipped:
            if holds_components(module, entry):
                return Decision(module, "plain", None, None, f"{entry!r} is not converted")
        if _EXPERT.fullmatch(module):
            why = "experts are mxfp4 where quant_method is mxfp4"
            return Decision(module, "quantized", MXFP4, None, why)
        return Decision(module, "plain", None, None, "it is no matrix of an expert")

    def modules(self, tensors: TensorSource) -> Iterator[str]:
        """The modules with a tensor of their own, and the matrices of experts."""
        yield from matrices(tensors)
        for name in tensors.names:
            stack = name.removesuffix("_blocks")
            if stack != name and "." in stack:
                experts, _, matrix = stack.rpartition(".")
                for index in range((tensors.shape(name) or (0,))[0]):
                    yield f"{experts}.{index}.{matrix}"

    def tensors_of(self, module: str, tensors: TensorSource) -> Iterator[str]:
        """Those of its own, or those of all experts of its layer."""
        expert = _EXPERT.fullmatch(module)
        if expert is None or f"{module}.weight" in tensors:
            names = [f"{module}.{part}" for part in ("weight", "bias")]
        else:
            stack = f"{expert[1]}.{_ROWS[expert[3]][0]}"
            names = [f"{stack}_{part}" for part in ("blocks", "scales", "bias")]
        yield from (name for name in names if name in tensors)

    def read(self, module: str, decision: Decision, tensors: TensorSource) -> Linear:
        """The module; an expert's matrix is cut out of those of its layer."""
        expert = _EXPERT.fullmatch(module)
        if expert is None or f"{module}.weight" in tensors:
            return plain_linear(ModuleParts(tensors, module), decision)
        index = int(expert[2])
        stored, rows = _ROWS[expert[3]]
        parts = ModuleParts(tensors, module, f"{expert[1]}.{stored}_")
        blocks = parts.take("blocks", (torch.uint8,), (4,))
        scales = parts.take("scales", E8M0, (3,))
        experts, n, groups, size = blocks.shape
        if size != _BLOCK_BYTES or tuple(scales.shape) != (experts, n, groups):
            raise parts.error(
                "scales",
                f"has the shape {list(scales.shape)} beside blocks {list(blocks.shape)}",
                "Blocks are [E, N, K / 32, 16], scales [E, N, K / 32].",
            )
        if index >= experts:
            raise CheckpointError(
                f"{self._where}: {module}: there are {experts} experts, counted from 0"
            )
        bias = None
        if parts.has("bias"):
            bias = parts.take("bias", FLOATS, (2,))
            if tuple(bias.shape) != (experts, n):
                raise parts.error(
                    "bias", f"has the shape {list(bias.shape)}", f"It is [{experts}, {n}]."
                )
            bias = bias[index, rows].contiguous()
        codes = blocks[index, rows].flatten(1).contiguous()
        if not codes.shape[0]:
            raise parts.error("blocks", "has no such rows", "Gates and ups alternate.")
        shape = (codes.shape[0], 32 * groups)
        weight = weight_of(
            parts,
            ("blocks", "scales"),
            MXFP4,
            shape,
            codes,
            as_matrix(scales[index, rows]),
        )
        if expert[3] == "gate_up_proj":
            parts.note("its rows alternate: 0, 2, ... are of the gate, 1, 3, ... of the up matrix")
        return Linear(weight, bias, activation=decision.activation, notes=tuple(parts.notes))
