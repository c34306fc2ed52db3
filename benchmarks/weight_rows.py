"""Some rows of a quantized weight as numbers: references of large products in little memory."""

from dataclasses import replace

import torch

from humming import reference
from humming.quantized import QuantizedWeight


def dequantized_rows(weight: QuantizedWeight, rows: slice) -> torch.Tensor:
    """Rows of a weight in float64, without those of the others; they begin where a block does."""
    n, k = weight.shape

    def part(scales: torch.Tensor | None) -> torch.Tensor | None:
        if scales is None or scales.shape[0] == 1:
            return scales
        rows_per_scale = -(-n // scales.shape[0])
        return scales[rows.start // rows_per_scale : -(-rows.stop // rows_per_scale)]

    scales = part(weight.scales)
    assert scales is not None
    some = replace(
        weight,
        shape=(rows.stop - rows.start, k),
        codes=weight.codes[rows].contiguous(),
        scales=scales.contiguous(),
        zeros=part(weight.zeros),
        second_scale=part(weight.second_scale),
    )
    return reference.dequantize(some)
