"""The comparison with a card, with the simulator itself in the place of the card."""

import importlib
import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import card as card_module
import composed_products
import conformance
import faulty_cards
import hopper_kernels as hk
import known_differences as known
import numpy as np
import pytest
import torch
from card import (
    Card,
    CardError,
    CardHangError,
    CardProcess,
    Launch,
    arguments_of,
    maps_in,
    moved,
    retargeted,
)
from conftest import kernel as kernel_text
from conftest import launch

from humming.hookspecs import Image

launch_shape = importlib.import_module("humming.devices.simulator.launch_shape")
runtime = importlib.import_module("humming.devices.simulator.runtime")
tensor_maps = importlib.import_module("humming.devices.simulator.tensor_maps")
accumulation = importlib.import_module("humming.devices.simulator.accumulation")

MMA = """
  .reg .b32 t, a<4>, b<2>, d<4>; .reg .b64 base, at;
  mov.u32 t, %laneid;
  ld.param.u64 base, [p0]; mad.wide.u32 at, t, 16, base;
  ld.global.v4.b32 {a0, a1, a2, a3}, [at];
  ld.param.u64 base, [p1]; mad.wide.u32 at, t, 8, base;
  ld.global.v2.b32 {b0, b1}, [at];
  mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {d0, d1, d2, d3}, {a0, a1, a2, a3}, {b0, b1},
    {0f00000000, 0f00000000, 0f00000000, 0f00000000};
  mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {d0, d1, d2, d3}, {a0, a1, a2, a3}, {b0, b1},
    {d0, d1, d2, d3};
  ld.param.u64 base, [p2]; mad.wide.u32 at, t, 16, base;
  st.global.v4.b32 [at], {d0, d1, d2, d3};
"""


class SimulatedCard:
    """Launches on copies of the memory, as `Card` does, in a simulator of its own.

    Args:
        by: by which share of their bound sums lie off.
        spoil: changes the memory after a launch.
    """

    name, driver_version, target, most_smem_bytes = "NVIDIA H200", 0, "sm_90a", 232448

    def __init__(self, by: float = 0.0, spoil: Any = None) -> None:
        self._by, self._spoil = by, spoil
        self._load, self._launch = runtime.SimulatorRuntime.load, runtime.SimulatedKernel.launch
        self.launches: list[Launch] = []

    def run(self, text: str, entry: str, places: Any, launch: Launch) -> list[np.ndarray]:
        self.launches.append(launch)
        options = launch_shape.Options()
        # Also by more than the simulator itself would.
        object.__setattr__(options, "sums", self._by)
        simulator = runtime.SimulatorRuntime(options)
        copies, homes = [], []
        for address, before in places:
            room = np.zeros(len(before) + 512, np.uint8)
            start = (address - room.ctypes.data) % 256
            copies.append(room[start : start + len(before)])
            homes.append(copies[-1].ctypes.data)
            simulator.register(homes[-1], len(before), "a copy")
        for place, (_, before) in enumerate(places):
            raw = before.tobytes()
            data = card_module.with_maps(raw, raw, places, homes, encoded)
            copies[place][:] = np.frombuffer(data, np.uint8)
        params = moved(launch.params, places, homes)
        params = card_module.with_maps(params, launch.params, places, homes, encoded)
        loaded = self._load(simulator, Image("ptx", text.encode()), entry, launch.smem_bytes)
        self._launch(loaded, launch.grid, launch.block, params, cluster=launch.cluster)
        found = [copy.copy() for copy in copies]
        if self._spoil is not None:
            self._spoil(found)
        return found


def encoded(*arguments: Any) -> bytes:
    """A map of the simulator's, of the driver's arguments."""
    kind, _, address, dims, strides, box, steps, interleave, swizzle, _, fill, corners = arguments
    data: bytes = tensor_maps.TensorMap(
        tensor_maps.TYPES[kind].name,
        address,
        tuple(dims),
        tuple(strides),
        tuple(box),
        tuple(steps),
        swizzle,
        interleave,
        fill,
        tuple(corners),
    ).encode()
    return data


def run_mma(card: Any, scale: float = 1.0, ptx: str = MMA) -> list[dict[str, Any]]:
    rng = np.random.default_rng(5)
    a = (scale * rng.normal(size=(32, 8))).astype(np.float16)
    b = rng.normal(size=(32, 4)).astype(np.float16)
    out = np.zeros((32, 4), np.float32)
    comparison = conformance.Comparison(card)
    with comparison:
        comparison.test = "tests/sim/test_x.py::test_mma"
        launch(kernel_text(ptx, 3), {"a": a, "b": b, "out": out})
    return comparison.rows


def test_a_launch_beyond_the_card_is_not_made() -> None:
    card = SimulatedCard()
    card.most_smem_bytes = 1000
    with conformance.Comparison(card) as comparison:
        launch(kernel_text("", 0), {}, smem_bytes=1001)
    assert [row["outcome"] for row in comparison.rows] == ["needs more than the card has"]
    assert card.launches == []


def test_what_is_equal_is_equal() -> None:
    (row,) = run_mma(SimulatedCard())
    assert row == {"test": "tests/sim/test_x.py::test_mma", "outcome": "equal"}


@pytest.mark.parametrize(
    ("by", "outcome"), [(0.9, "within the bound"), (-0.9, "within the bound"), (1.2, "beyond")]
)
def test_sums_are_held_against_their_bound(by: float, outcome: str) -> None:
    """Of both instructions: the second adds to what the first has left."""
    (row,) = run_mma(SimulatedCard(by))
    assert row["outcome"].startswith(outcome)
    assert row["share_of_the_bound"] == pytest.approx(abs(by), abs=0.1)


def test_other_words_are_held_against_nothing() -> None:
    """A word that no sum goes into must be equal, also where a kernel has sums."""

    def spoil(memories: list[np.ndarray]) -> None:
        memories[0][3] ^= 1

    (row,) = run_mma(SimulatedCard(spoil=spoil))
    assert row["outcome"] == "beyond the bound"
    integers = "mov.b32 %d0, 1;"
    assert conformance.kinds_of_sums(integers) == set()


def test_the_simulated_memory_is_as_the_simulator_left_it() -> None:
    """Moved sums are computed in the same memory, and leave no trace."""
    rng = np.random.default_rng(5)
    a, b = (rng.normal(size=(32, 2 * n)).astype(np.float16) for n in (4, 2))
    out, plain = np.zeros((32, 4), np.float32), np.zeros((32, 4), np.float32)
    launch(kernel_text(MMA, 3), {"a": a, "b": b, "out": plain})
    with conformance.Comparison(SimulatedCard(0.5)):
        launch(kernel_text(MMA, 3), {"a": a, "b": b, "out": out})
    np.testing.assert_array_equal(out, plain)


def test_sums_move_up_down_and_at_random(rng: np.random.Generator) -> None:
    a = rng.normal(size=(32, 8)).astype(np.float16)
    b = rng.normal(size=(32, 4)).astype(np.float16)
    found = {}
    for options in ((0.0, None), (1.0, None), (-1.0, None), (1.0, 3)):
        out = np.zeros((32, 4), np.float32)
        buffers = {"a": a, "b": b, "out": out}
        launch(kernel_text(MMA, 3), buffers, sums=options[0], sums_seed=options[1])
        found[options] = out
    exact = found[0.0, None]
    assert (found[1.0, None] > exact).all()
    assert (found[-1.0, None] < exact).all()
    mixed = found[1.0, 3]
    assert (mixed > exact).any()
    assert (mixed < exact).any()


def test_bounds_of_accumulations() -> None:
    """By hand: 2 products, so a block, with S = 11 * 2^-10."""
    a, b = np.array([[1.0, -2.0]]), np.array([[3.0], [4.0]]) * 2.0**-10
    size = 11 * 2.0**-10
    bound = float(accumulation.bound(a, b, 0.0, "f32", "f16")[0, 0])
    assert bound == pytest.approx(5 * 2.0**-23 * size)
    bound = float(accumulation.bound(a, b, 0.0, "f32", "e4m3")[0, 0])
    assert bound == pytest.approx(5 * 2.0**-13 * size)
    bound = float(accumulation.bound(a, b, 0.0, "f16", "f16")[0, 0])
    assert bound == pytest.approx((5 * 2.0**-23 + 2 * 2.0**-11) * size + 2.0**-24)
    bound = float(accumulation.bound(a, b, 0.0, "f64", "f64")[0, 0])
    assert bound == pytest.approx(6 * 2.0**-53 * size)
    total = np.array([[np.inf]])
    same = accumulation.Sums(1.0, None).moved(total, a * np.inf, b, 0.0, "f32", "f16")
    assert same == total


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {", {"f32"}),
        ("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {", {"f16"}),
        ("wgmma.mma_async.sync.aligned.m64n8k32.f16.e4m3.e5m2 {", {"f16"}),
        ("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {", set()),
        ("cvt.rn.f16x2.f32 r, a, b;", set()),
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {", {"f32"}),
        ("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {\ncvt.rn.bf16.f32", {"f32", "bf16"}),
        ("tcgen05.mma.cta_group::1.kind::f16 [", {"f32", "f16"}),
        ("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {", {"f64"}),
        ("wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {", {"f32", "f16"}),
        ("wmma.mma.sync.aligned.row.col.m16n16k16.s32.s8.s8.s32 {", set()),
        ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {\ncvt.rn.f16.f32 a", {"f32", "f16"}),
    ],
)  # fmt: skip
def test_types_of_sums_come_from_the_text(text: str, kinds: set[str]) -> None:
    assert conformance.kinds_of_sums(text) == kinds


def test_tensor_maps_are_made_for_the_copies(rng: np.random.Generator) -> None:
    """Wherever they lie, with the address of the copied array."""
    array = hk.placed(rng.integers(0, 256, (8, 64), dtype=np.uint8))
    encoded_map = hk.tensor_map(array, "uint8", (32, 4), swizzle=1)
    data = b"\1" * 64 + encoded_map.data + b"\2" * 8
    ((at, tensor),) = maps_in(data)
    assert (at, tensor.address, tensor.box) == (64, array.ctypes.data, (32, 4))
    place = (array.ctypes.data - 128, np.zeros(array.nbytes + 128, np.uint8))
    changed = card_module.with_maps(data, data, [place], [1 << 20], encoded)
    ((_, other),) = maps_in(changed)
    assert other.address == (1 << 20) + 128
    assert changed[:64] == data[:64]
    assert changed[-8:] == data[-8:]
    with pytest.raises(CardError, match="no allocation"):
        card_module.with_maps(data, data, [], [], encoded)
    assert maps_in(b"hummingT" + bytes(200)) == []


def test_a_kernel_with_a_tensor_map_is_compared(rng: np.random.Generator) -> None:
    """From `test_wgmma`: loads by maps, products and stores, against the simulated card."""
    import test_wgmma

    comparison = conformance.Comparison(SimulatedCard())
    with comparison:
        comparison.test = "pipeline"
        test_wgmma.test_warp_specialized_pipeline(rng, None)
    assert [row["outcome"] for row in comparison.rows] == ["equal"]
    assert any(maps_in(launch.params) for launch in comparison.card.launches)


def test_arguments_of_the_driver() -> None:
    tensor = tensor_maps.TensorMap(
        "bfloat16", 4096, (64, 8, 3), (128, 1024), (32, 2, 1), swizzle=2, fill=1
    )
    assert arguments_of(tensor, 8192) == (
        9, 3, 8192, [64, 8, 3], [128, 1024], [32, 2, 1], [1, 1, 1], 0, 2, 0, 1, [],
    )  # fmt: skip


def test_the_driver_gets_numbers_of_its_own_types() -> None:
    """`cuTensorMapEncodeTiled` as cuda-python has it, whose library is not there."""
    driver = pytest.importorskip("cuda.bindings.driver")
    card = object.__new__(Card)
    seen: list[Any] = []

    def encode(*arguments: Any) -> Any:
        seen.extend(arguments)
        return driver.CUresult.CUDA_SUCCESS, driver.CUtensorMap()

    names = ("cuuint64_t", "cuuint32_t", "CUtensorMapDataType", "CUtensorMapInterleave")
    names += ("CUtensorMapSwizzle", "CUtensorMapL2promotion", "CUtensorMapFloatOOBfill")
    own = {name: getattr(driver, name) for name in names}
    card._driver = SimpleNamespace(cuTensorMapEncodeTiled=encode, **own)
    tensor = tensor_maps.TensorMap("16u4_align16b", 4096, (256, 8), (128,), (128, 2), swizzle=3)
    assert len(card._encode(*arguments_of(tensor, 4096))) == tensor_maps.BYTES
    assert seen[0].name == "CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B"
    assert seen[8].name == "CU_TENSOR_MAP_SWIZZLE_128B"
    seen.clear()
    card._driver = SimpleNamespace(cuTensorMapEncodeIm2col=encode, **own)
    corners = ((-1, -2), (-3, -4))
    strides = (128, 1024, 8192)
    tensor = tensor_maps.TensorMap("uint16", 4096, (64, 8, 8, 2), strides, (8, 32), corners=corners)
    assert len(card._encode(*arguments_of(tensor, 4096))) == tensor_maps.BYTES
    assert seen[5:7] == [[-1, -3], [-2, -4]]
    assert [int(number) for number in seen[7:9]] == [8, 32]
    for number, each in enumerate(tensor_maps.TYPES):
        name = driver.CUtensorMapDataType(number).name.removeprefix("CU_TENSOR_MAP_DATA_TYPE_")
        assert name.lower() == each.name


def test_maps_are_left_out_of_the_comparison() -> None:
    first = tensor_maps.TensorMap("uint8", 4096, (64,), (), (32,)).encode()
    ours = np.frombuffer(first + b"\1\2", np.uint8)
    theirs = np.frombuffer(bytes(128) + b"\1\3", np.uint8)
    a, b = conformance.without_maps(ours, ours, theirs)
    assert np.flatnonzero(a != b).tolist() == [129]


def test_pointers_are_moved_and_numbers_are_not() -> None:
    places = [(1000, np.zeros(100, np.uint8)), (5000, np.zeros(8, np.uint8))]
    params = struct.pack("<4Q", 1000, 1099, 1100, 5004)
    assert struct.unpack("<4Q", moved(params, places, [70000, 80000])) == (
        70000, 70099, 1100, 80004,
    )  # fmt: skip


def test_targets_are_replaced() -> None:
    text = retargeted(".version 9.4\n.target sm_75\n.address_size 64", "sm_90a")
    assert text == ".version 9.0\n.target sm_90a\n.address_size 64"


@pytest.fixture
def card_process() -> Any:
    card = CardProcess(faulty_cards.FaultyCard)
    yield card
    card.close()


def test_a_card_that_a_kernel_has_spoiled_is_replaced(card_process: CardProcess) -> None:
    """What only that launch did wrong leaves it as it is."""
    launch = Launch((1, 1, 1), (32, 1, 1), b"", (1, 1, 1), 0)

    def uses(text: str) -> int:
        return int(card_process.run(text, "test", [], launch)[0][0])

    assert (card_process.name, card_process.driver_version) == ("a card", 7)
    assert uses("works") == 1
    with pytest.raises(CardError) as told:
        uses("INVALID_PTX")
    assert not told.value.assembled
    with pytest.raises(CardError, match="INVALID_VALUE"):
        uses("INVALID_VALUE")
    assert uses("works") == 4
    for text, error in (
        ("ERROR_ILLEGAL_ADDRESS", CardError),
        ("dies", CardError),
        ("hangs", CardHangError),
    ):
        with pytest.raises(error):
            uses(text)
        assert uses("works") == 1


def test_a_card_that_can_not_be_used_is_named() -> None:
    with pytest.raises(CardError, match="no driver"):
        CardProcess(faulty_cards.NoCard)


def test_a_process_that_is_not_there_any_more(card_process: CardProcess, monkeypatch: Any) -> None:
    """Whatever sending to it raises, the answer tells; one that does not end is left behind."""
    waited = []
    join = type(card_process._process).join

    def refuse(*_: Any) -> None:
        raise ConnectionResetError

    def note(process: Any, timeout: float | None = None) -> None:
        waited.append(timeout)
        join(process, timeout)

    monkeypatch.setattr(type(card_process._process), "join", note)
    card_process._process.kill()
    card_process._process.join(60)
    monkeypatch.setattr(type(card_process._pipe), "send", refuse)
    with pytest.raises(CardError, match="has died"):
        card_process.run("works", "test", [], Launch((1, 1, 1), (32, 1, 1), b"", (1, 1, 1), 0))
    assert None not in waited


# -- known differences ----------------------------------------------------------------------------


def memory(before: Any, ours: Any, theirs: Any) -> known.Memory:
    parts = (
        np.ascontiguousarray(part).view(np.uint8).reshape(-1) for part in (before, ours, theirs)
    )
    return known.Memory(*parts)


def test_payloads_of_nans_are_known_and_nothing_else_is() -> None:
    ours = np.array([0x7FFFFFFF, 0x3F800000], np.uint32)
    theirs = np.array([0xFF810000, 0x3F800000], np.uint32)
    name = "tests/sim/test_convert.py::test_half_to_float32_is_exact"
    assert "payload" in known.reason(name, [memory(ours, ours, theirs)])
    assert known.reason("another test", [memory(ours, ours, theirs)]) == ""
    for wrong in ([0x7F800000, 0x3F800000], [0x7FFFFFFF, 0x3F800001]):
        off = memory(ours, ours, np.array(wrong, np.uint32))
        assert known.reason(name, [off]) == ""


def test_the_number_of_a_warp_is_one_number() -> None:
    name = "test_control.py::test_special_registers_say_who_runs"
    ours = np.zeros((6, 48, 4), np.uint32)
    ours[:, 32:, 1] = 1
    theirs = ours.copy()
    theirs[..., 1] += 2
    assert known.reason(name, [memory(ours, ours, theirs)])
    theirs[0, 0, 1] = 9
    assert not known.reason(name, [memory(ours, ours, theirs)])
    theirs = ours.copy()
    theirs[0, 0, 0] = 1
    assert not known.reason(name, [memory(ours, ours, theirs)])


def test_the_start_of_shared_memory() -> None:
    name = "test_memory.py::test_dynamic_shared_memory_is_aligned_as_declared_and_no_better"
    ours = np.array([0x480, 4096], np.uint32)
    for start, size, fits in ((0x400, 4096, True), (0x440, 4096, False), (0x400, 0, False)):
        theirs = np.array([start, size], np.uint32)
        assert bool(known.reason(name, [memory(ours, ours, theirs)])) == fits


def test_approximations_are_close() -> None:
    name = "test_opcodes.py::test_functions_of_one_operand[sin]"
    ours = np.array([0.5, np.nan, 1.0], np.float32)
    near = np.array([0.5 + 2.0**-21, np.nan, 1.0], np.float32)
    assert known.reason(name, [memory(ours, ours, near)])
    for wrong in ([0.5 + 2.0**-18, 0, 1.0], [0.5, 2.0, 1.0], [0.5, np.nan, np.inf]):
        assert not known.reason(name, [memory(ours, ours, np.array(wrong, np.float32))])


def test_the_systems_part_of_shared_memory() -> None:
    name = "test_scalar_forms.py::test_special_registers_of_memory_and_time"
    ours = np.array([1792, 768, 0, 1024, 0, 0, 1024, 0], np.uint32)
    theirs = np.array([2048, 1024, 0, 1024, 77, 5, 1024, 0], np.uint32)
    assert known.reason(name, [memory(ours, ours, theirs)])
    theirs[1] = 512
    assert not known.reason(name, [memory(ours, ours, theirs)])


@pytest.mark.parametrize(
    ("steps", "end", "possible"),
    [
        ([(1, 2), (2, 5)], 5, True),
        ([(2, 5), (1, 2)], 5, True),
        ([(1, 2), (3, 5)], 5, False),
        ([(1, 2), (1, 5)], 5, False),
        ([(1, 1), (1, 2), (2, 1)], 1, True),
        ([(1, 2), (4, 4)], 2, False),
        ([(1, 2)], 1, False),
        ([], 1, True),
    ],
)
def test_orders_of_turns(steps: list[tuple[int, int]], end: int, possible: bool) -> None:
    assert known.in_some_order(1, end, steps) == possible


@pytest.mark.parametrize("operation", ["add", "exch", "inc", "cas", "xor"])
def test_atomics_may_take_turns_in_another_order(rng: np.random.Generator, operation: str) -> None:
    from test_memory import scalar_rounds

    before = rng.integers(0, 12, (64, 2), dtype=np.uint32)
    after, value = before.copy(), 7
    for thread in rng.permutation(64):
        after[thread, 0] = value
        v, w = (int(x) for x in before[thread])
        value = scalar_rounds(operation, value, [v], [w])
    cell = memory(np.uint32([7]), np.uint32([0]), np.uint32([value]))
    name = f"test_memory.py::test_atomic_operations[{operation}-global]"
    assert known.reason(name, [memory(before, before, after), cell])
    after[5, 0] += 100
    assert not known.reason(name, [memory(before, before, after), cell])


# -- products and the report ----------------------------------------------------------------------


def test_products_are_of_every_format() -> None:
    rows = composed_products.rows_for("NVIDIA H200")
    assert rows == ["t4", "a100", "h200"]
    assert composed_products.rows_for("no card") == ["t4", "a100"]
    found = list(composed_products.cases(rows, np.random.default_rng(0)))
    for row in rows:
        weights = {case.problem.weight.name for case in found if case.row == row}
        assert len(weights) >= len(composed_products.FORMATS)
    assert any(case.problem.bias for case in found)
    assert {case.problem.out_dtype.name for case in found} == {"float16", "bfloat16", "float32"}


def test_products_are_judged_by_exact_ones() -> None:
    comparison = conformance.Comparison(SimulatedCard(0.5))
    with comparison:
        composed_products.compare_products(comparison, seed=1, only=2)
    assert [row["outcome"] for row in comparison.rows] == ["right product"] * 2


def test_a_wrong_product_is_told() -> None:
    out = torch.tensor([[1.0, 2.0]])
    exact = torch.tensor([[1.0, 2.5]], dtype=torch.float64)
    bound = torch.full((1, 2), 0.25, dtype=torch.float64)
    judge = composed_products.Exact(out.data_ptr(), out.dtype, exact, bound)
    data = out.numpy().copy()
    good = np.array([[1.0, 2.5]], np.float32)
    assert judge(out.data_ptr(), memory(data, good, good)) == ""
    told = judge(out.data_ptr(), memory(data, good, data))
    assert told is not None
    assert told.startswith("the card: 1 outputs beyond the bound, the first at [0, 1]")
    assert judge(0, memory(data, data, good)) is None
    assert judge(0, memory(data, good, good)) == ""


def test_a_product_of_a_test_is_judged_by_the_bound_that_the_test_asks_for() -> None:
    import test_kernels

    def run(card: SimulatedCard) -> str:
        comparison = conformance.Comparison(card)
        with comparison:
            torch.manual_seed(3)
            test_kernels.Product("int4_g128 x fp16", "a100", 3, 64, 256).check()
        (found,) = comparison.rows
        return str(found["outcome"])

    def spoils(size: int) -> SimulatedCard:
        def spoil(memories: list[np.ndarray]) -> None:
            next(memory for memory in memories if len(memory) == size)[:64] ^= 0x55

        return SimulatedCard(spoil=spoil)

    assert run(SimulatedCard(0.3)) == "right product"
    assert run(spoils(2 * 3 * 64)) == "wrong product"
    assert run(spoils(2 * 3 * 256)) == "beyond the bound"  # an input


def row(outcome: str, **more: Any) -> dict[str, Any]:
    return {"test": "tests/sim/test_a.py::test_b", "outcome": outcome, **more}


@pytest.mark.parametrize("outcome", conformance.FAILURES)
def test_failures_decide_the_exit_status(outcome: str) -> None:
    comparison = conformance.Comparison(SimulatedCard())
    comparison.rows = [row("equal"), row("within the bound", share_of_the_bound=0.5)]
    found = conformance.report(comparison, 0, 1.0)
    assert conformance.status_of(found) == 0
    assert found["largest_share_of_a_bound"] == 0.5
    assert conformance.status_of(conformance.report(comparison, 1, 1.0)) == 1
    comparison.rows.append(row(outcome))
    found = conformance.report(comparison, 0, 1.0)
    assert conformance.status_of(found) == 1
    assert found["failures"] == [row(outcome)]
    comparison.rows = []
    assert conformance.status_of(conformance.report(comparison, 0, 1.0)) == 1


def test_the_report_says_what_it_was_made_with_and_what_was_rejected() -> None:
    comparison = conformance.Comparison(SimulatedCard())
    comparison.rows = [row("rejected by the assembler")]
    found = conformance.report(comparison, 0, 1.0)
    assert found["environment"]["versions"]["numpy"] == np.__version__
    assert found["rejected_by_test_file"] == {"test_a.py": ["tests/sim/test_a.py::test_b"]}


def test_a_run_from_end_to_end(tmp_path: Path) -> None:
    test = tmp_path / "test_sum.py"
    test.write_text(
        "import numpy as np\n"
        "from conftest import kernel, launch\n"
        "def test_add():\n"
        "    out = np.zeros(1, np.uint32)\n"
        "    body = '.reg .b64 at; ld.param.u64 at, [p0]; st.global.u32 [at], 7;'\n"
        "    launch(kernel(body, 1), {'out': out}, block=1)\n"
    )
    output = tmp_path / "report.json"
    arguments = ["--no-products", "--output", str(output), str(test)]
    assert conformance.main(arguments, SimulatedCard()) == 0
    assert json.loads(output.read_text())["outcomes"] == {"equal": 1}

    def spoil(memories: list[np.ndarray]) -> None:
        memories[0][0] += 1

    assert conformance.main(arguments, SimulatedCard(spoil=spoil)) == 1
    (failure,) = json.loads(output.read_text())["failures"]
    assert failure["examples"] == [{"word": "0", "simulator": "0x00000007", "card": "0x00000008"}]


def test_parts_are_joined() -> None:
    about = {"name": "a card", "driver_version": 13000, "target": "sm_90a"}
    parts = [
        {"rows": [row("equal")], "status": 0, "card": about},
        {"rows": [row("differs")], "status": 5, "card": about},  # no tests in this part
    ]
    comparison, status = conformance.joined(parts)
    assert (status, len(comparison.rows), comparison.card.name) == (0, 2, "a card")
    assert conformance.joined([*parts, None])[1] == 1
    assert conformance.joined([parts[0], {**parts[0], "status": 1}])[1] == 1
    assert conformance.status_of(conformance.report(comparison, status, 1.0)) == 1


def test_parts_have_every_test_once(tmp_path: Path) -> None:
    test = tmp_path / "test_three.py"
    test.write_text("def test_a(): pass\ndef test_b(): pass\ndef test_c(): pass\n")
    seen: list[str] = []
    for part in range(2):
        comparison = conformance.Comparison(SimulatedCard(), (part, 2))
        collected: list[Any] = [f"{part}", *"abc"][1:]
        comparison.pytest_collection_modifyitems(collected)
        seen += collected
    assert sorted(seen) == ["a", "b", "c"]
    output = tmp_path / "part.json"
    arguments = ["--no-products", "--shard", "1/2", "--output", str(output), str(test)]
    assert conformance.main(arguments, SimulatedCard()) == 0
    assert json.loads(output.read_text())["card"]["target"] == "sm_90a"


def test_a_rejected_kernel_is_counted() -> None:
    class Refusing(SimulatedCard):
        def run(self, *_: Any) -> list[np.ndarray]:
            raise CardError("CUDA_ERROR_INVALID_PTX", assembled=False)

    (found,) = run_mma(Refusing())
    assert found["outcome"] == "rejected by the assembler"


def test_what_goes_wrong_in_the_comparison_is_a_failure_of_its_launch() -> None:
    class Broken(SimulatedCard):
        def run(self, *_: Any) -> list[np.ndarray]:
            raise ValueError("no such enumeration")

    (found,) = run_mma(Broken())
    assert found["outcome"] == "card fault"
    assert "no such enumeration" in found["error"]
