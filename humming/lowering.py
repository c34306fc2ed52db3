"""Lowerings: every way in which a device's instructions can compute a problem.

Weights are the MMA's A operand and tokens its N dimension, in every instruction family, so one row
of the device's table gives one choice of operands: weights are dequantized to the row's A type and
activations are presented as its B type. What remains free is where the weight scales enter and
which mover brings the bytes. Nothing here knows a vendor, a device or an architecture: a choice is
discarded because of what a row says, and the reason is kept.

Whether a type can stand in for another is computed from their values, not listed:

>>> from humming.dtypes import DataType
>>> represents(DataType.parse("float8e4m3"), DataType.parse("int4"))
True
>>> represents(DataType.parse("int8"), DataType.parse("float4e2m1"))  # 0.5 and 1.5 are not in int8
False
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from humming.capability import DeviceCapabilities, MmaRow
from humming.dtypes import DataType
from humming.formats import ActivationSpec, WeightSpec
from humming.problem import GemmProblem

EPILOGUE, ACCUMULATOR, OPERAND, INSTRUCTION = "epilogue", "accumulator", "operand", "instruction"
BRICK, K_MAJOR = "brick", "k_major"
BOX_MAINLOOPS = ("wgmma",)
"""Mainloops that read activations from shared memory, where a producer brings boxes of them."""
BOX_MOVER = "tma"
"""The mover that brings boxes."""

LONGEST_STAGE_K = 512
"""Most values of K of a pipeline stage, after which sums in halves have been added to floats."""

PROMOTED_K = 128
"""Values of K after which sums that keep few bits are added to floats."""

MOST_LEFT_OUT = 16
"""Powers of two that sums may be too small: of the 149 that float has below one, few are lost."""

_Values = npt.NDArray[np.float64]


class Rejection(NamedTuple):
    """A choice that was discarded, and why."""

    what: str
    reason: str


class Requirement(NamedTuple):
    """A component that a lowering needs: its slot and the key of what it must serve.

    Components that use a feature of the device serve `typed`, a key of one type of codes. What no
    component may ever serve has a name for people, `told`.
    """

    slot: str
    serves: str
    typed: str = ""
    told: str = ""

    def __str__(self) -> str:
        return self.told or f"{self.slot} {self.serves}"


@dataclass(frozen=True, slots=True)
class Lowering:
    """One way to compute a problem on a device.

    Attributes:
        operand: what weights are presented as to the MMA, dequantized or native.
        activation_operand: what activations are presented as; wider than the problem's activation
            type only where the device takes no such pair as it is, and then `notes` says so.
        mma: the instruction.
        scale_site: where weight scales enter: "epilogue" (tensor and channel scales),
            "accumulator" (per group, in fp32), "operand" (multiplied into the dequantized
            registers) or "instruction" (a block-scaled MMA).
        mover: what brings tiles to shared memory: tma, bulk, cp_async or plain.
        mainloop: the instruction family.
        layout: of the packed weights, "brick" or "k_major".
        packed_bits: width of the operand that weights are packed for; `operand_bits` or less.
        notes: what a reader of the plan must know: legacy, undocumented, widened from X to Y, ...
    """

    operand: DataType
    activation_operand: DataType
    mma: MmaRow
    scale_site: str
    mover: str
    mainloop: str
    layout: str
    packed_bits: int
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Readable and unique among the lowerings of one problem on one device."""
        layout = "" if self.layout == BRICK else f", {self.layout}"
        return f"{self.mma.name}, scales in {self.scale_site}, {self.mover}{layout}"

    @property
    def operand_bits(self) -> int:
        """Width of a weight in an operand register."""
        return operand_bits(self.mma)

    @property
    def step_k(self) -> int:
        """K values after which scales may change: those of an MMA step of 256 bits, or of what the
        steps that share packed registers take together."""
        return step_k(self.mma, self.packed_bits)

    @property
    def folds(self) -> bool:
        """Whether operands may be powers of two too small, which scales put back: not if sums are
        halves, which would lose them."""
        return self.mma.accumulator.bits == 32

    def partial_k(self, problem: GemmProblem) -> int:
        """Values of K whose sums are added to sums in float, of one stage at most; 0 where sums run
        over all of K. Scales change after a multiple or a divisor of it, or stages are shorter."""
        step = scale_step(problem) if self.scale_site == ACCUMULATOR else 0
        if not self.mma.is_promoted:
            return step
        most = LONGEST_STAGE_K if self.mma.sum_bits is None else PROMOTED_K
        return min(step or most, most)

    @property
    def has_producer(self) -> bool:
        """Whether warps of their own bring operands to shared memory, instead of all threads."""
        return self.mainloop in BOX_MAINLOOPS

    def may_fold(self, problem: GemmProblem) -> bool:
        """Whether sums may be powers of two too small: not with scales of all of float's range."""
        scales = problem.weight.scale_dtype, problem.activation.scale_dtype
        return self.folds and "float8e8m0" not in [dtype.name for dtype in scales]

    def scale_left_out(self, problem: GemmProblem) -> int:
        """Exponent of the power of two by which scales of operands are made smaller, so that the
        largest products are numbers of the operand; sums have it back."""
        if self.scale_site != OPERAND:
            return 0
        return _scale_left_out(problem, self.mma) or 0

    def operand_roundings(self, problem: GemmProblem) -> int:
        """How often a weight is rounded to the operand's type; 0 where operands are exact."""
        scaled = self.scale_site == OPERAND and not _products_exact(problem, self.mma)
        return scaled + (problem.weight.zero_point == "float")

    def scale_up(self, spec: WeightSpec | ActivationSpec) -> int:
        """Exponent of the power of two that scales of operands put back for their codes, or -1.

        Bits of a float put where a wider one has them mean a value that is a power of two too
        small. Scales can put it back, or so much of it that operands stay exact; the sums have the
        rest.
        """
        operand = self.operand if isinstance(spec, WeightSpec) else self.activation_operand
        placed = spec.dtype.kind == "float" and not operand.is_narrow
        if self.scale_site != OPERAND or not (self.folds and placed):
            return -1
        return _scale_up(operand, spec.dtype, spec.scale_dtype)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "operand": self.operand.name,
            "activation_operand": self.activation_operand.name,
            "mma": self.mma.key,
            "scale_site": self.scale_site,
            "mover": self.mover,
            "mainloop": self.mainloop,
            "layout": self.layout,
            "notes": list(self.notes),
        }

    def requirements(self, problem: GemmProblem) -> tuple[Requirement, ...]:
        """The components that the kernel is built of, one per slot."""
        needed = [
            Requirement("producer" if self.has_producer else "mover", self.mover),
            Requirement("mma", self.mma.key),
            Requirement("mainloop", self.mainloop),
            Requirement("epilogue", "tile"),
        ]
        if self.layout == BRICK:
            zero = "-zero" if problem.weight.zero_point == "integer" else ""
            pair = f"{problem.weight.dtype.kind}{zero}:{self.operand.name}"
            typed = f"{problem.weight.dtype.name}{zero}:{self.operand.name}"
            needed.append(Requirement("dequant", pair, typed))
        if self.scale_site != INSTRUCTION:
            for slot, scaled in (("scale", problem.weight), ("token_scale", problem.activation)):
                name = scaled.scale_dtype.name
                needed.append(Requirement(slot, name, name))
        activation = problem.activation.dtype
        straight = self.operand_bits == self.packed_bits == activation.bits
        if self.activation_operand == activation and straight:
            needed.append(Requirement("tokens", "direct"))
        else:
            pair = f"{activation.kind}:{self.activation_operand.name}"
            # Codes lie as those of weights do, or are 4 bits to be spread over bytes.
            read = activation.bits == self.packed_bits or (activation.bits, self.packed_bits) == (
                4,
                8,
            )
            tokens = "widened" if read else f"widened:{activation.bits}"
            tokens += ":shared" if self.has_producer else ""
            typed = f"{activation.name}:{self.activation_operand.name}"
            told = "" if read else f"a reader of {activation.bits}-bit activations"
            if not read and activation.bits not in (4, 8):
                told += " (4, 8 and 16 bits have one)"
            reader = Requirement("tokens", tokens, told=told)
            needed += [reader, Requirement("convert", pair, typed)]
        if problem.experts:
            needed.append(Requirement("scheduler", "experts"))
        return tuple(needed)


def operand_bits(row: MmaRow) -> int:
    """Width of a weight in an operand register of an instruction."""
    if row.a.bits > 8:
        return 16
    packed = row.a.is_integer or (row.block_scale and row.shape[2] >= 64)
    narrow = max(row.a.bits, row.b.bits) <= 4
    return 4 if packed and narrow else 8  # 4- and 6-bit floats otherwise sit in a byte each


def step_k(row: MmaRow, packed: int) -> int:
    """K values after which scales may change, of an instruction and a packed width."""
    return max(row.shape[2], 256 // operand_bits(row), 128 // packed)


def packed_bits(problem: GemmProblem, row: MmaRow | None = None) -> int:
    """Width of the operands that a problem's weight is packed for, on every device alike.

    That of the activations as they are stored, or 8 where 4 bits do not hold the weights or would
    mix groups of K in one register. Devices that multiply in wider operands widen both sides.
    Instructions that apply block scales of 4-bit types (`row`) read 4 bits at once.
    """
    if row is not None and row.block_scale:
        return operand_bits(row)
    activation, weight = problem.activation.dtype, problem.weight.dtype
    if not activation.is_narrow:
        return 16
    narrow = activation.bits <= 4 and weight.bits <= 4 and scale_step(problem) % 32 == 0
    return 4 if narrow else 8


# -- exactness, from the types' values ----------------------------------------------------------


@cache
def represents(operand: DataType, dtype: DataType) -> bool:
    """Whether every value of `dtype`, NaN and infinities included, is a value of `operand`."""
    if operand == dtype:
        return True
    if not dtype.is_narrow:
        return (
            operand.is_float
            and not operand.is_narrow
            and operand.mantissa_bits >= dtype.mantissa_bits
            and operand.exponent_bits >= dtype.exponent_bits
        )
    table = dtype.decode_table()
    finite = np.isfinite(table)
    specials_fit = bool(finite.all()) or operand.specials != "none"
    return specials_fit and _holds(operand, table[finite])


@cache
def represents_differences(operand: DataType, dtype: DataType) -> bool:
    """Whether code - zero is a value of `operand` for every code and integer zero point."""
    table = dtype.decode_table()
    return _holds(operand, np.unique(table[:, None] - table[None, :]))


@cache
def represents_products(operand: DataType, dtype: DataType, scale: DataType) -> bool:
    """Whether weight x scale is a value of `operand` for every code and every finite scale.

    Integer zero points change nothing: what they make of unsigned codes are these and their
    negatives, which 16-bit operands hold alike.
    """
    if not (dtype.is_narrow and scale.is_narrow):
        return False
    codes, scales = dtype.decode_table(), scale.decode_table()
    codes, scales = codes[np.isfinite(codes)], scales[np.isfinite(scales)]
    return _holds(operand, np.unique(codes[:, None] * scales[None, :]))


@cache
def left_out_of_products(operand: DataType, dtype: DataType, scale: DataType) -> int | None:
    """The least x >= 0 for which weight x scale / 2^x and scale / 2^x are values of `operand` for
    every code and every finite scale; None if there is none.

    >>> from humming.dtypes import DataType
    >>> e8m0 = DataType.parse("float8e8m0")
    >>> left_out_of_products(DataType.parse("bfloat16"), DataType.parse("float4e2m1"), e8m0)
    2
    """
    if represents_products(operand, dtype, scale):
        return 0
    if not (dtype.is_narrow and scale.is_narrow) or operand.is_narrow:
        return None
    codes, scales = dtype.decode_table(), scale.decode_table()
    codes, scales = codes[np.isfinite(codes)], scales[np.isfinite(scales)]
    products = np.unique(codes[:, None] * scales[None, :])
    for left in range(1, MOST_LEFT_OUT + 1):
        if _holds(operand, np.ldexp(scales, -left)) and _holds(operand, np.ldexp(products, -left)):
            return left
    return None


@cache
def _scale_up(operand: DataType, dtype: DataType, scale: DataType) -> int:
    if not scale.is_narrow or not represents_products(operand, dtype, scale):
        return -1
    missing = operand.exponent_bias - dtype.exponent_bias
    codes, scales = dtype.decode_table(), scale.decode_table()
    codes, scales = codes[np.isfinite(codes)], scales[np.isfinite(scales)]
    products = np.unique(codes[:, None] * scales[None, :])
    room = int(np.floor(np.log2(operand.max / scale.max)))
    for up in (0, min(missing, room)):
        left = missing - up
        fits = _holds(operand, np.ldexp(scales, up)) and _holds(operand, np.ldexp(products, -left))
        if left <= MOST_LEFT_OUT and fits:
            return up
    return -1


def _holds(operand: DataType, values: _Values) -> bool:
    """Whether each finite value is one of `operand`'s."""
    if operand.is_narrow:
        return bool(np.isin(values, operand.decode_table()).all())
    if not operand.is_float:
        return False
    _, exponent = np.frexp(values)
    lowest = 1 - operand.exponent_bias - operand.mantissa_bits  # exponent of the least subnormal
    ulp = np.maximum(exponent - 1 - operand.mantissa_bits, lowest)
    steps = np.ldexp(values, -ulp)
    return bool(((steps == np.rint(steps)) & (np.abs(values) <= operand.max)).all())


# -- enumeration --------------------------------------------------------------------------------


def enumerate_lowerings(
    problem: GemmProblem, caps: DeviceCapabilities, *, widen: bool = False
) -> tuple[tuple[Lowering, ...], tuple[Rejection, ...]]:
    """Every lowering that the device's rows allow, and each discarded choice with its reason.

    The reasons come nearest first: rows that take the types but not the scales, rows that are not
    used unasked, then everything that does not take the types.

    Activations are widened only where no row takes the problem's pair of types as it is, since a
    wider operand costs rate and may lose what the narrow one guarantees (exact int32 sums); or,
    with `widen`, where one does too: for those who cannot build what it needs.
    """
    by_scales: list[Rejection] = []
    by_consent: list[Rejection] = []
    by_types = list(_lacking_families(problem, caps))
    straight: list[Lowering] = []
    widened: list[Lowering] = []
    for row in caps.mma:
        if mismatch := _mismatch(problem, row):
            by_types.append(Rejection(row.name, mismatch))
        elif reserve := _reserve(problem, row):
            by_consent.append(Rejection(row.name, reserve))
        elif needless := _superseded(row, caps):
            by_types.append(Rejection(row.name, needless))
        elif row.instruction in BOX_MAINLOOPS and BOX_MOVER not in caps.movers:
            why = "reads activations that only tensor maps bring, which the device has not"
            by_types.append(Rejection(row.name, why))
        else:
            sites, objections = _scale_sites(problem, row)
            by_scales += [Rejection(row.name, why) for why in objections]
            found = [
                lowering for site in sites for lowering in _with_movers(problem, caps, row, *site)
            ]
            (straight if row.b == problem.activation.dtype else widened).extend(found)
    rejected = (*by_scales, *by_consent, *by_types)
    if widen or not straight:
        return (*straight, *widened), rejected
    taken = straight[0].mma.instruction
    why = f"would widen {problem.activation.dtype} activations; {taken} takes them as they are"
    names = dict.fromkeys(lowering.mma.name for lowering in widened)
    return tuple(straight), (*rejected, *(Rejection(name, why) for name in names))


def _mismatch(problem: GemmProblem, row: MmaRow) -> str | None:
    """Why a row cannot take the problem's types, or None."""
    weight, activation = problem.weight, problem.activation
    if not represents(row.a, weight.dtype):
        return f"{weight.dtype} weights are not exact in {row.a}"
    if not represents(row.b, activation.dtype):
        return f"{activation.dtype} activations are not exact in {row.b}"
    if weight.zero_point == "integer" and not represents_differences(row.a, weight.dtype):
        return f"{weight.dtype} minus its zero point is not exact in {row.a}"
    if weight.zero_point == "float" and row.a != weight.scale_dtype:
        return f"{weight.scale_dtype} zero points cannot be subtracted in {row.a}"
    if operand_bits(row) < packed_bits(problem, row):
        return f"reads operands of {operand_bits(row)} bits, and weights are packed for more"
    if not activation.symmetric and activation_group(problem):
        return "zero points of groups of activations need sums of weights that no epilogue has"
    return None


def _reserve(problem: GemmProblem, row: MmaRow) -> str | None:
    """Why a row that takes the problem's types is not used for it unasked, or None."""
    if row.emulated:
        return f"emulated: {row.note}" if row.note else "emulated by the assembler"
    if row.undocumented and not problem.allow_undocumented:
        return "undocumented; used only with allow_undocumented=True"
    if row.accumulator.bits == 16 and not problem.fp16_accumulation:
        return "accumulates in float16; used only with fp16_accumulation=True"
    return None


def _superseded(row: MmaRow, caps: DeviceCapabilities) -> str | None:
    """Why a row is needless beside one that does the same on more rows and values of K at once."""
    m, n, k = row.shape
    for other in caps.mma:
        rows, tokens, depth = other.shape
        larger = tokens == n and rows % m == 0 and depth % k == 0 and (rows, depth) > (m, k)
        if larger and all(getattr(row, field) == getattr(other, field) for field in _SAME_WORK):
            return f"{other.name} does the same in fewer instructions"
    return None


_SAME_WORK = (
    *("instruction", "a", "b", "accumulator", "sum_bits", "block_scale"),
    *("rate_class", "legacy", "emulated", "undocumented"),
)


def _lacking_families(problem: GemmProblem, caps: DeviceCapabilities) -> Iterator[Rejection]:
    """Instruction families without a row for the problem's types, and what is said of them."""
    weight, activation = problem.weight.dtype, problem.activation.dtype
    for instruction in caps.instructions:
        rows = [row for row in caps.mma if row.instruction == instruction]
        if any(row.b == activation and represents(row.a, weight) for row in rows):
            continue
        operands = dict.fromkeys((weight, activation))
        said = (caps.why_absent(operand, instruction) for operand in operands)
        reason = "; ".join(dict.fromkeys(why for why in said if why))
        reason = reason or f"takes no {weight} weights with {activation} activations"
        yield Rejection(f"{instruction} {weight.ptx} x {activation.ptx}", reason)


def weight_group(problem: GemmProblem) -> int:
    """K values that a weight scale covers, 0 where it covers all of K."""
    weight = problem.weight
    if weight.granularity == "block":
        return weight.block[1]
    return weight.group_size if weight.granularity == "group" else 0


def activation_group(problem: GemmProblem) -> int:
    """K values that an activation scale covers, 0 where it covers all of K."""
    activation = problem.activation
    return activation.group_size if activation.granularity in ("group", "block") else 0


def scale_step(problem: GemmProblem) -> int:
    """K values after which some scale, of weights or activations, changes; 0 where none does."""
    return gcd(weight_group(problem), activation_group(problem))


def _scale_sites(
    problem: GemmProblem, row: MmaRow
) -> tuple[list[tuple[str, tuple[str, ...]]], list[str]]:
    """Where scales may enter with this row, each with notes; and why not elsewhere."""
    if row.block_scale:
        return _instruction_site(problem, row)
    weight, groups = problem.weight, (weight_group(problem), activation_group(problem))
    step = scale_step(problem)
    sites: list[tuple[str, tuple[str, ...]]] = []
    objections: list[str] = []
    overflow = _integer_overflow(problem, row, step or problem.k) or _half_overflow(problem, row)
    if overflow:
        return [], [overflow]
    if not step:
        return [(EPILOGUE, ())], []
    k = step_k(row, packed_bits(problem, row))
    if step % k:
        return [], [f"a scale per {step} values of K does not divide into the {k} of an MMA step"]
    sites.append((ACCUMULATOR, ()))
    if not groups[0]:
        objections.append("scales in operand: weights have no scales per group")
    elif groups[1] and not _token_products_exact(problem, row.b):
        objections.append("scales in operand: activation groups need the accumulator")
    elif row.a.is_narrow:
        objections.append(f"scales in operand: products would round to {row.a}")
    elif _products_exact(problem, row):
        sites.append((OPERAND, ()))
    elif row.b != problem.activation.dtype:
        objections.append(
            f"scales in operand: products of exact activations would round to {row.a}"
        )
    elif row.a == weight.scale_dtype:
        sites.append((OPERAND, (f"weight times scale rounds to {row.a}",)))
    else:
        objections.append(f"scales in operand: {weight.scale_dtype} scales are not {row.a}")
    return sites, objections


def _products_exact(problem: GemmProblem, row: MmaRow) -> bool:
    return _scale_left_out(problem, row) is not None and problem.weight.zero_point != "float"


def _scale_left_out(problem: GemmProblem, row: MmaRow) -> int | None:
    """Exponent of the least power of two that weights times scales must leave out to be numbers of
    the operand, or None. Sums in halves would lose it, and so must not have any."""
    weight = problem.weight
    left = left_out_of_products(row.a, weight.dtype, weight.scale_dtype)
    return left if left is None or not left or row.accumulator.bits == 32 else None


def _token_products_exact(problem: GemmProblem, operand: DataType) -> bool:
    activation = problem.activation
    exact = represents_products(operand, activation.dtype, activation.scale_dtype)
    return exact and not operand.is_narrow and activation.symmetric


def _instruction_site(
    problem: GemmProblem, row: MmaRow
) -> tuple[list[tuple[str, tuple[str, ...]]], list[str]]:
    """Block-scaled rows: each side brings scales as the row wants them, or ones."""
    weight, activation = problem.weight, problem.activation
    notes: list[str] = []
    for side, spec, group in (
        ("weight", weight, weight_group(problem)),
        ("activation", activation, activation_group(problem)),
    ):
        if not group:
            notes.append(f"{side} block scales are one; its own scales enter in the epilogue")
        elif not _block_scale_fits(row, spec.scale_dtype, group):
            wanted = " or ".join(f"{dtype} per {size}" for dtype, size in row.block_scale)
            return [], [
                f"takes scales of {wanted}; {side} scales are {spec.scale_dtype} per {group}"
            ]
    if weight.granularity == "block" and weight.block[0] > 1:
        notes.append("weight block scales are repeated over the rows of a block")
    return [(INSTRUCTION, tuple(notes))], []


def _block_scale_fits(row: MmaRow, dtype: DataType, group: int) -> bool:
    # Stored e4m3 block scales are positive, so the unsigned type of the instruction reads them.
    stored = {dtype.name, f"u{dtype.ptx}"} | {dtype.ptx}
    return any(size == group and wanted.ptx in stored for wanted, size in row.block_scale)


def _integer_overflow(problem: GemmProblem, row: MmaRow, k: int) -> str:
    if row.a.is_float or row.b.is_float:
        return ""
    # The zero point of activations is taken off in integers, too.
    token = _largest(row.b) if problem.activation.symmetric else row.b.max - row.b.min
    largest = _largest(row.a) * token * k
    return f"sums over K = {k} may leave int32" if largest >= 2**31 else ""


def _half_overflow(problem: GemmProblem, row: MmaRow) -> str:
    """Quantized activations reach the largest codes of their type; how large those of 16 bits are
    is known to whoever permits sums in halves."""
    weight, activation = problem.weight, problem.activation
    if row.accumulator.bits > 16 or not activation.dtype.is_narrow:
        return ""
    k = min(scale_step(problem) or problem.k, LONGEST_STAGE_K)
    spread = weight.dtype.max - weight.dtype.min
    largest = _largest(weight.dtype) if weight.zero_point == "none" else spread
    overflows = largest * _largest(activation.dtype) * k > row.accumulator.max
    return f"sums of codes over K = {k} may leave {row.accumulator}" if overflows else ""


def _largest(dtype: DataType) -> float:
    return max(abs(dtype.min), dtype.max)


def _with_movers(
    problem: GemmProblem,
    caps: DeviceCapabilities,
    row: MmaRow,
    site: str,
    site_notes: tuple[str, ...],
) -> Iterator[Lowering]:
    """One lowering per mover that may serve, of the device, which lists them best first."""
    native = row.a == problem.weight.dtype and problem.weight.zero_point == "none"
    from_shared = site == INSTRUCTION and native and "register" not in row.a_sites
    notes = _row_notes(problem, row) + site_notes
    boxes = row.instruction in BOX_MAINLOOPS
    for mover in (BOX_MOVER,) if boxes else caps.movers:
        yield Lowering(
            operand=row.a,
            activation_operand=row.b,
            mma=row,
            scale_site=site,
            mover=mover,
            mainloop=row.instruction,
            layout=K_MAJOR if from_shared and "shared" in row.a_sites else BRICK,
            packed_bits=packed_bits(problem, row),
            notes=notes,
        )


def _row_notes(problem: GemmProblem, row: MmaRow) -> tuple[str, ...]:
    notes = [flag for flag in ("legacy", "undocumented") if getattr(row, flag)]
    if row.b != problem.activation.dtype:
        notes.append(f"activations widened from {problem.activation.dtype} to {row.b}")
    if problem.weight.zero_point == "float":
        notes.append(f"weight minus zero point rounds to {row.a}")
    if row.min_compiler:
        notes.append("needs compiler {}.{} or later".format(*row.min_compiler))
    return tuple(notes)
