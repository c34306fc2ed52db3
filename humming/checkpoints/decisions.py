"""What is said of a module of a checkpoint: what becomes of it, and what was read."""

from dataclasses import dataclass, replace

import torch

from humming.checkpoints.rounding import round_scales
from humming.checkpoints.shards import columns_of, part_of, slice_of
from humming.dtypes import DataType
from humming.formats import ActivationSpec, WeightSpec
from humming.nn import QuantLinear
from humming.places import place_of
from humming.quantized import QuantizedWeight, take_columns

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

    def to_module(
        self,
        device: torch.device | str | None = None,
        *,
        activation: ActivationSpec | str | None = None,
        scale_dtype: DataType | str | None = None,
    ) -> QuantLinear | torch.nn.Linear:
        """The layer to compute with: a `QuantLinear`, or torch's own where nothing is quantized.

        Args:
            device: where to pack and to leave it; None for where the tensors lie.
            activation: what to quantize activations to instead of what the checkpoint wants, "fp16"
                or "bf16" to leave them; None for what it wants.
            scale_dtype: float16 or bfloat16 to round scales and zero points of a quantized weight
                to, see `round_scales`; None keeps them.

        Raises:
            UnsupportedError: no kernel multiplies the weight with such activations.
        """
        weight, bias = self.weight, self.bias
        if isinstance(weight, QuantizedWeight):
            if scale_dtype is not None:
                weight = round_scales(weight, scale_dtype)
            wanted, static = self.activation, self.activation_scale
            if activation is not None and ActivationSpec.parse(activation) != wanted:
                # A static scale is that of one format.
                wanted, static = ActivationSpec.parse(activation), None
            return QuantLinear.from_quantized(
                weight,
                bias,
                activation=wanted,
                device=device,
                activation_scale=static,
                input_permutation=self.input_permutation,
                input_scale=self.input_scale,
            )
        if device is not None:
            device = place_of("a linear layer", device)
        n, k = weight.shape
        layer = torch.nn.Linear(k, n, bias=bias is not None, device="meta")
        for name, tensor in {"weight": weight, "bias": bias}.items():
            if tensor is not None:
                placed = tensor if device is None else tensor.to(device)
                setattr(layer, name, torch.nn.Parameter(placed, requires_grad=False))
        return layer

    def shard(self, rank: int, world: int, dim: str) -> "Linear":
        """The part of one of several ranks that share the layer, exactly.

        Args:
            rank, world: which part of how many equal ones.
            dim: "n" to split the outputs (column parallel): each rank takes all inputs and has its
                part of the bias. "k" to split the inputs (row parallel): results of all ranks are
                to be added, and rank 0 adds the bias.

        Raises:
            UnsupportedError: parts would not be equal, or cut what a scale covers; or in act-order
                the inputs of a rank share groups with those of others.
        """
        first, last = part_of(self.weight, rank, world, dim)
        if dim == "n":
            bias = None if self.bias is None else self.bias[first:last]
            return replace(self, weight=slice_of(self.weight, n=(first, last)), bias=bias)
        scale = None if self.input_scale is None else self.input_scale[first:last]
        bias = self.bias if rank == 0 else None
        if self.input_permutation is None or not isinstance(self.weight, QuantizedWeight):
            weight, order = slice_of(self.weight, k=(first, last)), None
        else:
            asked = f"part {rank} of {world} along k of a weight {self.weight.spec}"
            columns = columns_of(self.weight, self.input_permutation, (first, last), asked)
            weight = take_columns(self.weight, columns)
            order = self.input_permutation[columns.to(self.input_permutation.device)] - first
        return replace(self, weight=weight, bias=bias, input_scale=scale, input_permutation=order)
