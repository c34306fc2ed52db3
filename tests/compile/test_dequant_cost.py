"""Dequantizing takes no more instructions than the cost model and the composer's page say."""

from pathlib import Path
from types import ModuleType

import pytest
from scripts import load_script

from humming.dtypes import DataType
from humming.instruction_counts import PER_SCALE_PAIR, PER_VALUE

ROOT = Path(__file__).parents[2]
# Another compiler may shift or mask once more in the 32 values of a lane.
SLACK = 2 / 32


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_script("benchmarks/dequant_cost.py")


@pytest.fixture(scope="module")
def counts(tool: ModuleType) -> dict:
    made: dict = tool.counts()
    return made


WRITE = "run `python benchmarks/dequant_cost.py --write`"


def test_no_pair_got_worse(tool: ModuleType, counts: dict) -> None:
    found = {tool.key_of(pair): count for pair, count in counts.items()}
    assert found.keys() == PER_VALUE.keys(), WRITE
    worse = {key: count for key, count in found.items() if count > PER_VALUE[key] + SLACK}
    assert not worse, "what got slower, in instructions a value"


def test_no_scales_got_worse(tool: ModuleType) -> None:
    found = {tool.key_of(pair): count for pair, count in tool.scale_counts().items()}
    assert found.keys() == PER_SCALE_PAIR.keys(), WRITE
    worse = {key: count for key, count in found.items() if count > PER_SCALE_PAIR[key] + 1}
    assert not worse, "what got slower, in instructions for two scales"


def test_page_has_the_counts_of_the_cost_model(tool: ModuleType) -> None:
    section = tool.PAGE.read_text(encoding="utf-8").split(tool.BEGIN)[1].split(tool.END)[0]
    assert section.strip() == tool.tables(PER_VALUE, PER_SCALE_PAIR).strip(), WRITE


@pytest.mark.parametrize(
    ("code", "operand", "expected"),
    [
        # 16 registers: a mask and an addition each, and 4 shifts of 4 words.
        ("int4", "float16", 36 / 32),
        # As the instruction reads them.
        ("int8", "int8", 0),
        # A multiplication, two masks, and of each four registers three shifts and two products;
        # the codes that are in place need none.
        ("float4e2m1", "bfloat16", 68 / 32),
        ("float8e4m3", "float8e4m3", 0),
    ],
)
def test_counts_that_are_known(
    tool: ModuleType, counts: dict, code: str, operand: str, expected: float
) -> None:
    pair = tool.Pair(DataType.parse(code), DataType.parse(operand))
    assert counts[pair] == pytest.approx(expected, abs=SLACK)


def test_only_what_computes_is_counted(tool: ModuleType) -> None:
    body = """{
\t.reg .b32 %r<4>;
\tld.param.u64 %rd1, [p];
\tld.global.u32 %r1, [%rd1];
\tshr.u32 %r2, %r1, 4; // comment
\t// begin inline asm
\tlop3.b32 %r3, %r2, 1, 2, 106;
\t// end inline asm
\t{ mov.b32 %r1, %r2; add.f16x2 %r1, %r2, %r3; }
\tst.global.u32 [%rd1], %r3;
\tret;
}"""
    assert tool.instructions(body) == 3
