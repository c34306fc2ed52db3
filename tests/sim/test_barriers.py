"""Barriers of CTAs and clusters, and barrier objects (PTX ISA 9.7.13.1-3, 9.7.13.15)."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

errors = importlib.import_module("humming.devices.simulator.errors")
SEEDS = [None, 1, 2, 3, 4]

START = """
  .reg .b32 t, v, w, s, u, n, m; .reg .b64 base, at; .reg .pred p, q;
  mov.u32 t, %tid.x; ld.param.u64 base, [p0]; mad.wide.u32 at, t, 4, base;
  .shared .align 16 .b8 tile[1024];
  .shared .align 8 .b8 full[8];
  .shared .align 8 .b8 empty[8];
  mov.u32 s, tile;
"""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("operation", ["popc.u32", "and.pred", "or.pred"])
def test_reduction_at_a_barrier(
    run_ptx: Callable[..., Any], rng: Any, operation: str, seed: Any
) -> None:
    result = "v" if operation == "popc.u32" else "q"
    body = (
        START
        + f"""
      ld.global.u32 w, [at]; setp.ne.u32 p, w, 0;
      barrier.cta.red.{operation} {result}, 3, p;
      {"" if result == "v" else "selp.b32 v, 1, 0, q;"}
      st.global.u32 [at], v;
    """
    )
    votes = rng.integers(0, 2, 96, dtype=np.uint32)
    out = votes.copy()
    run_ptx(body, {"out": out}, block=96, seed=seed)
    expected = {"popc.u32": votes.sum(), "and.pred": votes.all(), "or.pred": votes.any()}[operation]
    assert (out == int(expected)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_named_barriers_join_producers_and_consumers(
    run_ptx: Callable[..., Any], seed: Any
) -> None:
    """Warps 0 and 1 write in turns, warps 2 and 3 read: `bar.arrive` of one side, `bar.sync` of
    the other."""
    body = (
        START
        + """
      mov.u32 n, 0; mov.u32 m, 0;
      and.b32 u, t, 63; mad.lo.u32 u, u, 4, s;
      setp.ge.u32 p, t, 64; @p bra CONSUMER;
    PRODUCER:
      mad.lo.u32 v, n, 100, t;
      st.shared.u32 [u], v;
      bar.arrive 1, 128;
      bar.sync 2, 128;
      add.u32 n, n, 1; setp.lt.u32 q, n, 4; @q bra PRODUCER;
      exit;
    CONSUMER:
      bar.sync 1, 128;
      ld.shared.u32 v, [u]; add.u32 m, m, v;
      bar.arrive 2, 128;
      add.u32 n, n, 1; setp.lt.u32 q, n, 4; @q bra CONSUMER;
      st.global.u32 [at], m;
    """
    )
    out = np.zeros(128, np.uint32)
    run_ptx(body, {"out": out}, block=128, seed=seed)
    assert out[64:].tolist() == [600 + 4 * t for t in range(64)]


PIPELINE = """
  setp.ne.u32 p, t, 0; @p bra READY;
  mbarrier.init.shared.b64 [full], 1;
  mbarrier.init.shared.b64 [empty], 64;
READY:
  bar.sync 0;
  mov.u32 n, 0; mov.u32 m, 0;
  setp.ge.u32 p, t, 32; @p bra CONSUMER;
PRODUCER:
  and.b32 w, n, 1; xor.b32 w, w, 1;
  { .reg .pred done;
  WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [empty], w;
    @done bra DONE; bra WAIT; DONE: }
  mad.lo.u32 u, t, 4, s; mad.lo.u32 v, n, 100, t; st.shared.u32 [u], v;
  bar.warp.sync -1;
  setp.eq.u32 q, t, 0;
  @q mbarrier.arrive.shared.b64 _, [full];
  add.u32 n, n, 1; setp.lt.u32 q, n, 5; @q bra PRODUCER;
  exit;
CONSUMER:
  and.b32 w, n, 1;
  { .reg .pred done;
  WAIT: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [full], w, 1000;
    @!done bra WAIT; }
  and.b32 u, t, 31; mad.lo.u32 u, u, 4, s; ld.shared.u32 v, [u]; add.u32 m, m, v;
  mbarrier.arrive.release.cta.shared::cta.b64 _, [empty];
  add.u32 n, n, 1; setp.lt.u32 q, n, 5; @q bra CONSUMER;
  st.global.u32 [at], m;
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_pipeline_over_barrier_objects(run_ptx: Callable[..., Any], seed: Any) -> None:
    """One warp writes, two read; phases alternate; nothing races."""
    out = np.zeros(96, np.uint32)
    run_ptx(START + PIPELINE, {"out": out}, block=96, seed=seed)
    assert out[32:].tolist() == [1000 + 5 * (t % 32) for t in range(64)]


@pytest.mark.parametrize("seed", [None, 1])
def test_overtaken_readers_are_found(run_ptx: Callable[..., Any], seed: Any) -> None:
    """The producer does not wait for the readers of the last round: they race, or miss a phase."""
    body = START + PIPELINE.replace("[empty], w;", "[other], 1;").replace(
        "READY:",
        ".shared .align 8 .b8 other[8]; @!p mbarrier.init.shared.b64 [other], 1; READY:",
        1,
    )
    out = np.zeros(96, np.uint32)
    with pytest.raises((errors.RaceError, errors.DeadlockError)):
        run_ptx(body, {"out": out}, block=96, seed=seed)


def test_states_tell_phases_apart(run_ptx: Callable[..., Any]) -> None:
    """`test_wait` with a state, and the number of arrivals pending in it."""
    body = (
        START
        + """
      .reg .b64 state, other; .reg .pred before, after;
      setp.eq.u32 p, t, 0;
      @p mbarrier.init.shared.b64 [full], 3;
      bar.warp.sync -1;
      @!p exit;
      mbarrier.arrive.shared.b64 state, [full];
      mbarrier.test_wait.shared.b64 before, [full], state;
      mbarrier.arrive.shared.b64 other, [full], 2;
      mbarrier.test_wait.shared.b64 after, [full], state;
      mbarrier.pending_count.b64 v, other;
      selp.b32 w, 1, 0, before; selp.b32 u, 1, 0, after;
      st.global.v2.u32 [base], {w, u}; st.global.u32 [base+8], v;
    """
    )
    out = np.zeros(3, np.uint32)
    run_ptx(body, {"out": out})
    assert out.tolist() == [0, 1, 2]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("noinc", ["", ".noinc"])
def test_copies_arrive_at_barrier_objects(
    run_ptx: Callable[..., Any], noinc: str, seed: Any
) -> None:
    """PTX ISA 9.7.13.15.15: the arrival follows the copies of its thread."""
    expected = 32 if noinc else 1
    body = (
        START
        + f"""
      .reg .b64 from;
      setp.ne.u32 p, t, 0; @p bra READY;
      mbarrier.init.shared.b64 [full], {expected};
    READY: bar.sync 0;
      setp.ge.u32 p, t, 32; @p bra CONSUMER;
      ld.param.u64 from, [p1]; mad.wide.u32 from, t, 16, from; mad.lo.u32 u, t, 16, s;
      cp.async.cg.shared.global [u], [from], 16;
      cp.async.mbarrier.arrive{noinc}.shared.b64 [full];
      {"" if noinc else "bar.warp.sync -1; setp.eq.u32 q, t, 0;"}
      {"" if noinc else "@q mbarrier.arrive.shared.b64 _, [full];"}
      exit;
    CONSUMER:
      WAIT: mbarrier.try_wait.parity.shared.b64 q, [full], 0; @!q bra WAIT;
      sub.u32 u, t, 32; mad.lo.u32 u, u, 16, s; ld.shared.u32 v, [u+12];
      st.global.u32 [at], v;
    """
    )
    out, data = np.zeros(64, np.uint32), np.arange(128, dtype=np.uint32)
    run_ptx(body, {"out": out, "in": data}, block=64, seed=seed)
    assert out[32:].tolist() == [4 * t + 3 for t in range(32)]


def test_waiting_without_a_barrier_object(run_ptx: Callable[..., Any]) -> None:
    body = START + "mbarrier.try_wait.parity.shared.b64 q, [full], 0;"
    with pytest.raises(errors.BarrierError, match="no initialized mbarrier"):
        run_ptx(body, {"out": np.zeros(32, np.uint32)})


def test_deadlock_at_a_barrier_object_says_what_lacks(run_ptx: Callable[..., Any]) -> None:
    body = (
        START
        + """
      setp.eq.u32 p, t, 0;
      @p mbarrier.init.shared.b64 [full], 2;
      bar.warp.sync -1;
      @p mbarrier.arrive.expect_tx.shared.b64 _, [full], 512;
      WAIT: mbarrier.try_wait.parity.shared.b64 q, [full], 0; @!q bra WAIT;
    """
    )
    with pytest.raises(
        errors.DeadlockError, match="lacks 1 of 2 arrivals and 512 bytes in phase 0"
    ):
        run_ptx(body, {"out": np.zeros(32, np.uint32)})


@pytest.mark.parametrize("seed", SEEDS)
def test_clusters_share_memory(run_ptx: Callable[..., Any], seed: Any) -> None:
    """Each CTA writes to the next one's shared memory, between two barriers of the cluster."""
    body = (
        START
        + """
      .reg .b32 r, k, a, c; .reg .b64 g;
      mov.u32 r, %cluster_ctarank; mov.u32 k, %cluster_nctarank;
      barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
      add.u32 r, r, 1; rem.u32 r, r, k;
      mad.lo.u32 u, t, 4, s;
      mapa.shared::cluster.u32 a, u, r;
      mov.u32 c, %ctaid.x; mad.lo.u32 v, c, 1000, t;
      st.shared::cluster.u32 [a], v;
      barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
      ld.shared.u32 w, [u];
      mad.lo.u32 v, c, 64, t; mad.wide.u32 at, v, 8, base;
      getctarank.shared::cluster.u32 k, a;
      st.global.v2.u32 [at], {w, k};
    """
    )
    out = np.zeros((8, 64, 2), np.uint32)
    run_ptx(body, {"out": out}, block=64, grid=8, cluster=(4, 1, 1), seed=seed)
    for cta in range(8):
        before = cta // 4 * 4 + (cta - 1) % 4
        assert out[cta, :, 0].tolist() == [1000 * before + t for t in range(64)]
        assert (out[cta, :, 1] == (cta + 1) % 4).all()


def test_shared_memory_of_another_cta_is_not_ones_own(run_ptx: Callable[..., Any]) -> None:
    body = START + "mapa.shared::cluster.u32 u, s, 1; st.shared.u32 [u], t;"
    with pytest.raises(errors.BoundsError, match="lies in no variable of the CTA"):
        run_ptx(body, {"out": np.zeros(32, np.uint32)}, grid=2, cluster=(2, 1, 1))


@pytest.mark.parametrize("seed", SEEDS)
def test_ctas_count_themselves_in_global_memory(run_ptx: Callable[..., Any], seed: Any) -> None:
    """The last CTA to come sums up what the others have written, as split-K kernels do."""
    body = (
        START
        + """
      .reg .b32 c, k; .reg .b64 g, part;
      mov.u32 c, %ctaid.x; mov.u32 k, %nctaid.x;
      ld.param.u64 part, [p2]; mad.lo.u32 v, c, 32, t; mad.wide.u32 g, v, 4, part;
      add.u32 w, c, t; st.global.u32 [g], w;
      membar.gl; bar.sync 0;
      setp.ne.u32 p, t, 0; @p bra NEXT;
      ld.param.u64 g, [p1]; sub.u32 w, k, 1; atom.global.inc.u32 v, [g], w;
      setp.eq.u32 q, v, w; selp.b32 v, 1, 0, q; st.shared.u32 [s], v;
    NEXT:
      bar.sync 0; ld.shared.u32 v, [s]; setp.ne.u32 q, v, 1; @q exit;
      membar.gl; mov.u32 n, 0; mov.u32 m, 0;
    LOOP:
      mad.lo.u32 v, n, 32, t; mad.wide.u32 g, v, 4, part; ld.global.cg.u32 w, [g];
      add.u32 m, m, w; add.u32 n, n, 1; setp.lt.u32 q, n, k; @q bra LOOP;
      st.global.u32 [at], m;
    """
    )
    out, counter = np.zeros(32, np.uint32), np.zeros(1, np.uint32)
    partials = np.zeros((12, 32), np.uint32)
    buffers = {"out": out, "counter": counter, "partials": partials}
    run_ptx(body, buffers, grid=12, seed=seed, wave_warps=4)
    assert counter[0] == 0
    assert out.tolist() == [66 + 12 * t for t in range(32)]


@pytest.mark.parametrize("wait", ["test_wait", "try_wait"])
@pytest.mark.parametrize("parity", [2, 3])
def test_parity_is_zero_or_one(run_ptx: Any, wait: str, parity: int) -> None:
    """9.7.13.15.16."""
    body = f"""
      .reg .b32 s; .reg .pred p; .shared .align 8 .b64 bar; mov.u32 s, bar;
      mbarrier.init.shared.b64 [s], 1; mbarrier.{wait}.parity.shared.b64 p, [s], {parity};
    """
    with pytest.raises(errors.UndefinedBehaviorError, match=f"the parity {parity} of a phase"):
        run_ptx(body, {"out": np.zeros(1, np.uint32)}, block=1)
