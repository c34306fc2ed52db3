"""What orders accesses of several warps and CTAs, and what does not: planted faults and their
legal counterparts, each in several schedules."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

errors = importlib.import_module("humming.devices.simulator.errors")

SEEDS = (None, 1, 2)
START = """
  .reg .b32 t, v, w, s, u, c, k, f, bar; .reg .b64 base, at, g, part, tok; .reg .pred p, q, r;
  mov.u32 t, %tid.x; mov.u32 c, %ctaid.x; mov.u32 k, %nctaid.x;
  ld.param.u64 base, [p0]; mad.wide.u32 at, t, 4, base;
  .shared .align 16 .b8 tile[2048]; .shared .align 8 .b8 obj[16];
  mov.u32 s, tile; mov.u32 bar, obj; and.b32 v, t, 31; mad.lo.u32 u, v, 4, s;
  setp.lt.u32 p, t, 32; setp.eq.u32 q, t, 0; setp.eq.u32 r, t, 32;
"""


@pytest.fixture(params=SEEDS)
def run(request: Any, run_ptx: Callable[..., Any]) -> Callable[..., np.ndarray]:
    """Runs a body that is right; returns what it leaves in `out`."""

    def of(body: str, *, block: int = 64, out: int = 64, **options: Any) -> np.ndarray:
        result = np.zeros(out, np.uint32)
        buffers = {"out": result, **options.pop("more", {})}
        run_ptx(START + body, buffers, block=block, seed=request.param, **options)
        return result

    return of


@pytest.fixture
def fault(run: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a body that must fail, in a given way and place."""

    def of(kind: str, match: str, body: str, **options: Any) -> Any:
        kinds = tuple(getattr(errors, name) for name in kind.split("|"))
        with pytest.raises(kinds, match=match) as caught:
            run(body, **options)
        where = caught.value.where
        assert where.line > 0
        assert None not in (where.cta, where.warp, where.lane)
        return caught.value

    return of


# -- one instruction of several warps -------------------------------------------------------------


@pytest.mark.parametrize(
    "store",
    ["st.shared.u32 [u], t;", "st.shared.v4.u32 [s], {t, t, t, t};", "st.shared.u8 [s], t;"],
)
def test_two_warps_store_to_one_place(fault: Any, store: str) -> None:
    error = fault("RaceError", "warp [01]", store)
    assert "shared address" in str(error)


def test_two_warps_store_matrices_to_one_place(fault: Any) -> None:
    body = "mad.lo.u32 u, v, 16, s; stmatrix.sync.aligned.m8n8.x4.shared.b16 [u], {t, t, t, t};"
    fault("RaceError", "warp [01]", body)


SOURCE = {"more": {"in": np.arange(512, dtype=np.uint32)}}
COPY = """
  ld.param.u64 g, [p1]; mad.lo.u32 u, v, 16, s;
  cp.async.cg.shared.global [u], [g], 16; cp.async.wait_all;
"""


def test_two_warps_copy_to_one_place(fault: Any) -> None:
    fault("RaceError|AsyncHazardError", "same place|may still|has written", COPY, **SOURCE)


def test_two_threads_copy_to_one_place(fault: Any) -> None:
    body = COPY.replace("mad.lo.u32 u, v, 16, s;", "mov.u32 u, s;")
    fault("AsyncHazardError", "two threads begin", body, block=32, **SOURCE)


def test_two_warps_store_apart_or_one_behind_a_barrier(run: Any) -> None:
    run("st.shared.u32 [u+0], t;", block=32)
    run("mad.lo.u32 u, t, 1, s; st.shared.u8 [u], t; @p st.shared.u16 [s+512], t;")
    run("@p st.shared.u32 [u], t; bar.sync 0; @!p st.shared.u32 [u], t;")


# -- shared atomics -------------------------------------------------------------------------------

ADD = "atom.shared.add.u32 w, [s], 1;"


def test_an_atomic_on_what_another_warp_has_stored(fault: Any) -> None:
    told = "without a barrier|memory that is undefined"  # as the schedule has it
    fault("RaceError|PoisonError", told, f"@q st.shared.u32 [s], 0; {ADD}")


def test_a_load_of_what_another_warp_has_added_to(fault: Any) -> None:
    body = f"@q st.shared.u32 [s], 0; bar.sync 0; {ADD} ld.shared.u32 v, [s];"
    fault("RaceError", "without a barrier", body)


def test_a_store_to_what_another_warp_has_added_to(fault: Any) -> None:
    body = f"@q st.shared.u32 [s], 0; bar.sync 0; {ADD} @r st.shared.u32 [s], t;"
    fault("RaceError", "without a barrier", body)


def test_atomics_do_not_race_with_each_other(run: Any) -> None:
    body = f"@q st.shared.u32 [s], 0; bar.sync 0; {ADD} red.shared.add.u32 [s], 1; bar.sync 0;"
    assert (run(f"{body} ld.shared.u32 v, [s]; st.global.u32 [at], v;") == 128).all()


# -- flags in shared memory -----------------------------------------------------------------------

FLAG = """
  @q st.shared.u32 [s+1024], 0; bar.sync 0;
  @!p bra CONSUMER;
  st.shared.u32 [u], t; bar.warp.sync -1; {release}
  bra END;
CONSUMER:
WAIT:
  {acquire} setp.eq.u32 r, f, 0; @r bra WAIT;
  {behind} ld.shared.u32 v, [u]; sub.u32 w, t, 32; mad.wide.u32 at, w, 4, base;
  st.global.u32 [at], v;
END:
"""
RELEASES = {
    "release": "@q st.release.cta.shared.u32 [s+1024], 1;",
    "atom.release": "@q atom.release.cta.shared.exch.b32 f, [s+1024], 1;",
    "fence": "fence.acq_rel.cta; @q atom.shared.exch.b32 f, [s+1024], 1;",
    "membar": "membar.cta; @q st.volatile.shared.u32 [s+1024], 1;",
}
ACQUIRES = {
    "acquire": ("ld.acquire.cta.shared.u32 f, [s+1024];", ""),
    "atom.acquire": ("atom.acquire.cta.shared.add.u32 f, [s+1024], 0;", ""),
    "fence": ("ld.relaxed.cta.shared.u32 f, [s+1024];", "fence.acq_rel.cta;"),
    "membar": ("ld.volatile.shared.u32 f, [s+1024];", "membar.cta;"),
}


@pytest.mark.parametrize("release", RELEASES.values(), ids=RELEASES)
@pytest.mark.parametrize("acquire", ACQUIRES.values(), ids=ACQUIRES)
def test_flags_order(run: Any, release: str, acquire: tuple[str, str]) -> None:
    body = FLAG.format(release=release, acquire=acquire[0], behind=acquire[1])
    assert run(body)[:32].tolist() == list(range(32))


@pytest.mark.parametrize(
    ("release", "acquire"),
    [
        ("@q st.relaxed.cta.shared.u32 [s+1024], 1;", ACQUIRES["acquire"]),
        ("@q st.volatile.shared.u32 [s+1024], 1;", ACQUIRES["membar"]),
        (RELEASES["release"], ("ld.relaxed.cta.shared.u32 f, [s+1024];", "")),
        (RELEASES["fence"], ("ld.volatile.shared.u32 f, [s+1024];", "")),
    ],
)
def test_flags_that_order_nothing(fault: Any, release: str, acquire: tuple[str, str]) -> None:
    body = FLAG.format(release=release, acquire=acquire[0], behind=acquire[1])
    error = fault("RaceError", "warp 0 has written", body)
    assert error.where.warp == 1


def test_flags_pass_on_proxy_fences(run: Any, fault: Any) -> None:
    copy = "setp.eq.u32 r, t, 32; @!r bra END; cp.async.bulk.global.shared::cta.bulk_group "
    copy += "[base], [s], 128; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; bra END;"
    proxy, flag = "fence.proxy.async.shared::cta;", RELEASES["fence"]
    acquire, behind = ACQUIRES["fence"]
    body = FLAG.format(release=proxy + flag, acquire=acquire, behind=behind + copy)
    assert run(body)[:32].tolist() == list(range(32))
    body = FLAG.format(release=flag, acquire=acquire, behind=behind + copy)
    fault("AsyncHazardError", "no fence.proxy.async", body)


def test_a_plain_flag_is_a_race(fault: Any) -> None:
    body = FLAG.format(
        release="@q st.shared.u32 [s+1024], 1;", acquire=ACQUIRES["acquire"][0], behind=""
    )
    fault("RaceError", "without a barrier", body)


# -- arrivals that are taken at their time --------------------------------------------------------


def test_stores_behind_an_arrival_are_not_ordered(fault: Any) -> None:
    body = """
      @p bra PRODUCER;
      bar.sync 1, 64; ld.shared.u32 w, [u]; bra END;
    PRODUCER:
      bar.arrive 1, 64; st.shared.u32 [u], t;
    END:
    """
    fault("RaceError", "without a barrier", body)


def test_stores_behind_an_arrival_at_the_cluster_are_not_ordered(fault: Any) -> None:
    body = """
      barrier.cluster.arrive; @p st.shared.u32 [u], t; barrier.cluster.wait;
      @!p ld.shared.u32 w, [u];
    """
    fault("RaceError", "without a barrier", body)


def test_a_relaxed_arrival_at_the_cluster_orders_what_a_fence_covers(run: Any, fault: Any) -> None:
    body = """
      @p st.shared.u32 [u], t; {fence}
      barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;
      @!p ld.shared.u32 w, [u];
    """
    run(body.format(fence="fence.acq_rel.cluster;"))
    fault("RaceError", "without a barrier", body.format(fence=""))


def test_an_aligned_cluster_barrier_of_half_a_warp(fault: Any) -> None:
    body = """
      setp.lt.u32 p, t, 16; @p bra HALF; barrier.cluster.arrive.aligned; bra END;
    HALF: barrier.cluster.arrive.aligned;
    END: barrier.cluster.wait;
    """
    fault("DivergenceError", "must execute one instruction together", body, block=32)


# -- barrier objects ------------------------------------------------------------------------------

INIT = "@q mbarrier.init.shared.b64 [bar], {count};"


def test_an_object_that_another_warp_has_made(fault: Any, run: Any) -> None:
    body = INIT.format(count=2) + "{} @r mbarrier.arrive.shared.b64 tok, [bar];"
    run(body.format("bar.sync 0;"))
    error = fault("RaceError|BarrierError", "initialized", body.format(""))
    assert error.where.warp == 1


def test_an_object_is_made_again(fault: Any, run: Any) -> None:
    body = INIT.format(count=2) + "{}" + INIT.format(count=2)
    run(body.format("@q mbarrier.inval.shared.b64 [bar];"))
    fault("BarrierError", "again without mbarrier.inval", body.format(""))


def test_a_whole_warp_makes_one_object(fault: Any) -> None:
    body = "mbarrier.init.shared.b64 [bar], 1;"
    fault("BarrierError", "again without mbarrier.inval", body, block=32)


@pytest.mark.parametrize("store", ["st.shared.u32 [bar+4], 0", "red.shared.add.u32 [bar], 1"])
def test_a_store_over_an_object(fault: Any, run: Any, store: str) -> None:
    fault("BarrierError", "holds an mbarrier", INIT.format(count=1) + f"@q {store};")
    zero = "@q st.shared.u64 [bar], 0;"
    inval = "@q mbarrier.inval.shared.b64 [bar];"
    run(INIT.format(count=1) + inval + zero + f"@q {store};")


@pytest.mark.parametrize(
    ("arrival", "match"),
    [
        ("mbarrier.arrive.shared.b64 tok, [bar], 3;", "counts 3 .* 2 are pending"),
        ("mbarrier.arrive.noComplete.shared.b64 tok, [bar], 2;", "noComplete"),
    ],
)
def test_arrivals_that_count_too_much(fault: Any, run: Any, arrival: str, match: str) -> None:
    fault("BarrierError", match, INIT.format(count=2) + f"@q {arrival}")
    run(INIT.format(count=4) + f"@q {arrival}")


def test_a_stale_state(fault: Any, run: Any) -> None:
    body = (
        INIT.format(count=1)
        + "@!q bra END; mbarrier.arrive.shared.b64 tok, [bar];"
        + "{} mbarrier.test_wait.shared.b64 r, [bar], tok; END:"
    )
    run(body.format(""))
    more = "mbarrier.arrive.shared.b64 _, [bar];"
    fault("UndefinedBehaviorError", "a state of phase 0", body.format(more))


ARRIVE = """
  @q mbarrier.init.shared.b64 [bar], 1; bar.sync 0;
  @!p bra CONSUMER;
  st.shared.u32 [u], t; bar.warp.sync -1; {fence}
  @q mbarrier.arrive{arrive}.shared.b64 tok, [bar]; bra END;
CONSUMER:
WAIT:
  mbarrier.try_wait.parity{wait}.shared.b64 r, [bar], 0; @!r bra WAIT;
  {behind} ld.shared.u32 v, [u];
END:
"""
RELAXED = ".relaxed.cta"


@pytest.mark.parametrize(
    ("arrive", "wait", "legal"),
    [("", "", True), (RELAXED, "", False), ("", RELAXED, False), (RELAXED, RELAXED, False)],
)
def test_relaxed_arrivals_and_waits(
    run: Any, fault: Any, arrive: str, wait: str, legal: bool
) -> None:
    body = ARRIVE.format(arrive=arrive, wait=wait, fence="", behind="")
    if legal:
        run(body)
    else:
        fault("RaceError", "warp 0 has written", body)
    fence = "fence.acq_rel.cta;"
    run(ARRIVE.format(arrive=arrive, wait=wait, fence=fence, behind=fence))


BULK = """
  @!q bra END; ld.param.u64 g, [p1];
  mbarrier.init.shared.b64 [bar], 1; {}
  mbarrier.arrive.expect_tx.shared.b64 tok, [bar], 64;
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [s], [g], 64, [bar];
WAIT: mbarrier.try_wait.parity.shared.b64 r, [bar], 0; @!r bra WAIT;
END:
"""


@pytest.mark.parametrize("fence", ["fence.mbarrier_init.release.cluster", "fence.proxy.async"])
def test_a_copy_completes_at_a_new_object(run: Any, fault: Any, fence: str) -> None:
    run(BULK.format(f"{fence};"), block=32, **SOURCE)
    fault("RaceError", "neither fence.mbarrier_init", BULK.format(""), block=32, **SOURCE)


def test_a_copy_completes_at_an_object_behind_a_barrier(run: Any) -> None:
    body = BULK.replace("@!q bra END;", "").format("").replace("mbarrier.init", "@q mbarrier.init")
    body = body.replace("  mbarrier.arrive", "  bar.sync 0; @!q bra END; mbarrier.arrive")
    run(body, **SOURCE)


def test_a_copy_over_an_object(fault: Any) -> None:
    body = BULK.format("fence.proxy.async;").replace("[s], [g], 64", "[bar], [g], 16")
    fault("BarrierError", "holds an mbarrier", body.replace("64;", "16;"), block=32, **SOURCE)


# -- between CTAs ---------------------------------------------------------------------------------

COMBINE = """
  ld.param.u64 g, [p1]; ld.param.u64 part, [p2];
  mad.lo.u32 w, c, 64, t; mad.wide.u32 tok, w, 4, part; add.u32 w, c, t; st.global.u32 [tok], w;
  {release} bar.sync 0;
  @!q bra NEXT;
  {leader} sub.u32 w, k, 1; {count} setp.eq.u32 r, v, w; selp.b32 v, 1, 0, r;
  {follower} st.shared.u32 [s+1024], v;
NEXT:
  bar.sync 0; ld.shared.u32 v, [s+1024]; setp.ne.u32 r, v, 1; @r exit;
  {acquire} mov.u32 f, 0; mov.u32 u, 0;
LOOP:
  mad.lo.u32 v, u, 64, t; mad.wide.u32 tok, v, 4, part; ld.global.u32 w, [tok];
  add.u32 f, f, w; add.u32 u, u, 1; setp.lt.u32 r, u, k; @r bra LOOP;
  st.global.u32 [at], f;
"""
COUNT = "atom.global.inc.u32 v, [g], w;"
PARTS = {"release": "", "leader": "", "count": COUNT, "follower": "", "acquire": ""}
LEGAL = {
    "all": {"release": "membar.gl;", "acquire": "fence.acq_rel.gpu;"},
    "one": {"leader": "fence.acq_rel.gpu;", "follower": "fence.acq_rel.gpu;"},
    "atom": {"count": "atom.acq_rel.gpu.global.inc.u32 v, [g], w;"},
    "sys": {"release": "fence.sc.sys;", "acquire": "membar.sys;"},
}
ILLEGAL = {
    "no release": {"acquire": "membar.gl;"},
    "no acquire": {"release": "membar.gl;"},
    "near": {"release": "membar.cta;", "acquire": "membar.cta;"},
    "near atom": {"count": "atom.acq_rel.cta.global.inc.u32 v, [g], w;"},
    "release alone": {"count": "atom.release.gpu.global.inc.u32 v, [g], w;"},
    "no barrier": {"release": "membar.gl; bra SKIP;", "acquire": "membar.gl;"},
}


def _combined(run: Any, parts: dict[str, str], waves: int) -> np.ndarray:
    body = COMBINE.format(**{**PARTS, **parts})
    if "bra SKIP;" in body:
        body = body.replace("bar.sync 0;", "SKIP:", 1)
    more = {"counter": np.zeros(1, np.uint32), "partials": np.zeros((6, 64), np.uint32)}
    found: np.ndarray = run(body, grid=6, more=more, wave_warps=12 // waves)
    return found


@pytest.mark.parametrize("waves", [1, 3])
@pytest.mark.parametrize("parts", LEGAL.values(), ids=LEGAL)
def test_ctas_add_up_their_parts(run: Any, parts: dict[str, str], waves: int) -> None:
    assert _combined(run, parts, waves).tolist() == [15 + 6 * t for t in range(64)]


@pytest.mark.parametrize("waves", [1, 3])
@pytest.mark.parametrize("parts", ILLEGAL.values(), ids=ILLEGAL)
def test_ctas_add_up_parts_that_nothing_orders(run: Any, parts: Any, waves: int) -> None:
    with pytest.raises(errors.RaceError, match="another CTA has written") as caught:
        _combined(run, parts, waves)
    assert "of partials" in str(caught.value)


@pytest.mark.parametrize("waves", [1, 2])
def test_two_ctas_write_one_word(run: Any, fault: Any, waves: int) -> None:
    options: dict[str, Any] = {"grid": 2, "wave_warps": 4 // waves}
    fault("RaceError", "another CTA", "st.global.u32 [at], t;", **options)
    run("red.global.add.u32 [at], t;", **options)
    run("setp.eq.u32 q, c, 0; @q st.global.u32 [at], t;", **options)
    mixed = "setp.eq.u32 q, c, 0; @q st.global.u32 [at], t; @!q red.global.add.u32 [at], t;"
    fault("RaceError", "another CTA", mixed, **options)


def test_two_warps_use_one_global_word(run: Any, fault: Any) -> None:
    body = "xor.b32 w, t, 32; mad.wide.u32 g, w, 4, base; st.global.u32 [at], t; {} "
    body += "ld.global.u32 v, [g];"
    run(body.format("bar.sync 0;"))
    fault("RaceError", "warp [01] has written", body.format(""))


# -- asynchronous operations on global memory -----------------------------------------------------

LOAD = """
  @!q bra END;
  mbarrier.init.shared.b64 [bar], 1; fence.mbarrier_init.release.cluster; {before}
  mbarrier.arrive.expect_tx.shared.b64 tok, [bar], 64;
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [s], [base], 64, [bar];
  {during}
WAIT: mbarrier.try_wait.parity.shared.b64 r, [bar], 0; @!r bra WAIT;
  {behind}
END:
"""
NOTHING = {"before": "", "during": "", "behind": ""}
STORE = "st.global.u32 [base+4], t;"


def _loaded(**parts: str) -> str:
    return LOAD.format(**{**NOTHING, **parts})


def test_a_copy_of_what_the_kernel_has_stored(run: Any, fault: Any) -> None:
    run(_loaded(before=f"{STORE} fence.proxy.async;"), block=32)
    run(_loaded(before=f"{STORE} fence.proxy.async.global;"), block=32)
    for fence in ("", "membar.gl;", "fence.proxy.async.shared::cta;"):
        told = "no fence.proxy.async lies in between"
        fault("AsyncHazardError", told, _loaded(before=STORE + fence), block=32)


def test_a_store_onto_the_source_of_a_copy(run: Any, fault: Any) -> None:
    run(_loaded(behind=STORE), block=32)
    run(_loaded(during="st.global.u32 [base+64], t;"), block=32)
    fault("AsyncHazardError", "may still read", _loaded(during=STORE), block=32)


def test_a_store_onto_the_source_of_a_copy_of_threads(run: Any, fault: Any) -> None:
    body = "mad.lo.u32 u, t, 16, s; mad.wide.u32 g, t, 16, base; cp.async.ca.shared.global "
    body += "[u], [g], 16; {} st.global.u32 [g], t; cp.async.wait_all;"
    run(body.format("cp.async.wait_all;"), block=32, out=128)
    fault("AsyncHazardError", "may still read", body.format(""), block=32, out=128)


OUT = """
  @!q bra END; st.shared.v4.u32 [s], {{t, t, t, t}}; fence.proxy.async.shared::cta;
  cp.async.bulk.global.shared::cta.bulk_group [base], [s], 16;
  cp.async.bulk.commit_group; {}
  cp.async.bulk.wait_group.read 0;
END:
"""


@pytest.mark.parametrize(
    ("access", "verb"),
    [("st.global.u32 [base+12], t;", "store"), ("ld.global.u32 v, [base];", "load")],
)
def test_the_target_of_a_copy_to_global_memory(
    run: Any, fault: Any, access: str, verb: str
) -> None:
    told = f"a {verb} .* may still write"
    run(OUT.format(access.replace("[base]", "[base+16]").replace("12", "16")), block=32)
    run(OUT.format("cp.async.bulk.wait_group 0;" + access), block=32)
    fault("AsyncHazardError", told, OUT.format(access), block=32)
    behind = "cp.async.bulk.wait_group.read 0;" + access
    fault("AsyncHazardError", told, OUT.format(behind), block=32)


def test_two_ctas_copy_to_one_place(run: Any, fault: Any) -> None:
    fault("AsyncHazardError|RaceError", "may still write|another CTA", OUT.format(""), grid=2)
    adds = OUT.replace(
        "cp.async.bulk.global.shared::cta.bulk_group",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32",
    )
    run(adds.format(""), grid=2)
