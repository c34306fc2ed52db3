"""Distributed shared memory: remote accesses, barriers and asynchronous stores."""

from typing import Any

import numpy as np
import pytest
from hopper_kernels import aligned, errors, placed, run

SEEDS = [None, 2, 9]


@pytest.mark.parametrize("seed", SEEDS)
def test_generic_and_explicit_access_to_another_cta(
    rng: np.random.Generator, seed: int | None
) -> None:
    """mapa, ld and st in shared::cluster, atom by a generic address (9.7.9.23, 9.7.9.8)."""
    source = r"""
    extern "C" __global__ void test(u32* out, const u32* in) {
      __shared__ u32 mine[32]; __shared__ u32 given[32]; __shared__ u32 sum;
      u32 t = threadIdx.x, me = rank(), next = (me + 1) % 4;
      mine[t] = in[32 * me + t];
      if (t == 0) sum = 0;
      cluster_sync();
      u32 v;
      asm volatile("ld.shared::cluster.u32 %0, [%1];"
                   : "=r"(v) : "r"(remote(shared(&mine[t]), next)) : "memory");
      asm volatile("st.shared::cluster.u32 [%0], %1;"
                   :: "r"(remote(shared(&given[t]), next)), "r"(v + 1) : "memory");
      u64 far;
      asm volatile("mapa.u64 %0, %1, %2;" : "=l"(far) : "l"(&sum), "r"(next));
      atomicAdd((u32*)far, v);
      u32* generic; asm volatile("mapa.u64 %0, %1, %2;" : "=l"(far) : "l"(&mine[t]), "r"(next));
      generic = (u32*)far;
      u32 again = *(volatile u32*)generic;
      cluster_sync();
      out[128 * 0 + 32 * me + t] = given[t];
      out[128 + 32 * me + t] = sum;
      out[256 + 32 * me + t] = again;
      cluster_sync();
    }
    """
    data = placed(rng.integers(0, 2**32, (4, 32), dtype=np.uint32))
    out = aligned((3, 4, 32), np.uint32)
    run(source, out, data, grid=4, cluster=4, block=32, seed=seed)
    # CTA c gave to c + 1 what it found there, plus 1: everyone gets its own.
    np.testing.assert_array_equal(out[0], data + np.uint32(1))
    expected = np.broadcast_to(data.sum(1, dtype=np.uint32)[:, None], (4, 32))
    np.testing.assert_array_equal(out[1], expected)
    np.testing.assert_array_equal(out[2], np.roll(data, -1, 0))


@pytest.mark.parametrize("seed", SEEDS)
def test_remote_arrivals(rng: np.random.Generator, seed: int | None) -> None:
    """Every thread of three CTAs arrives at the mbarrier of the first (9.7.13.15.13)."""
    source = r"""
    extern "C" __global__ void test(u32* out, const u32* in) {
      __shared__ u32 box[4][32]; __shared__ u64 bar;
      u32 t = threadIdx.x, me = rank();
      if (t == 0) { init(&bar, 96); fence_init(); }
      cluster_sync();
      for (u32 round = 0; round < 2; ++round) {
        if (me) {
          asm volatile("st.shared::cluster.u32 [%0], %1;"
                       :: "r"(remote(shared(&box[me][t]), 0)), "r"(in[32 * me + t] + round)
                       : "memory");
          arrive_remote(&bar, 0);
        } else {
          wait(&bar, round);
          for (int i = 1; i < 4; ++i) out[128 * round + 32 * i + t] = box[i][31 - t];
        }
        cluster_sync();
      }
    }
    """
    data = placed(rng.integers(0, 2**31, (4, 32), dtype=np.uint32))
    out = aligned((2, 4, 32), np.uint32)
    run(source, out, data, grid=4, cluster=4, block=32, seed=seed)
    np.testing.assert_array_equal(out[0, 1:], data[1:, ::-1])
    np.testing.assert_array_equal(out[1, 1:], data[1:, ::-1] + np.uint32(1))


@pytest.mark.parametrize("seed", SEEDS)
def test_asynchronous_stores(rng: np.random.Generator, seed: int | None) -> None:
    """st.async of one and of four values (9.7.9.12)."""
    source = r"""
    extern "C" __global__ void test(u32* out, const u32* in) {
      __shared__ alignas(16) u32 box[32]; __shared__ alignas(16) u32 four[128];
      __shared__ u64 bar;
      u32 t = threadIdx.x, me = rank(), other = me ^ 1;
      if (t == 0) { init(&bar, 1); fence_init(); expect(&bar, 128 + 512); }
      cluster_sync();
      u32 to = remote(shared(&bar), other), v = in[32 * me + t];
      asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
                   :: "r"(remote(shared(&box[t]), other)), "r"(v), "r"(to) : "memory");
      asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32"
                   " [%0], {%1, %2, %3, %4}, [%5];"
                   :: "r"(remote(shared(&four[4 * t]), other)), "r"(v), "r"(v + 1), "r"(v + 2),
                      "r"(v + 3), "r"(to) : "memory");
      wait(&bar, 0);
      out[160 * me + t] = box[t];
      for (int i = 0; i < 4; ++i) out[160 * me + 32 + 4 * t + i] = four[4 * t + i];
      cluster_sync();
    }
    """
    data = placed(rng.integers(0, 2**31, (2, 32), dtype=np.uint32))
    out = aligned((2, 160), np.uint32)
    run(source, out, data, grid=2, cluster=2, block=32, seed=seed)
    np.testing.assert_array_equal(out[:, :32], data[::-1])
    quads = data[::-1, :, None] + np.arange(4, dtype=np.uint32)
    np.testing.assert_array_equal(out[:, 32:], quads.reshape(2, 128))


def test_asynchronous_reductions(rng: np.random.Generator) -> None:
    """red.async from all CTAs to one place (9.7.13.10)."""
    source = r"""
    extern "C" __global__ void test(u32* out, const u32* in) {
      __shared__ u32 sum; __shared__ u64 bar;
      u32 t = threadIdx.x;
      if (t == 0) { sum = 7; init(&bar, 1); fence_init(); expect(&bar, rank() ? 0 : 4 * 128); }
      cluster_sync();
      asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32"
                   " [%0], %1, [%2];"
                   :: "r"(remote(shared(&sum), 0)), "r"(in[32 * rank() + t]),
                      "r"(remote(shared(&bar), 0)) : "memory");
      if (rank() == 0) { wait(&bar, 0); out[t] = sum; }
      cluster_sync();
    }
    """
    data = placed(rng.integers(0, 2**32, (4, 32), dtype=np.uint32))
    out = aligned(32, np.uint32)
    run(source, out, data, grid=4, cluster=4, block=32)
    assert (out == data.sum(dtype=np.uint32) + np.uint32(7)).all()


def test_requests_for_other_clusters_fail() -> None:
    """A kernel that asks for more work gets none, and all clusters run (9.7.13.19-20)."""
    source = r"""
    extern "C" __global__ void test(u32* out) {
      __shared__ alignas(16) u64 response[2]; __shared__ u64 bar;
      u32 canceled;
      if (threadIdx.x == 0) {
        init(&bar, 1); fence_init(); expect(&bar, 16);
        asm volatile("clusterlaunchcontrol.try_cancel.async.shared::cta"
                     ".mbarrier::complete_tx::bytes.b128 [%0], [%1];"
                     :: "r"(shared(response)), "r"(shared(&bar)) : "memory");
      }
      __syncwarp();
      wait(&bar, 0);
      asm volatile("{ .reg .b128 r; .reg .pred p; mov.b128 r, {%1, %2};\n"
                   "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, r;\n"
                   "selp.u32 %0, 1, 0, p; }"
                   : "=r"(canceled) : "l"(response[0]), "l"(response[1]));
      out[32 * blockIdx.x + threadIdx.x] = 5 + canceled;
    }
    """
    out = aligned((3, 32), np.uint32)
    run(source, out, grid=3, block=32, arch="sm_100a")
    assert (out == 5).all()


# -- shared memory of CTAs that end ---------------------------------------------------------------

OTHERS = """
  .reg .b32 t, r, w, v, s; .reg .b64 base, at; .reg .pred p, first;
  .shared .align 16 .b8 tile[128]; .shared .align 8 .b64 bar;
  mov.u32 t, %tid.x; mov.u32 r, %cluster_ctarank; ld.param.u64 base, [p0];
  setp.eq.u32 first, t, 0; setp.eq.u32 p, r, 0;
  mad.wide.u32 at, r, 32, base; mov.u32 s, bar; @first mbarrier.init.shared.b64 [s], 1;
  mov.u32 s, tile; mad.lo.u32 s, t, 4, s; st.shared.u32 [s], t;
  barrier.cluster.arrive; barrier.cluster.wait;
  mapa.shared::cluster.u32 w, s, 1;
"""
ACCESSES = {
    "load": "ld.shared::cluster.u32 v, [w];",
    "store": "st.shared::cluster.u32 [w], t;",
    "volatile": "ld.volatile.shared::cluster.u32 v, [w];",
    "atom": "atom.relaxed.cluster.shared::cluster.add.u32 v, [w], 1;",
    "red": "red.relaxed.cluster.shared::cluster.add.u32 [w], 1;",
    "arrive": "mov.u32 s, bar; mapa.shared::cluster.u32 w, s, 1;"
    "@first mbarrier.arrive.release.cluster.shared::cluster.b64 _, [w];",
}
every_access = pytest.mark.parametrize("text", ACCESSES.values(), ids=ACCESSES)


@every_access
def test_access_to_a_cta_that_has_ended(run_ptx: Any, text: str) -> None:
    """Without a barrier of the cluster at its end a CTA may be gone when others still access it."""
    body = f"{OTHERS} @!p exit;\n{text}\n st.global.u32 [at], t;"
    with pytest.raises(errors.RaceError, match="of a CTA that has ended") as caught:
        run_ptx(body, {"out": np.zeros(64, np.uint32)}, grid=2, cluster=(2, 1, 1))
    assert caught.value.where.cta == (0, 0, 0)


@every_access
def test_end_that_nothing_orders_behind_an_access(run_ptx: Any, text: str) -> None:
    """The other CTA lives on for a while, and does not know for how long it must."""
    body = f"{OTHERS} @!p bra L;\n{text}\n bra E;\n L: nanosleep.u32 9; nanosleep.u32 9; E: exit;"
    with pytest.raises(errors.RaceError, match=r"CTA (that has ended|ends, and nothing orders)"):
        run_ptx(body, {"out": np.zeros(64, np.uint32)}, grid=2, cluster=(2, 1, 1))


@every_access
def test_end_behind_a_barrier_of_the_cluster(run_ptx: Any, text: str) -> None:
    body = f"{OTHERS} @!p bra L;\n{text}\n L:"
    body += "barrier.cluster.arrive; barrier.cluster.wait;"
    run_ptx(body, {"out": np.zeros(64, np.uint32)}, grid=2, cluster=(2, 1, 1))


def test_end_behind_the_arrival_that_it_waits_for(run_ptx: Any) -> None:
    body = f"""{OTHERS} @!p bra W; {ACCESSES["store"]} bar.warp.sync 0xffffffff;
      {ACCESSES["arrive"]} exit;
      W: mov.u32 s, bar; mbarrier.try_wait.parity.acquire.cluster.shared.b64 p, [s], 0; @!p bra W;
    """
    run_ptx(body, {"out": np.zeros(64, np.uint32)}, grid=2, cluster=(2, 1, 1))


@pytest.mark.parametrize(
    "opcode",
    [
        "st.async.mbarrier::complete_tx::bytes.u32 [x], 41, [x]",
        "red.async.relaxed.cluster.mbarrier::complete_tx::bytes.add.u32 [x], 1, [x]",
    ],
)
def test_asynchronous_operations_by_generic_addresses(run_ptx: Any, opcode: str) -> None:
    """9.7.9.12 has them, but H200 take them for illegal instructions."""
    body = f".reg .b64 x; .shared .align 8 .b64 bar; mov.u64 x, bar; {opcode};"
    with pytest.raises(errors.UnknownInstructionError, match="by generic addresses"):
        run_ptx(body, {"out": np.zeros(1, np.uint32)}, block=1)
