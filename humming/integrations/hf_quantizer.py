"""The quantizer of transformers that puts humming's layers into a model while it is loaded."""

import re
from collections.abc import Mapping
from typing import Any

import torch

from humming import reference
from humming.composer import plan
from humming.errors import CheckpointError, UnsupportedError
from humming.formats import ActivationSpec, WeightSpec
from humming.integrations.humming_config import HummingConfig
from humming.integrations.module_names import ModelNames
from humming.integrations.quantized_source import Layers, OthersLayers, SavedLayers, open_files
from humming.integrations.transformers_api import ConversionOps, HfQuantizer
from humming.model_quantizer import ModelReport, Places, linear_layers, unused_entries
from humming.nn import QuantLinear
from humming.packing import unpack
from humming.places import place_of
from humming.quantized_ops import problem_of


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
        self._places: Any = None
        self._files: list[str] = []
        self._candidates: dict[str, torch.nn.Linear] = {}
        # Of the model, the layers that become quantized ones: name -> name in the checkpoint.
        self._sources: dict[str, str] = {}
        # Those that have been quantized on their way in, still without a bias.
        self._made: dict[str, QuantLinear] = {}
        self._skipped: dict[str, str] = {}
        self._notes: tuple[str, ...] = ()
        self._layers: Layers | None = None
        self._refusal: UnsupportedError | None = None

    # -- before the weights --------------------------------------------------------------------

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        """Refuses what cannot be loaded, as soon as it is known."""
        places = set(map(str, device_map.values() if isinstance(device_map, Mapping) else ()))
        for place in places - {"disk"}:
            place_of("a model", f"cuda:{place}" if place.isdecimal() else place)
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
        self._places = Places(model)
        config = self.quantization_config
        only, skip = config.only, config.skip
        if self.pre_quantized:
            # The checkpoint has been made by these names, perhaps of a larger model.
            only = skip = ()
        elif skip is None:
            output = model.get_output_embeddings()
            skip = [name for name, module in model.named_modules() if module is output]
        found, self._skipped = linear_layers(model, only, skip)
        self._notes = unused_entries(model, skip)
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
        config, tensors = self.quantization_config, open_files(self._files)
        layers: Layers = (
            SavedLayers(config.activations, config.activation, tensors)
            if config.checkpoint is None
            else OthersLayers(config.checkpoint, tensors)
        )
        ours: set[str] = set()
        unused: list[str] = []
        self._layers = layers
        for module in layers.names():
            name = names.in_model(module)
            if name in self._candidates:
                self._sources[name] = module
                size, linear = layers.stored_bytes(module), self._candidates[name]
                self._places.replace(linear, _Reservation(size, linear))
                ours |= {re.escape(name), re.escape(names.of_unknown(module))}
            elif holder := names.holder_of(module):
                raise UnsupportedError(
                    f"the quantized weight {module} in {type(self._model).__name__}",
                    f"the model does not hold it as a linear layer of its own, but in {holder}",
                    "Load models of which only linear layers are quantized.",
                )
            else:
                unused.append(module)
        self._notes += layers.notes
        if unused:
            self._notes += (
                f"{len(unused)} quantized layers of the checkpoint are none of the model's; "
                f"the first is {unused[0]}",
            )
        if ours:
            # Their tensors are read here, and not unexpected.
            pattern = rf"^({'|'.join(sorted(ours))})\."
            known = set(self._model._keys_to_ignore_on_load_unexpected or ())
            self._model._keys_to_ignore_on_load_unexpected = known | {pattern}
        for name in self._candidates.keys() - self._sources.keys():
            self._skipped[name] = "it is not quantized in the checkpoint"

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
        """Quantizes the weight of a linear layer; whether it did, so that it need not be kept."""
        config, linear = self.quantization_config, self._model.get_submodule(name)
        if self._refusal is None and weight.shape != linear.weight.shape:
            # transformers has its own ways with those.
            self._leave(name, f"its weight in the checkpoint is {list(weight.shape)}")
            return False
        # Something in its place that parts of the model may initialize and move, of no size.
        empty = torch.zeros((), dtype=weight.dtype, device=weight.device).expand(weight.shape)
        n, k = weight.shape
        mine = torch.nn.Linear(k, n, bias=False, device="meta")
        mine.weight = torch.nn.Parameter(weight, requires_grad=False)
        try:
            if self._refusal is None:
                self._made[name] = QuantLinear.from_linear(
                    mine, config.weight, config.activation, method=config.method
                )
        except UnsupportedError as error:
            if config.unsupported == "skip":
                self._leave(name, str(error))
                return False
            told = f"the layer {name}: {error.asked}"
            self._refusal = UnsupportedError(told, error.why, error.possible)
        linear.weight = torch.nn.Parameter(empty, requires_grad=False)
        linear.weight._is_hf_initialized = True
        return True

    def _leave(self, name: str, why: str) -> None:
        self._skipped[name] = why
        del self._sources[name]

    # -- after the weights ---------------------------------------------------------------------

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        if self._refusal is not None:
            raise self._refusal
        if self.pre_quantized:
            self._fill()
        else:
            self._place_made()
        told = dict(sorted(self._skipped.items()))
        self.report = ModelReport(tuple(self._sources), told, self._notes)
        self._check_products()
        self._keep_activations()
        self._model = self._layers = self._places = None
        self._candidates, self._made = {}, {}
        return model

    def _place_made(self) -> None:
        """Puts what was quantized into the model, now that each bias is what it stays."""
        for name in list(self._sources):
            linear = self._model.get_submodule(name)
            if name not in self._made:
                # A weight that was made together with others did not pass by itself.
                loaded = getattr(linear.weight, "_is_hf_initialized", False)
                if not loaded or not self.quantize_weight(name, linear.weight.detach()):
                    why = "the checkpoint has no weight for it"
                    self._skipped.setdefault(name, why)
                    self._sources.pop(name, None)
                    continue
            if self._refusal is not None:
                raise self._refusal
            made = self._made.pop(name)
            activation = self.quantization_config.activation
            layer = QuantLinear.from_packed(made.packed, linear.bias, activation=activation)
            self._put(name, layer)

    def _fill(self) -> None:
        """Reads the quantized layers into the places that are reserved for them."""
        assert self._layers is not None
        biases: dict[str, list[str]] = {}
        for name, module in self._sources.items():
            place = self._model.get_submodule(name).place
            layer: Any = self._layers.read(module, name, place.device)
            linear = self._candidates[name]
            found, wanted = ([of.out_features, of.in_features] for of in (layer, linear))
            if found != wanted:
                raise CheckpointError(f"{module} is {found}, and the model expects {wanted}")
            if linear.bias is None and layer.bias is not None and not bool(layer.bias.any()):
                layer.bias = None  # some methods store one for every layer
            self._notes += tuple(
                f"{name}: {note}" for note in self._layers.layer_notes.get(module, ())
            )
            if (layer.bias is None) != (linear.bias is None):
                differ = "none, the model one" if layer.bias is None else "one, the model none"
                biases.setdefault(differ, []).append(module)
            self._put(name, layer)
        self._notes += tuple(
            f"{len(modules)} layers have biases as the checkpoint says: it has {differ}; "
            f"the first is {modules[0]}"
            for differ, modules in biases.items()
        )

    def _put(self, name: str, layer: torch.nn.Module) -> None:
        old = self._model.get_submodule(name)
        if stray := [key for key, of in layer.state_dict().items() if of.is_meta]:
            raise CheckpointError(f"{name}: nothing was loaded for {', '.join(stray)}")
        layer.to(self._dtype).train(old.training)
        layer._is_hf_initialized = True  # type: ignore[assignment]
        if isinstance(layer, QuantLinear):
            layer.name = name
        self._places.replace(old, layer)
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

    def _keep_activations(self) -> None:
        """Notes in the configuration, which is saved, what the tensors of layers do not say."""
        config = self.quantization_config
        for name in self._sources:
            layer = self._model.get_submodule(name)
            if isinstance(layer, QuantLinear) and config.checkpoint is not None:
                spec = layer.activation_spec
                config.activations[name] = None if spec is None else spec.name

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        places = Places(model)
        for layer in list(model.modules()):
            if isinstance(layer, QuantLinear):
                places.replace(layer, _dequantized(layer, dtype or model.dtype))
        return model

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Whether the loaded model can be saved."""
        return True


class _Reservation(torch.nn.Module):
    """Takes the room of a quantized layer where transformers places it.

    It looks like the linear layer, without memory, to what initializes the parts of a model.
    """

    def __init__(self, size: int, linear: torch.nn.Linear) -> None:
        super().__init__()
        place = torch.empty(size, dtype=torch.uint8, device="meta")
        self.register_buffer("place", place, persistent=False)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = _initialized(linear.weight)
        self.bias = None if linear.bias is None else _initialized(linear.bias)
        # Nothing is to be drawn at random.
        self._is_hf_initialized = True


def _initialized(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the meta device that transformers takes for loaded."""
    found = torch.empty_like(tensor, device="meta", requires_grad=False)
    found._is_hf_initialized = True  # type: ignore[attr-defined]
    return found


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
        """What is left for transformers to put in place: nothing of layers that are quantized."""
        left = {}
        for name, weight in input_dict.items():
            found = weight[0] if isinstance(weight, list) else weight
            module = name.removesuffix(".weight")
            takes = self._quantizer.param_needs_quantization(None, name)
            if not takes or not self._quantizer.quantize_weight(module, found):
                left[name] = found
            elif missing_keys is not None:
                missing_keys.discard(name)
        return left


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
