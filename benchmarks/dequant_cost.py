"""Counts the instructions that dequantize a value, for each pair of code and operand types.

python benchmarks/dequant_cost.py            # print the tables
python benchmarks/dequant_cost.py --write    # and write them into humming/instruction_counts.py
                                             # and docs/composer.md

A lane's 32 codes become operand registers in a kernel of their own, compiled to PTX for sm_90a;
loads, stores and moves are left out. No accelerator is needed. Scales and zero points are not in
it, nor the powers of two that kernels fold into scales; noting NaN is. The scales of two rows are
counted in kernels of their own.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from humming import plugins
from humming.cache import include_closure
from humming.components import ELEMENTS, Component
from humming.dtypes import DataType
from humming.errors import UnsupportedError
from humming.layout import CODES_PER_LANE, device_struct
from humming.lowering import represents
from humming.source import dequantizer

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "composer.md"
MODULE = ROOT / "humming" / "instruction_counts.py"
COUNTED = "# What follows is counted.\n"
BEGIN, END = "<!-- instructions: begin -->", "<!-- instructions: end -->"
DEVICE = "sim:h200"
OPERANDS = (
    *("float16", "bfloat16", "int8", "float8e4m3", "float8e5m2"),
    *("float6e3m2", "float6e2m3", "float4e2m1", "int4"),
)
CODES = (
    *(f"int{bits}" for bits in range(1, 9)),
    *(f"uint{bits}" for bits in range(1, 9)),
    *("float4e2m1", "float6e2m3", "float6e3m2", "float8e4m3", "float8e5m2", "float8e3m4"),
    *("float4e0m3", "float8e0m7", "float5e3m1"),
)
SCALES = ("float32", "float16", "bfloat16", "float8e8m0", "float8e4m3")
SCALED = ("float32", "float16", "bfloat16")
NOTE = """
template <class Noting, int kBits>
__device__ void note(const humming::u32 (&words)[kBits], unsigned* out) {
  if constexpr (Noting::kNotes) {
    humming::u32 marks[2] = {};
    Noting::Type::note(words, marks);
    out[0] = marks[0], out[1] = marks[1];
  }
}
"""
# What moves values but computes nothing; integers of 16 bits take a register like those of 32.
_FREE = re.compile(r"(ld|st|mov|cvta|ret|cvt\.u(16|32|64)\.u(8|16|32))\b")


class Pair(NamedTuple):
    """A type of codes and the operand that it becomes, perhaps by a feature of the device."""

    code: DataType
    operand: DataType
    feature: str = ""


def pairs_of(slot: str, codes: Iterable[str], operands: Iterable[str]) -> list[Pair]:
    """The pairs that a component of a slot serves."""
    caps = plugins.capabilities(DEVICE)
    found = (
        Pair(DataType.parse(code), DataType.parse(operand), feature)
        for code in codes
        for operand in operands
        for feature in ("", *sorted(caps.features))
    )
    return [pair for pair in found if component(pair, slot)]


def component(pair: Pair, slot: str = "dequant") -> Component | None:
    """What serves a pair, None where nothing does or the operand does not hold the codes."""
    if slot == "scale":
        held = pair.operand == "float32" or pair.code in (pair.operand, "float8e4m3")
        held = held or (pair.code, pair.operand) == ("float8e8m0", "bfloat16")
        plain = typed = pair.code.name
    else:
        held = represents(pair.operand, pair.code)
        plain = f"{pair.code.kind}:{pair.operand.name}"
        typed = f"{pair.code.name}:{pair.operand.name}"
    serves = f"{typed}:{pair.feature}" if pair.feature else plain
    found = plugins.registry().components(slot, serves) if held else ()
    return found[0] if found else None


def source(pairs: list[Pair]) -> str:
    """One kernel for each pair, that dequantizes what a lane holds of a brick."""
    headers: dict[str, None] = {"humming/contracts.cuh": None}
    lines: list[str] = []
    for index, pair in enumerate(pairs):
        used = component(pair)
        if used is None:
            raise UnsupportedError(f"{pair.code} to {pair.operand}", "nothing does it", "")
        headers[used.header] = None
        bits = 4 if pair.operand == "int4" else 8 if pair.operand.is_narrow else 16
        order = device_struct(pair.code.bits, bits, bits, "Order")
        lines += dequantizer(f"pair_{index}", order, pair.code, used.struct, fold=True)
        lines += [
            f'extern "C" __global__ void cost_{index}(const unsigned* in, unsigned* out) {{',
            f"  using Noting = humming::Noting<pair_{index}::Dequant>;",
            "  using Dequant = Noting::Type;",
            f"  humming::u32 words[{pair.code.bits}];",
            *(f"  words[{i}] = in[{i}];" for i in range(pair.code.bits)),
            "  const auto row = Dequant::offset();",
            *(f"  out[{i}] = Dequant::value<{i}>(words, row);" for i in range(bits)),
            f"  note<Noting>(words, out + {bits});",
            "}",
        ]
    return "\n".join([*(f"#include <{name}>" for name in headers), NOTE, *lines, ""])


def scale_source(pairs: list[Pair]) -> str:
    """One kernel for each pair, that converts the scales of two rows."""
    headers: dict[str, None] = {}
    lines: list[str] = []
    for index, pair in enumerate(pairs):
        used = component(pair, "scale")
        if used is None:
            raise UnsupportedError(f"{pair.code} scales in {pair.operand}", "nothing does it", "")
        headers[used.header] = None
        operand = f"humming::{ELEMENTS[pair.operand.name]}"
        convert = (
            "Scales::floats(in[0], in[1], *reinterpret_cast<float (*)[2]>(out));"
            if pair.operand == "float32"
            else f"*out = Scales::operands<{operand}>(in[0], in[1]);"
        )
        lines += [
            f'extern "C" __global__ void cost_{index}(const {used.struct}::Storage* in,',
            "                                       unsigned* out) {",
            f"  using Scales = {used.struct};",
            f"  {convert}",
            "}",
        ]
    return "\n".join([*(f"#include <{name}>" for name in headers), *lines, ""])


def counts() -> dict[Pair, float]:
    """Instructions per value of every pair that has a component."""
    found: dict[Pair, float] = {}
    for operand in OPERANDS:
        pairs = pairs_of("dequant", CODES, [operand])
        counted = compiled(source(pairs))
        found |= {pair: count / CODES_PER_LANE for pair, count in zip(pairs, counted, strict=True)}
    return found


def scale_counts() -> dict[Pair, float]:
    """Instructions to convert two scales, of every pair that has a component."""
    pairs = pairs_of("scale", SCALES, SCALED)
    return dict(zip(pairs, compiled(scale_source(pairs)), strict=True))


def compiled(text: str) -> list[int]:
    """Instructions of each kernel of a source."""
    caps = plugins.capabilities(DEVICE)
    headers = include_closure(text, plugins.registry().headers)
    ptx = plugins.compiler_for(caps).compile(text, headers, "cost_0", caps).data.decode()
    bodies = dict(re.findall(r"\.entry cost_(\d+)\(.*?\)\s*(\{.*?^\})", ptx, re.DOTALL | re.M))
    return [instructions(bodies[str(index)]) for index in range(len(bodies))]


def instructions(body: str) -> int:
    """Instructions of a function's body that compute.

    Equal ones of equal values count once, for the assembler merges them.
    """
    statements = (line.strip(" \t{}") for line in re.sub(r"//.*", "", body).split("\n"))
    words = (part.strip() for line in statements for part in line.split(";"))
    same: dict[str, str] = {}  # registers that hold what another one does
    made: dict[tuple[str, ...], str] = {}
    count = 0
    for word in words:
        if not re.match(r"[a-z]", word) or _FREE.match(word):
            if copy := re.match(r"mov\.\w+\s+(%\w+), ([^{]+)$", word):
                same[copy[1]] = same.get(copy[2], copy[2])
            continue
        operation, _, operands = word.partition(" ")
        target, *read = (operand.strip() for operand in operands.split(","))
        key = (operation, *(same.get(operand, operand) for operand in read))
        if key in made:
            same[target] = made[key]
        else:
            made[key] = target
            count += 1
    return count


def table(found: Mapping[str, float], first: str, operands: tuple[str, ...]) -> Iterator[str]:
    """Counts as Markdown."""
    yield f"| {first} | " + " | ".join(operands) + " |"
    yield "|---|" + "---|" * len(operands)
    rows = dict.fromkeys((key.split(":")[0], *key.split(":")[2:]) for key in found)
    for code, *feature in rows:
        cells = (found.get(":".join([code, operand, *feature])) for operand in operands)
        told = " | ".join("" if cell is None else f"{cell:.2f}" for cell in cells)
        yield f"| {code}{''.join(f' with {name}' for name in feature)} | {told} |"


def key_of(pair: Pair) -> str:
    """The key of a pair in the tables."""
    return ":".join(filter(None, (pair.code.name, pair.operand.name, pair.feature)))


def tables(values: Mapping[str, float], scales: Mapping[str, float]) -> str:
    """Both tables of the page."""
    return "\n".join([*table(values, "codes", OPERANDS), "", *table(scales, "two scales", SCALED)])


def literal(name: str, found: Mapping[str, float]) -> str:
    """A table as Python."""
    rows = "".join(f'    "{key}": {count:g},\n' for key, count in found.items())
    return f"{name}: dict[str, float] = {{\n{rows}}}\n"


def main() -> None:
    """Print the tables, and write them if that is asked for."""
    values = {key_of(pair): round(count, 3) for pair, count in counts().items()}
    scales = {key_of(pair): count for pair, count in scale_counts().items()}
    text = tables(values, scales)
    print(text)
    if "--write" in sys.argv:
        head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
        PAGE.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")
        head = MODULE.read_text(encoding="utf-8").split(COUNTED)[0]
        counted = [literal("PER_VALUE", values), literal("PER_SCALE_PAIR", scales)]
        MODULE.write_text(head + COUNTED + "\n".join(counted), encoding="utf-8")


if __name__ == "__main__":
    main()
