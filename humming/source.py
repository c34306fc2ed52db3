"""Composes the CUDA source of a kernel: includes, one config struct, one entry.

The source depends on the problem's types and the tile, not on N and K, so that the layers of a
model share kernels. Everything a component needs is a constant of the config struct.
"""

from collections.abc import Mapping

from humming.capability import DeviceCapabilities
from humming.components import ELEMENTS, Component
from humming.dtypes import DataType
from humming.errors import UnsupportedError
from humming.layout import BRICK_K, BRICK_ROWS, device_struct
from humming.lowering import (
    ACCUMULATOR,
    EPILOGUE,
    OPERAND,
    Lowering,
    activation_group,
    scale_step,
    weight_group,
)
from humming.problem import GemmProblem
from humming.tiles import TileConfig, box_element_bytes

ENTRY = "humming_gemm"
"""C symbol of every composed kernel."""

# Tiles along N that share token tiles in a group; keeps weights of concurrent CTAs in L2.
RASTER_GROUP = 8

_SITES = {EPILOGUE: "kEpilogue", ACCUMULATOR: "kAccumulator", OPERAND: "kOperand"}
_ZERO_POINTS = {"none": "kNone", "integer": "kInteger", "float": "kFloat"}
_SECOND_SCALES = {"none": "kNone", "tensor": "kTensor", "channel": "kChannel"}
# Scales of groups and blocks change with K: the mainloop applies them.
_TOKEN_SCALES = {
    "none": "kNone",
    "tensor": "kTensor",
    "token": "kToken",
    "group": "kNone",
    "block": "kNone",
}


def compose_source(
    problem: GemmProblem,
    lowering: Lowering,
    tile: TileConfig,
    components: Mapping[str, Component],
    caps: DeviceCapabilities,
) -> str:
    """The source of the kernel that computes a problem by a lowering, cut as a tile.

    Args:
        components: by slot; those that the lowering requires.

    Raises:
        UnsupportedError: a type has no counterpart in device code.
    """
    headers = sorted(
        {"humming/gemm.cuh", "humming/scheduler/raster.cuh"}
        | {component.header for component in components.values()}
    )
    struct = {slot: component.struct for slot, component in components.items()}
    weight, activation = problem.weight, problem.activation
    types = {
        "Scale": f"humming::{_element(weight.scale_dtype)}",
        "TokenScale": f"humming::{_element(activation.scale_dtype)}",
        "Scales": struct["scale"],
        "TokenScales": struct["token_scale"],
        "Out": f"humming::{_out(problem.out_dtype, caps)}",
        "Mover": struct["producer" if lowering.has_producer else "mover"],
        "Mma": struct["mma"],
        "Tokens": _token_struct(problem, lowering, struct["tokens"]),
        "Dequant": "::weights::Dequant",
        "Scheduler": f"humming::RasterScheduler<{RASTER_GROUP}, {tile.split_k}>",
    }
    numbers = {
        "kBlockN": tile.block_n,
        "kBlockM": tile.block_m,
        "kBlockK": tile.block_k,
        "kWarpsN": tile.warps_n,
        "kWarpsK": tile.warps_k,
        "kStages": tile.num_stages,
        "kSplitK": tile.split_k,
        "kClusterN": tile.cluster_n,
        "kClusterK": tile.cluster_k,
        "kEpilogueM": tile.epilogue_m,
        "kGroupK": weight_group(problem),
        "kTokenGroupK": activation_group(problem),
        "kScaleStepK": scale_step(problem),
        "kPartialK": lowering.partial_k(problem),
        "kScaleLeftOut": lowering.scale_left_out(problem),
        "kSharedBytes": tile.smem_bytes(problem, lowering),
    }
    if lowering.has_producer:
        dealt = tile.dealt_registers(caps.registers_per_sm or 65536)
        numbers |= zip(("kProducerRegisters", "kRegisters"), dealt, strict=True)
        numbers |= _boxes(problem, lowering, tile)
    choices = {
        "ScaleSite": _SITES[lowering.scale_site],
        "ZeroPoint": _ZERO_POINTS[weight.zero_point],
        "SecondScale": _SECOND_SCALES[weight.second_scale],
        "TokenScaling": _TOKEN_SCALES[activation.granularity],
    }
    flags = {
        "kStagedTokenScales": tile.stages_token_scales(problem, lowering),
        "kTokenZero": not activation.symmetric,
        "kTokenSecond": activation.second_scale == "tensor",
        "kDependentLaunch": "griddepcontrol" in caps.features,
    }
    params = "MappedGemmParams" if lowering.has_producer else "GemmParams"
    lines = [
        f"// {weight.name} x {activation.name} -> {problem.out_dtype}; {lowering.name};",
        f"// {tile}",
        *(f"#include <{header}>" for header in headers),
        "",
        *_weights(problem, lowering, struct["dequant"]),
        *(_tokens(problem, lowering, struct["convert"]) if "convert" in struct else ()),
        "struct Config {",
        "  using Order = ::weights::Order;",
        *(f"  using {name} = {value};" for name, value in types.items()),
        *(f"  static constexpr int {name} = {value};" for name, value in numbers.items()),
        *(
            f"  static constexpr humming::{name} k{name} = humming::{name}::{value};"
            for name, value in choices.items()
        ),
        *(f"  static constexpr bool {name} = {_bool(value)};" for name, value in flags.items()),
        "};",
        "",
        # With one CTA an SM as the aim, the compiler gives a thread all the registers it can use.
        f'extern "C" __global__ void {_clustered(tile)}__launch_bounds__({tile.threads}, 1)',
        f"    {ENTRY}(const __grid_constant__ humming::{params} params) {{",
        f"  humming::gemm<Config, {struct['mainloop']}, {struct['epilogue']}>(params);",
        "}",
        "",
    ]
    return "\n".join(lines)


def _boxes(problem: GemmProblem, lowering: Lowering, tile: TileConfig) -> dict[str, int]:
    """How the copy engine brings a stage."""
    brick_bytes = BRICK_ROWS * BRICK_K * problem.weight.dtype.bits // 8
    bricks, groups = tile.box_bricks(problem), tile.groups(problem)
    scale_bytes, zero_bytes = tile.staged_bytes(problem, lowering)
    return {
        "kBoxBricks": bricks,
        "kCodeElementBytes": box_element_bytes(bricks * brick_bytes),
        "kScaleElementBytes": box_element_bytes(groups * BRICK_ROWS * scale_bytes),
        "kZeroElementBytes": box_element_bytes(groups * BRICK_ROWS * zero_bytes),
    }


def _weights(problem: GemmProblem, lowering: Lowering, struct: str) -> list[str]:
    weight = problem.weight
    order = device_struct(weight.dtype.bits, lowering.packed_bits, lowering.operand_bits, "Order")
    return dequantizer(
        "weights",
        f"// (plane, register) -> word and bit of a lane's codes\n{order}",
        weight.dtype,
        struct,
        # What is left out is put back by scales that meet sums in float.
        fold=lowering.may_fold(problem) and lowering.scale_site != OPERAND,
        scale_up=lowering.scale_up(weight),
        zero_point=weight.zero_point == "integer",
    )


def _tokens(problem: GemmProblem, lowering: Lowering, struct: str) -> list[str]:
    dtype = problem.activation.dtype
    widths = f"{dtype.bits}, {lowering.packed_bits}, {lowering.operand_bits}"
    order = f"using Order = humming::TokenOrder<{widths}>;"
    fold = lowering.may_fold(problem)
    if lowering.scale_site != OPERAND or not activation_group(problem):
        return dequantizer("tokens", order, dtype, struct, fold=fold)
    scale_up = lowering.scale_up(problem.activation)
    return dequantizer("tokens", order, dtype, struct, scale_up=scale_up)


def _token_struct(problem: GemmProblem, lowering: Lowering, struct: str) -> str:
    return struct.format(
        stored_bits=problem.activation.dtype.bits,
        packed_bits=lowering.packed_bits,
        operand_bits=lowering.operand_bits,
    )


def dequantizer(
    namespace: str,
    order: str,
    dtype: DataType,
    struct: str,
    *,
    fold: bool = False,
    scale_up: int = -1,
    zero_point: bool = False,
) -> list[str]:
    """A namespace with a component of slot dequant, `Dequant`, and all that it may refer to.

    Args:
        namespace: its name.
        order: definition of `Order`, how the codes lie.
        dtype: type of the codes.
        struct: the component's type.
        fold: whether powers of two may be left out of operands.
        scale_up: exponent of the power of two that scales of operands put back; -1 for none.
        zero_point: whether the codes have integer zero points.

    Returns:
        Lines of CUDA source.
    """
    return [
        f"namespace {namespace} {{",
        order,
        _code_struct(dtype),
        f"[[maybe_unused]] constexpr bool kFold = {_bool(fold)};",
        f"[[maybe_unused]] constexpr int kScaleUp = {scale_up};",
        f"[[maybe_unused]] constexpr bool kZeroPoint = {_bool(zero_point)};",
        f"using Dequant = {struct};",
        f"}}  // namespace {namespace}",
        "",
    ]


def _code_struct(dtype: DataType) -> str:
    """The type of the codes as a C++ struct of constants."""
    specials = {"none": "kNone", "fn": "kFn", "ieee": "kIeee"}[dtype.specials]
    return "\n".join(
        [
            f"struct Code {{  // {dtype}",
            f"  static constexpr int kBits = {dtype.bits};",
            f"  static constexpr bool kTwosComplement = {_bool(dtype.kind == 'int')};",
            f"  static constexpr int kMantissaBits = {dtype.mantissa_bits};",
            f"  static constexpr int kBias = {dtype.exponent_bias};",
            f"  static constexpr humming::Specials kSpecials = humming::Specials::{specials};",
            "};",
        ]
    )


def _clustered(tile: TileConfig) -> str:
    if tile.cluster_n * tile.cluster_k == 1:
        return ""
    return f"__cluster_dims__({tile.cluster_n}, 1, {tile.cluster_k}) "


def _out(dtype: DataType, caps: DeviceCapabilities) -> str:
    native = dtype == "bfloat16" and "bf16_arithmetic" in caps.features
    return "NativeBf16" if native else _element(dtype)


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _element(dtype: DataType) -> str:
    try:
        return ELEMENTS[dtype.name]
    except KeyError:
        raise UnsupportedError(
            f"{dtype} in a kernel",
            "device code has no such element type",
            f"Use one of {', '.join(ELEMENTS)}.",
        ) from None
