"""Composes the kernels that quantize activations, and cuts their work.

A kernel depends on the format, the type of the input, what is fused, and how many values a thread
keeps; K and the number of tokens are run-time values. Which encoder it has is decided by the
device's features: its own conversions where it has them, else arithmetic that every device has.
"""

from dataclasses import dataclass
from math import ceil

from humming.capability import DeviceCapabilities
from humming.components import Component
from humming.dtypes import DataType, float8e4m3
from humming.errors import UnsupportedError
from humming.formats import ActivationSpec
from humming.registry import Registry

ENTRY = "humming_quantize"
"""C symbol of every kernel that quantizes activations."""

NOT_FUSED = "none"
FUSED = {NOT_FUSED: "kNone", "silu_mul": "kSiluMul", "gelu": "kGelu", "gelu_tanh": "kGeluTanh"}
"""What can be done to the input in the same pass -> its name in device code."""

INPUTS = {"float32": "F32", "float16": "F16", "bfloat16": "Bf16"}
"""Types of the input -> their names in device code."""

ROW_BYTES = 16
"""Rows of codes are a multiple of this apart."""

_SCALES = {
    "float32": "ScaleF32",
    "float16": "ScaleF16",
    "bfloat16": "ScaleBf16",
    "float8e8m0": "ScaleE8m0",
}
# Values that a thread handles at a time; so many bytes of float16 are one load.
_VECTOR, _WARP = 8, 32
_THREADS = 128
# Registers in which a thread keeps its part of a row, of which 8 values take 4 (16 bits) or 8.
_KEPT_REGISTERS = 64
_MAX_PIECES = 65535
# Steps of a thread where there is work for the whole device several times over, and where not.
_MANY_STEPS, _FEW_STEPS = 4, 1
_WAVES_THAT_ARE_MANY = 4


@dataclass(frozen=True, slots=True)
class QuantizeConfig:
    """What a quantizing kernel is compiled for.

    Attributes:
        spec: the format of the codes and scales.
        source: type of the input.
        fuse: one of `FUSED`.
        scale_of: what a scale covers: `kItem`, `kLanes` or `kStatic`, see `quantize/kernel.cuh`.
        group_lanes: for `kLanes`: neighbouring threads whose values share a scale.
        item_threads: threads that take one piece of a row.
        threads: threads of a CTA.
        steps: how many times 8 values a thread keeps; 1 if it keeps none.
        resident: whether values are kept between finding a scale and encoding.
        vectors: whether pieces are a multiple of 8 values.
    """

    spec: ActivationSpec
    source: DataType
    fuse: str
    scale_of: str
    group_lanes: int
    item_threads: int
    threads: int
    steps: int
    resident: bool
    vectors: bool


@dataclass(frozen=True, slots=True)
class QuantizePlan:
    """A kernel and how rows of K values are cut for it.

    Attributes:
        config: what the kernel is compiled for.
        k, k_padded: values of a row, and codes that fit into one.
        row_bytes: bytes from one row of codes to the next.
        piece, pieces: values of a row that an item takes, and how many items a row has.
        groups: scales of a row.
    """

    config: QuantizeConfig
    k: int
    k_padded: int
    row_bytes: int
    piece: int
    pieces: int
    groups: int

    def grid(self, m: int) -> tuple[int, int, int]:
        """CTAs for m rows."""
        rows = self.config.threads // self.config.item_threads
        return ceil(m / rows), self.pieces, 1


def code_bytes(k: int, bits: int) -> int:
    """Bytes that the codes of one row take."""
    return ceil(k * bits / 8)


def row_bytes(k: int, bits: int) -> int:
    """Bytes from one row of codes to the next."""
    return ceil(code_bytes(k, bits) / ROW_BYTES) * ROW_BYTES


def scale_columns(spec: ActivationSpec, k: int) -> int:
    """Scales of a row."""
    return ceil(k / spec.group_size) if spec.group_size else 1


def check_quantizable(spec: ActivationSpec) -> None:
    """Refuses formats to which no kernel can quantize in one pass."""
    asked = f"quantizing activations to {spec}"
    dtype = spec.dtype
    if not dtype.is_narrow:
        raise UnsupportedError(
            asked, "it has no codes", "Multiply float16 and bfloat16 activations as they are."
        )
    if dtype.bits not in (4, 8):
        raise UnsupportedError(
            asked, f"codes of {dtype.bits} bits are not stored", "Use a type of 4 or 8 bits."
        )
    if dtype.is_float and not dtype.mantissa_bits:
        why = f"{dtype} has no mantissa, so that halves have no even neighbour"
        raise UnsupportedError(asked, why, "Use e.g. float8e4m3 or float4e2m1.")
    if spec.granularity == "tensor" and spec.dynamic:
        raise UnsupportedError(
            asked,
            "the one scale is known only when all activations have been read, and they are read "
            "once",
            f"Use {spec.dtype}_tensor with a scale known beforehand, or a scale per token.",
        )
    if not spec.symmetric and spec.scale_dtype.is_narrow:
        why = "zero points go with scales that fit a range, not with powers of two"
        raise UnsupportedError(asked, why, "Use float32 scales, or symmetric codes.")
    if dtype.bits == 4 and spec.group_size % 2:
        raise UnsupportedError(
            asked, "two groups would share a byte of two codes", "Use an even group size."
        )


def plan_quantize(
    spec: ActivationSpec, source: DataType, fuse: str, k: int, m: int, caps: DeviceCapabilities
) -> QuantizePlan:
    """The kernel for m rows of k values, and how they are cut.

    Args:
        spec: a format that `check_quantizable` accepts.
        source: type of the input.
        fuse: one of `FUSED`.
        k: values of a row after what is fused.
        m: rows; whether there are many decides how much a thread does.

    Raises:
        UnsupportedError: more groups in a row than a launch can cover.
    """
    bits, group = spec.dtype.bits, spec.group_size
    stride = row_bytes(k, bits)
    padded = stride * 8 // bits
    groups = scale_columns(spec, k)
    if spec.granularity == "tensor":
        scale_of, lanes = "kStatic", 1
    elif group and group % _VECTOR == 0 and _WARP % (group // _VECTOR) == 0:
        scale_of, lanes = "kLanes", group // _VECTOR
    else:
        scale_of, lanes = "kItem", 1
    if scale_of == "kItem":
        piece = group or padded
        # The last piece may hold the padding, too.
        longest = max(piece, padded - (groups - 1) * piece)
        item_threads, steps, resident = _whole_items(longest, source, fuse)
        pieces = groups
        threads = max(_THREADS, item_threads)
    else:
        many = m * padded >= _WAVES_THAT_ARE_MANY * _values_at_a_time(caps)
        item_threads, steps, resident = _WARP, _MANY_STEPS if many else _FEW_STEPS, True
        if not many and m < _THREADS // _WARP:
            item_threads = _THREADS  # else the warps of a CTA would wait for rows
        piece = _VECTOR * item_threads * steps
        pieces, threads = ceil(padded / piece), _THREADS
    if pieces > _MAX_PIECES:
        raise UnsupportedError(
            f"quantizing rows of {k} values to {spec}",
            f"a launch covers at most {_MAX_PIECES} pieces of a row, and these have {pieces}",
            "Use larger groups, or split the rows.",
        )
    config = QuantizeConfig(
        spec,
        source,
        fuse,
        scale_of,
        lanes,
        item_threads,
        threads,
        steps,
        resident,
        vectors=piece % _VECTOR == 0,
    )
    return QuantizePlan(config, k, padded, stride, piece, pieces, groups)


def _values_at_a_time(caps: DeviceCapabilities) -> int:
    """Values that all threads of a device hold, 8 a thread."""
    return _VECTOR * (caps.sms or 1) * (caps.max_threads_per_sm or 1024)


def _whole_items(values: int, source: DataType, fuse: str) -> tuple[int, int, bool]:
    """Threads for an item with one scale, steps of each, and whether these keep what they read."""
    registers = 4 if source.bits == 16 and fuse == "none" else 8
    most = _KEPT_REGISTERS // registers
    vectors = ceil(values / _VECTOR)
    for threads, steps in ((32, 2), (64, 2), (128, 4), (256, 8), (512, 16)):
        if vectors <= threads * min(steps, most):
            return threads, ceil(vectors / threads), True
    return 512, 1, False


def encoder_of(dtype: DataType, caps: DeviceCapabilities, registry: Registry) -> Component:
    """The encoder of a type: one that a feature of the device serves, else the plain one."""
    found = registry.serving("encode", dtype.name, dtype.name, caps)
    if not found:
        raise UnsupportedError(
            f"quantizing activations to {dtype} on {caps.name}",
            "no component encodes this type",
            "Use int8, float8e4m3 or another type of 4 or 8 bits.",
        )
    return found[0]


def compose_quantize(config: QuantizeConfig, caps: DeviceCapabilities, registry: Registry) -> str:
    """The source of a quantizing kernel for a device."""
    spec = config.spec
    encoder = encoder_of(spec.dtype, caps, registry)
    headers = {"humming/quantize/kernel.cuh", encoder.header}
    if spec.scale_dtype == float8e4m3:
        scale_encoder = encoder_of(float8e4m3, caps, registry)
        headers.add(scale_encoder.header)
        scale = f"humming::ScaleE4m3<{scale_encoder.struct}>"
    else:
        scale = f"humming::{_SCALES[spec.scale_dtype.name]}"
    types = {
        "Input": f"humming::{INPUTS[config.source.name]}",
        "Encoder": encoder.struct,
        "Scale": scale,
    }
    numbers = {
        "kGroupLanes": config.group_lanes,
        "kItemThreads": config.item_threads,
        "kThreads": config.threads,
        "kChunks": config.steps,
    }
    choices = {
        "kResident": config.resident,
        "kVectors": config.vectors,
        "kSymmetric": spec.symmetric,
        "kSecondScale": spec.scale_dtype == float8e4m3,
        "kDependentLaunch": caps.supports("griddepcontrol"),
        "kPackedMax": caps.supports("packed_max"),
    }
    lines = [
        f"// {config.source} -> {spec.name}, fused: {config.fuse}",
        *(f"#include <{header}>" for header in sorted(headers)),
        "",
        "struct Config {",
        *(f"  using {name} = {value};" for name, value in types.items()),
        *(f"  static constexpr int {name} = {value};" for name, value in numbers.items()),
        *(
            f"  static constexpr bool {name} = {'true' if value else 'false'};"
            for name, value in choices.items()
        ),
        f"  static constexpr humming::ScaleOf kScaleOf = humming::ScaleOf::{config.scale_of};",
        f"  static constexpr humming::Fuse kFuse = humming::Fuse::{FUSED[config.fuse]};",
        "};",
        "",
        f'extern "C" __global__ void __launch_bounds__({config.threads})',
        f"    {ENTRY}(const __grid_constant__ humming::QuantizeParams params) {{",
        "  humming::QuantizeKernel<Config>::run(params);",
        "}",
        "",
    ]
    return "\n".join(lines)
