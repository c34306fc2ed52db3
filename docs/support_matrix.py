"""Writes support_matrix.md from device_matrix.yaml and the composer.

Run `python docs/support_matrix.py` after a change of either.

What a pair of formats becomes depends on the device's family: its instructions, movers and limits.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from humming.devices.thead_ppu.components import COMPONENTS

from humming.capability import DeviceCapabilities, MmaRow
from humming.composer import decide, m_range_of
from humming.decision import Decision
from humming.dtypes import DataType
from humming.matrix import read_matrix
from humming.problem import GemmProblem
from humming.registry import Contribution, Registry, load_yaml
from humming.tuned import NO_RECORDS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "support_matrix.md"
MARKS = {"native": "●", "legacy": "◐", "emulated": "○", "undocumented": "?"}
KERNELS = ROOT / "devices" / "thead_ppu" / "kernels"
SIZE, TOKENS = 4096, 1024
HEAD = """# Support matrix

<!-- Written by docs/support_matrix.py from device_matrix.yaml and the composer; do not edit. -->

What devices can do, from `device_matrix.yaml`, and what humming does with it; for one problem and
device `humming explain PROBLEM --device NAME` says more. `humming capabilities NAME` shows every
instruction, and where each figure comes from. A dash stands for what nothing public says. Rates are
dense, in 10^12 operations per second, with 32-bit accumulation; announced figures of coming devices
are as announced.

## Devices
"""
LEGEND = """
## Operand types

Types that matrix instructions take, by family: ● native, ◐ native but left over from an earlier
generation and far from the peak, ○ emulated by the assembler, ? undocumented and used only on
request. In brackets: block scales that the instruction applies.
"""

PAIRS = (
    *("int4_g128 x fp16", "int4_g128 x bf16", "uint4_g64_zp x bf16"),
    *("fp8 x bf16", "mxfp4 x bf16", "nvfp4 x bf16"),
    *("int8 x int8", "int4_g128 x int8", "int4 x int4"),
    *("fp8 x fp8", "fp8_block128 x fp8_g128", "int4_g128 x fp8"),
    *("mxfp8 x mxfp8", "mxfp4 x mxfp8", "mxfp4 x mxfp4", "nvfp4 x nvfp4"),
    *("float8e3m4 x float8e3m4", "float4e0m3_g16_se4m3_s2tensor x float4e0m3_nv16"),
)
PAIRS_HEAD = f"""
## Pairs of formats

What runs today, for a matrix of {SIZE} x {SIZE} and {TOKENS} tokens, by family:

- native: an instruction takes the activations as they are;
- widened: no instruction that is built does, so that they are made wider first, exactly;
- legacy: as native or widened, by an instruction far from the device's peak.

The types that are multiplied follow, weights before activations where they differ. After an arrow:
the instruction that would be faster by the cost model, and is not built yet.
"""


def devices() -> list[DeviceCapabilities]:
    """The bundled devices, whatever plugins are installed."""
    matrix = read_matrix(load_yaml(ROOT / "device_matrix.yaml"), "device_matrix.yaml")
    order = list(matrix.families)
    found = [bundled().device(name) for name in matrix.devices]
    return sorted(found, key=lambda caps: order.index(caps.family))


@cache
def bundled() -> Registry:
    """The bundled devices and components."""
    matrix = read_matrix(load_yaml(ROOT / "device_matrix.yaml"), "device_matrix.yaml")
    return Registry([Contribution("bundled", matrix, COMPONENTS, (KERNELS,))])


def page() -> str:
    """The page as Markdown."""
    rows = devices()
    families = {caps.family: caps for caps in rows}
    lines = [HEAD, *_table(_device_columns(rows)), LEGEND, *_table(_type_columns(families))]
    decisions = {
        (caps.family, pair): _decide(pair, caps)
        for caps in {caps.family: caps for caps in reversed(rows)}.values()
        for pair in PAIRS
    }
    lines += [PAIRS_HEAD, *_table(_pair_rows(list(families), decisions)), ""]
    lines += ["Where there is nothing:\n", *_refusals(decisions)]
    lines += ["\n## Limits and movers\n", *_table(_limit_columns(families))]
    lines += ["\n## What is missing, and what surprises\n", *_remarks(families, rows)]
    return "\n".join(lines) + "\n"


def _device_columns(rows: list[DeviceCapabilities]) -> Iterator[list[str]]:
    yield [
        *("name", "device", "architecture", "SMs", "memory GB", "GB/s", "L2 MiB"),
        *("fp16", "fp8", "int8", "fp4"),
    ]
    for caps in rows:
        peaks = [_peak(caps, name) for name in ("f16", "fp8", "int8", "fp4")]
        memory = caps.memory_bytes and caps.memory_bytes / 1e9
        figures = [caps.sms, memory, caps.bandwidth_gbs, caps.l2_bytes and caps.l2_bytes / 2**20]
        yield [f"`{caps.name}`", caps.title, caps.arch, *map(_figure, (*figures, *peaks))]


def _peak(caps: DeviceCapabilities, rate_class: str) -> float | None:
    """Dense 10^12 operations per second of the fastest instruction, with 32-bit accumulation."""
    peaks = [caps.peak_tops(row) for row in caps.mma if row.rate_class == rate_class]
    return max((peak for peak in peaks if peak is not None), default=None)


def _type_columns(families: dict[str, DeviceCapabilities]) -> Iterator[list[str]]:
    types = {row.a.name: row.a for caps in families.values() for row in caps.mma}
    ordered = sorted(types.values(), key=lambda dtype: (-dtype.bits, dtype.name))
    yield ["family", "instruction", *(dtype.ptx for dtype in ordered)]
    for name, caps in families.items():
        for instruction in caps.instructions:
            rows = [row for row in caps.mma if row.instruction == instruction]
            yield [f"`{name}`", instruction, *(_cell(rows, dtype) for dtype in ordered)]


def _cell(rows: list[MmaRow], dtype: DataType) -> str:
    found = [row for row in rows if row.a == dtype]
    if not found:
        return ""
    scales = {f"{scale.ptx}/{k}" for row in found for scale, k in row.block_scale}
    # A documented type also occurs beside undocumented ones; that says nothing about itself.
    documented = [row for row in found if not row.undocumented]
    marks = {MARKS[row.status] for row in documented} or {MARKS["undocumented"]}
    return "".join(sorted(marks)) + (f" ({', '.join(sorted(scales))})" if scales else "")


def _decide(pair: str, caps: DeviceCapabilities) -> Decision:
    problem = GemmProblem.parse(pair, SIZE, SIZE)
    return decide(problem, caps, m_range_of(TOKENS), bundled(), records=NO_RECORDS)


def _pair_rows(
    families: list[str], decisions: dict[tuple[str, str], Decision]
) -> Iterator[list[str]]:
    yield ["weights x activations", *(f"`{name}`" for name in families)]
    for pair in PAIRS:
        yield [f"`{pair}`", *(pair_cell(decisions[name, pair]) for name in families)]


def pair_cell(decision: Decision) -> str:
    """What a pair of formats becomes on a device, and what would be better."""
    if decision.chosen is None:
        return "no"
    lowering = decision.chosen.lowering
    straight = lowering.activation_operand == decision.problem.activation.dtype
    operands = dict.fromkeys((lowering.operand.ptx, lowering.activation_operand.ptx))
    words = [] if straight else ["widened"]
    words += ["legacy"] if lowering.mma.legacy else ["native"] if straight else []
    words.append(" x ".join(operands))
    preferred = decision.preferred
    if preferred is not None and preferred.lowering.mma.instruction != lowering.mma.instruction:
        words.append(f"→ {preferred.lowering.mma.instruction}")
    return " ".join(words)


def _refusals(decisions: dict[tuple[str, str], Decision]) -> Iterator[str]:
    """The pairs that do not run, by family and reason."""
    pairs: dict[tuple[str, str], list[str]] = {}
    for (family, pair), decision in decisions.items():
        if decision.chosen is None:
            pairs.setdefault((family, _why_not(decision)), []).append(pair)
    for (family, reason), refused in pairs.items():
        every = "every pair" if len(refused) == len(PAIRS) else ", ".join(f"`{p}`" for p in refused)
        yield f"- `{family}`: {every}: {reason}"


def _why_not(decision: Decision) -> str:
    instructions = dict.fromkeys(m.lowering.mma.instruction for m in decision.missing)
    if instructions:
        return f"only {' and '.join(instructions)} would do, which is not built yet"
    activation = decision.problem.activation.dtype
    inexact = f"{activation} activations are not exact in "
    reasons = list(dict.fromkeys(rejection.reason for rejection in decision.rejected))
    wider = [why.removeprefix(inexact) for why in reasons if why.startswith(inexact)]
    # Narrower types are not the nearest that could have taken it.
    return f"{inexact}{wider[0]}" if wider else "; ".join(reasons)


def _limit_columns(families: dict[str, DeviceCapabilities]) -> Iterator[list[str]]:
    yield [
        *("family", "shared memory per block KiB", "per SM KiB", "blocks per SM"),
        *("threads per SM", "movers", "first CUDA compiler"),
    ]
    for name, caps in families.items():
        kib = [size and size / 1024 for size in (caps.smem_per_block_bytes, caps.smem_per_sm_bytes)]
        limits = map(_figure, (*kib, caps.max_blocks_per_sm, caps.max_threads_per_sm))
        first = ".".join(map(str, caps.min_compiler)) if caps.min_compiler else ""
        yield [f"`{name}`", *limits, ", ".join(caps.movers), first]


def _remarks(
    families: dict[str, DeviceCapabilities], rows: list[DeviceCapabilities]
) -> Iterator[str]:
    shared = {quirk for caps in families.values() for quirk in _family_quirks(caps, rows)}
    for name, caps in families.items():
        remarks = [f"{', '.join(d.ptx for d in a.operands)}: {a.why}" for a in caps.absent]
        remarks += _family_quirks(caps, rows)
        yield from (f"- `{name}`: {remark}" for remark in remarks)
    for caps in rows:
        yield from (f"- `{caps.name}`: {quirk}" for quirk in caps.quirks if quirk not in shared)


def _family_quirks(caps: DeviceCapabilities, rows: list[DeviceCapabilities]) -> list[str]:
    """Quirks that every device of the family has, where it has several."""
    relatives = [other for other in rows if other.family == caps.family]
    return [quirk for quirk in caps.quirks if all(quirk in other.quirks for other in relatives)]


def _figure(value: float | None) -> str:
    if value is None:
        return "–"  # noqa: RUF001
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def _table(rows: Iterable[list[str]]) -> Iterator[str]:
    for index, row in enumerate(rows):
        yield "| " + " | ".join(row) + " |"
        if index == 0:
            yield "|" + "---|" * len(row)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
