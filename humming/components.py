"""Which header and struct implements what; the shared components, found by what a row says.

A component serves a key, never a device: every device whose rows contain the key can use it.
Plugins add more through `humming_components`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import product

from humming.dtypes import NARROW
from humming.errors import PluginError

SLOTS = (
    *("mover", "producer", "mma", "dequant", "tokens", "convert", "mainloop", "epilogue"),
    *("scheduler", "scale", "token_scale", "encode"),
)
"""The slots of a kernel; `kernels/contracts.cuh` has the contract of each."""


@dataclass(frozen=True, slots=True)
class Component:
    """A struct in a header that fills one slot of a kernel.

    Attributes:
        slot: one of `SLOTS`.
        serves: key of what it serves: a mover's name, for movers whose threads copy and for
            producers, which tell a copy engine; `MmaRow.key`; `int:bfloat16` for weights of a kind
            of type (`DataType.kind`), whatever its width, dequantized to an operand type; the
            instruction family of a mainloop; a name such as `tile` for epilogues and schedulers;
            the type of the codes for encoders and scales. A component that needs a feature has it
            behind a colon and goes before those that need none: `float8e4m3:cvt_fp8`, and of
            dequantizers, which then serve one type of codes, `float8e4m3:float16:cvt_fp8`.
        header: `humming/mma/sync_m16n8k16.cuh`, found in an include folder.
        struct: the C++ type, which may hold template arguments:
            `humming::MmaSync16816<humming::Bf16>`. A dequantizer's are among Order, Code, kFold,
            kScaleUp and kZeroPoint, which the composed source defines; in those of tokens
            `{stored_bits}`, `{packed_bits}` and `{operand_bits}` stand for the widths of
            activations in memory, of what weights are packed for, and of the operand.

    Raises:
        PluginError: a field is not of this form.
    """

    slot: str
    serves: str
    header: str
    struct: str

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str):
                raise PluginError(f"component: {field.name} = {value!r} is no text")
        rules = {
            "slot": (self.slot in SLOTS, f"is none of {', '.join(SLOTS)}"),
            "serves": (bool(self.serves), "is empty"),
            "header": (
                bool(re.fullmatch(r"humming/(\w+/)*\w+\.cuh", self.header)),
                "is not of the form humming/folder/name.cuh",
            ),
            "struct": (bool(re.match(r"(::)?[A-Za-z_]\w*", self.struct)), "is not a C++ type"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                told = f"{self.slot} for {self.serves!r}"
                raise PluginError(f"component {told}: {name} = {getattr(self, name)!r} {rule}")


ELEMENTS = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "Bf16",
    "float8e8m0": "E8m0",
    "float8e4m3": "E4m3",
}
"""Element types of kernels/types.cuh that are read from memory and written to it."""

# Element types of device code by the names of operands.
_INTEGERS = {"int8": "S8", "uint8": "U8", "int4": "S4", "uint4": "U4"}
_FLOATS = {"float8e4m3": "E4m3", "float8e5m2": "E5m2"}
_NARROW_FLOATS = {"float6e3m2": "E3m2", "float6e2m3": "E2m3", "float4e2m1": "E2m1"}


def _mma_sync() -> Iterator[Component]:
    """Warp-level instructions, by row."""
    for key, header, struct in (
        ("m16n8k8:float16:float16:float32", "sync_m16n8k8", "MmaSync1688F16"),
        ("m16n8k8:float16:float16:float16", "sync_m16n8k8", "MmaSync1688HalfSums"),
        ("m16n8k16:float16:float16:float32", "sync_m16n8k16", "MmaSync16816<humming::F16>"),
        ("m16n8k16:bfloat16:bfloat16:float32", "sync_m16n8k16", "MmaSync16816<humming::Bf16>"),
        ("m16n8k16:float16:float16:float16", "sync_m16n8k16", "MmaSync16816HalfSums"),
        *_integer_mma("m16n8k32", "m8n8k16", ("int8", "uint8")),
        *_integer_mma("m16n8k64", "m8n8k32", ("int4", "uint4")),
        *_float8_mma(),
    ):
        yield Component("mma", f"mma_sync:{key}", f"humming/mma/{header}.cuh", f"humming::{struct}")


def _wgmma() -> Iterator[Component]:
    """Instructions of warpgroups, by row."""
    for name, element in (("float16", "F16"), ("bfloat16", "Bf16")):
        struct = f"humming::Wgmma<humming::{element}, humming::{element}, float>"
        key = f"wgmma:m64n8k16:{name}:{name}:float32"
        yield Component("mma", key, "humming/mma/wgmma.cuh", struct)
    for a, b in product(("int8", "uint8"), repeat=2):
        struct = f"humming::Wgmma<humming::{_INTEGERS[a]}, humming::{_INTEGERS[b]}, int>"
        yield Component("mma", f"wgmma:m64n8k32:{a}:{b}:int32", "humming/mma/wgmma.cuh", struct)
    for a, b in product(_FLOATS, repeat=2):
        struct = f"humming::Wgmma<humming::{_FLOATS[a]}, humming::{_FLOATS[b]}, float>"
        yield Component("mma", f"wgmma:m64n8k32:{a}:{b}:float32", "humming/mma/wgmma.cuh", struct)


def _integer_mma(wide: str, narrow: str, types: tuple[str, str]) -> Iterator[tuple[str, str, str]]:
    for a, b in product(types, types):
        pair = f"<humming::{_INTEGERS[a]}, humming::{_INTEGERS[b]}>"
        yield f"{wide}:{a}:{b}:int32", "sync_integer", f"MmaSyncInteger{pair}"
        yield f"{narrow}:{a}:{b}:int32", "sync_integer", f"MmaSyncIntegerM8{pair}"


def _float8_mma() -> Iterator[tuple[str, str, str]]:
    types = _FLOATS | _NARROW_FLOATS
    for a, b in product(types, types):
        pair = f"<humming::{types[a]}, humming::{types[b]}>"
        yield f"m16n8k32:{a}:{b}:float32", "sync_float8", f"MmaSyncFloat8{pair}"


def _dequant() -> Iterator[Component]:
    """Kinds of codes to operand types, of weights and, where they are made wider, of tokens."""
    rows: list[tuple[str, str, str, str]] = []
    for name, element in (("float16", "F16"), ("bfloat16", "Bf16")):
        integer = f"DequantInteger16<Order, Code, humming::{element}>"
        rows += [(kind, name, "integer_16", integer) for kind in ("int", "uint", "uint-zero")]
        magnitude = f"DequantMagnitude16<Order, Code, humming::{element}>"
        rows.append(("sign_magnitude", name, "magnitude_16", magnitude))
        floating = f"DequantFloat16<Order, Code, humming::{element}, kFold, kScaleUp>"
        rows.append(("float", name, "float_16", floating))
    for name, element in _INTEGERS.items():
        signed, types = name.startswith("int"), f"Order, Code, humming::{element}"
        kinds = ["int" if signed else "uint"]
        # Unsigned codes of fewer bits are numbers of the signed type as they are.
        kinds += ["uint", "uint-zero"] if name == "int8" else ["uint"] if signed else []
        integer = f"DequantInteger8<{types}, kZeroPoint>"
        rows += [(kind, name, "integer_8", integer) for kind in kinds]
        if signed:
            rows.append(("sign_magnitude", name, "magnitude_8", f"DequantMagnitude8<{types}>"))
    for name, element in (_FLOATS | _NARROW_FLOATS).items():
        types = f"Order, Code, humming::{element}"
        rows.append(("float", name, "float_8", f"DequantFloat8<{types}>"))
        if name in _FLOATS:
            small = f"DequantSmall8<{types}, kZeroPoint, humming::Dequant"
            kinds = ["int", "uint", "uint-zero"]
            rows += [(kind, name, "table_8", f"{small}Integer16>") for kind in kinds]
            rows.append(("sign_magnitude", name, "table_8", f"{small}Magnitude16>"))
    keyed = [(f"{kind}:{name}", header, struct) for kind, name, header, struct in rows]
    conversion = "DequantConversion16<Order, humming::E4m3>"
    keyed.append(("float8e4m3:float16:cvt_fp8", "conversion_16", conversion))
    for slot, (key, header, struct) in product(("dequant", "convert"), keyed):
        yield Component(slot, key, f"humming/dequant/{header}.cuh", f"humming::{struct}")


def _scales() -> Iterator[Component]:
    """Stored scales to pairs of floats or of operands, of weights and of tokens."""
    for slot in ("scale", "token_scale"):
        for name in ("float32", "float16", "bfloat16", "float8e8m0"):
            struct = f"humming::ScalePairs<humming::{ELEMENTS[name]}>"
            yield Component(slot, name, "humming/scale/pairs.cuh", struct)
        for key, header, halves in (
            ("float8e4m3", "pairs", "E4m3Arithmetic"),
            ("float8e4m3:cvt_fp8", "e4m3_conversion", "E4m3Conversion"),
        ):
            struct = f"humming::E4m3Pairs<humming::{halves}>"
            yield Component(slot, key, f"humming/scale/{header}.cuh", struct)


def _encoders() -> Iterator[Component]:
    """By plain arithmetic, for every type of 4 or 8 bits in which halves have an even neighbour."""
    for dtype in NARROW:
        if dtype.kind == "int" and dtype.bits in (4, 8):
            struct = f"humming::EncodeInt<{dtype.bits}>"
            yield Component("encode", dtype.name, "humming/quantize/encode_int.cuh", struct)
        elif dtype.name == "float4e2m1":
            header = "humming/quantize/encode_e2m1.cuh"
            yield Component("encode", dtype.name, header, "humming::EncodeE2m1")
        elif dtype.kind in ("float", "sign_magnitude") and dtype.bits in (4, 8):
            exponent, mantissa = dtype.exponent_bits, dtype.mantissa_bits
            codes = 1 << (dtype.bits - 1)
            beyond = {"none": 0, "fn": 1, "ieee": 1 << mantissa}[dtype.specials]
            nan = -1 if dtype.nan_code is None else dtype.nan_code
            numbers = f"{exponent}, {mantissa}, {codes - 1 - beyond}, {nan}"
            struct = f"humming::EncodeFloat<{numbers}>"
            if mantissa:
                yield Component("encode", dtype.name, "humming/quantize/encode_float.cuh", struct)


SHARED: tuple[Component, ...] = (
    Component("mover", "cp_async", "humming/mover/cp_async.cuh", "humming::CpAsyncMover"),
    Component("mover", "plain", "humming/mover/plain.cuh", "humming::PlainMover"),
    Component("producer", "tma", "humming/producer/tma.cuh", "humming::TmaProducer"),
    *_mma_sync(),
    *_wgmma(),
    *_dequant(),
    *_scales(),
    Component(
        "tokens",
        "direct",
        "humming/tokens/direct.cuh",
        "humming::DirectTokens<{operand_bits}>",
    ),
    Component(
        "tokens",
        "widened",
        "humming/tokens/widened.cuh",
        "humming::WidenedTokens<::tokens::Dequant, {stored_bits}, {packed_bits}, {operand_bits}>",
    ),
    Component("mainloop", "mma_sync", "humming/mainloop/mma_sync.cuh", "humming::MmaSyncMainloop"),
    Component("mainloop", "wgmma", "humming/mainloop/wgmma.cuh", "humming::WgmmaMainloop"),
    Component("epilogue", "tile", "humming/epilogue/tile.cuh", "humming::TileEpilogue"),
    *_encoders(),
    *(
        Component("encode", f"{code}:{feature}", f"humming/quantize/{header}.cuh", struct)
        for code, feature, header, struct in (
            ("float8e4m3", "cvt_fp8", "encode_fp8", "humming::EncodeE4m3Pairs"),
            ("float8e5m2", "cvt_fp8", "encode_fp8", "humming::EncodeE5m2Pairs"),
            ("float4e2m1", "cvt_fp6_fp4", "encode_fp4", "humming::EncodeE2m1Pairs"),
        )
    ),
)
"""The components of `kernels/`, for every device whose rows have what they serve."""
