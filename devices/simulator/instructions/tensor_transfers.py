"""Copies to tensor memory, and commits of what was issued (PTX ISA 9.7.16.9 and .12)."""

import numpy as np

from .. import tensor_product
from ..decoder import Decoder, Step, instruction
from ..errors import UndefinedBehaviorError
from ..groups import Array, Group
from ..machine import Machine
from ..tensor_descriptors import SharedMatrix
from ..tensor_memory import Region, same_group
from ..tensor_pipe import Operation, tensor_pipe
from .memory import shared_addresses
from .tensor_allocation import cta_group, peers
from .tensor_issue import Issuer, Located, Operands, issuers

# -- copies ---------------------------------------------------------------------------------------

_COPIES: dict[str, tuple[int, int]] = {
    "128x256b": (128, 2),
    "4x256b": (4, 2),
    "128x128b": (128, 1),
    "64x128b": (64, 1),
    "32x128b": (32, 1),
}
"""Rows, and chunks of 16 bytes in a row, of each shape of `tcgen05.cp`."""


def _copy_lanes(shape: str, multicast: str) -> list[Array]:
    """The lanes that the rows go to, for each copy that is made of them."""
    row = np.arange(_COPIES[shape][0])
    if shape == "4x256b":
        return [32 * row]
    if multicast == "warpx2::02_13":
        return [row, row + 64]
    if multicast == "warpx2::01_23":
        return [row // 32 * 64 + row % 32, row // 32 * 64 + row % 32 + 32]
    if multicast == "warpx4":
        return [row + 32 * part for part in range(4)]
    return [row]


@instruction("tcgen05.cp")
def copy(d: Decoder) -> Step:
    """PTX ISA 9.7.16.9.1: from shared to tensor memory, unpacking elements of 4 and 6 bits."""
    modifiers = d.modifiers
    group = cta_group(d)
    shape = modifiers.one_of(*_COPIES)
    multicast = modifiers.one_of("warpx2::02_13", "warpx2::01_23", "warpx4", default="")
    wanted = {"64x128b": ("warpx2::02_13", "warpx2::01_23"), "32x128b": ("warpx4",)}
    if multicast not in wanted.get(shape, ("",)):
        d.refuse(f"tcgen05.cp.{shape} goes with .{', .'.join(wanted.get(shape, ('nothing',)))}")
    packed = modifiers.one_of("b4x16_p64", "b6x16_p32", default="")
    if modifiers.flag("b8x16") != bool(packed):
        d.refuse("unpacking is said with both formats, .b8x16 and .b4x16_p64 or .b6x16_p32")
    d.expect(2)
    operands = Operands(d)
    address, source = operands.address(0), operands.number(1, "b64", "the descriptor")
    machine, pipe, pc = d.machine, tensor_pipe(d.machine), d.pc
    rows, chunks = _COPIES[shape]
    lanes = _copy_lanes(shape, multicast)

    def expanded(data: Array) -> Array:
        if not packed:
            return data
        codes = tensor_product.unpacked(data, int(packed[1]))
        return codes << 2 if packed == "b4x16_p64" else codes

    def issue(group_: Group, issuer: Issuer) -> None:
        at = address(group_, issuer)
        descriptor = SharedMatrix.decode(source(group_, issuer), "the source")
        if at >> 16 and (shape != "4x256b" or at >> 16 > 31):
            raise UndefinedBehaviorError(f"tcgen05.cp.{shape} writes to lane {at >> 16}")
        window = descriptor.k_major(rows, chunks, "the source")
        access = pipe.memory.begin(issuer.row, issuer.lane, "tcgen05.cp", True, pc)
        ctas = peers(machine, issuer.cta, group)
        pairs = []
        for cta in ctas:
            operand = pipe.operand(access, cta, window, "the source")
            regions = [Region(cta, to + (at >> 16), at & 0xFFFF, 4 * chunks) for to in lanes]
            for region in regions:
                pipe.memory.will_write(access, region)
            pairs.append((operand, regions))

        def finish() -> None:
            for operand, regions in pairs:
                data, poison = operand.read()
                bad = None if poison is None else _as_words(expanded(poison))
                for region in regions:
                    pipe.memory.store(region, _as_words(expanded(data)), bad)

        pipe.issue(ctas[0], Operation(access, finish))

    def step(group_: Group) -> None:
        for issuer in issuers(machine, group_, "tcgen05.cp"):
            with Located((issuer.row, issuer.lane)):
                same_group(pipe.memory, group, issuer.row)
                issue(group_, issuer)

    return step


def _as_words(data: Array) -> Array:
    """uint32 [rows, words] of bytes [rows, chunks, 16]."""
    return np.ascontiguousarray(data).reshape(len(data), -1).view(np.uint32)


@instruction("tcgen05.shift")
def shift(d: Decoder) -> Step:
    """PTX ISA 9.7.16.9.3: not executed."""
    d.refuse("whether tcgen05.shift moves rows to greater or to smaller lanes is not known")


# -- completion -----------------------------------------------------------------------------------


@instruction("tcgen05.commit")
def commit(d: Decoder) -> Step:
    """PTX ISA 9.7.16.12.1: an arrival at barriers when what the thread has issued is done."""
    modifiers = d.modifiers
    group = cta_group(d)
    modifiers.one_of("mbarrier::arrive::one")
    space = modifiers.one_of("shared::cluster", default="")
    multicast = modifiers.flag("multicast::cluster")
    modifiers.one_of("b64")
    d.expect(2 if multicast else 1)
    addresses = shared_addresses(d, 0, space == "")
    mask = Operands(d).number(1, "b16", "the mask of CTAs") if multicast else None
    machine, pipe, pc = d.machine, tensor_pipe(d.machine), d.pc
    shared = machine.shared

    def step(group_: Group) -> None:
        offsets = shared.place(group_, addresses(group_), 8, True, True)
        for issuer in issuers(machine, group_, "tcgen05.commit"):
            with Located((issuer.row, issuer.lane)):
                same_group(pipe.memory, group, issuer.row)
                offset = int(offsets[issuer.place, issuer.lane])
                barriers = [offset]
                if mask is not None:
                    barriers = _barriers(machine, issuer.cta, offset, mask(group_, issuer))
                pair = peers(machine, issuer.cta, group)
                pipe.commit(pair[0], issuer.row, issuer.lane, barriers, pc)

    return step


def _barriers(machine: Machine, cta: int, offset: int, mask: int) -> list[int]:
    """The barriers at the same place in each CTA of a mask."""
    size = machine.shape.cluster_size
    if mask >> size or not mask:
        told = f"the mask {mask:#x} names CTAs that the cluster of {size} does not have"
        raise UndefinedBehaviorError(told)
    first = cta - cta % size
    inside = offset % machine.shared.size
    ranks = [rank for rank in range(size) if mask >> rank & 1]
    return [(first + rank) * machine.shared.size + inside for rank in ranks]
