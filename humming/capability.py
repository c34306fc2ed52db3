"""What a device can do: immutable rows that check themselves.

`DeviceCapabilities` is what the registry makes of one device of a device matrix, and all that the
parts to its right know of a device.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from humming.dtypes import DataType, suggest
from humming.errors import PluginError, UnsupportedError, check_type

MOVERS = ("tma", "bulk", "cp_async", "plain")
"""How data reaches shared memory, best first: tensor maps, bulk copies, 16-byte copies, loads."""

A_SITES = ("register", "shared", "tensor_memory")
"""Where the weights, the A operand, may lie when an MMA instruction reads them."""


class _Accumulator(DataType):
    """int32: sums of integer products have it; no weight or activation does."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Accept what no narrow type may be."""

    @property
    def max(self) -> float:
        return 2.0**31 - 1

    @property
    def min(self) -> float:
        return -(2.0**31)

    def __eq__(self, other: object) -> bool:
        # Its name is no name of a storage type, so that DataType.parse does not know it.
        return other in ("int32", "s32") if isinstance(other, str) else DataType.__eq__(self, other)

    __hash__ = DataType.__hash__


INT32: DataType = _Accumulator("int32", "int", 32, 0, 0, "none")
"""The accumulator of integer MMA instructions."""


@dataclass(frozen=True, slots=True, repr=False)
class MmaRow:
    """One matrix instruction of a device, with one pair of operand types.

    Attributes:
        instruction: instruction family: `mma_sync`, `mma_sync_block_scaled`, `wgmma`, `tcgen05`,
            `ppu_mma`, `ppu_tc02_mma`, or a third party's.
        shape: (M, N, K) of one instruction; the smallest N where there are several.
        a: type of the weights, the A operand.
        b: type of the activations, the B operand.
        accumulator: type of the sums; `INT32` for integers.
        sum_bits: bits behind the largest addend that sums keep, None where those of the
            accumulator's type.
        a_sites: where A may lie, a part of `A_SITES`.
        rate_class: what the row's throughput is listed under (`f16`, `fp8`, `int8`, ...).
        rate: dense operations, two per multiply-add, per SM and clock; None if not public.
        block_scale: pairs of scale type and K values per scale that the instruction applies.
        m_values, n_values, k_values: all sizes that the instruction takes.
        legacy: native, but left over from an earlier generation and far from the device's peak.
        emulated: the assembler makes a long sequence of other instructions of it.
        undocumented: no vendor document names it; used only where the user opts in.
        min_compiler: first (major, minor) of the compiler that accepts it, None if any does.
        note: what a user of the row should know.
        source: where the row comes from.

    Raises:
        PluginError: a field contradicts the rules above; the message names row and value.
    """

    instruction: str
    shape: tuple[int, int, int]
    a: DataType
    b: DataType
    accumulator: DataType
    a_sites: tuple[str, ...] = ("register",)
    rate_class: str = ""
    rate: float | None = None
    block_scale: tuple[tuple[DataType, int], ...] = ()
    m_values: tuple[int, ...] = ()
    n_values: tuple[int, ...] = ()
    k_values: tuple[int, ...] = ()
    legacy: bool = False
    emulated: bool = False
    undocumented: bool = False
    min_compiler: tuple[int, int] | None = None
    sum_bits: int | None = None
    note: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        for name, size in zip(("m_values", "n_values", "k_values"), self.shape, strict=True):
            if not getattr(self, name):
                object.__setattr__(self, name, (size,))
        _require(bool(re.fullmatch(r"[a-z]\w*", self.instruction)), self, "instruction")
        _require(all(size > 0 for size in self.shape), self, "shape")
        _require(self.shape[0] in self.m_values, self, "m_values")
        _require(self.shape[1] in self.n_values, self, "n_values")
        _require(self.shape[2] in self.k_values, self, "k_values")
        _require(bool(self.a_sites) and set(self.a_sites) <= set(A_SITES), self, "a_sites")
        _require(self.sum_bits is None or self.sum_bits > 0, self, "sum_bits")
        _require(self.rate is None or self.rate > 0, self, "rate")
        _require(all(group > 0 for _, group in self.block_scale), self, "block_scale")
        _require(not (self.legacy and self.emulated), self, "legacy")

    @property
    def is_promoted(self) -> bool:
        """Whether sums keep so little that they must not run over all of K."""
        return self.sum_bits is not None or self.accumulator.bits == 16

    @property
    def name(self) -> str:
        """Readable: `mma_sync m16n8k16 bf16 x bf16 -> f32`."""
        m, n, k = self.shape
        types = f"{self.a.ptx} x {self.b.ptx} -> {self.accumulator.ptx}"
        scales = "".join(f" ({dtype.ptx} per {group})" for dtype, group in self.block_scale)
        return f"{self.instruction} m{m}n{n}k{k} {types}{scales}"

    @property
    def key(self) -> str:
        """What components serve: `mma_sync:m16n8k16:bfloat16:bfloat16:float32`."""
        m, n, k = self.shape
        types = f"{self.a.name}:{self.b.name}:{self.accumulator.name}"
        return f"{self.instruction}:m{m}n{n}k{k}:{types}"

    @property
    def status(self) -> str:
        """`native`, `legacy` or `emulated`, with `, undocumented` where that holds."""
        kind = "emulated" if self.emulated else "legacy" if self.legacy else "native"
        return f"{kind}, undocumented" if self.undocumented else kind

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; types by name."""
        return {"name": self.name} | {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    def __repr__(self) -> str:
        return f"MmaRow({self.name}, {self.status})"


@dataclass(frozen=True, slots=True)
class Absence:
    """What a device cannot do although its relatives can, with the reason.

    Attributes:
        instruction: instruction family, or `*` for every one.
        operands: operand types that it does not take.
        why: the reason, as a clause.
        source: where the fact comes from.
    """

    instruction: str
    operands: tuple[DataType, ...]
    why: str
    source: str = ""

    def concerns(self, operand: DataType, instruction: str | None = None) -> bool:
        """Whether this speaks of an operand type, and of an instruction if one is given."""
        applies = instruction is None or self.instruction in ("*", instruction)
        return applies and operand in self.operands

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


@dataclass(frozen=True, slots=True, repr=False)
class DeviceCapabilities:
    """What one device can do. Sizes are in bytes unless the name says otherwise.

    None stands for a number that nothing public gives. Get one from `humming.capabilities`.

    Attributes:
        name: name of the row, `h200`.
        vendor, family, arch, title, driver_names: identity, for display and for plugins; what to
            do is decided by the fields below.
        sms: streaming multiprocessors, or what the vendor calls the unit that runs a block.
        clock_mhz: clock of these at which the vendor quotes its dense rates.
        movers: a part of `MOVERS`, best first.
        features: names of single abilities (`ldmatrix`, `griddepcontrol`, `cvt_fp8`, ...).
        feature_min_compiler: first compiler that accepts a feature, for those that need a newer
            one than the device does.
        mma: every matrix instruction, with every pair of operand types.
        absent: what relatives of the device have and it has not.
        peak_tops_by_class: whole-device figures in 10^12 operations per second, keyed
            `instruction.rate_class`; they win over rates.
        min_compiler: first (major, minor) of the compiler that knows the device, None if any does.
        sources: field name -> where its value comes from; `*` stands for all others.
        quirks: what surprises, as sentences.
        vocabulary: every name that `supports` may be asked for.

    Raises:
        PluginError: a field is out of range; the message names device, field and value.
    """

    name: str
    vendor: str
    family: str
    arch: str
    title: str = ""
    driver_names: tuple[str, ...] = ()
    sms: int | None = None
    smem_per_sm_bytes: int | None = None
    smem_per_block_bytes: int | None = None
    registers_per_sm: int | None = None
    max_threads_per_sm: int | None = None
    max_blocks_per_sm: int | None = None
    l2_bytes: int | None = None
    memory_bytes: int | None = None
    bandwidth_gbs: float | None = None
    clock_mhz: float | None = None
    movers: tuple[str, ...] = ("plain",)
    features: frozenset[str] = frozenset()
    feature_min_compiler: Mapping[str, tuple[int, int]] = field(default_factory=dict, hash=False)
    mma: tuple[MmaRow, ...] = ()
    absent: tuple[Absence, ...] = ()
    peak_tops_by_class: Mapping[str, float] = field(default_factory=dict, hash=False)
    min_compiler: tuple[int, int] | None = None
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    quirks: tuple[str, ...] = ()
    vocabulary: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in _MAPPINGS:
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        for name in _POSITIVE:
            value = getattr(self, name)
            _require(value is None or value > 0, self, name)
        for name, kind in (("mma", MmaRow), ("absent", Absence)):
            rows = getattr(self, name)
            sound = isinstance(rows, tuple) and all(isinstance(row, kind) for row in rows)
            _require(sound, self, name)
        known = [mover for mover in MOVERS if mover in self.movers]
        _require(bool(known) and list(self.movers) == known, self, "movers")
        if self.smem_per_sm_bytes and self.smem_per_block_bytes:
            _require(
                self.smem_per_block_bytes <= self.smem_per_sm_bytes, self, "smem_per_block_bytes"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # Read-only views of dictionaries do not pickle; kernels may be compiled in other processes.
        values = (getattr(self, f.name) for f in fields(self))
        return type(self), tuple(dict(v) if isinstance(v, MappingProxyType) else v for v in values)

    def supports(self, what: str) -> bool:
        """Whether the device has a feature, mover, instruction, or takes operands of a type.

        An operand type counts if a documented instruction takes it natively.

        Raises:
            UnsupportedError: `what` is none of the names that any device could have.
        """
        how = "Give the name of a feature, mover, instruction or operand type."
        check_type("supports", "the name", what, (str, DataType), how)
        if what in self.features or what in self.movers or what in self.instructions:
            return True
        if what in self.vocabulary or what in MOVERS:
            return False
        try:
            operand = DataType.parse(what)
        except UnsupportedError:
            if not self.vocabulary:
                return False
            raise UnsupportedError(
                f"supports({what!r})",
                "no device has a feature, mover, instruction or operand type of this name",
                suggest(what, {*self.vocabulary, *MOVERS}),
            ) from None
        return operand.name in self.formats()

    @property
    def instructions(self) -> tuple[str, ...]:
        """Instruction families of the device, in the order of its rows."""
        return tuple(dict.fromkeys(row.instruction for row in self.mma))

    def formats(self, undocumented: bool = False) -> list[str]:
        """Names of the operand types that instructions take without emulation, widest first."""
        rows = [r for r in self.mma if not r.emulated and (undocumented or not r.undocumented)]
        types = {dtype.name: dtype for row in rows for dtype in (row.a, row.b)}
        return sorted(types, key=lambda name: (-types[name].bits, name))

    def why_absent(self, operand: DataType, instruction: str | None = None) -> str | None:
        """Why the device, unlike its relatives, does not take an operand type; None if unsaid."""
        reasons = [row.why for row in self.absent if row.concerns(operand, instruction)]
        return "; ".join(reasons) or None

    def peak_tops(self, row: MmaRow) -> float | None:
        """Dense 10^12 operations per second of a row on the whole device; None if not public."""
        figure = self.peak_tops_by_class.get(f"{row.instruction}.{row.rate_class}")
        if figure is not None:
            return figure
        if row.rate is None or self.sms is None or self.clock_mhz is None:
            return None
        return row.rate * self.sms * self.clock_mhz * 1e-6

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with everything but the vocabulary."""
        plain = {f.name: _plain(getattr(self, f.name)) for f in fields(self)}
        del plain["vocabulary"]
        return plain

    def __repr__(self) -> str:
        figures = [
            f"{self.sms} SMs" if self.sms else "",
            f"{self.bandwidth_gbs:g} GB/s" if self.bandwidth_gbs else "",
            f"{self.memory_bytes / 1e9:.0f} GB" if self.memory_bytes else "",
            " + ".join(self.instructions),
            f"{self.movers[0]} copies",
        ]
        told = ", ".join(text for text in (self.title or self.name, self.arch, *figures) if text)
        return f"DeviceCapabilities({self.name}: {told})"


_MAPPINGS = ("feature_min_compiler", "peak_tops_by_class", "sources")
_POSITIVE = (
    "sms",
    "smem_per_sm_bytes",
    "smem_per_block_bytes",
    "registers_per_sm",
    "max_threads_per_sm",
    "max_blocks_per_sm",
    "l2_bytes",
    "memory_bytes",
    "bandwidth_gbs",
    "clock_mhz",
)
_RULES = {
    "instruction": "is not a lower-case name",
    "shape": "must hold positive sizes",
    "m_values": "must contain the M of the shape",
    "n_values": "must contain the N of the shape",
    "k_values": "must contain the K of the shape",
    "a_sites": f"must be some of {', '.join(A_SITES)}",
    "rate": "must be positive or None",
    "block_scale": "must have positive groups",
    "legacy": "cannot hold together with emulated",
    "mma": "must be a tuple of MmaRow",
    "absent": "must be a tuple of Absence",
    "movers": f"must be some of {', '.join(MOVERS)}, in this order",
    "smem_per_block_bytes": "is more than an SM has",
}


def _require(holds: bool, row: "MmaRow | DeviceCapabilities", name: str) -> None:
    if not holds:
        rule = _RULES.get(name, "must be positive or None")
        raise PluginError(f"{row.name}: {name} = {getattr(row, name)!r} {rule}")


def _plain(value: Any) -> Any:
    """JSON values of a field: types and rows by their own rules, collections as lists."""
    if isinstance(value, DataType):
        return value.name
    if isinstance(value, (MmaRow, Absence)):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
