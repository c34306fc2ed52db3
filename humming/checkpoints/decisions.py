"""What is said of a module of a checkpoint: what becomes of it, and what was read."""

from dataclasses import dataclass

import torch

from humming.formats import ActivationSpec, WeightSpec
from humming.quantized import QuantizedWeight

ACTIONS = ("quantized", "plain", "skipped", "refused")


@dataclass(frozen=True, slots=True)
class Decision:
    """What the configuration of a checkpoint says of one module.

    Attributes:
        module: its name, as the names of its tensors start.
        action: `quantized`; `plain`: a linear layer of ordinary numbers; `skipped`: what the
            configuration speaks of but is no linear layer; `refused`: it cannot be read.
        weight: the format of a quantized weight. The type of its scales is what the method writes
            as a rule; the tensors have the last word.
        activation: what activations are to be quantized to, None for 16 bits.
        why: the entry or rule that decided, and for `refused` what is possible.
    """

    module: str
    action: str
    weight: WeightSpec | None = None
    activation: ActivationSpec | None = None
    why: str = ""

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ValueError(f"{self.action!r} is none of {', '.join(ACTIONS)}")
        if (self.weight is not None) != (self.action == "quantized"):
            raise ValueError(f"{self.module}: {self.action} with the weight {self.weight}")


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A linear layer as a checkpoint holds it.

    It multiplies `(x * input_scale)[..., input_permutation]` with the weight and adds the bias.

    Attributes:
        weight: canonical where it is quantized, else [N, K] in 16 or 32 bits.
        bias: [N], or None.
        activation: what activations are to be quantized to, None for 16 bits.
        input_permutation: int64 [K]: column k of the weight belongs to input
            `input_permutation[k]`; None where that is k itself.
        input_scale: [K], by which activations are multiplied before anything else, or None.
        activation_scale: float32 [1, 1], the static scale of quantized activations, or None.
        notes: where tensors and configuration disagreed, and what else a reader should know.
    """

    weight: QuantizedWeight | torch.Tensor
    bias: torch.Tensor | None = None
    activation: ActivationSpec | None = None
    input_permutation: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None
    activation_scale: torch.Tensor | None = None
    notes: tuple[str, ...] = ()
