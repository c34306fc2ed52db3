"""humming: quantized matrix products composed at run time for the device at hand.

Importing this package is light: it loads neither torch nor a driver, and needs no accelerator.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Public name -> the module that defines it; resolved on first use so that the import stays light.
_EXPORTS = {
    "DataType": "humming.dtypes",
    "WeightSpec": "humming.formats",
    "ActivationSpec": "humming.formats",
    "GemmProblem": "humming.problem",
    "DeviceCapabilities": "humming.capability",
    "capabilities": "humming.plugins",
    "plan": "humming.composer",
    "KernelPlan": "humming.composer",
    "compile": "humming.compiler",
    "QuantizedWeight": "humming.quantized",
    "quantize": "humming.quantizer",
    "PackedWeight": "humming.packing",
    "pack": "humming.packing",
    "unpack": "humming.packing",
    "QuantizedActivation": "humming.activations",
    "quantize_activation": "humming.activations",
    "matmul": "humming.ops",
    "QuantLinear": "humming.nn",
    "quantize_model": "humming.model_quantizer",
    "load_linear": "humming.checkpoints.checkpoint",
    "load_model": "humming.checkpoints.model",
    "save_packed": "humming.checkpoints.packed_writer",
    "load_packed": "humming.checkpoints.packed_reader",
    "HummingError": "humming.errors",
    "UnsupportedError": "humming.errors",
    "CompileError": "humming.errors",
    "PluginError": "humming.errors",
    "CheckpointError": "humming.errors",
}
_SUBMODULES = ("devices", "reference", "dtypes", "formats")

__all__ = [*_EXPORTS, *_SUBMODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"humming.{name}")
    if name in _EXPORTS:
        value = getattr(import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'humming' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
