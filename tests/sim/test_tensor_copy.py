"""Tensor copies: boxes, swizzles, what lies outside, reductions, changed maps (9.7.9.26-27)."""

import dataclasses
import functools
import importlib
from typing import Any

import numpy as np
import pytest
from hopper_kernels import MapOf, aligned, placed, run, tensor_map, tensor_maps

from humming.errors import HummingError

errors = importlib.import_module("humming.devices.simulator.errors")

DTYPES = {
    "uint8": np.uint8,
    "uint16": np.uint16,
    "int32": np.int32,
    "uint64": np.uint64,
    "float16": np.uint16,
    "bfloat16": np.uint16,
    "float32": np.uint32,
    "float64": np.uint64,
}


def random_bits(rng: np.random.Generator, shape: Any, dtype: Any) -> np.ndarray:
    info = np.iinfo(dtype)
    return placed(rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True))


@functools.cache
def load_source(rank: int) -> str:
    """A kernel that loads a box at given coordinates and writes out the shared memory."""
    coordinates = ", ".join(f"i32 c{i}" for i in range(rank))
    places = ", ".join(f"%{i + 2}" for i in range(rank))
    operands = ", ".join(f'"r"(c{i})' for i in range(rank))
    return f"""
    extern "C" __global__ void test(const __grid_constant__ Map map, u32* out, u32 size,
                                    {coordinates}) {{
      extern __shared__ __align__(1024) u32 tile[];
      __shared__ u64 bar;
      if (threadIdx.x == 0) {{
        init(&bar, 1); fence_init(); expect(&bar, size);
        asm volatile("cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile"
                     ".mbarrier::complete_tx::bytes [%0], [%1, {{{places}}}], [%{rank + 2}];"
                     :: "r"(shared(tile)), "l"(&map), {operands}, "r"(shared(&bar)) : "memory");
      }}
      __syncthreads();
      wait(&bar, 0);
      for (u32 i = threadIdx.x; i < size / 4; i += 32) out[i] = tile[i];
    }}
    """


def load_box(encoded: MapOf, at: tuple[int, ...], size: int, **options: Any) -> np.ndarray:
    out = aligned(size, np.uint8)
    run(load_source(len(at)), encoded, out, size, *at, block=32, smem_bytes=size, **options)
    return out


def expected_box(
    array: np.ndarray,
    at: tuple[int, ...],
    box: tuple[int, ...],
    steps: tuple[int, ...],
    fill: int,
) -> np.ndarray:
    """The box, element by element; all arguments but the array have the innermost first."""
    counts = [box[0]] + [-(-b // s) for b, s in zip(box[1:], steps[1:], strict=True)]
    found = np.full(counts[::-1], fill, array.dtype)
    for index in np.ndindex(*counts[::-1]):
        inner_first = index[::-1]
        where = [
            c + i * (s if d else 1)
            for d, (c, i, s) in enumerate(zip(at, inner_first, steps, strict=True))
        ]
        if all(0 <= w < n for w, n in zip(where, array.shape[::-1], strict=True)):
            found[index] = array[tuple(where[::-1])]
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_boxes_of_every_rank_and_type(rng: np.random.Generator, rank: int, dtype: str) -> None:
    """Random tensors, boxes and places, partly outside (9.7.9.27.1.2)."""
    kind = DTYPES[dtype]
    per = 16 // np.dtype(kind).itemsize
    box = (per * int(rng.integers(1, 3)), *(int(v) for v in rng.integers(1, 5, rank - 1)))
    # Rows of a whole number of 16 bytes; the tensor itself may be narrower.
    shape = (*(int(v) for v in rng.integers(2, 7, rank - 1)), per * int(rng.integers(1, 5)))
    whole = random_bits(rng, shape, kind)
    narrow = int(rng.integers(1, shape[-1] + 1))
    array = whole[..., :narrow]
    at = [int(rng.integers(-b, n + 1)) for b, n in zip(box, array.shape[::-1], strict=True)]
    at[0] = at[0] // per * per
    steps = (1,) * rank
    if rank > 1 and rng.random() < 0.5:
        steps = (1, *(int(v) for v in rng.integers(1, 4, rank - 1)))
    encoded = tensor_map(array, dtype, box, element_strides=steps)
    expected = expected_box(array, tuple(at), box, steps, 0)
    found = load_box(encoded, tuple(at), expected.nbytes)
    np.testing.assert_array_equal(found, np.ascontiguousarray(expected).view(np.uint8).reshape(-1))


def swizzled_rows(rows: np.ndarray, span: int) -> np.ndarray:
    """Rows of `span` bytes as shared memory holds them, from an address that the pattern fits.

    For rows of 128 bytes: the piece c of row r lies at piece c ^ (r & 7).
    """
    found = np.zeros_like(rows)
    pieces = span // 16
    for r in range(len(rows)):
        turn = (r * span // 128) % pieces
        for c in range(pieces):
            to = c ^ turn
            found[r, 16 * to : 16 * to + 16] = rows[r, 16 * c : 16 * c + 16]
    return found


ROWS = """
    extern "C" __global__ void test(const __grid_constant__ Map from,
                                    const __grid_constant__ Map to, u32* out,
                                    i32 c, i32 r0, i32 r1, i32 r2, i32 r3) {
      extern __shared__ __align__(1024) u32 tile[];
      __shared__ u64 bar;
      if (threadIdx.x == 0) {
        init(&bar, 1); fence_init(); expect(&bar, 256);
        asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4"
                     ".mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];"
                     :: "r"(shared(tile)), "l"(&from), "r"(c), "r"(r0), "r"(r1), "r"(r2), "r"(r3),
                        "r"(shared(&bar)) : "memory");
      }
      __syncthreads();
      wait(&bar, 0);
      for (u32 i = threadIdx.x; i < 64; i += 32) out[i] = tile[i];
      __syncthreads();
      if (threadIdx.x == 0) {
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group"
                     " [%0, {%1, %2, %3, %4, %5}], [%6];\\n"
                     "cp.async.bulk.commit_group;\\ncp.async.bulk.wait_group 0;"
                     :: "l"(&to), "r"(c), "r"(r3), "r"(r2), "r"(r1), "r"(r0), "r"(shared(tile))
                     : "memory");
      }
    }
"""


@pytest.mark.parametrize("swizzle", [0, 2])
def test_single_rows(rng: np.random.Generator, swizzle: int) -> None:
    """PTX ISA 5.5.6, tile::gather4 and tile::scatter4: a column, then the numbers of four rows.

    Rows outside of the tensor are zeros when they are loaded, and are not stored.
    """
    array, other = random_bits(rng, (20, 128), np.uint8), placed(np.zeros((20, 128), np.uint8))
    maps = [tensor_map(a, "uint8", (64, 1), swizzle=swizzle) for a in (array, other)]
    out = aligned(256, np.uint8)
    rows = [13, 2, 40, 7]
    run(ROWS, *maps, out, 32, *rows, block=32, smem_bytes=256, arch="sm_100a")
    plain = np.stack([array[r, 32:96] if r < 20 else np.zeros(64, np.uint8) for r in rows])
    expected = swizzled_rows(plain, 64) if swizzle else plain
    np.testing.assert_array_equal(out.reshape(4, 64), expected)
    stored = np.zeros_like(other)
    for place, row in zip(rows[::-1], plain, strict=True):
        if place < 20:
            stored[place, 32:96] = row
    np.testing.assert_array_equal(other, stored)


PAIR = """
    extern "C" __global__ void test(const __grid_constant__ Map map, u32* out) {
      extern __shared__ __align__(1024) u32 tile[];
      __shared__ u64 bar;
      u32 own = rank(), even = shared(&bar) & 0xFEFFFFFF;
      if (threadIdx.x == 0) { init(&bar, 1); fence_init(); }
      cluster_sync();
      if (threadIdx.x == 0) {
        if (own == 0) expect(&bar, 1024);
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile"
                     ".mbarrier::complete_tx::bytesGROUP [%0], [%1, {%2, %3}], [%4];"
                     :: "r"(shared(tile)), "l"(&map), "r"(0), "r"(8 * own), "r"(even) : "memory");
      }
      if (own == 0) wait(&bar, 0);
      cluster_sync();
      for (u32 i = threadIdx.x; i < 128; i += 32) out[128 * own + i] = tile[i];
      cluster_sync();
    }
"""


def test_loads_of_a_pair_signal_in_one_of_its_ctas(rng: np.random.Generator) -> None:
    """PTX ISA 9.7.9.27.1.2, .cta_group::2: the barrier may be in the other CTA of the pair."""
    array = random_bits(rng, (16, 64), np.uint8)
    encoded, out = tensor_map(array, "uint8", (64, 8)), aligned(1024, np.uint8)
    how = {"grid": 2, "cluster": 2, "block": 32, "smem_bytes": 512, "arch": "sm_100a"}
    run(PAIR.replace("GROUP", ".cta_group::2"), encoded, out, **how)
    np.testing.assert_array_equal(out, array.reshape(-1))
    with pytest.raises(errors.UndefinedBehaviorError, match="another CTA than the destination"):
        run(PAIR.replace("GROUP", ""), encoded, out, **how)


@pytest.mark.parametrize(("mode", "span"), [(1, 32), (2, 64), (3, 128)])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "partly_outside"])
def test_swizzles(rng: np.random.Generator, mode: int, span: int, inside: bool) -> None:
    """PTX ISA 5.5.7."""
    array = random_bits(rng, (40, 256), np.uint8)
    at = (64, 8) if inside else (256 - span // 2, -3)
    encoded = tensor_map(array, "uint8", (span, 24), swizzle=mode)
    found = load_box(encoded, at, 24 * span).reshape(24, span)
    plain = expected_box(array, at, (span, 24), (1, 1), 0)
    np.testing.assert_array_equal(found, swizzled_rows(plain, span))


def test_swizzle_of_32_byte_atoms(rng: np.random.Generator) -> None:
    """Pairs of pieces change places, by the pair of rows."""
    array = random_bits(rng, (16, 128), np.uint8)
    found = load_box(tensor_map(array, "uint8", (128, 16), swizzle=4), (0, 0), 2048, arch="sm_100a")
    expected = array.reshape(16, 4, 32).copy()
    for r in range(16):
        for c in range(4):
            expected[r, c ^ (r & 3)] = array[r, 32 * c : 32 * c + 32]
    np.testing.assert_array_equal(found, expected.reshape(-1))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_fill_with_nan(rng: np.random.Generator, dtype: str) -> None:
    """With 0x7ff7 again and again, which is NaN in each type."""
    array = random_bits(rng, (4, 16), DTYPES[dtype])
    box, at = (16, 4), (-8, 2)
    found = load_box(tensor_map(array, dtype, box, fill=1), at, array.nbytes)
    nan = int.from_bytes(b"\xf7\x7f" * (array.itemsize // 2), "little")
    expected = expected_box(array, at, box, (1, 1), nan)
    np.testing.assert_array_equal(found.view(expected.dtype), expected.reshape(-1))
    kind = {"bfloat16": np.float32}.get(dtype) or np.dtype(dtype).type
    bits = np.array([nan << 16 * (dtype == "bfloat16")], f"u{np.dtype(kind).itemsize}")
    assert np.isnan(bits.view(kind)).all()


@pytest.mark.parametrize("start", [1, 4, 8, -1, 248])
def test_boxes_begin_at_pieces(rng: np.random.Generator, start: int) -> None:
    """Not said by the PTX ISA; on H200 it ends in an illegal instruction, for stores too."""
    array = random_bits(rng, (4, 256), np.uint8)
    with pytest.raises(errors.AlignmentError, match=f"begins {start} bytes into the rows"):
        load_box(tensor_map(array, "uint8", (32, 4)), (start, 0), 128)
    opcode = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
    encoded, data = tensor_map(array, "uint8", (128, 4)), placed(np.zeros(512, np.uint32))
    if start > 0:
        with pytest.raises(errors.AlignmentError, match=f"begins {start} bytes into the rows"):
            run(STORE.replace("OPCODE", opcode), encoded, data, start, 0, block=32)


def test_loads_keep_subnormal_numbers() -> None:
    array = placed(np.array([[1, 0x80000001, 0x3F800000, 0x807FFFFF]], np.uint32))
    found = load_box(tensor_map(array, "float32_ftz", (4, 1)), (0, 0), 16).view(np.uint32)
    assert found.tolist() == array[0].tolist()


@pytest.mark.parametrize("dtype", ["float32", "float32_ftz"])
def test_reductions_flush_subnormal_numbers_if_the_type_says_so(dtype: str) -> None:
    tiny = np.arange(512, dtype=np.uint32).reshape(16, 32) * 0x3FFF | 0x80000000
    out = placed(np.full((16, 32), 3, np.uint32))
    opcode = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"
    run(
        STORE.replace("OPCODE", opcode),
        tensor_map(out, dtype, (32, 16)),
        placed(tiny),
        0,
        0,
        block=32,
    )
    if dtype == "float32":
        expected = np.full(tiny.shape, 3, np.uint32).view(np.float32) + tiny.view(np.float32)
        np.testing.assert_array_equal(out, expected.view(np.uint32))
    else:
        assert (out & 0x7FFFFFFF == 0).all()


@pytest.mark.parametrize(
    ("dtype", "bits", "width"), [("16u4_align16b", 4, 8), ("16u6_align16b", 6, 12)]
)
def test_packed_elements_get_gaps(
    rng: np.random.Generator, dtype: str, bits: int, width: int
) -> None:
    """Groups of 16 elements take 16 bytes in shared memory."""
    row = 256 * bits // 8
    array = random_bits(rng, (6, row), np.uint8)
    encoded = tensor_maps.TensorMap(
        dtype, array.ctypes.data, (256, 6), (row,), (128, 4), swizzle=3
    ).encode()
    with pytest.raises(errors.UndefinedBehaviorError, match="they need sm_100"):
        load_box(MapOf(encoded, array), (128, 1), 512)
    found = load_box(MapOf(encoded, array), (128, 1), 512, arch="sm_100a")
    groups = array[1:5, row // 2 :].reshape(4, 8, width)
    plain = np.pad(groups, ((0, 0), (0, 0), (0, 16 - width))).reshape(4, 128)
    np.testing.assert_array_equal(found.reshape(4, 128), swizzled_rows(plain, 128))


STORE = r"""
extern "C" __global__ void test(const __grid_constant__ Map map, const u32* in, i32 x, i32 y) {
  __shared__ alignas(1024) u32 tile[512];
  for (u32 i = threadIdx.x; i < 512; i += 32) tile[i] = in[i];
  fence_async();
  __syncwarp();
  if (threadIdx.x == 0) {
    asm volatile("OPCODE [%0, {%1, %2}], [%3];"
                 :: "l"(&map), "r"(x), "r"(y), "r"(shared(tile)) : "memory");
    commit(); wait_all();
  }
}
"""


@pytest.mark.parametrize("mode", [0, 3])
@pytest.mark.parametrize("width", [208, 200, 197])
def test_stores_leave_alone_what_is_outside(
    rng: np.random.Generator, mode: int, width: int
) -> None:
    """The reverse of a load; parts of the box outside of the tensor are not written.

    But in the 16 bytes in which a row ends: H200 write all of them.
    """
    data = random_bits(rng, (16, 128), np.uint8)
    array = random_bits(rng, (20, 224), np.uint8)
    before = array.copy()
    opcode = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
    encoded = tensor_map(array[:, :width], "uint8", (128, 16), swizzle=mode)._replace(array=array)
    held = swizzled_rows(data, 128) if mode else data
    run(STORE.replace("OPCODE", opcode), encoded, placed(held), 112, 9, block=32)
    before[9:20, 112:208] = data[:11, :96]
    np.testing.assert_array_equal(array, before)


@pytest.mark.parametrize(("x", "y"), [(0, 7), (208, 2), (224, 0), (96, 20), (112, 12)])
def test_stores_partly_or_wholly_outside(rng: np.random.Generator, x: int, y: int) -> None:
    data = random_bits(rng, (16, 128), np.uint8)
    array = random_bits(rng, (20, 224), np.uint8)
    expected = array.copy()
    opcode = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
    encoded = tensor_map(array, "uint8", (128, 16))
    run(STORE.replace("OPCODE", opcode), encoded, placed(data), x, y, block=32)
    for row, line in enumerate(data, y):
        for column, value in enumerate(line, x):
            if 0 <= row < 20 and 0 <= column < 224:
                expected[row, column] = value
    np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize(("x", "y"), [(0, -3), (-16, 2), (48, -16)])
@pytest.mark.parametrize("operation", ["", "add"])
def test_stores_before_the_tensor(x: int, y: int, operation: str) -> None:
    """Not said by the PTX ISA; on H200 stores there end in an illegal instruction."""
    array, data = aligned((20, 56), np.uint32), aligned((16, 32), np.uint32)
    opcode = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
    if operation:
        opcode = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"
    encoded = tensor_map(array, "uint32", (32, 16))
    with pytest.raises(errors.UndefinedBehaviorError, match="before the tensor begins"):
        run(STORE.replace("OPCODE", opcode), encoded, data, x, y, block=32)


def test_reductions_end_with_a_piece_too(rng: np.random.Generator) -> None:
    array = random_bits(rng, (16, 64), np.uint32)
    data, before = random_bits(rng, (16, 32), np.uint32), array.copy()
    opcode = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.xor.tile.bulk_group"
    encoded = tensor_map(array[:, :42], "uint32", (32, 16))._replace(array=array)
    run(STORE.replace("OPCODE", opcode), encoded, placed(data), 20, 0, block=32)
    before[:, 20:44] ^= data[:, :24]
    np.testing.assert_array_equal(array, before)


@pytest.mark.parametrize(
    ("operation", "dtype"),
    [("add", "float32"), ("add", "bfloat16"), ("max", "int32"), ("xor", "uint32")],
)
def test_tensor_reductions(rng: np.random.Generator, operation: str, dtype: str) -> None:
    """cp.reduce.async.bulk.tensor takes its type from the map (9.7.9.27.1.3)."""
    kind = DTYPES.get(dtype, np.uint32)
    columns = 2048 // 16 // np.dtype(kind).itemsize
    if dtype.endswith("float32") or dtype == "bfloat16":
        old, new = (rng.standard_normal((16, columns)).astype(np.float32) for _ in range(2))
        if dtype == "bfloat16":
            codes = [placed((v.view(np.uint32) >> 16).astype(np.uint16)) for v in (old, new)]
            wide = [(c.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for c in codes]
            total = (wide[0] + wide[1]).astype(np.float32).view(np.uint32)
            expected = ((total + 0x7FFF + ((total >> 16) & 1)) >> 16).astype(np.uint16)
            old, new = codes
        else:
            expected = (old.astype(np.float64) + new).astype(np.float32)
    else:
        old, new = (random_bits(rng, (16, columns), kind) for _ in range(2))
        expected = np.maximum(old, new) if operation == "max" else old ^ new
    out = placed(old)
    opcode = f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{operation}.tile.bulk_group"
    encoded = tensor_map(out, dtype, (columns, 16))
    run(STORE.replace("OPCODE", opcode), encoded, placed(new), 0, 0, block=32)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("seed", [None, 1])
def test_multicast_of_halves(rng: np.random.Generator, seed: int | None) -> None:
    """Both CTAs of a cluster load half of a tile each, and both get all of it."""
    source = r"""
    extern "C" __global__ void test(const __grid_constant__ Map map, u32* out) {
      __shared__ alignas(1024) u32 tile[2][256];
      __shared__ u64 bar;
      u32 me = rank();
      if (threadIdx.x == 0) { init(&bar, 1); fence_init(); expect(&bar, 2048); }
      cluster_sync();
      if (threadIdx.x == 0)
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
                     :: "r"(shared(tile[me])), "l"(&map), "r"(0), "r"(8 * me), "r"(shared(&bar)),
                        "h"((u16)3) : "memory");
      wait(&bar, 0);
      for (u32 i = threadIdx.x; i < 512; i += 32) out[512 * me + i] = tile[i >> 8][i & 255];
      cluster_sync();
    }
    """
    array = random_bits(rng, (16, 128), np.uint8)
    out = aligned((2, 16, 128), np.uint8)
    encoded = tensor_map(array, "uint8", (128, 8), swizzle=3)
    run(source, encoded, out, grid=2, cluster=2, block=32, seed=seed)
    for half in out:
        np.testing.assert_array_equal(half, swizzled_rows(array, 128))


def test_prefetch_and_map_in_global_memory(rng: np.random.Generator) -> None:
    """Maps may lie in global memory; a prefetch changes nothing (9.7.9.27.1.4)."""
    source = r"""
    extern "C" __global__ void test(const Map* map, u32* out) {
      __shared__ alignas(128) u32 tile[32];
      __shared__ u64 bar;
      if (threadIdx.x == 0) {
        asm volatile("prefetch.tensormap [%0];" :: "l"(map));
        asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];"
                     :: "l"(map), "r"(0), "r"(0));
        init(&bar, 1); fence_init(); expect(&bar, 128);
        load_2d(tile, map, 0, 0, &bar);
      }
      __syncwarp();
      wait(&bar, 0);
      out[threadIdx.x] = tile[threadIdx.x];
    }
    """
    array = random_bits(rng, (2, 16), np.uint32)
    encoded = placed(np.frombuffer(tensor_map(array, "uint32", (16, 2)).data, np.uint8))
    out = aligned((2, 16), np.uint32)
    run(source, encoded, out, array, block=32)
    np.testing.assert_array_equal(out, array)


def test_maps_changed_in_shared_memory(rng: np.random.Generator) -> None:
    """tensormap.replace, cp_fenceproxy, and the fence that acquires (9.7.9.26.1)."""
    source = r"""
    extern "C" __global__ void test(const __grid_constant__ Map map, Map* changed, u32* out,
                                    const u32* other) {
      __shared__ alignas(128) Map copy; __shared__ alignas(128) u32 tile[16];
      __shared__ u64 bar;
      u32 t = threadIdx.x;
      if (t < 16) copy.opaque[t] = map.opaque[t];
      __syncwarp();
      if (t == 0) {
        asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;"
                     :: "r"(shared(&copy)), "l"(other) : "memory");
        asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 1, %1;"
                     :: "r"(shared(&copy)), "r"(3) : "memory");
        asm volatile("tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%0], 0, %1;"
                     :: "r"(shared(&copy)), "l"(32ull) : "memory");
      }
      __syncwarp();
      asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu"
                   ".sync.aligned [%0], [%1], 128;"
                   :: "l"(changed), "r"(shared(&copy)) : "memory");
      if (t == 0) {
        asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;"
                     :: "l"(changed) : "memory");
        init(&bar, 1); fence_init(); expect(&bar, 64);
        load_2d(tile, changed, 0, 0, &bar);
      }
      __syncwarp();
      wait(&bar, 0);
      if (t < 16) out[t] = tile[t];
    }
    """
    array, other = random_bits(rng, (4, 4), np.uint32), random_bits(rng, (4, 8), np.uint32)
    out, space = aligned((4, 4), np.uint32), aligned(128, np.uint8)
    run(source, tensor_map(array, "uint32", (4, 4)), space, out, other, block=32)
    expected = np.vstack([other[:3, :4], np.zeros((1, 4), np.uint32)])
    np.testing.assert_array_equal(out, expected)


GOOD = tensor_maps.TensorMap("uint8", 1 << 20, (256, 64), (256,), (128, 8), swizzle=3)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"address": (1 << 20) + 8}, "address not aligned to 16"),
        ({"dims": (256, 0)}, "dimensions not in 1"),
        ({"strides": (264,)}, "strides that are no multiples of 16"),
        ({"strides": (1 << 40,)}, "strides that are no multiples of 16 below"),
        ({"box": (128, 257)}, "a box with dimensions not in 1 to 256"),
        ({"box": (120, 8)}, "inner dimension is no multiple of 16 bytes"),
        ({"box": (144, 8)}, "longer than the span of the swizzle"),
        ({"element_strides": (1, 9)}, "element strides not in 1 to 8"),
        ({"swizzle": 7}, "the swizzle 7"),
        ({"swizzle": 5}, "not simulated"),
        ({"interleave": 1}, "not simulated"),
        ({"fill": 1}, "NaN to fill elements of type uint8"),
        ({"dtype": "float8"}, "elements of type 'float8'"),
        ({"dims": (256,)}, "1 dimensions"),
        ({"dtype": "16u4_align16b", "box": (64, 8)}, "packed box that is not 128 wide"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rules_of_the_driver(change: dict[str, Any], what: str) -> None:
    with pytest.raises(HummingError, match=what):
        dataclasses.replace(GOOD, **change).encode()


def test_maps_survive_encoding(rng: np.random.Generator) -> None:
    for rank in range(1, 6):
        tensor = tensor_maps.TensorMap(
            "float16",
            16 * int(rng.integers(1, 2**40)),
            tuple(int(v) for v in rng.integers(1, 2**32, rank, endpoint=True)),
            tuple(16 * int(v) for v in rng.integers(0, 2**36, rank - 1)),
            (8, *(int(v) for v in rng.integers(1, 257, rank - 1))),
            tuple(int(v) for v in rng.integers(1, 9, rank)),
        )
        encoded = tensor.encode()
        assert len(encoded) == 128
        assert tensor_maps.decode(encoded) == tensor
        assert tensor_maps.decode(encoded).encode() == encoded
