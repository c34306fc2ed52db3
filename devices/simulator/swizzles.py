"""Swizzles of shared memory: the same for tensor copies and matrix descriptors.

Bits of an address, those that name a piece of 16 bytes in its row, are combined by exclusive or
with bits that name the row (PTX ISA 5.5.7 "Swizzling modes").
"""

from dataclasses import dataclass

from .groups import Array


@dataclass(frozen=True, slots=True)
class Swizzle:
    """One mode.

    Attributes:
        name: as the PTX ISA spells it.
        span_bytes: length of the rows in which pieces change places; 0 for none.
        mask: bits of the address that change.
        shift: how far above them the bits lie that they are combined with.
    """

    name: str
    span_bytes: int
    mask: int
    shift: int

    def __call__(self, addresses: Array, base: int = 0) -> Array:
        """Where what belongs at some addresses lies.

        Args:
            addresses: byte addresses in shared memory, int64.
            base: row of 128 bytes at which the pattern begins.
        """
        if not self.mask:
            return addresses
        rows = addresses - (base << 7) if base else addresses
        found: Array = addresses ^ ((rows >> self.shift) & self.mask)
        return found


NONE = Swizzle("none", 0, 0, 0)
B32 = Swizzle("32B", 32, 0x10, 3)
B64 = Swizzle("64B", 64, 0x30, 3)
B128 = Swizzle("128B", 128, 0x70, 3)
B128_ATOM_32B = Swizzle("128B, atoms of 32B", 128, 0x60, 2)

OF_TENSOR_MAP = (NONE, B32, B64, B128, B128_ATOM_32B)
"""By the number that `CUtensorMapSwizzle` has for it."""
OF_DESCRIPTOR = (NONE, B128, B64, B32)
"""By the number in bits 63:62 of the matrix descriptor of `wgmma`."""
