"""Bulk copies without tensor maps: all directions, groups, multicast (PTX ISA 9.7.9.25.5)."""

from typing import Any

import numpy as np
import pytest
from hopper_kernels import aligned, placed, run

SEEDS = [None, 3, 11]


@pytest.mark.parametrize("seed", SEEDS)
def test_loads_and_stores_in_a_ring_of_stages(rng: np.random.Generator, seed: int | None) -> None:
    """A producer warp fills two stages, four consumer warps empty them (9.7.9.25.5.2)."""
    source = r"""
    extern "C" __global__ void test(u32* out, const u32* in, u32 rounds) {
      __shared__ alignas(128) u32 stage[2][128];
      __shared__ alignas(128) u32 result[128];
      __shared__ u64 full[2], empty[2];
      u32 t = threadIdx.x;
      if (t == 0) {
        for (int s = 0; s < 2; ++s) { init(&full[s], 1); init(&empty[s], 128); }
        fence_init();
      }
      __syncthreads();
      if (t >= 128) {
        if (t == 128)
          for (u32 i = 0; i < rounds; ++i) {
            u32 s = i & 1;
            if (i >= 2) wait(&empty[s], (i / 2 - 1) & 1);
            expect(&full[s], 512);
            load(stage[s], in + 128 * i, 512, &full[s]);
          }
      } else {
        u32 sum = 0;
        for (u32 i = 0; i < rounds; ++i) {
          u32 s = i & 1;
          wait(&full[s], (i / 2) & 1);
          sum = sum * 3 + stage[s][(t * 7 + i) & 127];
          arrive(&empty[s]);
        }
        result[t] = sum;
        fence_async();
        asm volatile("bar.sync 1, 128;" ::: "memory");
        if (t == 0) { store(out, result, 512); commit(); wait_all(); }
      }
    }
    """
    data = placed(rng.integers(0, 2**32, (5, 128), dtype=np.uint32))
    out = aligned(128, np.uint32)
    run(source, out, data, 5, block=160, undefined=(0,), seed=seed)
    expected = np.zeros(128, np.uint32)
    for i in range(5):
        expected = expected * np.uint32(3) + data[i, (np.arange(128) * 7 + i) & 127]
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_multicast_reaches_every_cta_of_the_mask(
    rng: np.random.Generator, seed: int | None
) -> None:
    """Each CTA sends a quarter to those of a mask, at the same place and mbarrier of each."""
    source = r"""
    extern "C" __global__ void test(u32* out, const u32* in) {
      __shared__ alignas(128) u32 tile[4][32];
      __shared__ u64 bar;
      u32 t = threadIdx.x, me = rank();
      if (t == 0) { init(&bar, 1); fence_init(); expect(&bar, me == 3 ? 128 : 512); }
      cluster_sync();
      if (t == 0) {
        u16 mask = me == 1 ? 15 : 7;
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                     ".multicast::cluster.L2::cache_hint [%0], [%1], %2, [%3], %4, %5;"
                     :: "r"(shared(tile[me])), "l"(in + 32 * me), "r"(128), "r"(shared(&bar)),
                        "h"(mask), "l"(0ull) : "memory");
      }
      wait(&bar, 0);
      for (int i = 0; i < 4; ++i)
        if (me != 3 || i == 1) out[128 * me + 32 * i + t] = tile[i][t];
      cluster_sync();
    }
    """
    data = placed(rng.integers(0, 2**32, (4, 32), dtype=np.uint32))
    out = aligned((4, 4, 32), np.uint32)
    run(source, out, data, grid=4, cluster=4, block=32, seed=seed)
    expected = np.broadcast_to(data, (4, 4, 32)).copy()
    expected[3, [0, 2, 3]] = 0
    np.testing.assert_array_equal(out, expected)


def test_copies_to_another_cta_of_the_cluster(rng: np.random.Generator) -> None:
    """From shared::cta to shared::cluster, with the receiver's mbarrier."""
    source = r"""
    extern "C" __global__ void test(u32* out, const u32* in) {
      __shared__ alignas(16) u32 mine[64]; __shared__ alignas(16) u32 theirs[64];
      __shared__ u64 bar;
      u32 t = threadIdx.x, other = rank() ^ 1;
      if (t == 0) { init(&bar, 1); fence_init(); expect(&bar, 256); }
      mine[t] = in[64 * rank() + t];
      asm volatile("fence.proxy.async.shared::cluster;" ::: "memory");
      cluster_sync();
      if (t == 0)
        asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
                     " [%0], [%1], %2, [%3];"
                     :: "r"(remote(shared(theirs), other)), "r"(shared(mine)), "r"(256),
                        "r"(remote(shared(&bar), other)) : "memory");
      wait(&bar, 0);
      out[64 * rank() + t] = theirs[t];
      cluster_sync();
    }
    """
    data = placed(rng.integers(0, 2**32, (2, 64), dtype=np.uint32))
    out = aligned((2, 64), np.uint32)
    run(source, out, data, grid=2, cluster=2, block=64)
    np.testing.assert_array_equal(out, data[::-1])


REDUCTIONS = [
    ("add", "u32", np.uint32),
    ("add", "s32", np.int32),
    ("add", "u64", np.uint64),
    ("min", "s32", np.int32),
    ("max", "u32", np.uint32),
    ("min", "s64", np.int64),
    ("and", "b32", np.uint32),
    ("or", "b64", np.uint64),
    ("xor", "b32", np.uint32),
    ("inc", "u32", np.uint32),
    ("dec", "u32", np.uint32),
    ("add", "f32", np.float32),
    ("add", "f64", np.float64),
    ("add.noftz", "f16", np.float16),
    ("min", "f16", np.float16),
]


def _random(rng: np.random.Generator, dtype: Any, count: int) -> np.ndarray:
    if np.dtype(dtype).kind == "f":
        return rng.standard_normal(count).astype(dtype)
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, count, dtype=dtype, endpoint=True)


def _combined(operation: str, old: Any, new: Any) -> Any:
    """One element, by Python's own arithmetic."""
    if operation == "inc":
        return 0 if old >= new else old + 1
    if operation == "dec":
        return new if old == 0 or old > new else old - 1
    return {
        "add": lambda: old + new,
        "min": lambda: min(old, new),
        "max": lambda: max(old, new),
        "and": lambda: old & new,
        "or": lambda: old | new,
        "xor": lambda: old ^ new,
    }[operation]()


@pytest.mark.parametrize(("operation", "kind", "dtype"), REDUCTIONS)
def test_reductions_into_global_memory(
    rng: np.random.Generator, operation: str, kind: str, dtype: Any
) -> None:
    """cp.reduce.async.bulk in a bulk group (9.7.9.25.5.3)."""
    source = r"""
    extern "C" __global__ void test(u64* out, const u64* in) {
      __shared__ alignas(16) u64 tile[32];
      tile[threadIdx.x] = in[threadIdx.x];
      fence_async();
      __syncwarp();
      if (threadIdx.x == 0) {
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.OPERATION.KIND"
                     " [%0], [%1], %2;" :: "l"(out), "r"(shared(tile)), "r"(256) : "memory");
        commit(); wait_all();
      }
    }
    """.replace("OPERATION", operation).replace("KIND", kind)
    count = 256 // np.dtype(dtype).itemsize
    old, new = _random(rng, dtype, count), _random(rng, dtype, count)
    old[: count // 4] = new[: count // 4]
    out = placed(old)
    run(source, out, placed(new), block=32)
    name = operation.partition(".")[0]
    if np.dtype(dtype).kind == "f":
        wide = np.longdouble if dtype is np.float64 else np.float64
        pairs = zip(old.astype(wide), new.astype(wide), strict=True)
        expected = np.array([_combined(name, a, b) for a, b in pairs]).astype(dtype)
    else:
        bits = 8 * np.dtype(dtype).itemsize
        found = [
            _combined(name, a, b) % 2**bits for a, b in zip(old.tolist(), new.tolist(), strict=True)
        ]
        expected = np.array(found, f"u{bits // 8}").view(dtype)
    np.testing.assert_array_equal(out, expected)


def test_reductions_into_shared_memory_of_the_cluster(rng: np.random.Generator) -> None:
    """All CTAs add to CTA 0 at the same time, through its mbarrier."""
    source = r"""
    extern "C" __global__ void test(u32* out, const u32* in) {
      __shared__ alignas(16) u32 mine[32]; __shared__ alignas(16) u32 total[32];
      __shared__ u64 bar;
      u32 t = threadIdx.x;
      if (t == 0) { init(&bar, 1); fence_init(); expect(&bar, rank() == 0 ? 512 : 0); }
      mine[t] = in[32 * rank() + t];
      total[t] = 5;
      asm volatile("fence.proxy.async.shared::cluster;" ::: "memory");
      cluster_sync();
      if (t == 0)
        asm volatile("cp.reduce.async.bulk.shared::cluster.shared::cta"
                     ".mbarrier::complete_tx::bytes.add.u32 [%0], [%1], %2, [%3];"
                     :: "r"(remote(shared(total), 0)), "r"(shared(mine)), "r"(128),
                        "r"(remote(shared(&bar), 0)) : "memory");
      if (rank() == 0) { wait(&bar, 0); out[t] = total[t]; }
      cluster_sync();
    }
    """
    data = placed(rng.integers(0, 2**32, (4, 32), dtype=np.uint32))
    out = aligned(32, np.uint32)
    run(source, out, data, grid=4, cluster=4, block=32)
    np.testing.assert_array_equal(out, data.sum(0, dtype=np.uint32) + np.uint32(5))


def test_waiting_for_reads_lets_the_source_be_written_again(rng: np.random.Generator) -> None:
    """wait_group.read, and groups that are written when the kernel ends."""
    source = r"""
    extern "C" __global__ void test(u32* out) {
      __shared__ alignas(16) u32 tile[32];
      for (u32 i = 0; i < 3; ++i) {
        tile[threadIdx.x] = 100 * i + threadIdx.x;
        fence_async();
        __syncwarp();
        if (threadIdx.x == 0) { store(out + 32 * i, tile, 128); commit(); wait_read(); }
        __syncwarp();
      }
    }
    """
    out = aligned((3, 32), np.uint32)
    run(source, out, block=32, undefined=(0,))
    np.testing.assert_array_equal(out, 100 * np.arange(3)[:, None] + np.arange(32))


def test_only_masked_bytes_are_stored() -> None:
    """cp_mask takes the same bytes of every 16."""
    source = r"""
    extern "C" __global__ void test(u32* out) {
      __shared__ alignas(16) u32 tile[32];
      tile[threadIdx.x] = 0x04030201;
      fence_async();
      __syncwarp();
      if (threadIdx.x == 0) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%0], [%1], %2, %3;"
                     :: "l"(out), "r"(shared(tile)), "r"(128), "h"((u16)0x8421) : "memory");
        commit(); wait_all();
      }
    }
    """
    out = aligned(128, np.uint8)
    run(source, out, block=32, arch="sm_100a")
    expected = np.zeros((8, 16), np.uint8)
    for byte in (0, 5, 10, 15):
        expected[:, byte] = byte % 4 + 1
    np.testing.assert_array_equal(out, expected.reshape(-1))


def test_prefetch_changes_nothing() -> None:
    """cp.async.bulk.prefetch (9.7.9.25.5.4)."""
    source = r"""
    extern "C" __global__ void test(u32* out) {
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(out), "r"(128));
      out[threadIdx.x] = 1;
    }
    """
    out = aligned(32, np.uint32)
    run(source, out, block=32)
    assert out.all()
