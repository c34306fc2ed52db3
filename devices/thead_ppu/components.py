"""Device code that only T-Head's PPUs need: their own matrix instructions, of 16 rows x 16 tokens.

The mainloop is the shared one for warp-level instructions.
"""

from collections.abc import Iterator
from itertools import product

from humming.components import Component

_ELEMENTS = {
    "float16": "humming::F16",
    "bfloat16": "humming::Bf16",
    "int8": "humming::S8",
    "float8e4m3": "humming::E4m3",
    "float8e5m2": "humming::E5m2",
}
_K16 = (("float16", "float16", "float32"), ("bfloat16", "bfloat16", "float32"))
_FLOAT8 = tuple(product(("float8e4m3", "float8e5m2"), repeat=2))


def _mma() -> Iterator[Component]:
    # Of the first generation, where halves lie among the sums is not public.
    header, numbers = "humming/thead_ppu/mma/ppu_m16n16.cuh", {"float32": "float", "int32": "int"}
    for a, b, sums in (*_K16, ("int8", "int8", "int32")):
        struct = f"humming::PpuMma<{_ELEMENTS[a]}, {_ELEMENTS[b]}, {numbers[sums]}>"
        yield Component("mma", f"ppu_mma:{_shape(a)}:{a}:{b}:{sums}", header, struct)
    header = "humming/thead_ppu/mma/ppu_tc02_m16n16.cuh"
    types = {
        "float32": "humming::PlainSums<float, 16>",
        "int32": "humming::PlainSums<int, 16>",
        "float16": "humming::PairedHalfSums<16>",
    }
    for a, b, sums in (
        *(*_K16, ("float16", "float16", "float16"), ("int8", "int8", "int32")),
        # Without sums in half: products of two 8-bit floats alone can leave their range.
        *((a, b, "float32") for a, b in _FLOAT8),
    ):
        struct = f"humming::PpuTc02Mma<{_ELEMENTS[a]}, {_ELEMENTS[b]}, {types[sums]}>"
        yield Component("mma", f"ppu_tc02_mma:{_shape(a)}:{a}:{b}:{sums}", header, struct)


def _shape(operand: str) -> str:
    return "m16n16k16" if operand in ("float16", "bfloat16") else "m16n16k32"


COMPONENTS: tuple[Component, ...] = (
    *_mma(),
    *(
        Component("mainloop", family, "humming/mainloop/mma_sync.cuh", "humming::MmaSyncMainloop")
        for family in ("ppu_mma", "ppu_tc02_mma")
    ),
)
"""The components of `devices/thead_ppu/kernels`."""
