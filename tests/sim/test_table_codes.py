"""Looking 4-bit codes up for 8-bit floats: every code in every place of a lane's words."""

import importlib

import numpy as np
import pytest

from humming import plugins
from humming.cache import include_closure
from humming.dtypes import DataType
from humming.layout import device_struct, fields, widened_register
from humming.lowering import represents
from humming.source import dequantizer

simulate = importlib.import_module("humming.devices.simulator").simulate
BITS, OPERAND_BITS, WORDS = 4, 8, 4
SLOTS = 32 // OPERAND_BITS
TABLE = "humming/dequant/table_8.cuh"
Places = list[list[tuple[int, int]]]


def weights(packed_bits: int) -> tuple[str, Places]:
    """The order of weights, and of each operand register (word, bit) of its codes."""
    places = []
    for register in range(OPERAND_BITS):
        source, part = widened_register(packed_bits, OPERAND_BITS, register)
        (field,) = fields(BITS, packed_bits, source * (32 // packed_bits))
        first = field.bit + packed_bits * part
        places.append([(field.word, first + OPERAND_BITS * slot) for slot in range(SLOTS)])
    return device_struct(BITS, packed_bits, OPERAND_BITS, "Order"), places


def tokens(packed_bits: int) -> tuple[str, Places]:
    """The same of activations, of which one word is read at a time."""
    order = f"using Order = humming::TokenOrder<{BITS}, {packed_bits}, {OPERAND_BITS}>;"
    registers = range(OPERAND_BITS // packed_bits)
    return order, [
        [(0, packed_bits * register + OPERAND_BITS * slot) for slot in range(SLOTS)]
        for register in registers
    ]


def looked_up(words: np.ndarray, order: str, registers: int, struct: str, code: str) -> np.ndarray:
    """What a component makes of [threads, WORDS]: operand registers [threads, registers]."""
    text = "\n".join(
        [
            f"#include <{TABLE}>",
            *(f"#include <humming/dequant/{half}_16.cuh>" for half in ("integer", "magnitude")),
            *dequantizer("codes", order, DataType.parse(code), struct),
            'extern "C" __global__ void look_up(const unsigned* in, unsigned* out) {',
            "  using codes::Dequant;",
            f"  humming::u32 words[{WORDS}];",
            f"  for (int i = 0; i < {WORDS}; ++i) words[i] = in[{WORDS} * threadIdx.x + i];",
            f"  out += {registers} * threadIdx.x;",
            *(
                f"  out[{register}] = Dequant::value<{register}>(words, Dequant::offset());"
                for register in range(registers)
            ),
            "}",
        ]
    )
    caps = plugins.capabilities("sim:h200")
    headers = include_closure(text, plugins.registry().headers)
    ptx = plugins.compiler_for(caps).compile(text, headers, "look_up", caps).data.decode()
    out = np.zeros((len(words), registers), np.uint32)
    simulate(ptx, [words, out], block=len(words), device="h200")
    return out


@pytest.mark.parametrize(
    ("code", "operand"),
    [
        (code, operand)
        for code in ("int4", "uint4", "float4e0m3")
        for operand in ("float8e4m3", "float8e5m2")
        # 9 is no number of two bits of mantissa.
        if represents(DataType.parse(operand), DataType.parse(code))
    ],
)
@pytest.mark.parametrize(
    ("slot", "placed"),
    [
        *(("dequant", weights(packed_bits)) for packed_bits in (4, 8)),
        *(("convert", tokens(packed_bits)) for packed_bits in (4, 8)),
    ],
    ids=["weights-4", "weights-8", "tokens-4", "tokens-8"],
)
def test_every_code_in_every_place(
    slot: str, placed: tuple[str, Places], code: str, operand: str, rng: np.random.Generator
) -> None:
    dtype, (order, places) = DataType.parse(code), placed
    (component,) = plugins.registry().components(slot, f"{dtype.kind}:{operand}")
    assert component.header == TABLE
    flat = [place for register in places for place in register]
    assert len(set(flat)) == len(flat) == SLOTS * len(places)
    # Thread (place, code): that code there, and elsewhere others at random.
    words = rng.integers(0, 1 << 32, (len(flat) << BITS, WORDS), np.uint32)
    for thread in range(len(words)):
        word, bit = flat[thread >> BITS]
        kept = words[thread, word] & np.uint32(~(15 << bit) & 0xFFFFFFFF)
        words[thread, word] = kept | np.uint32((thread & 15) << bit)
    found = looked_up(words, order, len(places), component.struct, code)
    for register, slots in enumerate(places):
        for place, (word, bit) in enumerate(slots):
            codes = words[:, word] >> bit & 15
            values = dtype.decode_table()[codes]
            bytes_found = found[:, register] >> (OPERAND_BITS * place) & 0xFF
            numbers = DataType.parse(operand).decode_table()[bytes_found]
            assert np.array_equal(numbers, values)
            assert np.array_equal(np.signbit(numbers), np.signbit(values)), "-0 stays -0"
