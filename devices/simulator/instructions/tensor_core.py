"""Products of the tensor pipe (PTX ISA 9.7.16.10)."""

from collections.abc import Callable

import numpy as np

from .. import availability, tensor_product
from ..decoder import Decoder, Step, instruction
from ..errors import UndefinedBehaviorError
from ..groups import Array, Group
from ..machine import Machine
from ..ptx_syntax import Address, Integer, Vector
from ..shared_memory import PIECE
from ..tensor_descriptors import (
    BLOCK_SCALED,
    Product,
    SharedMatrix,
    decode_plain,
    decode_scaled,
)
from ..tensor_memory import Access, Region, same_group
from ..tensor_pipe import Operation, SharedOperand, tensor_pipe
from ..tensor_product import Layout, Scales
from .tensor_allocation import cta_group, peers
from .tensor_issue import Issuer, Located, Operands, issuers

_PLAIN = ("f16", "tf32", "f8f6f4", "i8")


# -- products -------------------------------------------------------------------------------------


@instruction("tcgen05.mma")
def multiply(d: Decoder) -> Step:
    """PTX ISA 9.7.16.10.9.1."""
    return _Multiply(d, False).step


@instruction("tcgen05.mma.ws")
def multiply_weight_stationary(d: Decoder) -> Step:
    """PTX ISA 9.7.16.10.9.3."""
    return _Multiply(d, True).step


@instruction("tcgen05.mma.sp", "tcgen05.mma.ws.sp")
def multiply_sparse(d: Decoder) -> Step:
    """PTX ISA 9.7.16.10.9.2: not executed."""
    d.refuse("the simulator has no sparse tcgen05.mma: how its metadata lies is not known to it")


class _Multiply:
    """The step of a product."""

    def __init__(self, d: Decoder, weight_stationary: bool) -> None:
        self._machine, self._pc, self._opcode = d.machine, d.pc, d.opcode
        self._pipe = tensor_pipe(d.machine)
        self._target = availability.number_of(d.arch)
        self._stationary = weight_stationary
        modifiers = d.modifiers
        self._group = cta_group(d)
        kinds = tuple(f"kind::{kind}" for kind in (*_PLAIN, *BLOCK_SCALED, "ti16"))
        self._kind = modifiers.one_of(*kinds).removeprefix("kind::")
        self._size = ""
        scaled = modifiers.flag("block_scale")
        if self._kind == "ti16":
            d.refuse("how kind::ti16 rounds is not known to the simulator")
        if scaled != (self._kind in BLOCK_SCALED) or (scaled and weight_stationary):
            d.refuse(f"kind::{self._kind} {'with' if scaled else 'without'} block scales")
        self._check_target(d)
        if scaled:
            sizes = ("block16", "block32", *(f"scale_vec::{n}X" for n in (1, 2, 4)))
            self._size = modifiers.one_of(*sizes, default="")
        if modifiers.flag("ashift"):
            d.refuse("which way .ashift moves rows is not known to the simulator")
        modifiers.ignore_prefixes("collector::")
        self._read_operands(d, scaled)

    def _check_target(self, d: Decoder) -> None:
        if self._stationary and self._group == 2:
            d.refuse("tcgen05.mma.ws is for one CTA")

    def _read_operands(self, d: Decoder, scaled: bool) -> None:
        operands = Operands(d)
        self._d_at = operands.address(0)
        self._in_tensor = isinstance(d.operands[1], Address)
        self._a_at = (
            operands.address(1)
            if self._in_tensor
            else operands.number(1, "b64", "the descriptor of A")
        )
        self._b_at = operands.number(2, "b64", "the descriptor of B")
        self._idesc = operands.number(3, "b32", "the instruction descriptor")
        self._disabled: list[Callable[[Group, Issuer], int]] = []
        self._sfa_at: Callable[[Group, Issuer], int] | None = None
        self._sfb_at: Callable[[Group, Issuer], int] | None = None
        self._columns: Callable[[Group, Issuer], int] | None = None
        self._shift = 0
        place = 4
        if scaled:
            d.expect(7)
            self._sfa_at, self._sfb_at, place = operands.address(4), operands.address(5), 6
        elif len(d.operands) > 4 and isinstance(d.operands[4], Vector):
            items = d.items(4)
            if self._stationary or len(items) != 4 * self._group:
                d.refuse(f"a mask of lanes has {4 * self._group} elements")
            self._disabled = [
                operands.reader(d.source(item, "b32"), "the mask of lanes") for item in items
            ]
            place = 5
        if len(d.operands) not in (place + 1, place + 2):
            d.refuse(f"{len(d.operands)} operands")
        self._enable = operands.number(place, "pred", "the predicate for the input of D")
        if len(d.operands) == place + 2:
            self._read_last(d, operands, place + 1)

    def _read_last(self, d: Decoder, operands: Operands, place: int) -> None:
        if self._stationary:
            self._columns = operands.number(place, "b64", "the zero-column mask descriptor")
            return
        scale = d.operands[place]
        if not isinstance(scale, Integer) or not 0 <= scale.value <= 15:
            d.refuse("the scale of D is a number from 0 to 15")
        if self._kind not in ("f16", "tf32"):
            d.refuse(f"kind::{self._kind} does not scale D")
        d.require(availability.missing("datacenter but 110", d.arch))
        self._shift = scale.value

    def step(self, group: Group) -> None:
        for issuer in issuers(self._machine, group, self._opcode):
            with Located((issuer.row, issuer.lane)):
                same_group(self._pipe.memory, self._group, issuer.row)
                self._issue(group, issuer)

    def _issue(self, group: Group, issuer: Issuer) -> None:
        target = self._target
        bits = self._idesc(group, issuer)
        if self._kind in BLOCK_SCALED:
            product = decode_scaled(bits, self._kind, self._size, target)
        else:
            product = decode_plain(bits, self._kind, target)
        tensor_product.check_executes(product, self._machine.options.device)
        d_at = self._d_at(group, issuer)
        layout = tensor_product.layout_of(product, self._group, self._stationary, d_at >> 16)
        access = self._pipe.memory.begin(issuer.row, issuer.lane, self._opcode, True, self._pc)
        ctas = peers(self._machine, issuer.cta, self._group)
        parts = []
        b = self._shared_b(group, issuer, access, ctas, product)
        enabled = bool(self._enable(group, issuer))
        masks = [read(group, issuer) for read in self._disabled]
        zeros = None
        if self._columns is not None:
            zeros, _ = tensor_product.zero_columns(self._columns(group, issuer), product, product.m)
        for number, cta in enumerate(ctas):
            part = _Part(self._machine, access, product, layout, cta, d_at & 0xFFFF)
            part.a_at(self._in_tensor, self._a_at(group, issuer))
            if self._sfa_at is not None and self._sfb_at is not None:
                part.scales_at(self._sfa_at(group, issuer), self._sfb_at(group, issuer))
            part.enabled, part.shift, part.zeros = enabled, self._shift, zeros
            if masks:
                own = np.array(masks[4 * number : 4 * number + 4], np.uint32)
                part.keep = np.unpackbits(own.view(np.uint8), bitorder="little").astype(np.bool_)
            part.begin()
            parts.append(part)

        def finish() -> None:
            values, undefined = _joined([_matrix(product, operand, "b") for operand in b])
            for part in parts:
                part.finish(values, undefined)

        self._pipe.issue(ctas[0], Operation(access, finish))

    def _shared_b(
        self, group: Group, issuer: Issuer, access: Access, ctas: list[int], product: Product
    ) -> list[SharedOperand]:
        """B, half of whose columns are in each CTA of a pair."""
        descriptor = SharedMatrix.decode(self._b_at(group, issuer), "B")
        rows = product.n // len(ctas)
        window = _window(descriptor, product, "B", rows, product.b_along_n)
        return [self._pipe.operand(access, cta, window, "B") for cta in ctas]


def _window(
    descriptor: SharedMatrix, product: Product, name: str, rows: int, along_rows: bool
) -> Array:
    """Offsets of the 16-byte chunks of an operand: [rows, along K], or [K, along rows]."""
    if not along_rows:
        return descriptor.k_major(rows, product.row_bytes // PIECE, name)
    kind = product.a if name == "A" else product.b
    if tensor_product.element_bits(kind) < 8:
        raise UndefinedBehaviorError(f"{name} has elements of less than 8 bits and lies along MN")
    if (product.kind == "tf32") != (descriptor.swizzle == 1):
        told = f"{name} lies along MN: 32-bit elements need 128-byte swizzling with atoms of 32"
        raise UndefinedBehaviorError(f"{told} bytes, others must not have it")
    return descriptor.mn_major(product.k, -(-rows * product.element_bits // (8 * PIECE)))


def _matrix(product: Product, operand: SharedOperand, which: str) -> tuple[Array, Array]:
    """float64 [rows, K] of an operand in shared memory, and its undefined rows."""
    name, negate, along_rows = (
        (product.a, product.negate_a, product.a_along_m)
        if which == "a"
        else (product.b, product.negate_b, product.b_along_n)
    )

    def elements(chunks: Array) -> Array:
        codes = tensor_product.codes_in_shared(chunks, product, name)
        found = codes.reshape(len(codes), -1)
        return found.T if along_rows else found

    data, poison = operand.read()
    values = tensor_product.decoded(elements(data), name, negate)
    if poison is None:
        return values, np.zeros(len(values), np.bool_)
    return values, (elements(poison) != 0).any(axis=1)


def _joined(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


class _Part:
    """The part of a product that lies in one CTA."""

    def __init__(
        self,
        machine: Machine,
        access: Access,
        product: Product,
        layout: Layout,
        cta: int,
        column: int,
    ) -> None:
        self._pipe, self._sums = tensor_pipe(machine), machine.sums
        self._memory = self._pipe.memory
        self._access, self._product, self._layout, self._cta = access, product, layout, cta
        self._d = [
            Region(cta, layout.lanes_of(block), column, layout.columns)
            for block in range(layout.blocks)
        ]
        self._a_regions: list[Region] = []
        self._a_shared: SharedOperand | None = None
        self._sfa: list[Region] = []
        self._sfb: list[Region] = []
        self.enabled, self.shift = True, 0
        self.keep: Array | None = None
        self.zeros: Array | None = None

    def a_at(self, in_tensor: bool, place: int) -> None:
        """Where A is: at an address in tensor memory, or where a descriptor says."""
        product, layout = self._product, self._layout
        if not in_tensor:
            descriptor = SharedMatrix.decode(place, "A")
            window = _window(descriptor, product, "A", layout.rows, product.a_along_m)
            self._a_shared = self._pipe.operand(self._access, self._cta, window, "A")
            return
        if product.a_along_m:
            raise UndefinedBehaviorError("A in tensor memory lies along K")
        if place >> 16 != int(layout.lanes[0]):
            told = f"A begins at lane {place >> 16} of tensor memory, and D at lane"
            raise UndefinedBehaviorError(f"{told} {int(layout.lanes[0])}")
        columns = product.row_bytes // 4
        self._a_regions = [
            Region(self._cta, layout.lanes_of(block), place & 0xFFFF, columns)
            for block in range(layout.blocks)
        ]

    def scales_at(self, sfa: int, sfb: int) -> None:
        """Where the scales are. The upper bits of the addresses say the data id once more."""
        product = self._product
        for place, rows, first, regions in (
            (sfa, self._layout.rows, product.sfa_id, self._sfa),
            (sfb, product.n, product.sfb_id, self._sfb),
        ):
            if place >> 16 & 0x3FFF:
                raise UndefinedBehaviorError("scales begin at lane 0 of tensor memory")
            for offset, count in tensor_product.scale_columns(product, rows, first):
                column = (place & 0xFFFF) + offset
                regions.append(Region(self._cta, slice(0, 128), column, count))

    def begin(self) -> None:
        """Checks and notes what will be read and written."""
        memory, access = self._memory, self._access
        for region in (*self._a_regions, *self._sfa, *self._sfb):
            memory.will_read(access, region)
        for region in self._d:
            if self.enabled:
                memory.will_read(access, region)
            memory.will_write(access, region)

    def finish(self, b: Array, b_undefined: Array) -> None:
        """Computes the part and writes it.

        Args:
            b: float64 [N, K].
            b_undefined: which columns of the product B makes undefined.
        """
        product, layout = self._product, self._layout
        if self.zeros is not None:
            b = np.where(self.zeros[:, None], 0.0, b)
            b_undefined = b_undefined & ~self.zeros
        if product.block:
            b, b_undefined = self._scaled(b, b_undefined, self._sfb, product.sfb_id)
        shared = None
        if self._a_shared is not None:
            shared = self._scaled_a(*_matrix(product, self._a_shared, "a"))
        for block, region in enumerate(self._d):
            a, a_undefined = shared or self._scaled_a(*self._tensor_a(block))
            columns = slice(block * layout.columns, (block + 1) * layout.columns)
            total = tensor_product.multiplied(a, b[columns])
            undefined = a_undefined[:, None] | b_undefined[columns][None]
            held = np.zeros(())
            if self.enabled:
                words, bad = self._memory.load(region)
                held = tensor_product.d_values(words, product.d) * 2.0**-self.shift
                total += held
                if bad is not None:
                    seen = bad & 0xFFFF if product.d == "f16" else bad
                    undefined = undefined | (seen != 0)
            total = self._sums.moved(total, a, b[columns].T, held, product.d, product.a)
            self._write(region, total, undefined)

    def _write(self, region: Region, total: Array, undefined: Array) -> None:
        words, poison = tensor_product.d_words(total, self._product)
        if undefined.any():
            poison = np.zeros_like(words) if poison is None else poison
            poison = np.where(undefined, np.uint32(0xFFFFFFFF), poison)
        keep = None if self.keep is None else self.keep[region.lanes]
        self._memory.store(region, words, poison, keep)

    def _tensor_a(self, block: int) -> tuple[Array, Array]:
        product = self._product
        words, bad = self._memory.load(self._a_regions[block])
        codes = tensor_product.codes_in_tensor(words, product, product.a)
        values = tensor_product.decoded(codes, product.a, product.negate_a)
        undefined = np.zeros(len(words), np.bool_)
        if bad is not None:
            undefined = (tensor_product.codes_in_tensor(bad, product, product.a) != 0).any(axis=1)
        return values, undefined

    def _scaled_a(self, values: Array, undefined: Array) -> tuple[Array, Array]:
        if not self._product.block:
            return values, undefined
        return self._scaled(values, undefined, self._sfa, self._product.sfa_id)

    def _scaled(
        self, values: Array, undefined: Array, regions: list[Region], first: int
    ) -> tuple[Array, Array]:
        words = [self._memory.load(region) for region in regions]
        scales: Scales = tensor_product.scales_of(self._product, len(values), first, words)
        factors = np.repeat(scales.values, self._product.block, axis=1)
        return values * factors, undefined | scales.undefined
