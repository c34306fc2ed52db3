"""Writes into formats.md what quantizing normal values to each named format costs.

Run `python docs/format_errors.py` after a change of the formats or of how they are quantized.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

import humming
from humming import reference
from humming.formats import ActivationSpec, WeightSpec

PAGE = Path(__file__).with_name("formats.md")
BEGIN, END = "<!-- errors: begin -->", "<!-- errors: end -->"
ROWS, K = 256, 4096

WEIGHTS = (
    *("int8", "int8_tensor", "int8_g128", "int4", "int4_g128", "int4_g32", "int3_g128", "int2_g64"),
    *("uint8", "uint4_g128", "uint4_g128_zp", "uint4_g64_zp", "uint4_g64_fzp", "uint2_g64_fzp"),
    *("uint1_g64_fzp", "fp8", "fp8_tensor", "fp8_block128", "fp8_e5m2", "float8e3m4"),
    *("float4e0m3_g16", "mxfp4", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp8", "mxfp8_e5m2", "mxint4"),
    "nvfp4",
)
ACTIVATIONS = (
    *("int8", "int8_asym", "int8_g128", "int4", "int4_g64", "fp8", "fp8_g128", "fp8_e5m2"),
    *("mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4"),
)


def sample() -> torch.Tensor:
    """Normal values, always the same."""
    return torch.randn(ROWS, K, generator=torch.Generator().manual_seed(1))


def weight_error(name: str, values: torch.Tensor) -> float:
    """Root-mean-square error over root-mean-square of the values."""
    spec = WeightSpec.parse(name)
    if not spec.dtype.is_signed and spec.zero_point == "none":
        values = values.abs()
    return _error(reference.dequantize(humming.quantize(values, spec), torch.float32), values)


def activation_error(name: str, values: torch.Tensor) -> float:
    """The same for activations."""
    spec, second = ActivationSpec.parse(name), None
    if spec.second_scale == "tensor":
        second = (values.abs().max() / (spec.scale_dtype.max * spec.dtype.max)).reshape(1)
    parts = reference.quantize_activation(values, spec, second_scale=second)
    found = reference.dequantize_activation(
        spec, values.shape[1], parts.codes, parts.scales, parts.zeros, second
    )
    return _error(found, values)


def _error(found: torch.Tensor, values: torch.Tensor) -> float:
    return float((found.double() - values.double()).norm() / values.double().norm())


def table() -> Iterator[str]:
    """Lines of Markdown: a row for each format."""
    values = sample()
    yield "| weights | bytes per weight | error |"
    yield "|---|---|---|"
    for name in WEIGHTS:
        size = WeightSpec.parse(name).bits_per_weight(4096, 4096) / 8
        yield f"| `{name}` | {size:.4g} | {percent(weight_error(name, values))} |"
    yield ""
    yield "| activations | error |"
    yield "|---|---|"
    for name in ACTIVATIONS:
        yield f"| `{name}` | {percent(activation_error(name, values))} |"


def percent(error: float) -> str:
    """To three digits."""
    return f"{100 * error:.3g} %"


def main() -> None:
    """Rewrite the tables."""
    head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    text = "\n".join(table())
    PAGE.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
