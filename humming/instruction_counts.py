"""Instructions that turn codes and scales into what is multiplied, for the cost model.

Arithmetic instructions of PTX, without moves, loads and stores. `benchmarks/dequant_cost.py
--write` counts them in the components and writes the two tables; a test fails where a count has
grown. Keys are code:operand, and behind it the feature of the device that a count needs.
"""

from collections.abc import Iterable
from functools import cache

from humming.capability import DeviceCapabilities
from humming.dtypes import DataType, float32
from humming.lowering import ACCUMULATOR, BRICK, OPERAND, Lowering, activation_group, weight_group
from humming.problem import GemmProblem

# One packed multiplication, subtraction or addition for two values.
_PACKED = 0.5
# The narrow loads of two scales; those of tokens come from memory and need addresses.
_LOADS, _TOKEN_LOADS = 2.0, 8.0
# Of types that are like none that is counted.
_UNCOUNTED = 2.0
# Codes of 4 bits of activations are spread over bytes: three operations for four.
_SPREAD = 0.75


def weight_values(problem: GemmProblem, lowering: Lowering, caps: DeviceCapabilities) -> float:
    """Instructions per value of weights: to dequantize it, less its zero point, times its scale."""
    weight, count = problem.weight, 0.0
    as_packed = lowering.layout != BRICK or lowering.operand_bits == weight.dtype.bits
    if lowering.operand != weight.dtype or weight.zero_point != "none" or not as_packed:
        count = per_value(weight.dtype, lowering.operand, caps.features)
    if weight.zero_point == "float":
        count += _PACKED
    folded = lowering.scale_up(weight) >= 0
    count += _PACKED * (lowering.scale_site == OPERAND and weight_group(problem) > 0)
    if weight.dtype.kind == "float" and weight.dtype != lowering.operand:
        # Counts are of kernels that fold what they can: all of it in halves.
        in_halves = lowering.operand == "float16"
        fold = folded or (lowering.may_fold(problem) and lowering.scale_site != OPERAND)
        count += _PACKED * in_halves * (not fold) - _PACKED * (not in_halves) * folded
    return count


def weight_scales(problem: GemmProblem, lowering: Lowering, caps: DeviceCapabilities) -> float:
    """Instructions per group of K for the scales of a lane's two rows."""
    if not weight_group(problem) or lowering.scale_site not in (OPERAND, ACCUMULATOR):
        return 0.0
    target = lowering.operand if lowering.scale_site == OPERAND else float32
    count = per_scale_pair(problem.weight.scale_dtype, target, caps.features)
    multiplied = lowering.scale_up(problem.weight) > 0 or lowering.scale_left_out(problem) > 0
    return _LOADS + count + multiplied


def token_values(problem: GemmProblem, lowering: Lowering, caps: DeviceCapabilities) -> float:
    """Instructions per value of activations that are converted on the way to the MMA."""
    activation = problem.activation.dtype
    if lowering.activation_operand == activation:
        return 0.0
    count = per_value(activation, lowering.activation_operand, caps.features)
    count += _SPREAD * (activation.bits < lowering.packed_bits)
    return count + _PACKED * (lowering.scale_site == OPERAND and activation_group(problem) > 0)


def token_scales(problem: GemmProblem, lowering: Lowering, caps: DeviceCapabilities) -> float:
    """Instructions per 8 tokens and change of scales for the scales of groups of activations."""
    if not activation_group(problem):
        return 0.0
    scale = problem.activation.scale_dtype
    if lowering.scale_site == OPERAND:
        # One load for a lane's token; a conversion serves two changes.
        converted = per_scale_pair(scale, lowering.activation_operand, caps.features)
        return (_TOKEN_LOADS + converted) / 2
    # Each of a lane's four sums is multiplied once more.
    return _TOKEN_LOADS + per_scale_pair(scale, float32, caps.features) + 4


def per_value(code: DataType, operand: DataType, features: Iterable[str]) -> float:
    """Instructions to dequantize one of a lane's values.

    A pair that is not counted costs what the nearest type of its kind does, of no fewer bits, in an
    operand that is as wide.
    """
    found = _best(PER_VALUE, f"{code.name}:{operand.name}", features)
    return _nearest(code, operand) if found is None else found


@cache
def _nearest(code: DataType, operand: DataType) -> float:
    of_kind = []
    for key, count in PER_VALUE.items():
        dtype, other = (DataType.parse(name) for name in key.split(":")[:2])
        alike = (other.is_narrow, other.is_float) == (operand.is_narrow, operand.is_float)
        if dtype.kind == code.kind and alike and count:
            of_kind.append((dtype.bits, count))
    wide_enough = [entry for entry in of_kind if entry[0] >= code.bits]
    return min(wide_enough or of_kind, default=(0, _UNCOUNTED))[1]


def per_scale_pair(scale: DataType, target: DataType, features: Iterable[str]) -> float:
    """Instructions to convert the scales of two rows, to floats or for operands of 16 bits."""
    found = _best(PER_SCALE_PAIR, f"{scale.name}:{target.name}", features)
    return PER_SCALE_PAIR["float8e4m3:float32"] if found is None else found


def _best(table: dict[str, float], key: str, features: Iterable[str]) -> float | None:
    found = [table[name] for name in (key, *(f"{key}:{f}" for f in features)) if name in table]
    return min(found, default=None)


# What follows is counted.
PER_VALUE: dict[str, float] = {
    "int1:float16": 1.219,
    "int2:float16": 1.188,
    "int3:float16": 2.156,
    "int4:float16": 1.125,
    "int5:float16": 2.094,
    "int6:float16": 2.062,
    "int7:float16": 3.281,
    "int8:float16": 1.25,
    "uint1:float16": 1.219,
    "uint2:float16": 1.188,
    "uint3:float16": 2.156,
    "uint4:float16": 1.125,
    "uint5:float16": 2.094,
    "uint6:float16": 2.062,
    "uint7:float16": 3.281,
    "uint8:float16": 1.25,
    "float4e2m1:float16": 1.625,
    "float6e2m3:float16": 2.562,
    "float6e3m2:float16": 2.375,
    "float8e4m3:float16": 2.469,
    "float8e4m3:float16:cvt_fp8": 1,
    "float8e5m2:float16": 0.5,
    "float8e3m4:float16": 2.469,
    "float4e0m3:float16": 2.25,
    "float8e0m7:float16": 2,
    "float5e3m1:float16": 1.969,
    "int1:bfloat16": 1.219,
    "int2:bfloat16": 1.188,
    "int3:bfloat16": 2.156,
    "int4:bfloat16": 1.375,
    "int5:bfloat16": 2.344,
    "int6:bfloat16": 2.312,
    "int7:bfloat16": 3.281,
    "int8:bfloat16": 1.75,
    "uint1:bfloat16": 1.219,
    "uint2:bfloat16": 1.188,
    "uint3:bfloat16": 2.156,
    "uint4:bfloat16": 1.375,
    "uint5:bfloat16": 2.344,
    "uint6:bfloat16": 2.312,
    "uint7:bfloat16": 3.281,
    "uint8:bfloat16": 2.438,
    "float4e2m1:bfloat16": 2.125,
    "float6e2m3:bfloat16": 3,
    "float6e3m2:bfloat16": 3.125,
    "float8e4m3:bfloat16": 2.969,
    "float8e5m2:bfloat16": 3.75,
    "float8e3m4:bfloat16": 2.969,
    "float4e0m3:bfloat16": 2.25,
    "float8e0m7:bfloat16": 2,
    "float5e3m1:bfloat16": 2.469,
    "int1:int8": 0.469,
    "int2:int8": 0.438,
    "int3:int8": 0.969,
    "int4:int8": 0.375,
    "int5:int8": 0.969,
    "int6:int8": 0.938,
    "int7:int8": 1.469,
    "int8:int8": 0,
    "uint1:int8": 0.469,
    "uint2:int8": 0.438,
    "uint3:int8": 0.906,
    "uint4:int8": 0.375,
    "uint5:int8": 0.844,
    "uint6:int8": 0.812,
    "uint7:int8": 1.281,
    "float4e0m3:int8": 2,
    "float8e0m7:int8": 1.75,
    "int1:float8e4m3": 2.219,
    "int2:float8e4m3": 2.188,
    "int3:float8e4m3": 2.906,
    "int4:float8e4m3": 1.75,
    "int5:float8e4m3": 2.844,
    "uint1:float8e4m3": 2.219,
    "uint2:float8e4m3": 2.188,
    "uint3:float8e4m3": 2.906,
    "uint4:float8e4m3": 1.75,
    "float4e2m1:float8e4m3": 0.875,
    "float6e2m3:float8e4m3": 1.562,
    "float6e3m2:float8e4m3": 1.75,
    "float8e4m3:float8e4m3": 0,
    "float4e0m3:float8e4m3": 1.75,
    "float5e3m1:float8e4m3": 1.719,
    "int1:float8e5m2": 2.219,
    "int2:float8e5m2": 2.188,
    "int3:float8e5m2": 2.906,
    "int4:float8e5m2": 1.75,
    "uint1:float8e5m2": 2.219,
    "uint2:float8e5m2": 2.188,
    "uint3:float8e5m2": 2.906,
    "float4e2m1:float8e5m2": 0.875,
    "float6e3m2:float8e5m2": 1.562,
    "float8e5m2:float8e5m2": 0,
    "float4e0m3:float8e5m2": 1.75,
    "float5e3m1:float8e5m2": 1.719,
    "float4e2m1:float6e3m2": 1,
    "float6e3m2:float6e3m2": 0.812,
    "float5e3m1:float6e3m2": 0.969,
    "float4e2m1:float6e2m3": 0.5,
    "float6e2m3:float6e2m3": 0.812,
    "float4e2m1:float4e2m1": 0.5,
    "int1:int4": 0.219,
    "int2:int4": 0.188,
    "int3:int4": 0.469,
    "int4:int4": 0,
    "uint1:int4": 0.219,
    "uint2:int4": 0.188,
    "uint3:int4": 0.406,
    "float4e0m3:int4": 0.875,
}

PER_SCALE_PAIR: dict[str, float] = {
    "float32:float32": 0,
    "float16:float32": 2,
    "float16:float16": 0,
    "bfloat16:float32": 2,
    "bfloat16:bfloat16": 0,
    "float8e8m0:float32": 6,
    "float8e8m0:bfloat16": 4,
    "float8e4m3:float32": 10,
    "float8e4m3:float32:cvt_fp8": 5,
    "float8e4m3:float16": 7,
    "float8e4m3:float16:cvt_fp8": 2,
    "float8e4m3:bfloat16": 11,
    "float8e4m3:bfloat16:cvt_fp8": 6,
}
