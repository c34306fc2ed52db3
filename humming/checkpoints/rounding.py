"""Scales and zero points in 16 bits: for weights whose own are wider than kernels can apply."""

from dataclasses import replace

import torch

from humming.dtypes import DataType, bfloat16, float16
from humming.errors import UnsupportedError
from humming.quantized import SCALE_TENSOR_DTYPES, QuantizedWeight, check_quantized, decode_scales


def round_scales(weight: QuantizedWeight, dtype: DataType | str = float16) -> QuantizedWeight:
    """A weight with its scales, and floating zero points, rounded to 16 bits; codes stay.

    No loader does this by itself, because it changes the weight: each scale by at most half a unit
    of its last place. A floating zero point is divided out anew, so that what it stands for, zero
    point times scale, is off by no more than its own rounding.

    Args:
        weight: the weight.
        dtype: float16 or bfloat16.

    Raises:
        UnsupportedError: another type, or one in which a scale becomes infinite, or 0 without
            being it, or a zero point infinite.
    """
    asked = f"scales of a weight in {dtype}"
    check_quantized(weight, asked)
    dtype = DataType.parse(dtype)
    if dtype not in (float16, bfloat16):
        raise UnsupportedError(asked, "it does not have 16 bits", "Use float16 or bfloat16.")
    exact = decode_scales(weight.scales, weight.spec.scale_dtype)
    scales = exact.to(SCALE_TENSOR_DTYPES[dtype])
    if bool((~torch.isfinite(scales) | ((scales == 0) & (exact != 0))).any()):
        least, most = float(exact.abs().min()), float(exact.abs().max())
        raise UnsupportedError(
            asked, f"its scales, {least:.3g} to {most:.3g}, exceed its range", "Use bfloat16."
        )
    zeros = weight.zeros
    if zeros is not None and weight.spec.zero_point == "float":
        rounded = scales.double()
        moved = torch.where(rounded == 0, zeros.double(), zeros.double() * exact / rounded)
        zeros = moved.to(scales.dtype)
        if not bool(torch.isfinite(zeros).all()):
            why = f"its zero points reach {float(moved.abs().max()):.3g}, beyond its range"
            raise UnsupportedError(asked, why, "Use bfloat16.")
    return replace(weight, spec=replace(weight.spec, scale_dtype=dtype), scales=scales, zeros=zeros)
