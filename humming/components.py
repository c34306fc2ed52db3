"""Which header and struct implements what; the shared components, found by what a row says.

A component serves a key, never a device: every device whose rows contain the key can use it.
Plugins add more through `humming_components`.
"""

import re
from dataclasses import dataclass

from humming.errors import PluginError

SLOTS = ("mover", "mma", "dequant", "convert", "mainloop", "epilogue", "scheduler")
"""The slots of a kernel; `kernels/contracts.cuh` has the contract of each."""


@dataclass(frozen=True, slots=True)
class Component:
    """A struct in a header that fills one slot of a kernel.

    Attributes:
        slot: one of `SLOTS`.
        serves: key of what it serves: a mover's name; `MmaRow.key`; `int:bfloat16` for weights of
            a kind of type (`DataType.kind`), whatever its width, dequantized to an operand type;
            the instruction family of a mainloop; a name such as `tile` for epilogues and
            schedulers.
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
        Component("dequant", f"{kind}:{operand}", f"humming/dequant/{header}.cuh", struct)
        for operand, element in (("float16", "humming::F16"), ("bfloat16", "humming::Bf16"))
        for kind, header, struct in (
            ("int", "integer_16", f"humming::DequantInteger16<Order, Code, {element}>"),
            ("uint", "integer_16", f"humming::DequantInteger16<Order, Code, {element}>"),
            ("float", "float_16", f"humming::DequantFloat16<Order, Code, {element}, kFold>"),
            ("sign_magnitude", "magnitude_16", f"humming::DequantMagnitude16<Order, Code, {element}>"),
        )
    ),
    Component("mainloop", "mma_sync", "humming/mainloop/mma_sync.cuh", "humming::MmaSyncMainloop"),
    Component("epilogue", "tile", "humming/epilogue/tile.cuh", "humming::TileEpilogue"),
)
"""The components of `kernels/`, for every device whose rows have what they serve."""
