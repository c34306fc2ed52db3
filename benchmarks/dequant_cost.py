"""Counts the instructions that dequantize a value, for each pair of code and operand types.

python benchmarks/dequant_cost.py            # print the table
python benchmarks/dequant_cost.py --write    # and write it into docs/composer.md

A lane's 32 codes become operand registers in a kernel of their own, compiled to PTX for sm_90a;
loads, stores and moves are left out. No accelerator is needed. Scales and zero points are not in
it, nor the powers of two that kernels fold into scales.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from humming import plugins
from humming.cache import include_closure
from humming.components import Component
from humming.dtypes import DataType
from humming.errors import UnsupportedError
from humming.layout import CODES_PER_LANE, device_struct
from humming.lowering import represents
from humming.source import dequantizer

PAGE = Path(__file__).parents[1] / "docs" / "composer.md"
BEGIN, END = "<!-- instructions: begin -->", "<!-- instructions: end -->"
DEVICE = "sim:h200"
OPERANDS = ("float16", "bfloat16", "int8", "float8e4m3", "float8e5m2", "int4")
CODES = (
    *(f"int{bits}" for bits in range(1, 9)),
    *(f"uint{bits}" for bits in range(1, 9)),
    *("float4e2m1", "float6e2m3", "float6e3m2", "float8e4m3", "float8e5m2", "float8e3m4"),
    *("float4e0m3", "float8e0m7", "float5e3m1"),
)
# What moves values but computes nothing.
_FREE = re.compile(r"(ld|st|mov|cvta|ret)\b")


class Pair(NamedTuple):
    """A type of codes and the operand that it becomes."""

    code: DataType
    operand: DataType


def component(pair: Pair) -> Component | None:
    """What dequantizes a pair, None where nothing does or the operand does not hold the codes."""
    if not represents(pair.operand, pair.code):
        return None
    serves = f"{pair.code.kind}:{pair.operand.name}"
    found = plugins.registry().components("dequant", serves)
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
        bits = 4 if pair.operand.bits == 4 else 8 if pair.operand.bits <= 8 else 16
        order = device_struct(pair.code.bits, bits, bits, "Order")
        lines += dequantizer(f"pair_{index}", order, pair.code, used.struct, fold=True)
        lines += [
            f'extern "C" __global__ void cost_{index}(const unsigned* in, unsigned* out) {{',
            f"  using Dequant = pair_{index}::Dequant;",
            f"  humming::u32 words[{pair.code.bits}];",
            *(f"  words[{i}] = in[{i}];" for i in range(pair.code.bits)),
            "  const auto row = Dequant::offset();",
            *(f"  out[{i}] = Dequant::value<{i}>(words, row);" for i in range(bits)),
            "}",
        ]
    return "\n".join([*(f"#include <{name}>" for name in headers), *lines, ""])


def counts() -> dict[Pair, float]:
    """Instructions per value of every pair that has a component."""
    caps = plugins.capabilities(DEVICE)
    compiler = plugins.compiler_for(caps)
    found: dict[Pair, float] = {}
    for operand in map(DataType.parse, OPERANDS):
        every = (Pair(DataType.parse(code), operand) for code in CODES)
        pairs = [pair for pair in every if component(pair)]
        text = source(pairs)
        headers = include_closure(text, plugins.registry().headers)
        ptx = compiler.compile(text, headers, "cost_0", caps).data.decode()
        bodies = dict(re.findall(r"\.entry cost_(\d+)\(.*?\)\s*(\{.*?^\})", ptx, re.DOTALL | re.M))
        for index, pair in enumerate(pairs):
            found[pair] = instructions(bodies[str(index)]) / CODES_PER_LANE
    return found


def instructions(body: str) -> int:
    """Instructions of a function's body that compute."""
    statements = (line.strip(" \t{}") for line in re.sub(r"//.*", "", body).split("\n"))
    words = (part.strip() for line in statements for part in line.split(";"))
    return sum(1 for word in words if re.match(r"[a-z]", word) and not _FREE.match(word))


def table(found: dict[Pair, float]) -> Iterator[str]:
    """The counts as Markdown."""
    yield "| codes | " + " | ".join(OPERANDS) + " |"
    yield "|---|" + "---|" * len(OPERANDS)
    for code in map(DataType.parse, CODES):
        cells = (found.get(Pair(code, DataType.parse(operand))) for operand in OPERANDS)
        told = " | ".join("" if cell is None else f"{cell:.2f}" for cell in cells)
        yield f"| {code.name} | {told} |"


def main() -> None:
    """Print the table, and write it if that is asked for."""
    text = "\n".join(table(counts()))
    print(text)
    if "--write" in sys.argv:
        head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
        PAGE.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
