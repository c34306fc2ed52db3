"""Which header and struct implements what; the shared components, found by what a row says.

A component serves a key, never a device: every device whose rows contain the key can use it.
Plugins add more through `humming_components`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from humming.dtypes import NARROW
from humming.errors import PluginError

SLOTS = ("mover", "mma", "dequant", "convert", "mainloop", "epilogue", "scheduler", "encode")
"""The slots of a kernel; `kernels/contracts.cuh` has the contract of each."""


@dataclass(frozen=True, slots=True)
class Component:
    """A struct in a header that fills one slot of a kernel.

    Attributes:
        slot: one of `SLOTS`.
        serves: key of what it serves: a mover's name; `MmaRow.key`; `int4:bfloat16` for weights
            dequantized to an operand type; the instruction family of a mainloop; a name such as
            `tile` for epilogues and schedulers; the type of the codes for encoders, and after a
            colon the feature that they need: `float8e4m3`, `float8e4m3:cvt_fp8`.
        header: `humming/mma/sync_m16n8k16.cuh`, found in an include folder.
        struct: the C++ type, which may hold template arguments:
            `humming::MmaSync16816<humming::Bf16>`.

    Raises:
        PluginError: a field is not of this form.
    """

    slot: str
    serves: str
    header: str
    struct: str

    def __post_init__(self) -> None:
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


def _encoders() -> Iterator[Component]:
    """By plain arithmetic, for every type of 4 or 8 bits in which halves have an even neighbour."""
    for dtype in NARROW:
        if dtype.kind == "int" and dtype.bits in (4, 8):
            struct = f"humming::EncodeInt<{dtype.bits}>"
            yield Component("encode", dtype.name, "humming/quantize/encode_int.cuh", struct)
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
    Component(
        "mma",
        "mma_sync:m16n8k8:float16:float16:float32",
        "humming/mma/sync_m16n8k8.cuh",
        "humming::MmaSync1688F16",
    ),
    Component(
        "mma",
        "mma_sync:m16n8k16:float16:float16:float32",
        "humming/mma/sync_m16n8k16.cuh",
        "humming::MmaSync16816<humming::F16>",
    ),
    Component(
        "mma",
        "mma_sync:m16n8k16:bfloat16:bfloat16:float32",
        "humming/mma/sync_m16n8k16.cuh",
        "humming::MmaSync16816<humming::Bf16>",
    ),
    *(
        Component("dequant", f"{code}:{operand}", f"humming/dequant/int4_{short}.cuh", struct)
        for code, signed in (("int4", "true"), ("uint4", "false"))
        for operand, short, struct in (
            ("float16", "f16", f"humming::DequantInt4F16<Order, {signed}>"),
            ("bfloat16", "bf16", f"humming::DequantInt4Bf16<Order, {signed}>"),
        )
    ),
    Component("mainloop", "mma_sync", "humming/mainloop/mma_sync.cuh", "humming::MmaSyncMainloop"),
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
