"""Faults of asynchronous copies and products, planted: each is found, named and located."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import test_wgmma
import warpgroup_matrices as wm
from hopper_kernels import MapOf, aligned, errors, placed, run, tensor_map

COPY = r"""
extern "C" __global__ void test(u32* out, const u32* in) {
  __shared__ alignas(128) u32 tile[256]; __shared__ alignas(128) u32 other[256];
  __shared__ u64 bar, second;
  u32 t = threadIdx.x;
  if (t == 0) { init(&bar, 1); init(&second, 1); fence_init(); }
  __syncthreads();
  BODY
}
"""


@pytest.fixture
def fault() -> Callable[..., Any]:
    """Runs a kernel that must fail in a given way; returns the error."""

    def check(kind: str, match: str, source: str, *arguments: Any, **options: Any) -> Any:
        with pytest.raises(getattr(errors, kind), match=match) as caught:
            run(source, *arguments, **options)
        assert caught.value.where is not None
        assert caught.value.where.line > 0
        assert ">" in caught.value.where.listing
        return caught.value

    return check


@pytest.fixture
def copy_fault(fault: Any) -> Callable[..., Any]:
    """The same for a body with a tile in shared memory and 1024 bytes of input."""

    def check(kind: str, match: str, body: str, block: int = 64, **options: Any) -> Any:
        data = placed(np.arange(256, dtype=np.uint32))
        out = aligned(256, np.uint32)
        return fault(kind, match, COPY.replace("BODY", body), out, data, block=block, **options)

    return check


START = "if (t == 0) { expect(&bar, 1024); load(tile, in, 1024, &bar); }\n"


# -- what a copy writes ---------------------------------------------------------------------------


def test_reading_before_the_barrier(copy_fault: Any) -> None:
    error = copy_fault(
        "AsyncHazardError",
        "a load of shared memory .* may still write",
        START + "out[t] = tile[t];",
    )
    assert (error.where.cta, error.where.warp, error.where.lane) == ((0, 0, 0), 0, 0)
    assert "ld.shared" in error.where.text


def test_writing_before_the_barrier(copy_fault: Any) -> None:
    copy_fault("AsyncHazardError", "a store to shared memory", START + "tile[t] = t;")


def test_only_one_warp_waits(copy_fault: Any) -> None:
    """The other one knows by a relaxed flag that the copy is over: this orders nothing."""
    body = (
        START
        + r"""
      volatile u32* flag = out + 200;
      if (t < 32) { wait(&bar, 0); if (t == 0) *flag = 1; }
      else { while (*flag == 0) __nanosleep(9); out[t] = tile[t]; }
    """
    )
    error = copy_fault("RaceError", "an asynchronous copy has written without a barrier", body)
    assert error.where.warp == 1


def test_two_copies_to_one_place(copy_fault: Any) -> None:
    body = START + "if (t == 0) { expect(&second, 512); load(tile + 128, in, 512, &second); }"
    copy_fault("AsyncHazardError", "what another one may still write", body)


def test_copy_over_what_others_read(copy_fault: Any) -> None:
    """The next round begins before all warps have read."""
    body = START + "wait(&bar, 0); out[t] = tile[t];\n" + START
    error = copy_fault("RaceError", "warp 1 has read without a barrier", body)
    assert (error.where.warp, error.where.lane) == (0, 0)


def test_copy_over_unfenced_stores(copy_fault: Any) -> None:
    body = "tile[t] = t; __syncthreads();\n" + START
    copy_fault("AsyncHazardError", "writes what warp 0 has written, and no fence.proxy", body)


def test_copy_over_unordered_stores(copy_fault: Any) -> None:
    body = "tile[t + 64] = t; fence_async();\n" + START
    copy_fault("RaceError", "warp 1 has written without a barrier", body)


def test_nobody_waits(copy_fault: Any) -> None:
    copy_fault("AsyncHazardError", "the kernel ends while an asynchronous operation writes", START)


def test_copy_into_a_cta_that_has_ended(fault: Any) -> None:
    source = r"""
    extern "C" __global__ void test(u32* out, const u32* in) {
      __shared__ alignas(16) u32 tile[32]; __shared__ u64 bar;
      if (threadIdx.x == 0) { init(&bar, 1); fence_init(); expect(&bar, 128); }
      cluster_sync();
      if (rank() == 1) return;
      if (threadIdx.x == 0)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                     ".multicast::cluster [%0], [%1], %2, [%3], %4;"
                     :: "r"(shared(tile)), "l"(in), "r"(128), "r"(shared(&bar)), "h"((u16)3));
      wait(&bar, 0);
      out[threadIdx.x] = tile[threadIdx.x];
    }
    """
    data, out = aligned(32, np.uint32), aligned(32, np.uint32)
    fault("AsyncHazardError", "of a CTA that has ended|kernel ends while", source, out, data,
          grid=2, cluster=2, block=32)  # fmt: skip


# -- what a copy reads ----------------------------------------------------------------------------

FILL = "tile[t] = t; tile[t + 64] = t; fence_async(); __syncthreads();\n"
SEND = "if (t == 0) { store(out, tile, 512); commit(); }\n"


def test_source_without_a_proxy_fence(copy_fault: Any) -> None:
    body = "tile[t] = t; tile[t + 64] = t; __syncthreads();\n" + SEND
    copy_fault("AsyncHazardError", "reads what warp 0 has written, and no fence.proxy.async", body)


def test_source_with_a_fence_for_global_memory_only(copy_fault: Any) -> None:
    body = FILL.replace("fence_async()", 'asm volatile("fence.proxy.async.global;")') + SEND
    copy_fault("AsyncHazardError", "no fence.proxy.async", body)


def test_fence_of_another_warp_without_a_barrier_behind_it(copy_fault: Any) -> None:
    """The fence must lie between the store and the copy in the order of events."""
    body = "tile[t] = t; tile[t + 64] = t; __syncthreads(); if (t >= 32) fence_async();\n" + SEND
    copy_fault("AsyncHazardError", "no fence.proxy.async", body)


def test_fence_on_the_side_of_the_copy() -> None:
    """No fault: it lies in between."""
    body = "tile[t] = t; tile[t + 64] = t; __syncthreads(); if (t == 0) fence_async();\n" + SEND
    out, data = aligned(256, np.uint32), aligned(256, np.uint32)
    run(COPY.replace("BODY", body + "if (t == 0) wait_all();"), out, data, block=64)
    np.testing.assert_array_equal(out[:128], np.tile(np.arange(64), 2))


def test_source_is_written_before_the_wait(copy_fault: Any) -> None:
    error = copy_fault("AsyncHazardError", "may still read", FILL + SEND + "tile[t] = 0;")
    assert "st.shared" in error.where.text


def test_source_is_overwritten_by_a_copy(copy_fault: Any) -> None:
    copy_fault("AsyncHazardError", "what another one may still read", FILL + SEND + START)


def test_other_warp_writes_the_source_without_a_barrier(copy_fault: Any) -> None:
    """It has been read, and nothing says so to the other warp."""
    body = FILL + SEND + "if (t == 0) wait_read(); if (t >= 32) { __nanosleep(9); tile[t] = 0; }"
    copy_fault("RaceError", "has read without", body)


def test_source_is_undefined(copy_fault: Any) -> None:
    copy_fault("PoisonError", "copied to global memory", "tile[t] = t; fence_async();\n"
               "__syncthreads();" + SEND)  # fmt: skip


def test_kernel_ends_before_the_source_is_read(copy_fault: Any) -> None:
    copy_fault("AsyncHazardError", "ends while a bulk copy reads", FILL + SEND)


def test_copy_in_no_group(copy_fault: Any) -> None:
    body = FILL + SEND.replace("commit();", "") + "if (t == 0) wait_all();"
    copy_fault("AsyncHazardError", "ends while a bulk copy reads", body)


# -- barriers -------------------------------------------------------------------------------------


def test_more_bytes_than_expected(copy_fault: Any) -> None:
    body = "if (t == 0) { expect(&bar, 512); load(tile, in, 1024, &bar); } wait(&bar, 0);"
    error = copy_fault("BarrierError", "512 more than it expects", body)
    assert "cp.async.bulk" in error.where.text


def test_fewer_bytes_than_expected(copy_fault: Any) -> None:
    body = "if (t == 0) { expect(&bar, 1040); load(tile, in, 1024, &bar); } wait(&bar, 0);"
    copy_fault("DeadlockError", "lacks 0 of 1 arrivals and 16 bytes", body)


def test_phase_is_over_without_a_copy(copy_fault: Any) -> None:
    body = "if (t == 0) { load(tile, in, 1024, &bar); arrive(&bar); expect(&bar, 16); }"
    body = body.replace("arrive(&bar);", "load(other, in, 16, &bar); arrive(&bar);")
    body = "if (t == 0) { expect(&bar, 16); load(tile, in, 16, &bar); load(other, in, 16, &bar); }"
    copy_fault("BarrierError", "phase 0, in which the copy began, is over", body + "wait(&bar, 0);"
               "wait(&bar, 1);")  # fmt: skip


def test_barrier_is_not_initialized(copy_fault: Any) -> None:
    body = "__shared__ u64 third; if (t == 0) load(tile, in, 1024, &third);"
    copy_fault("BarrierError", "is not initialized", body)


def test_too_many_expected_bytes(copy_fault: Any) -> None:
    copy_fault("BarrierError", "cannot count 1048576 bytes", "if (t == 0) expect(&bar, 1 << 20);")


# -- addresses and sizes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "kind", "match"),
    [
        ("load(tile + 1, in, 16, &bar)", "AlignmentError", "destination's address, .* of 16"),
        ("load(tile, in + 1, 16, &bar)", "AlignmentError", "source's address, .* of 16"),
        ("load(tile, in, 24, &bar)", "AlignmentError", "the size, 0x18, is no multiple of 16"),
        ("load(tile, in, 16, (u64*)((char*)&bar + 4))", "AlignmentError", "mbarrier, .* of 8"),
        ("load(tile, in, 1040, &bar)", "BoundsError", "of argument 1, which has 1024 bytes"),
        ("load(tile + 252, in, 32, &bar)", "BoundsError", "lies in no variable of the CTA"),
        ("store(out + 255, tile, 16)", "AlignmentError", "destination's address"),
        ("store(out + 252, tile, 32)", "BoundsError", "of argument 0, which has 1024 bytes"),
    ],
)
def test_operands(copy_fault: Any, call: str, kind: str, match: str) -> None:
    error = copy_fault(kind, match, f"{FILL} if (t == 33) {{ {call}; }}")
    assert (error.where.warp, error.where.lane) == (1, 1)


def test_barrier_in_another_cta(copy_fault: Any) -> None:
    body = r"""
      cluster_sync();
      if (t == 0)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                     " [%0], [%1], %2, [%3];" :: "r"(remote(shared(tile), rank() ^ 1)), "l"(in),
                     "r"(16), "r"(shared(&bar)));
    """
    copy_fault(
        "UndefinedBehaviorError", "in another CTA than the destination", body, grid=2, cluster=2
    )


@pytest.mark.parametrize("mask", [0, 4])
def test_multicast_to_nobody(copy_fault: Any, mask: int) -> None:
    body = r"""
      if (t == 0)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                     ".multicast::cluster [%0], [%1], %2, [%3], %4;" :: "r"(shared(tile)), "l"(in),
                     "r"(16), "r"(shared(&bar)), "h"((u16)MASK));
    """.replace("MASK", str(mask))
    copy_fault("UndefinedBehaviorError", "the mask 0x", body, grid=2, cluster=2)


# -- tensors --------------------------------------------------------------------------------------

TENSOR = r"""
extern "C" __global__ void test(const __grid_constant__ Map map, i32 shift) {
  __shared__ alignas(1024) u8 tile[4096]; __shared__ u64 bar;
  if (threadIdx.x == 0) {
    init(&bar, 1); fence_init(); expect(&bar, 2048);
    load_2d(tile + shift, &map, 0, 0, &bar);
  }
  __syncthreads();
  wait(&bar, 0);
}
"""


def test_bytes_that_are_no_tensor_map(fault: Any) -> None:
    array = aligned((16, 128), np.uint8)
    fault("UndefinedBehaviorError", "no tensor map", TENSOR, MapOf(bytes(128), array), 0)


def test_tensor_map_of_other_dimensions(fault: Any) -> None:
    array = aligned((2, 16, 128), np.uint8)
    encoded = tensor_map(array, "uint8", (128, 16, 1))
    fault("UndefinedBehaviorError", "3 dimensions with 2 coordinates", TENSOR, encoded, 0)


def test_tensor_beyond_its_memory(fault: Any) -> None:
    array = aligned((16, 128), np.uint8)
    encoded = tensor_map(array, "uint8", (128, 16))
    fault("BoundsError", "global address", TENSOR, encoded._replace(array=array[:8]), 0)


def test_tensor_to_a_misaligned_place(fault: Any) -> None:
    encoded = tensor_map(aligned((16, 128), np.uint8), "uint8", (128, 16))
    fault("AlignmentError", "destination's address, .* of 128", TENSOR, encoded, 64)


def test_box_that_does_not_fit(fault: Any) -> None:
    encoded = tensor_map(aligned((64, 128), np.uint8), "uint8", (128, 64))
    fault("BoundsError", "lies in no variable of the CTA", TENSOR, encoded, 0)


def test_rows_shorter_than_the_swizzle(fault: Any) -> None:
    encoded = tensor_map(aligned((32, 64), np.uint8), "uint8", (64, 32), swizzle=3)
    fault("UnknownInstructionError", "rows of 64 bytes in the swizzle 128B", TENSOR, encoded, 0)


def test_elements_that_are_not_simulated(fault: Any) -> None:
    encoded = tensor_map(aligned((16, 32), np.float32), "tfloat32", (32, 16))
    fault("UnknownInstructionError", "tfloat32 is not simulated", TENSOR, encoded, 0)


@pytest.mark.parametrize(
    "text",
    [
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [s], [m, {s, s, s}], [s];",
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [s], [m, {s, s}], [s];",
        "cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [m, {s, s}], [s];",
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group [m, {s, s}], [s];",
        "cp.async.bulk.prefetch.tensor.2d.L2.global [m, {s}];",
        "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
        " [s], [m, {s, s, s, s}], [s], {h, h};",
    ],
)
def test_coordinates_of_other_dimensions(run_ptx: Any, text: str) -> None:
    """Found when the kernel is loaded, as by ptxas."""
    body = f"""
      .reg .b64 m; .reg .b32 s; .reg .b16 h; .reg .pred p; .shared .align 128 .b8 tile[128];
      setp.ne.u32 p, 0, 0; @!p exit; {text}
    """
    with pytest.raises(errors.UnknownInstructionError, match="coordinates of a tensor of"):
        run_ptx(body, {"map": aligned(128, np.uint8)})


def test_changed_map_without_an_acquire(fault: Any) -> None:
    source = r"""
    extern "C" __global__ void test(Map* map, const u32* in) {
      __shared__ alignas(128) u32 tile[16]; __shared__ u64 bar;
      if (threadIdx.x == 0) {
        asm volatile("tensormap.replace.tile.global_address.global.b1024.b64 [%0], %1;"
                     :: "l"(map), "l"(in) : "memory");
        init(&bar, 1); fence_init(); expect(&bar, 64);
        load_2d(tile, map, 0, 0, &bar);
      }
    }
    """
    array = aligned((4, 4), np.uint32)
    data = placed(np.frombuffer(tensor_map(array, "uint32", (4, 4)).data, np.uint8))
    fault("AsyncHazardError", "has been changed", source, data, array, block=32)


@pytest.mark.parametrize("mode", ["im2col_no_offs", "im2col::w", "im2col::w::128"])
def test_modes_that_are_not_simulated(run_ptx: Any, mode: str) -> None:
    body = f"""
      .reg .b64 m; .reg .b32 s; .shared .align 128 .b8 tile[128]; mov.u32 s, tile;
      ld.param.u64 m, [p0];
      cp.async.bulk.tensor.3d.shared::cta.global.{mode}.mbarrier::complete_tx::bytes
        [s], [m, {{s, s, s}}], [s];
    """
    with pytest.raises(errors.UnknownInstructionError, match=f"mode .{mode} are not simulated"):
        run_ptx(body, {"map": aligned(128, np.uint8)})


# -- products -------------------------------------------------------------------------------------

PRODUCT = (
    test_wgmma.MAINLOOP
    + r"""
extern "C" __global__ void test(float* out, u64 garbage) {
  __shared__ alignas(1024) u32 sa[512 + 512]; __shared__ alignas(1024) u32 sb[256 + 512];
  u32 t = threadIdx.x;
  for (u32 i = t; i < 1024; i += blockDim.x) sa[i] = 0x3f803f80;
  for (u32 i = t; i < 768; i += blockDim.x) sb[i] = 0x3f803f80;
  u64 da = describe(sa, 1024, 128, 0), db = describe(sb, 512, 128, 0);
  float d[16]; u32 a[4];
  for (int i = 0; i < 16; ++i) d[i] = out[16 * (t % 128) + i];
  fence_async(); __syncthreads();
  for (int i = 0; i < 4; ++i) a[i] = sa[4 * (t % 128) + i];
  BODY
}
"""
)
SHOW = "put(out, 32, d);"


@pytest.fixture
def product_fault(fault: Any) -> Callable[..., Any]:
    """For a body that multiplies matrices of ones."""

    def check(kind: str, match: str, body: str, block: int = 128, **options: Any) -> Any:
        out = aligned((64, 32), np.float32)
        return fault(kind, match, PRODUCT.replace("BODY", body), out, 0, 0, block=block, **options)

    return check


def test_products_of_ones_agree() -> None:
    """No fault: what the other tests break."""
    body = "begin(); multiply(d, da, db, 1); multiply_rs(d, a, db, 1); end_group();"
    out = aligned((64, 32), np.float32)
    run(PRODUCT.replace("BODY", body + "wait_groups<0>();" + SHOW), out, 0, 0)
    np.testing.assert_array_equal(out, np.full((64, 32), 32.0))


def test_results_before_the_wait(product_fault: Any) -> None:
    body = "begin(); multiply(d, da, db, 1); end_group();" + SHOW + "wait_groups<0>();"
    product_fault("PoisonError", "an undefined value is stored", body)


def test_waiting_for_too_few_products(product_fault: Any) -> None:
    body = "begin(); multiply(d, da, db, 1); end_group(); wait_groups<1>();" + SHOW
    product_fault("PoisonError", "an undefined value is stored", body + "wait_groups<0>();")


def test_products_in_no_group(product_fault: Any) -> None:
    body = "begin(); multiply(d, da, db, 1); wait_groups<0>(); end_group();" + SHOW
    product_fault("PoisonError", "an undefined value is stored", body + "wait_groups<0>();")


def test_kernel_ends_with_a_product_in_flight(product_fault: Any) -> None:
    product_fault("AsyncHazardError", "in flight", "begin(); multiply(d, da, db, 1); end_group();")


def test_no_fence_before_the_first_product(product_fault: Any) -> None:
    body = "multiply(d, da, db, 1); end_group(); wait_groups<0>();" + SHOW
    error = product_fault("UndefinedBehaviorError", "no wgmma.fence lies before", body)
    assert error.where.text.startswith("wgmma.mma_async")


@pytest.mark.parametrize("which", ["A", "D"])
def test_registers_written_behind_the_fence(product_fault: Any, which: str) -> None:
    change = "a[1] ^= t;" if which == "A" else "d[3] += t;"
    body = "begin();" + change + "multiply_rs(d, a, db, 1); end_group(); wait_groups<0>();"
    product_fault("UndefinedBehaviorError", "since the last wgmma.fence", body + SHOW)


def test_second_fence_covers_the_registers() -> None:
    """No fault: registers are written, and fenced again."""
    body = "begin(); multiply_rs(d, a, db, 1); end_group(); wait_groups<0>();"
    body += "for (int i = 0; i < 16; ++i) d[i] *= 2; a[0] ^= 0x80008000;" + body + SHOW
    out = aligned((64, 32), np.float32)
    run(PRODUCT.replace("BODY", body), out, 0, 0)
    # Half of the columns of rows g change their sign: the sum is 0; rows g + 8 stay.
    expected = np.where(np.arange(64)[:, None] % 16 < 8, 2 * 16.0, 2 * 16.0 + 16) + np.zeros(
        (64, 32)
    )
    np.testing.assert_array_equal(out, expected)


def test_shared_memory_written_while_a_product_reads_it(product_fault: Any) -> None:
    body = "begin(); multiply(d, da, db, 1); end_group(); sb[t] = 0; wait_groups<0>();"
    error = product_fault("AsyncHazardError", "may still read", body + SHOW)
    assert "st.shared" in error.where.text


def test_operands_without_a_proxy_fence(product_fault: Any) -> None:
    body = "sb[t] = 0; __syncthreads(); begin(); multiply(d, da, db, 1); end_group();"
    error = product_fault("AsyncHazardError", "no fence.proxy.async", body + "wait_groups<0>();")
    assert error.where.text.startswith("wgmma.mma_async")


def test_operands_of_another_warp_without_a_barrier(product_fault: Any) -> None:
    body = "sb[t] = 0; fence_async(); begin(); multiply(d, da, db, 1); end_group();"
    product_fault("RaceError", "has written without a barrier", body + "wait_groups<0>();")


def test_release_before_the_wait(product_fault: Any) -> None:
    """Another warp may write again what a product may still be reading."""
    body = r"""
      __shared__ u64 bar;
      if (t == 0) { init(&bar, 1); fence_init(); }
      __syncthreads();
      if (t < 128) {
        begin(); multiply(d, da, db, 1); end_group();
        if (t == 0) arrive(&bar);
        wait_groups<0>();
        put(out, 32, d);
      } else { wait(&bar, 0); sb[t - 128] = 0; }
    """
    for seed in range(3):
        product_fault("SimulationError", "may still read|has read without", body, 160, seed=seed)


def test_undefined_operands_spoil_rows_and_columns(product_fault: Any) -> None:
    body = r"""
      __shared__ alignas(1024) u32 hole[256];
      for (u32 i = t; i < 256; i += 128) if (i != 5) hole[i] = 0x3f803f80;
      fence_async(); __syncthreads();
      begin(); multiply(d, da, describe(hole, 512, 128, 0), 1); end_group(); wait_groups<0>();
      u32 c = 1;
      if (t % 4 == 0) d[CHANGED] = 0;
      put(out, 32, d);
    """
    # Word 5 is in row 1 of B, so in column 1: element 1 of threads 0, 4, 8, ...
    out = aligned((64, 32), np.float32)
    product_fault("PoisonError", "undefined value is stored", body.replace("CHANGED", "2"))
    body = body.replace(
        "if (t % 4 == 0) d[CHANGED] = 0;", "if (t % 4 == 0) { d[1] = 0; d[3] = 0; }"
    )
    run(PRODUCT.replace("BODY", body), out, 0, 0)
    assert (np.delete(out, 1, axis=1) == 16).all()


@pytest.mark.parametrize(
    ("change", "kind", "match"),
    [
        ("da | 1ull << 46", "UndefinedBehaviorError", "descriptor of A, .* reserved"),
        ("da | 1ull << 14", "UndefinedBehaviorError", "reserved"),
        ("da | 1ull << 55", "UndefinedBehaviorError", "reserved"),
        ("da | 1ull << 49", "UndefinedBehaviorError", "base offset, which no swizzle uses"),
        ("da | 0x3fffull", "BoundsError", "matrix A of a wgmma, 16 bytes at shared address"),
        ("da + (t == 70 ? 8 : 0)", "UndefinedBehaviorError", "disagree about the descriptor of A"),
    ],
)
def test_descriptors(product_fault: Any, change: str, kind: str, match: str) -> None:
    body = f"begin(); multiply(d, {change}, db, 1); end_group(); wait_groups<0>();"
    product_fault(kind, match, body + SHOW)


def test_factor_of_the_accumulator_differs(product_fault: Any) -> None:
    body = "begin(); multiply(d, da, db, t != 3); end_group(); wait_groups<0>();"
    product_fault("UndefinedBehaviorError", "disagree about scale-d", body + SHOW)


def test_part_of_a_warpgroup(product_fault: Any) -> None:
    body = "if (t < 96) { begin(); multiply(d, da, db, 1); end_group(); wait_groups<0>(); }"
    error = product_fault("DivergenceError", "four warps of a warpgroup|must execute", body + SHOW)
    assert "wgmma" in error.where.text


def test_warps_of_a_warpgroup_at_two_products(product_fault: Any) -> None:
    body = "begin(); if (t < 64) multiply(d, da, db, 1); else multiply(d, da, db, 0); end_group();"
    product_fault("DivergenceError", "wait in vain", body + "wait_groups<0>();" + SHOW)


def test_warpgroup_that_is_not_whole(product_fault: Any) -> None:
    body = "begin(); multiply(d, da, db, 1); end_group(); wait_groups<0>();"
    product_fault("DivergenceError", "four warps of a warpgroup", body + SHOW, block=96)


@pytest.mark.parametrize(
    ("opcode", "what"),
    [
        ("m64n8k8.f32.f16.f16", "K = 8"),
        ("m64n12k16.f32.f16.f16", "no such shape"),
        ("m64n40k32.s32.s8.s8", "no such shape"),
        ("m64n8k16.f16.bf16.bf16", "no results of type f16"),
        ("m64n8k16.f32.f16.bf16", "wgmma of f16 and bf16"),
        ("m64n8k32.f32.s8.s8", "no results of type f32"),
    ],
)
def test_forms_that_do_not_exist(run_ptx: Any, opcode: str, what: str) -> None:
    body = test_wgmma.product_body(
        f"wgmma.mma_async.sync.aligned.{opcode}", 4, "f32", 1, 1, ", 1, 1, 0, 0", False
    ).replace("setp.ge.u32 p, i, 1", "setp.ge.u32 p, i, 0")
    arrays = {name: aligned((128, 4), np.float32) for name in ("out", "before", "a", "b")}
    with pytest.raises(errors.UnknownInstructionError, match=what):
        run_ptx(body, arrays, scalars=(0, 0, 1), block=128, target="sm_90a")


def test_accumulators_that_are_copied_in_flight(run_ptx: Any, rng: np.random.Generator) -> None:
    """No fault: compilers copy registers where they like, and results follow the copies."""
    moved = "\n".join(f"mov.f32 e{i}, d{i}; mov.f32 d{i}, 0f40000000;" for i in range(4))
    stores = "\n".join(f"st.global.f32 [pd+{4 * i}], e{i};" for i in range(4))
    opcode = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"
    text = test_wgmma.product_body(opcode, 4, "f32", 512, 64, ", 1, 1, 0, 0", False)
    head, _, _ = text.partition("wgmma.commit_group")
    body = (
        ".reg .f32 e<4>;"
        + head
        + f"""
      {moved}
      {opcode} {{e0, e1, e2, e3}}, descriptor_a, descriptor_b, adds, 1, 1, 0, 0;
      wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
      {stores}
    """
    )
    a, b = (wm.random_codes(rng, "bf16", (size, 16)) for size in (64, 8))
    left, right = (wm.k_major(wm.packed(m, "bf16"), "none") for m in (a, b))
    out, before = aligned((128, 4), np.float32), aligned((128, 4), np.float32)
    arrays = {"out": out, "before": before, "a": placed(left.image), "b": placed(right.image)}
    scalars = (left.descriptor, right.descriptor, 1)
    run_ptx(body, arrays, scalars=scalars, block=128, target="sm_90a")
    exact = 2 * (wm.values_of(a, "bf16") @ wm.values_of(b, "bf16").T)
    np.testing.assert_allclose(wm.accumulator(out, False), exact, atol=1e-4)
