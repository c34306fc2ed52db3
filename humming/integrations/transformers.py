"""humming as a quantizer of Hugging Face transformers.

Importing this module makes the method `humming` known to transformers, for models to be quantized
while they are loaded and for those saved afterwards. Checkpoints of other methods are loaded by
transformers' own quantizers until `enable` is called.
"""

import re
from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from humming import reference
from humming.checkpoints.checkpoint import Checkpoint
from humming.checkpoints.methods import method_of
from humming.checkpoints.tensors import TensorSource
from humming.composer import plan
from humming.errors import CheckpointError, UnsupportedError
from humming.formats import ActivationSpec, WeightSpec
from humming.integrations.module_names import ModelNames
from humming.integrations.transformers_api import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    ConversionOps,
    HfQuantizer,
    QuantizationConfigMixin,
    register_quantization_config,
    register_quantizer,
)
from humming.model_quantizer import ModelReport, linear_layers, replace_module
from humming.nn import QuantLinear
from humming.packing import unpack
from humming.quantized_ops import problem_of

METHOD = "humming"
OTHER_METHODS = (
    *("gptq", "awq", "auto-round", "compressed-tensors", "fp8", "fbgemm_fp8", "mxfp8"),
    *("w4afp8", "modelopt", "quark", "bitnet"),
)
"""Values of `quant_method` that `enable` can take over."""


@register_quantization_config(METHOD)
class HummingConfig(QuantizationConfigMixin):
    """How to quantize a model while it is loaded.

    Args:
        weight: the format, such as "mxfp4".
        activation: "fp16" or "bf16", or what activations are quantized to in each layer; None
            accepts both 16-bit types as they are.
        only, skip: names of layers as for `humming.quantize_model`. Skip None leaves the output
            layer, as the model names it.
        unsupported: "refuse" or "skip" for layers that the format cannot hold.
        method: how scales are chosen, see `humming.quantize`.
        checkpoint: the configuration of a checkpoint that is quantized by another method.
    """

    def __init__(
        self,
        weight: WeightSpec | str | None = None,
        activation: ActivationSpec | str | None = None,
        *,
        only: Iterable[str] = (),
        skip: Iterable[str] | None = None,
        unsupported: str = "refuse",
        method: str = "absmax",
        checkpoint: Mapping[str, Any] | None = None,
        quant_method: str = METHOD,
    ) -> None:
        self.quant_method = quant_method
        self.weight = None if weight is None else WeightSpec.parse(weight).name
        self.activation = None if activation is None else ActivationSpec.parse(activation).name
        self.only = list(only)
        self.skip = None if skip is None else list(skip)
        self.unsupported, self.method = unsupported, method
        self.checkpoint = None if checkpoint is None else dict(checkpoint)

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """The configuration that a model carries, of whatever method."""
        if config_dict.get("quant_method") == METHOD:
            config = cls(**config_dict)
        else:
            config = cls(checkpoint=config_dict)
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        """What is stored with a model that is saved: its layers are packed by then."""
        return {name: value for name, value in vars(self).items() if name != "checkpoint"}


@register_quantizer(METHOD)
class HummingHfQuantizer(HfQuantizer):
    """Loads models whose linear layers run on humming.

    Attributes:
        report: which layers of the loaded model do, and why others do not.
    """

    requires_calibration = False
    is_trainable = False
    is_compileable = True

    def __init__(self, quantization_config: HummingConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.report = ModelReport(())
        self._dtype: torch.dtype | None = None
        self._model: Any = None
        self._files: list[str] = []
        self._candidates: dict[str, torch.nn.Linear] = {}
        # Of the model, the layers that become quantized ones: name -> name in the checkpoint.
        self._sources: dict[str, str] = {}
        self._skipped: dict[str, str] = {}
        self._checkpoint: Checkpoint | None = None
        self._refusal: UnsupportedError | None = None

    # -- before the weights --------------------------------------------------------------------

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        """Refuses what cannot be loaded, as soon as it is known."""
        places = set(map(str, device_map.values() if isinstance(device_map, Mapping) else ()))
        if "disk" in places or ("cpu" in places and len(places) > 1):
            raise UnsupportedError(
                f"a device_map with {', '.join(sorted(places))}",
                "layers stay where they compute, none is fetched from host memory or disk",
                "Give all modules to accelerators, or all to the CPU.",
            )
        if not self.pre_quantized and self.quantization_config.weight is None:
            raise UnsupportedError(
                "HummingConfig() for a model that is not quantized",
                "it does not say to which format",
                "Pass e.g. HummingConfig(weight='mxfp4').",
            )

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the model, which is that of activations."""
        if dtype not in (torch.float16, torch.bfloat16):
            raise UnsupportedError(
                f"a model in {dtype} with humming",
                "activations have 16 bits",
                "Pass dtype=torch.bfloat16 or torch.float16 to from_pretrained.",
            )
        self._dtype = dtype
        return dtype

    def update_parallel_plan(self, model: Any, plan: Any) -> None:
        """Refuses tensor parallelism; without it there is nothing to plan."""
        self._refuse_tensor_parallelism(getattr(model.config, "distributed_config", None))

    def update_tp_plan(self, config: Any) -> Any:
        """As `update_parallel_plan`, by the name that it had before."""
        self._refuse_tensor_parallelism(getattr(config, "distributed_config", None))
        return config

    def _refuse_tensor_parallelism(self, distributed: Any) -> None:
        if distributed is not None:
            raise UnsupportedError(
                "a model on humming in tensor parallelism",
                "packed weights are not split",
                "Pass a device_map, which places whole layers.",
            )

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        self._model, self._files = model, list(checkpoint_files or ())
        config = self.quantization_config
        skip = () if self.pre_quantized else config.skip
        if skip is None:
            output = model.get_output_embeddings()
            skip = [name for name, module in model.named_modules() if module is output]
        found, self._skipped = linear_layers(model, config.only, skip)
        # Weights are tied after they are loaded.
        tied = getattr(model, "all_tied_weights_keys", {})
        for weight in tied:
            name = weight.removesuffix(".weight")
            if found.pop(name, None) is not None or name in self._skipped:
                self._skipped[name] = f"its weight is tied to {tied[weight]}"
        if self.pre_quantized:
            self._candidates = found
        else:
            self._sources = dict.fromkeys(found, "")

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> Any:
        """Reserves the places of a checkpoint's quantized layers.

        Only now all the names are known under which transformers looks for tensors.
        """
        if self.pre_quantized:
            self._reserve(ModelNames(self._model, weight_conversions))
        return weight_conversions

    def _reserve(self, names: ModelNames) -> None:
        checkpoint, tensors = self._open()
        parts: dict[str, set[str]] = {}
        for tensor in tensors.names:
            module, _, part = tensor.rpartition(".")
            parts.setdefault(module, set()).add(part)
        ours: set[str] = set()
        for module in checkpoint.modules():
            held = [f"{module}.{part}" for part in sorted(parts.get(module, ()))]
            if _are_ordinary(held, tensors):
                continue
            name = names.in_model(module)
            if name in self._candidates:
                checkpoint.decide(module).require_readable(checkpoint.where)
                self._sources[name] = module
                size = sum(_stored_bytes(tensor, tensors) for tensor in held)
                replace_module(self._model, name, _Reservation(size))
                ours |= {re.escape(name), re.escape(names.of_unknown(module))}
            elif holder := names.holder_of(module):
                raise UnsupportedError(
                    f"the quantized weight {module} in {type(self._model).__name__}",
                    f"the model does not hold it as a linear layer, but in {holder}",
                    "Models whose quantized weights are all linear layers are loaded.",
                )
        if ours:
            # Their tensors are read here, and not unexpected.
            known = set(self._model._keys_to_ignore_on_load_unexpected or ())
            self._model._keys_to_ignore_on_load_unexpected = known | {
                rf"^({'|'.join(sorted(ours))})\."
            }
        for name in self._candidates.keys() - self._sources.keys():
            self._skipped[name] = "it is not quantized in the checkpoint"

    def _open(self) -> tuple[Checkpoint, TensorSource]:
        """The tensors of the files, with the configuration that the model carries."""
        if not self._files or not self._files[0].endswith(".safetensors"):
            raise CheckpointError(
                f"a quantized model in {self._files or 'no files'}; possible: *.safetensors"
            )
        folder = Path(self._files[0]).parent
        where = f"{folder / 'config.json'}: quantization_config"
        tensors = TensorSource.of_files(self._files, str(folder))
        method = method_of(self.quantization_config.checkpoint, where)
        self._checkpoint = Checkpoint(folder, where, method, tensors)
        return self._checkpoint, tensors

    # -- the weights ---------------------------------------------------------------------------

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        """Whether a parameter is the weight of a layer that is quantized on its way in."""
        name = param_name.removesuffix(".weight")
        return not self.pre_quantized and name != param_name and name in self._sources

    @property
    def quantized_element_size(self) -> float | None:
        """Bytes of a weight on its way in, with its part of a scale."""
        weight = self.quantization_config.weight
        if self.pre_quantized or weight is None:
            return None
        spec = WeightSpec.parse(weight)
        per_scale = spec.group_size if spec.granularity == "group" else 128
        return (spec.dtype.bits + spec.scale_dtype.bits / per_scale) / 8

    def get_quantize_ops(self) -> Any:
        """What transformers does with such a weight."""
        return _QuantizeWeight(self)

    def quantize_weight(self, name: str, weight: torch.Tensor) -> bool:
        """Puts a quantized layer in the place of a linear one; whether it did."""
        config, linear = self.quantization_config, self._model.get_submodule(name)
        if self._refusal is not None:
            return False
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        try:
            layer = QuantLinear.from_linear(
                linear, config.weight, config.activation, method=config.method
            )
        except UnsupportedError as error:
            if config.unsupported == "skip":
                self._skipped[name] = str(error)
            else:
                told = f"the layer {name}: {error.asked}"
                self._refusal = UnsupportedError(told, error.why, error.possible)
            del self._sources[name]
            return False
        self._put(name, layer)
        return True

    # -- after the weights ---------------------------------------------------------------------

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        if self._refusal is not None:
            raise self._refusal
        if self.pre_quantized:
            self._fill()
        self.report = ModelReport(tuple(self._sources), dict(sorted(self._skipped.items())))
        self._check_products()
        self._model = self._checkpoint = None
        return model

    def _fill(self) -> None:
        """Reads the quantized layers into the places that are reserved for them."""
        assert self._checkpoint is not None
        for name, module in self._sources.items():
            reserved = self._model.get_submodule(name)
            layer = self._checkpoint.read(module).to_module(reserved.place.device)
            linear = self._candidates[name]
            found = layer.out_features, layer.in_features
            if found != (linear.out_features, linear.in_features):
                raise CheckpointError(
                    f"{self._checkpoint.where}: {module} is {list(found)}, and the model expects "
                    f"{[linear.out_features, linear.in_features]}"
                )
            self._put(name, layer)

    def _put(self, name: str, layer: torch.nn.Module) -> None:
        old = self._model.get_submodule(name)
        layer.to(self._dtype).train(old.training)
        layer._is_hf_initialized = True  # type: ignore[assignment]
        replace_module(self._model, name, layer)
        # A module that is an entry of the device_map by itself has been given one.
        if hook := getattr(old, "_hf_hook", None):
            from accelerate.hooks import add_hook_to_module

            add_hook_to_module(layer, hook)

    def _check_products(self) -> None:
        """Refuses formats that the present device cannot multiply, before the first token does."""
        assert self._dtype is not None
        seen = set()
        for name in self._sources:
            layer = self._model.get_submodule(name)
            if not isinstance(layer, QuantLinear):
                continue
            told = layer.activation_spec or ActivationSpec.parse(str(self._dtype).split(".")[1])
            if (layer.weight_spec, told) in seen:
                continue
            seen.add((layer.weight_spec, told))
            size = layer.out_features, layer.in_features
            plan(
                problem_of(told, layer.weight_spec, *size, self._dtype, layer.bias is not None), m=1
            )

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        for name, layer in list(model.named_modules()):
            if isinstance(layer, QuantLinear):
                replace_module(model, name, _dequantized(layer, dtype or model.dtype))
        return model

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Whether the loaded model can be saved."""
        return True


class _Reservation(torch.nn.Module):
    """Takes the room of a quantized layer where transformers places it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        place = torch.empty(size, dtype=torch.uint8, device="meta")
        self.register_buffer("place", place, persistent=False)
        # Nothing is to be drawn at random.
        self._is_hf_initialized = True


class _QuantizeWeight(ConversionOps):
    """Quantizes a weight that has been read, and puts the layer into the model."""

    def __init__(self, quantizer: HummingHfQuantizer) -> None:
        self._quantizer = quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        full_layer_name: str = "",
        missing_keys: set[str] | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        """What is left for transformers to put in place: nothing, where the layer is quantized."""
        (weight,) = input_dict.values()
        weight = weight[0] if isinstance(weight, list) else weight
        if not self._quantizer.quantize_weight(full_layer_name.rpartition(".")[0], weight):
            return {full_layer_name: weight}
        if missing_keys is not None:
            missing_keys.discard(full_layer_name)
        return {}


def enable(*methods: str) -> ExitStack:
    """Lets transformers load checkpoints of other methods with humming from now on.

    transformers has one quantizer for each method, so that this is for the process and not for one
    model. It ends with the `with` block that the result may stand in, or its `close()`:

        with enable("gptq"):
            model = AutoModelForCausalLM.from_pretrained(path)

    Args:
        methods: of `OTHER_METHODS`; none for all.

    Raises:
        UnsupportedError: a method is none of these.
    """
    for method in methods:
        if method not in OTHER_METHODS:
            raise UnsupportedError(
                f"enable({method!r})",
                "no checkpoint of linear layers is read of this method",
                f"Possible: {', '.join(OTHER_METHODS)}.",
            )
    undo = ExitStack()
    ours = (
        (AUTO_QUANTIZATION_CONFIG_MAPPING, HummingConfig),
        (AUTO_QUANTIZER_MAPPING, HummingHfQuantizer),
    )
    for method in methods or OTHER_METHODS:
        for mapping, entry in ours:
            undo.callback(_restore, mapping, method, mapping.get(method))
            mapping[method] = entry
    return undo


def _restore(mapping: MutableMapping[str, Any], method: str, entry: Any) -> None:
    if entry is None:
        mapping.pop(method, None)
    else:
        mapping[method] = entry


def _are_ordinary(names: list[str], tensors: TensorSource) -> bool:
    """Whether the tensors of a module are a plain weight, which transformers reads itself."""
    floats = (torch.float16, torch.bfloat16, torch.float32)
    return {name.rpartition(".")[2] for name in names} in ({"weight"}, {"weight", "bias"}) and all(
        tensors.dtype(name) in floats for name in names
    )


def _stored_bytes(name: str, tensors: TensorSource) -> int:
    return torch.Size(tensors.shape(name)).numel() * tensors.dtype(name).itemsize


def _dequantized(layer: QuantLinear, dtype: torch.dtype) -> torch.nn.Linear:
    if layer.input_permutation is not None or layer.input_scale is not None:
        raise UnsupportedError(
            "a dequantized layer", "its inputs are scaled or permuted first", "Keep it quantized."
        )
    bias = layer.bias is not None
    linear = torch.nn.Linear(layer.in_features, layer.out_features, bias, device="meta")
    weight = reference.dequantize(unpack(layer.packed), dtype)
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    if layer.bias is not None:
        linear.bias = torch.nn.Parameter(layer.bias.to(dtype), requires_grad=False)
    return linear.train(layer.training)
