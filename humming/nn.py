"""Layers with quantized weights, to put in the place of those of torch."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from humming.absent_weight import AbsentWeight
from humming.dtypes import DataType
from humming.errors import UnsupportedError, check_type
from humming.formats import ActivationSpec, WeightSpec
from humming.layer_inputs import input_scale_of, permutation_of, static_scale
from humming.ops import MISUSE, check_arguments, multiply
from humming.packing import PackedWeight, check_packed, pack
from humming.places import place_of
from humming.quantized import QuantizedWeight
from humming.quantized_ops import multiply_quantized, packed_bits_for
from humming.quantizer import quantize
from humming.runtime import Operands

_PACKED = ("codes", "scales", "zeros", "second_scale")
_INPUT = ("input_scale", "input_permutation", "activation_scale")


class QuantLinear(torch.nn.Module):
    """A linear layer for inference whose weight is packed; see `humming.matmul` for what it takes.

    It multiplies `(x * input_scale)[..., input_permutation]` with the weight and adds the bias.

    Casting the module (`half()`, `to(torch.bfloat16)`, ...) casts the bias alone: codes, scales and
    zero points are what the format says, and keep their dtypes. Moving it moves everything.

    The state dict holds the packed tensors as they are, the bias, and in `_extra_state` the format
    and sizes as JSON in a uint8 tensor, so that it can be stored as safetensors. It loads only into
    a layer of the same format and sizes.

    Args:
        weight: packed [N, K] for the activations.
        bias: [N] of a floating dtype, or None. One that has not the dtype of the activations is
            cast in each call.
        activation: "fp16" or "bf16" to accept only these activations; a format such as "int8" or
            "fp8" to quantize them to, in each call and with scales of their own; None accepts both
            16-bit types as they are.
        activation_scale: the one scale of formats whose scale is known beforehand, such as
            "fp8_tensor", or the factor on top of the scales of "nvfp4": a number, or a tensor of
            one. Without it that factor is 1, see `quantize_activation` for the range that is left.
        input_permutation: integers [K]: column k of the weight belongs to input
            `input_permutation[k]`. None for their own order.
        input_scale: [K] of a floating dtype, by which activations are multiplied before anything
            else, in float32 and rounded once; or None.

    Attributes:
        in_features, out_features: K and N.
        weight_spec: the format of the weight.
        name: what errors call the layer: its name in the model, where `quantize_model` put it.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    second_scale: torch.Tensor | None
    bias: torch.Tensor | None
    row_sums: torch.Tensor | None
    activation_scale: torch.Tensor | None
    input_permutation: torch.Tensor | None
    input_scale: torch.Tensor | None

    def __init__(
        self,
        weight: PackedWeight,
        bias: torch.Tensor | None = None,
        *,
        activation: ActivationSpec | str | None = None,
        activation_scale: torch.Tensor | float | None = None,
        input_permutation: torch.Tensor | None = None,
        input_scale: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        check_packed(weight, "a QuantLinear")
        if bias is not None:
            check_type("a QuantLinear", "the bias", bias, torch.Tensor, "Pass a tensor or None.")
        self.out_features, self.in_features = weight.shape
        self.weight_spec: WeightSpec = weight.spec
        self.activation_dtype, self.activation_spec = _activation(activation)
        told = self.activation_spec.name if self.activation_spec else "fp16"
        wanted = packed_bits_for(weight.spec, told, *weight.shape)
        if weight.operand_bits != wanted:
            raise UnsupportedError(
                f"a QuantLinear with a weight packed for {weight.operand_bits}-bit operands",
                f"activations {told} are multiplied by one packed for {wanted} bits",
                f"Pack the weight with humming.pack(weight, activation={told!r}).",
            )
        if bias is not None and (
            bias.shape != (self.out_features,) or not bias.is_floating_point()
        ):
            raise UnsupportedError(
                f"a QuantLinear with {self.out_features} outputs and a {bias.dtype} bias "
                f"{list(bias.shape)}",
                "a bias is one number for each output",
                f"Pass a floating-point bias [{self.out_features}], or None.",
            )
        self._metadata = weight.metadata()
        self.name = ""
        # What a layer of torch in its place would have for its weight's dtype.
        self._dtype = self.activation_dtype or (None if bias is None else bias.dtype)
        # The name is computed here, because forward runs often and is traced by torch.compile.
        self._format = weight.spec.name
        self._activation = self.activation_spec.name if self.activation_spec else None
        buffers = weight.tensors()
        if self.activation_spec is not None and not self.activation_spec.symmetric:
            buffers["row_sums"] = weight.row_sums
        if bias is not None:
            dtype = self.activation_dtype or bias.dtype
            buffers["bias"] = bias.detach().to(weight.codes.device, dtype).contiguous()
        inputs = {
            "activation_scale": static_scale(self.activation_spec, activation_scale),
            "input_permutation": permutation_of(input_permutation, self.in_features),
            "input_scale": input_scale_of(input_scale, self.in_features),
        }
        for name, tensor in inputs.items():
            if tensor is not None:
                buffers[name] = tensor.to(weight.codes.device)
        # Those that are None come last: torch.export loses count of buffers after one.
        names = (*_PACKED, "bias", "row_sums", *_INPUT)
        for name in sorted(names, key=lambda name: name not in buffers):
            # What follows from the weight is no part of the state.
            self.register_buffer(name, buffers.get(name), persistent=name != "row_sums")

    # -- making one ---------------------------------------------------------------------------

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Linear,
        weight: WeightSpec | str = "int4_g128",
        activation: ActivationSpec | str | None = None,
        device: torch.device | str | None = None,
        *,
        method: str = "absmax",
        activation_scale: torch.Tensor | float | None = None,
    ) -> "QuantLinear":
        """Quantizes and packs the weight of a linear layer, which stays as it is.

        Args:
            linear: the layer.
            weight: the format to quantize to.
            activation: "fp16" or "bf16" to accept only these activations, and to hold the bias so;
                or what activations are quantized to, as for the class.
            device: where to quantize and to leave the result; None for the layer's own.
            method: how scales are chosen, see `humming.quantize`.
            activation_scale: as for the class.
        """
        if not isinstance(linear, torch.nn.Linear):
            raise UnsupportedError(
                f"a QuantLinear from {type(linear).__name__}",
                "only the weight of a torch.nn.Linear is known to be [out, in]",
                "Use from_quantized(humming.quantize(weight, ...)).",
            )
        matrix = linear.weight.detach()
        if device is not None:
            matrix = matrix.to(place_of("a QuantLinear", device))
        quantized = quantize(matrix, weight, method=method)
        layer = cls.from_quantized(
            quantized, linear.bias, activation=activation, activation_scale=activation_scale
        )
        layer._dtype = layer.activation_dtype or linear.weight.dtype
        return layer

    @classmethod
    def from_quantized(
        cls,
        weight: QuantizedWeight,
        bias: torch.Tensor | None = None,
        *,
        activation: ActivationSpec | str | None = None,
        device: torch.device | str | None = None,
        **inputs: Any,
    ) -> "QuantLinear":
        """Packs a quantized weight, on `device` if given, else where it lies.

        `inputs` are `activation_scale`, `input_permutation` and `input_scale` of the class.
        """
        packed = pack(weight, device=device, activation=activation or "fp16")
        return cls(packed, bias, activation=activation, **inputs)

    @classmethod
    def from_packed(
        cls,
        weight: PackedWeight,
        bias: torch.Tensor | None = None,
        *,
        activation: ActivationSpec | str | None = None,
        **inputs: Any,
    ) -> "QuantLinear":
        """Takes a packed weight, whose tensors it shares; `inputs` as for `from_quantized`."""
        return cls(weight, bias, activation=activation, **inputs)

    # -- using it -----------------------------------------------------------------------------

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x @ W.T + bias in the dtype of x; [..., K] -> [..., N]."""
        try:
            dtype = x.dtype
            if self.activation_dtype is not None and dtype != self.activation_dtype:
                raise UnsupportedError(
                    f"activations of {dtype}",
                    f"this layer was made for {self.activation_dtype}",
                    f"Cast them with .to({self.activation_dtype}).",
                )
            # Attributes that are buffers are found at the end of a long search.
            buffers: dict[str, Any] = self._buffers
            bias = buffers["bias"]
            if bias is not None and bias.dtype != dtype:
                bias = bias.to(dtype)
            if buffers["input_scale"] is not None or buffers["input_permutation"] is not None:
                x = self._ordered(x)
            if self._activation is not None:
                return self._quantized(x, bias, dtype)
            operands = Operands(
                buffers["codes"], buffers["scales"], buffers["zeros"], buffers["second_scale"], bias
            )
            return multiply(x, operands, self._format, (self.out_features, self.in_features))
        except MISUSE:
            check_arguments(x)
            raise

    def _quantized(
        self, x: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        buffers: dict[str, Any] = self._buffers
        weight = tuple(buffers[name] for name in (*_PACKED, "row_sums"))
        shape = self.out_features, self.in_features
        scale = buffers["activation_scale"]
        return multiply_quantized(
            x, weight, bias, self._activation or "", self._format, shape, dtype, scale
        )

    def _ordered(self, x: torch.Tensor) -> torch.Tensor:
        """Activations as the columns of the weight expect them."""
        if x.shape[-1:] != (self.in_features,):
            raise UnsupportedError(
                f"activations {list(x.shape)} for a layer of {self.in_features} inputs",
                "the last size is another",
                f"Pass activations [..., {self.in_features}].",
            )
        buffers: dict[str, Any] = self._buffers
        scale, permutation = buffers["input_scale"], buffers["input_permutation"]
        if scale is not None:
            # What is quantized next need not be rounded before.
            scaled = x * scale if scale.dtype == x.dtype else x.float() * scale
            x = scaled if self._activation is not None else scaled.to(x.dtype)
        return x if permutation is None else x.index_select(-1, permutation)

    @property
    def activation(self) -> str | None:
        """What activations must be or are quantized to, None for both 16-bit types as they are."""
        if self.activation_dtype is not None:
            return DataType.parse(self.activation_dtype).name
        return self._activation

    @property
    def weight(self) -> AbsentWeight:
        """What modules that look at a layer's weight find: its shape, dtype and device alone."""
        shape = self.out_features, self.in_features
        named = self.name or f"a QuantLinear({self.extra_repr()})"
        return AbsentWeight(named, shape, self._dtype, self.codes.device)

    @property
    def packed(self) -> PackedWeight:
        """The weight, sharing the layer's tensors."""
        tensors = {name: getattr(self, name) for name in _PACKED}
        present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        return PackedWeight.from_tensors(self._metadata, present)

    def extra_repr(self) -> str:
        """What torch shows between the parentheses."""
        shown = f"in_features={self.in_features}, out_features={self.out_features}"
        shown = f"{shown}, bias={self.bias is not None}, weight={self._format}"
        shown = f"{shown}, activation={self._activation}" if self._activation else shown
        held = [name for name in _INPUT if self._buffers[name] is not None]
        return ", ".join([shown, *held])

    # -- state --------------------------------------------------------------------------------

    def get_extra_state(self) -> torch.Tensor:
        """The format and sizes, as JSON in a uint8 tensor."""
        text = json.dumps(self._metadata, sort_keys=True)
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Nothing to set: only a state of the same format is let in, see `_check_state`."""

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any
    ) -> None:
        # Before anything is copied, lest a refused state leave half of itself behind.
        self._check_state(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        if self._buffers["row_sums"] is not None:
            self.row_sums = self.packed.row_sums

    def _check_state(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        name = prefix.removesuffix(".") or "a QuantLinear"
        extra = state_dict.get(f"{prefix}_extra_state")
        stored = self._metadata if extra is None else _read_extra_state(extra, name)
        if stored != self._metadata:
            raise UnsupportedError(
                f"the state of {name} with {_told(stored)}",
                f"the layer has {_told(self._metadata)}",
                "Make the layer with QuantLinear.from_packed from the stored tensors.",
            )
        for part in (*_PACKED, *_INPUT):
            mine, theirs = getattr(self, part), state_dict.get(prefix + part)
            if mine is not None and theirs is not None and theirs.dtype != mine.dtype:
                raise UnsupportedError(
                    f"the state of {name} with {part} of {theirs.dtype}",
                    f"the layer has {mine.dtype}, and copying would round",
                    "Store the tensors of a state dict as they are.",
                )
        for part in _INPUT:
            mine, theirs = getattr(self, part), state_dict.get(prefix + part)
            # A state of nothing but a bias, say, changes nothing that these belong to.
            if (mine is None) != (theirs is None) and (
                mine is None or prefix + "codes" in state_dict
            ):
                raise UnsupportedError(
                    f"the state of {name} {'without' if theirs is None else 'with'} {part}",
                    f"the layer has {'none' if mine is None else 'one'}",
                    "Make the layer with what the stored one has.",
                )
        if (permutation := state_dict.get(prefix + "input_permutation")) is not None:
            permutation_of(permutation, self.in_features)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        kept = (self._buffers[name] for name in (*_PACKED, "row_sums", *_INPUT))
        packed = {id(tensor) for tensor in kept if tensor is not None}

        def keep_dtype(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            if id(tensor) not in packed or moved.dtype == tensor.dtype:
                return moved
            return tensor.to(moved.device)

        if self.activation_dtype is None:
            # A tensor that nothing but a cast would change tells what is cast to.
            probe = torch.empty(0, dtype=torch.float64, device=self.codes.device)
            told = fn(probe).dtype
            self._dtype = self._dtype if told == probe.dtype else told
        return super()._apply(keep_dtype, recurse)  # type: ignore[no-untyped-call]


def check_activation(activation: ActivationSpec) -> None:
    """Refuse activations that no layer finds a scale for by itself.

    Raises:
        UnsupportedError: their scale has to be known beforehand, or no kernel finds it.
    """
    static_scale(_activation(activation)[1], None)


def _activation(
    activation: ActivationSpec | str | None,
) -> tuple[torch.dtype | None, ActivationSpec | None]:
    """The one dtype that activations must have, and what they are quantized to."""
    if activation is None:
        return None, None
    spec = ActivationSpec.parse(activation)
    if not spec.dtype.is_narrow:
        dtype: torch.dtype = getattr(torch, spec.dtype.name)
        return dtype, None
    if spec.granularity == "tensor" and spec.dynamic:
        raise UnsupportedError(
            f"a QuantLinear for activations {spec.name}",
            "no kernel finds one scale for all of them",
            f"Use {spec.dtype.name}, with a scale for each token.",
        )
    if spec.granularity == "tensor" and not spec.symmetric:
        raise UnsupportedError(
            f"a QuantLinear for activations {spec.name}",
            "it holds a scale that is known beforehand, but no zero point",
            f"Quantize them with humming.quantize_activation, or use {spec.dtype.name}_asym.",
        )
    return None, spec


def _read_extra_state(extra: Any, name: str) -> dict[str, str]:
    try:
        stored: dict[str, str] = json.loads(bytes(extra.tolist()))
        return stored
    except (AttributeError, TypeError, ValueError) as error:
        raise UnsupportedError(
            f"the state of {name}",
            f"its _extra_state holds no description of a packed weight ({error})",
            "Load a state that a QuantLinear made.",
        ) from error


def _told(metadata: Mapping[str, str]) -> str:
    shown = {"weight": "?", "n": "?", "k": "?", "operand_bits": "?", **metadata}
    size = f"[{shown['n']}, {shown['k']}]"
    return f"weight {shown['weight']} {size} for {shown['operand_bits']}-bit operands"
