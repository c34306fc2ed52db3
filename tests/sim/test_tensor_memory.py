"""Tensor memory: allocation, loads, stores and copies (PTX ISA 9.7.16.7-9)."""

import importlib
from typing import Any

import numpy as np
import pytest
import tensor_kernels as tk

LANE = np.arange(32)
HEAD = """.version 9.4
.target {target}
.address_size 64
.visible .entry test(.param .u64 p0, .param .u64 p1) {{
  .shared .align 8 .b8 place[8];
  .reg .b32 t, warp, s, tmem, own, i; .reg .b64 from, to, at; .reg .pred first;
  .reg .b32 r<129>;
  mov.u32 t, %tid.x; shr.u32 warp, t, 5; setp.eq.u32 first, warp, 0;
  mov.u32 s, place; ld.param.u64 from, [p0]; ld.param.u64 to, [p1];
  @!first bra allocated;
  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [s], {columns};
allocated:
  tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
  ld.shared.u32 tmem, [s];
  shl.b32 own, warp, 21; add.u32 own, own, tmem;
"""
TAIL = """
  tcgen05.fence::before_thread_sync; bar.sync 0;
  @!first bra end;
  tcgen05.dealloc.cta_group::1.sync.aligned.b32 tmem, {columns};
end:
  ret;
}}
"""


def run(body: str, given: np.ndarray, out: np.ndarray, target: str = "sm_100a", **more: Any) -> Any:
    """Runs a body of PTX with 128 threads; `from` and `to` are the addresses of both arrays."""
    columns = more.pop("columns", 128)
    text = (HEAD + body.replace("{", "{{").replace("}", "}}") + TAIL).format(
        target=target, columns=columns
    )
    tk.launch(text, {"given": given, "out": out}, ["given", "out"], **more)
    return out


def vector(first: int, count: int) -> str:
    return "{" + ", ".join(f"r{first + i}" for i in range(count)) + "}"


def filling(columns: int) -> str:
    """PTX that writes [128, columns] numbers to tensor memory, a lane for each thread."""
    loads = "".join(f"ld.global.u32 r{i}, [at+{4 * i}];" for i in range(columns))
    return f"""
      mad.wide.u32 at, t, {4 * columns}, from;
      {loads}
      tcgen05.st.sync.aligned.32x32b.x{columns}.b32 [own], {vector(0, columns)};
      tcgen05.wait::st.sync.aligned;
    """


def writing(registers: int) -> str:
    """PTX that writes the registers of each thread out, [128, registers]."""
    stores = "".join(f"st.global.u32 [at+{4 * i}], r{i};" for i in range(registers))
    return f"tcgen05.wait::ld.sync.aligned; mad.wide.u32 at, t, {4 * registers}, to; {stores}"


def positions(shape: str, register: int) -> tuple[np.ndarray, np.ndarray]:
    """Lane and column of a register in each thread of a warp (9.7.16.2.3.1)."""
    if shape == "32x32b":
        return LANE, np.full(32, register)
    if shape == "16x32bx2":
        return LANE % 16, register + 40 * (LANE // 16)
    if shape == "16x64b":
        return LANE // 4 + 8 * (LANE % 2), LANE // 2 % 2 + 2 * register
    if shape == "16x128b":
        return LANE // 4 + 8 * (register % 2), LANE % 4 + 4 * (register // 2)
    place, repeat = register % 4, register // 4
    return LANE // 4 + 8 * (place // 2), 2 * (LANE % 4) + place % 2 + 8 * repeat


SHAPES = [
    ("32x32b", 1, 1),
    ("32x32b", 32, 32),
    ("16x64b", 1, 1),
    ("16x64b", 16, 16),
    ("16x128b", 1, 2),
    ("16x128b", 8, 16),
    ("16x256b", 1, 4),
    ("16x256b", 4, 16),
    ("16x32bx2", 8, 8),
]


@pytest.mark.parametrize(
    ("shape", "number", "registers", "upper"),
    [
        (*shape, upper)
        for shape in SHAPES
        for upper in (0, 16)
        if not (shape[0][0] == "3" and upper)
    ],
)
def test_loads(rng: Any, shape: str, number: int, registers: int, upper: int) -> None:
    given = rng.integers(0, 2**32, (128, 64), dtype=np.uint32)
    split = ", 40" if shape == "16x32bx2" else ""
    body = f"""{filling(64)}
      add.u32 i, own, {upper << 16};
      tcgen05.ld.sync.aligned.{shape}.x{number}.b32 {vector(0, registers)}, [i]{split};
      {writing(registers)}
    """
    out = run(body, given, np.zeros((128, registers), np.uint32))
    for warp in range(4):
        for register in range(registers):
            lane, column = positions(shape, register)
            want = given[32 * warp + upper + lane, column]
            assert (out[32 * warp : 32 * warp + 32, register] == want).all()


@pytest.mark.parametrize(
    ("shape", "number", "registers"), [shape for shape in SHAPES if shape[2] <= 28]
)
def test_stores_are_the_reverse(rng: Any, shape: str, number: int, registers: int) -> None:
    start = rng.integers(0, 2**32, (128, 64), dtype=np.uint32)
    split = " 40," if shape == "16x32bx2" else ""
    body = f"""{filling(64)}
      mov.u32 i, 77; mad.lo.u32 i, t, 1000, i;
      {"".join(f"add.u32 r{100 + k}, i, {k};" for k in range(registers))}
      tcgen05.st.sync.aligned.{shape}.x{number}.b32 [own],{split} {vector(100, registers)};
      tcgen05.wait::st.sync.aligned;
      tcgen05.ld.sync.aligned.32x32b.x64.b32 {vector(0, 64)}, [own];
      {writing(64)}
    """
    out = run(body, start, np.zeros((128, 64), np.uint32))
    want = start.copy()
    for warp in range(4):
        for register in range(registers):
            lane, column = positions(shape, register)
            thread = 32 * warp + LANE
            want[32 * warp + lane, column] = 77 + 1000 * thread + register
    assert (out == want).all()


LOAD = f"tcgen05.ld.sync.aligned.32x32b.x4.b32 {vector(0, 4)}, [own];"


def _loaded(between: str, behind: str = "") -> np.ndarray:
    body = f"{filling(4)} {LOAD} {between} tcgen05.wait::ld.sync.aligned; {behind}"
    given = np.arange(512, dtype=np.uint32).reshape(128, 4)
    return run(body + writing(4), given, np.zeros((128, 4), np.uint32))


@pytest.mark.parametrize(
    ("between", "kind", "match"),
    [
        ("ld.param.u64 at, [p1]; st.global.u32 [at], r1;", "PoisonError", "undefined value"),
        ("setp.eq.u32 first, r1, 0; @first bra early; early:", "PoisonError", "decides what runs"),
        ("mov.u32 r2, 5;", "AsyncHazardError", "r2 of tcgen05.ld has been written before"),
        ("add.u32 r2, r2, 1;", "AsyncHazardError", "r2 of tcgen05.ld has been written before"),
        (LOAD, "AsyncHazardError", "r0 of tcgen05.ld has been written before"),
    ],
)
def test_registers_of_a_load_arrive_with_the_wait(between: str, kind: str, match: str) -> None:
    """9.7.16.6.4: until then they are neither read nor written."""
    errors = importlib.import_module("humming.devices.simulator.errors")
    with pytest.raises(getattr(errors, kind), match=match) as caught:
        _loaded(between)
    assert (caught.value.where.cta, caught.value.where.warp) == ((0, 0, 0), 0)
    assert caught.value.where.lane == 0


def test_compilers_copy_registers_of_a_load() -> None:
    want = np.arange(512, dtype=np.uint32).reshape(128, 4)
    assert (_loaded("mov.u32 r100, r1;", "mov.u32 r1, r100;") == want).all()
    assert (_loaded("mov.u32 r100, r1; mov.u32 r1, 0;", "mov.u32 r1, r100;") == want).all()


@pytest.mark.parametrize(("shape", "registers"), [("32x32b", 4), ("16x256b", 4), ("16x64b", 1)])
def test_packed_loads_and_stores(rng: Any, shape: str, registers: int) -> None:
    """.pack::16b joins the lower halves of neighbouring columns; .unpack::16b is the reverse."""
    given = rng.integers(0, 2**32, (128, 64), dtype=np.uint32)
    number = {"32x32b": 4}.get(shape, 1)
    body = f"""{filling(64)}
      tcgen05.ld.sync.aligned.{shape}.x{number}.pack::16b.b32 {vector(0, registers)}, [own];
      tcgen05.wait::ld.sync.aligned;
      add.u32 i, own, 32;
      tcgen05.st.sync.aligned.{shape}.x{number}.unpack::16b.b32 [i], {vector(0, registers)};
      tcgen05.wait::st.sync.aligned;
      tcgen05.ld.sync.aligned.32x32b.x16.b32 {vector(registers, 16)}, [i];
      {writing(registers + (16 if shape == "32x32b" else 0))}
    """
    count = registers + (16 if shape == "32x32b" else 0)
    if shape == "32x32b":  # the columns that it does not write are still those of `given`
        body = body.replace("x16.b32", "x8.b32").replace(vector(registers, 16), vector(4, 8))
        body = body.replace(writing(count), writing(12))
        count = 12
    out = run(body, given, np.zeros((128, count), np.uint32))
    for warp in range(4):
        for register in range(registers):
            lane, column = positions(shape, register)
            row = 32 * warp + lane
            low, high = given[row, 2 * column] & 0xFFFF, given[row, 2 * column + 1] & 0xFFFF
            assert (out[32 * warp : 32 * warp + 32, register] == (low | high << 16)).all()
    if shape == "32x32b":
        assert (out[:, 4:] == given[:, :8] & 0xFFFF).all()


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("min", "f32"),
        ("max.abs", "f32"),
        ("max.NaN", "f32"),
        ("min", "u32"),
        ("max", "s32"),
    ],
)
def test_loads_with_reduction(rng: Any, operation: str, kind: str) -> None:
    """9.7.16.8.3, from sm_103 on."""
    values = rng.normal(size=(128, 16)).astype(np.float32)
    values[5, 3] = np.nan
    given = values.view(np.uint32)
    body = f"""{filling(16)}
      tcgen05.ld.red.sync.aligned.32x32b.x16.{operation}.{kind} {vector(0, 16)}, r16, [own];
      {writing(17)}
    """
    out = run(body, given, np.zeros((128, 17), np.uint32), "sm_103a")
    assert (out[:, :16] == given).all()
    if kind == "f32":
        numbers = np.abs(values) if "abs" in operation else values
        reduce = {"min": np.fmin, "max.abs": np.fmax, "max.NaN": np.maximum}[operation].reduce
        assert np.array_equal(out[:, 16].view(np.float32), reduce(numbers, axis=1), equal_nan=True)
    elif kind == "u32":
        assert (out[:, 16] == given.min(axis=1)).all()
    else:
        assert (out[:, 16].view(np.int32) == given.view(np.int32).max(axis=1)).all()


COPY = (
    'asm volatile("tcgen05.cp.cta_group::1.{} [%0], %1;"'
    ' :: "r"(tmem + (u32)args[1]), "l"(args[0] + base)); COMMIT'
)
TARGETS = {
    "128x256b": lambda row: [row],
    "128x128b": lambda row: [row],
    "4x256b": lambda row: [32 * row],
    "64x128b.warpx2::02_13": lambda row: [row, row + 64],
    "64x128b.warpx2::01_23": lambda row: [row // 32 * 64 + row % 32 + 32 * i for i in (0, 1)],
    "32x128b.warpx4": lambda row: [row + 32 * i for i in range(4)],
}


@pytest.mark.parametrize("packed", ["", "b4x16_p64", "b6x16_p32"])
@pytest.mark.parametrize("shape", TARGETS)
def test_copies_from_shared_memory(rng: Any, shape: str, packed: str) -> None:
    """9.7.16.9.1, with .b8x16 unpacking: 4 bits come into bits 5:2 of their byte."""
    rows, bits = (int(x) for x in shape.split(".")[0].rstrip("b").split("x"))
    data = rng.integers(0, 256, (max(rows, 8), bits // 8), dtype=np.uint8)
    image, desc = tk.k_major(data, 0)
    start = rng.integers(0, 2**32, (128, 16), dtype=np.uint32)
    multicast = "." + shape.split(".")[1] if "." in shape else ""
    spelled = shape.split(".")[0] + multicast + (f".b8x16.{packed}" if packed else "")
    found = tk.run(COPY.format(spelled), image, start, [desc, 4])[0]
    if packed:
        width = int(packed[1])
        whole = [
            [int.from_bytes(part.tobytes(), "little") for part in row.reshape(-1, 16)]
            for row in data
        ]
        shift = 2 if width == 4 else 0
        data = np.array(
            [
                [(w >> width * e & (1 << width) - 1) << shift for w in row for e in range(16)]
                for row in whole
            ],
            np.uint8,
        )
    want = start.copy()
    for row in range(rows):
        for lane in TARGETS[shape](row):
            want[lane, 4 : 4 + bits // 32] = data[row].view(np.uint32)
    assert (found == want).all()


def test_scales_are_copied_as_the_products_take_them(rng: Any) -> None:
    """The usual chunk of 128 rows x 4 scales, by 32x128b.warpx4 without swizzle (9.7.16.10.7)."""
    codes = rng.integers(0, 256, (128, 4))
    chunk = np.zeros(512, np.uint8)
    for row in range(128):
        for k in range(4):
            chunk[row % 32 * 16 + row // 32 * 4 + k] = codes[row, k]
    start = np.zeros((128, 16), np.uint32)
    desc = tk.descriptor(0, 0, 128)
    found = tk.run(COPY.format("32x128b.warpx4"), chunk, start, [desc, 4])[0]
    assert (found[:, 4:8] == tk.scale_columns(codes)).all()


def test_allocation(rng: Any) -> None:
    """Sizes add up; a warp that finds too few columns waits until others are freed."""
    text = """.version 9.4
    .target sm_100a
    .address_size 64
    .visible .entry test(.param .u64 p0, .param .u64 p1) {
      .shared .align 8 .b8 place[16];
      .reg .b32 t, warp, s, a, b; .reg .b64 to; .reg .pred first, lead;
      mov.u32 t, %tid.x; shr.u32 warp, t, 5; setp.eq.u32 first, warp, 0;
      mov.u32 s, place; ld.param.u64 to, [p1];
      @!first bra other;
      tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [s], 256;
      tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [s+4], 32;
      ld.shared.u32 a, [s]; ld.shared.u32 b, [s+4];
      bar.sync 0;
      tcgen05.dealloc.cta_group::1.sync.aligned.b32 a, 256;
      tcgen05.dealloc.cta_group::1.sync.aligned.b32 b, 32;
      bra end;
    other:
      bar.sync 0;
      tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [s+8], 512;
      ld.shared.u32 a, [s+8];
      tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
      tcgen05.dealloc.cta_group::1.sync.aligned.b32 a, 512;
    end:
      setp.eq.u32 lead, t, 0;
      @lead st.global.u32 [to], a;
      @lead st.global.u32 [to+4], b;
      ret;
    }
    """
    out = np.zeros(2, np.uint32)
    tk.launch(text, {"given": out.copy(), "out": out}, ["given", "out"], block=64)
    assert abs(int(out[0]) - int(out[1])) >= 32
