"""Lowerings: exactness from values, and what each rule admits and refuses, on small devices."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from humming import dtypes
from humming.capability import INT32, Absence, DeviceCapabilities, MmaRow
from humming.dtypes import NARROW, DataType
from humming.lowering import (
    ACCUMULATOR,
    BRICK,
    EPILOGUE,
    INSTRUCTION,
    K_MAJOR,
    OPERAND,
    enumerate_lowerings,
    left_out_of_products,
    represents,
    represents_differences,
    represents_products,
    scale_step,
)
from humming.problem import GemmProblem

WIDE = [dtypes.float16, dtypes.bfloat16]


def row(a, b=None, accumulator=None, shape=(16, 8, 16), instruction="mma_sync", **fields):
    """A row of a made-up device; types by name."""
    a, b = DataType.parse(a), DataType.parse(b or a)
    summed = INT32 if a.is_integer else DataType.parse(accumulator or "float32")
    return MmaRow(instruction, shape, a, b, summed, rate_class="r", rate=1024, **fields)


def device(*rows, movers=("cp_async", "plain"), absent=()):
    return DeviceCapabilities(
        name="toy", vendor="v", family="f", arch="x_1", movers=movers, mma=rows, absent=absent
    )


def lowered(problem, *rows, n=256, k=1024, movers=("plain",), absent=(), **overrides):
    """Lowerings and rejections of a named problem on a device with these rows."""
    asked = GemmProblem.parse(problem, n, k, **overrides)
    return enumerate_lowerings(asked, device(*rows, movers=movers, absent=absent))


def why(rejections):
    return " | ".join(rejection.reason for rejection in rejections)


# -- exactness ------------------------------------------------------------------------------------


def survives(values, wide):
    """Whether finite values are unchanged by a 16-bit type, by rounding in numpy or in bits."""
    single = values.astype(np.float32)
    if wide == dtypes.float16:
        with np.errstate(over="ignore"):
            rounded = single.astype(np.float16).astype(np.float64)
    else:
        rounded = (single.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return bool((rounded == values).all())


@pytest.mark.parametrize("wide", WIDE, ids=str)
@pytest.mark.parametrize("narrow", NARROW, ids=str)
def test_narrow_in_16_bits_agrees_with_rounding(narrow, wide):
    table = narrow.decode_table()
    assert represents(wide, narrow) == survives(table[np.isfinite(table)], wide)


@pytest.mark.parametrize("operand", NARROW, ids=str)
def test_narrow_in_narrow_agrees_with_sets_of_values(operand):
    held = {float(value) for value in operand.decode_table()}
    for dtype in NARROW:
        table = dtype.decode_table()
        wanted = {float(value) for value in table if np.isfinite(value)}
        specials = len(table) > np.isfinite(table).sum() and operand.specials == "none"
        assert represents(operand, dtype) == (wanted <= held and not specials), dtype


@pytest.mark.parametrize(
    ("operand", "dtype", "exact"),
    [
        ("int8", "uint8", False),
        ("float8e4m3", "int5", True),
        ("float8e4m3", "uint6", False),
        ("int8", "float4e2m1", False),
        ("int8", "float4e0m3", True),
        ("float8e5m2", "float4e2m1", True),
        ("float8e4m3", "float8e3m4", False),
        ("float16", "float8e5m2", True),
        ("float16", "bfloat16", False),
        ("bfloat16", "float16", False),
        ("float32", "bfloat16", True),
        ("int8", "float16", False),
    ],
)
def test_known_pairs(operand, dtype, exact):
    assert represents(DataType.parse(operand), DataType.parse(dtype)) is exact


@pytest.mark.parametrize(
    ("operand", "dtype", "exact"),
    [
        ("int8", "uint8", False),  # -255 to 255 is 9 bits
        ("int8", "uint7", True),
        ("bfloat16", "uint8", True),
        ("float8e4m3", "uint4", True),
        ("float8e4m3", "uint5", False),
    ],
)
def test_codes_minus_zero_points(operand, dtype, exact):
    assert represents_differences(DataType.parse(operand), DataType.parse(dtype)) is exact


@pytest.mark.parametrize(
    ("dtype", "scale", "exact"),
    [
        ("float4e2m1", "float8e4m3", True),
        ("float4e2m1", "float8e8m0", False),  # 6 * 2^127 is beyond
        ("float8e4m3", "float8e4m3", True),
        ("int8", "float8e4m3", False),
        ("int4", "float16", False),
    ],
)
def test_weights_times_scales_in_bfloat16(dtype, scale, exact):
    pair = DataType.parse(dtype), DataType.parse(scale)
    assert represents_products(dtypes.bfloat16, *pair) is exact


@pytest.mark.parametrize(
    ("dtype", "left"),
    [("float4e2m1", 2), ("int4", 3), ("float6e2m3", 2), ("float6e3m2", None), ("float8e4m3", None)],
)
def test_powers_of_two_that_scales_leave_out_in_bfloat16(dtype, left):
    """Of every product with scales of all of float's range, no bit is lost and none overflows."""
    codes, scale = DataType.parse(dtype), DataType.parse("float8e8m0")
    found = left_out_of_products(dtypes.bfloat16, codes, scale)
    assert found == left
    if left is None:
        return
    scales = scale.decode_table()
    products = np.outer(codes.decode_table(), scales[np.isfinite(scales)]) / 2.0**left
    made = torch.from_numpy(products).to(torch.bfloat16).double().numpy()
    assert np.array_equal(made, products)


@pytest.mark.parametrize(
    ("text", "short", "precise"),
    [
        ("fp8 x fp8", 128, 0),
        ("fp8_block128 x fp8_g128", 128, 128),
        ("mxfp8 x mxfp8", 32, 32),
        ("float8e4m3_g512 x fp8", 128, 512),
    ],
)
def test_sums_that_keep_few_bits_do_not_run_over_all_of_k(text, short, precise):
    problem = GemmProblem.parse(text, 1024, 1024)
    for bits, wanted in ((13, short), (None, precise)):
        found, _ = lowered(text, replace(row("float8e4m3", shape=(64, 8, 32)), sum_bits=bits))
        assert {lowering.partial_k(problem) for lowering in found} == {wanted}


# -- operands -------------------------------------------------------------------------------------


def test_weights_that_the_operand_cannot_hold_are_refused():
    found, rejected = lowered("uint8 x int8", row("int8", shape=(16, 8, 32)))
    assert not found
    assert "uint8 weights are not exact in int8" in why(rejected)


def test_activations_are_never_narrowed():
    found, rejected = lowered("int4 x bf16", row("float8e4m3"), row("float16"))
    assert not found
    assert "bfloat16 activations are not exact in float8e4m3" in why(rejected)
    assert "bfloat16 activations are not exact in float16" in why(rejected)


def test_activations_are_widened_only_without_a_row_that_takes_them():
    wide, fp8 = row("float16"), row("float8e4m3", shape=(16, 8, 32))
    found, _ = lowered("fp8 x fp8", wide)
    assert found[0].activation_operand == "float16"
    assert "activations widened from float8e4m3 to float16" in found[0].notes
    both, rejected = lowered("fp8 x fp8", wide, fp8)
    assert {option.activation_operand.name for option in both} == {"float8e4m3"}
    assert "would widen float8e4m3 activations" in why(rejected)


def test_a_device_without_an_instruction_for_the_problem_has_no_lowering():
    found, rejected = lowered("int4 x bf16", row("int8", shape=(16, 8, 32)))
    assert not found
    assert rejected


def test_what_the_device_says_of_an_absence_is_the_reason():
    absence = Absence("tcgen05", (dtypes.int8,), "there is no kind i8")
    rows = row("float8e4m3", instruction="tcgen05", shape=(128, 16, 32)), row("int8")
    _, rejected = lowered("int8 x int8", *rows, absent=(absence,))
    assert ("tcgen05 s8 x s8", "there is no kind i8") in rejected
    _, rejected = lowered("int8 x int8", *rows)
    assert ("tcgen05 s8 x s8", "takes no int8 weights with int8 activations") in rejected


# -- rows that need permission --------------------------------------------------------------------


def test_emulated_rows_are_refused_with_their_note():
    emulated = row("int4", shape=(16, 8, 64), emulated=True, note="190 instructions")
    found, rejected = lowered("w4a4 int4", emulated)
    assert not found
    assert "emulated: 190 instructions" in why(rejected)


def test_undocumented_rows_need_the_users_consent():
    hidden = row("float8e3m4", shape=(16, 8, 32), undocumented=True)
    found, rejected = lowered("e3m4", hidden)
    assert not found
    assert "allow_undocumented=True" in why(rejected)
    (consented,), _ = lowered("e3m4", hidden, allow_undocumented=True)
    assert "undocumented" in consented.notes


def test_sums_in_float16_need_permission():
    halves = row("float16", accumulator="float16")
    found, rejected = lowered("int4 x fp16", halves)
    assert not found
    assert "fp16_accumulation=True" in why(rejected)
    assert lowered("int4 x fp16", halves, fp16_accumulation=True)[0]


def test_legacy_rows_and_compiler_gates_are_noted():
    (found,), _ = lowered("int8 x int8", row("int8", legacy=True, min_compiler=(13, 4)))
    assert found.notes == ("legacy", "needs compiler 13.4 or later")


# -- where scales enter ---------------------------------------------------------------------------


def sites(found):
    return [option.scale_site for option in found]


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        ("int4 x fp16", [EPILOGUE]),
        ("int4_tensor x fp16", [EPILOGUE]),
        ("int4_g128 x fp16", [ACCUMULATOR, OPERAND]),
        ("int4_g128_sfp32 x fp16", [ACCUMULATOR]),
        ("int4_g128_sbf16 x fp16", [ACCUMULATOR]),
        ("fp8_block128 x fp16", [ACCUMULATOR]),
        ("nvfp4 x fp16", [ACCUMULATOR, OPERAND]),
        ("mxfp4 x fp16", [ACCUMULATOR]),
    ],
)
def test_sites_with_16_bit_operands(problem, expected):
    found, _ = lowered(problem, row("float16"))
    assert sites(found) == expected


def test_group_scales_of_integer_operands_enter_at_the_accumulator():
    found, rejected = lowered("w4a8 int8", row("int8", shape=(16, 8, 32)))
    assert sites(found) == [ACCUMULATOR]
    assert "products would round to int8" in why(rejected)


def test_activation_groups_need_the_accumulator():
    found, rejected = lowered("fp8 x fp8_g128", row("float8e4m3", shape=(16, 8, 32)))
    assert sites(found) == [ACCUMULATOR]
    assert "weights have no scales per group" in why(rejected)


def test_groups_that_the_instruction_steps_over_are_refused():
    found, rejected = lowered("nvfp4 x nvfp4", row("float8e4m3", shape=(16, 8, 32)))
    assert not found
    assert "a scale per 16 values of K" in why(rejected)


def test_rounding_by_scales_in_the_operand_is_said_and_exact_products_are_not():
    found, _ = lowered("int4_g128 x fp16", row("float16"))
    assert "weight times scale rounds to float16" in found[1].notes
    found, _ = lowered("nvfp4 x fp16", row("float16"))
    assert not found[1].notes


@pytest.mark.parametrize(
    ("problem", "roundings"),
    [
        ("int4_g128 x fp16", {ACCUMULATOR: 0, OPERAND: 1}),
        ("nvfp4 x fp16", {ACCUMULATOR: 0, OPERAND: 0}),
        ("uint4_g128_fzp x fp16", {ACCUMULATOR: 1, OPERAND: 2}),
        ("uint4_g128_zp_se4m3 x fp16", {ACCUMULATOR: 0, OPERAND: 0}),
    ],
)
def test_roundings_of_operands_are_counted(problem, roundings):
    found, _ = lowered(problem, row("float16"))
    asked = GemmProblem.parse(problem, 256, 1024)
    assert {x.scale_site: x.operand_roundings(asked) for x in found} == roundings


def test_the_smaller_group_of_the_two_sides_sets_the_step():
    problem = GemmProblem.parse("int4_g96 x fp8_g128", 256, 1024)
    assert scale_step(problem) == 32


# -- zero points ----------------------------------------------------------------------------------


def test_integer_zero_points_must_be_subtractable_exactly():
    found, rejected = lowered("uint8_zp x int8", row("int8", "int8", shape=(16, 8, 32)))
    assert not found
    assert "not exact in int8" in why(rejected)
    assert lowered("uint8_zp x bf16", row("bfloat16"))[0]
    found, rejected = lowered("uint8_zp x int8", row("uint8", "int8", shape=(16, 8, 32)))
    assert not found
    assert "uint8 minus its zero point is not exact in uint8" in why(rejected)


def test_float_zero_points_need_an_operand_of_their_type():
    found, _ = lowered("uint4_g64_fzp x fp16", row("float16"))
    assert found
    assert all("weight minus zero point rounds to float16" in option.notes for option in found)
    found, rejected = lowered("uint4_g64_fzp_sbf16 x fp16", row("float16"))
    assert not found
    assert "bfloat16 zero points cannot be subtracted in float16" in why(rejected)


def test_zero_points_of_activations_must_not_change_with_k():
    found, _ = lowered("int8 x int8_asym", row("int8", shape=(16, 8, 32)))
    assert found
    found, rejected = lowered("int8 x int8_g64_asym", row("int8", shape=(16, 8, 32)))
    assert not found
    assert "zero points of groups of activations" in why(rejected)


def test_rows_that_do_the_same_in_more_instructions_are_left_out():
    rows = row("int8", shape=(16, 8, 32)), row("int8", shape=(16, 8, 16))
    found, rejected = lowered("int8 x int8", *rows, row("int8", shape=(8, 8, 16)))
    assert {option.mma.shape for option in found} == {(16, 8, 32)}
    assert "m16n8k32 s8 x s8 -> s32 does the same in fewer instructions" in why(rejected)


def test_sums_that_may_leave_int32_are_refused():
    eight_bits = row("int8", shape=(16, 8, 32))
    assert lowered("int8 x int8", eight_bits, k=131071)[0]
    found, rejected = lowered("int8 x int8", eight_bits, k=131072)
    assert not found
    assert "may leave int32" in why(rejected)
    assert lowered("int8_g128 x int8", eight_bits, k=1 << 20)[0]


# -- block-scaled instructions --------------------------------------------------------------------


def scaled(a, b, scale, group, **fields):
    fields = {"instruction": "mma_sync_block_scaled", "shape": (16, 8, 64)} | fields
    return row(a, b, block_scale=((DataType.parse(scale), group),), **fields)


def test_block_scales_of_the_instructions_kind_go_into_it():
    (found,), _ = lowered("nvfp4 x nvfp4", scaled("e2m1", "e2m1", "ue4m3", 16))
    assert (found.scale_site, found.layout, found.operand_bits) == (INSTRUCTION, BRICK, 4)
    assert not found.notes


@pytest.mark.parametrize(("scale", "group"), [("ue8m0", 16), ("ue8m0", 32), ("ue4m3", 32)])
def test_block_scales_of_another_kind_are_refused(scale, group):
    found, rejected = lowered("nvfp4 x nvfp4", scaled("e2m1", "e2m1", scale, group))
    assert not found
    assert "weight scales are float8e4m3 per 16" in why(rejected)


def test_a_side_without_block_scales_brings_ones():
    (found,), _ = lowered("mxfp4 x fp8", scaled("e2m1", "e4m3", "ue8m0", 32, shape=(16, 8, 32)))
    assert found.scale_site == INSTRUCTION
    assert any("activation block scales are one" in note for note in found.notes)
    assert found.operand_bits == 8


def test_operands_of_shared_memory_alone_are_packed_k_major():
    sites = {"instruction": "tcgen05", "shape": (128, 16, 64)}
    both = scaled("e2m1", "e2m1", "ue4m3", 16, a_sites=("shared", "tensor_memory"), **sites)
    (found,), _ = lowered("nvfp4 x nvfp4", both)
    assert found.layout == K_MAJOR
    problem = GemmProblem.parse("nvfp4 x nvfp4", 256, 1024)
    assert "dequant" not in {needed.slot for needed in found.requirements(problem)}
    # Where weights are dequantized to the operand they pass through registers: bricks.
    wider = scaled("e4m3", "e4m3", "ue8m0", 32, a_sites=("shared", "tensor_memory"), **sites)
    (found,), _ = lowered("mxfp4 x mxfp8", wider)
    assert found.layout == BRICK


# -- movers and components ------------------------------------------------------------------------


def test_each_mover_of_the_device_gives_a_lowering_in_its_order():
    movers = ("bulk", "cp_async", "plain")
    found, _ = lowered("int4 x fp16", row("float16"), movers=movers)
    assert tuple(option.mover for option in found) == movers


def test_names_tell_lowerings_apart():
    rows = row("float16"), row("float16", shape=(16, 16, 8)), row("bfloat16")
    found, _ = lowered("int4_g128 x fp16", *rows, movers=("tma", "plain"))
    assert len({option.name for option in found}) == len(found) == 8


def test_requirements_are_the_keys_of_the_components():
    (found,), _ = lowered("uint4_zp x bf16", row("bfloat16"), movers=("cp_async",))
    problem = GemmProblem.parse("uint4_zp x bf16", 256, 1024)
    assert {str(needed) for needed in found.requirements(problem)} == {
        "mover cp_async",
        "mma mma_sync:m16n8k16:bfloat16:bfloat16:float32",
        "dequant uint-zero:bfloat16",
        "scale float16",
        "token_scale float32",
        "tokens direct",
        "mainloop mma_sync",
        "epilogue tile",
    }


def test_widening_and_experts_need_components_of_their_own():
    (found,), _ = lowered("fp8 x fp8", row("float16"))
    problem = GemmProblem.parse("fp8 x fp8", 256, 1024, experts=8)
    needed = {str(requirement) for requirement in found.requirements(problem)}
    assert {"tokens widened", "convert float:float16", "scheduler experts"} <= needed


@pytest.mark.parametrize(
    ("operand", "shape", "bits"),
    [
        ("float16", (16, 8, 8), 16),
        ("float8e4m3", (16, 8, 32), 8),
        ("int4", (16, 8, 32), 4),
        ("int4", (16, 8, 64), 4),
        ("float4e2m1", (16, 8, 32), 8),  # a byte each without block scales
        ("float6e3m2", (16, 8, 32), 8),
    ],
)
def test_operand_width_in_registers(operand, shape, bits):
    activation = operand if DataType.parse(operand).is_narrow else "fp16"
    found, _ = lowered(f"int2 x {activation}", row(operand, shape=shape))
    assert {option.operand_bits for option in found} == {bits}
