"""Each kind of fault, planted: it is found, named and located."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

errors = importlib.import_module("humming.devices.simulator.errors")

START = """
  .reg .b32 t, v, w, s, u; .reg .b64 base, at; .reg .pred p;
  mov.u32 t, %tid.x; ld.param.u64 base, [p0]; mad.wide.u32 at, t, 4, base;
  .shared .align 16 .b8 tile[1024];
  mov.u32 s, tile;
"""


@pytest.fixture
def fault(run_ptx: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a body that must fail in a given way; returns the error."""

    def run(kind: str, match: str, body: str, *, block: int = 64, **options: Any) -> Any:
        out = options.pop("out", np.zeros(64, np.uint32))
        with pytest.raises(getattr(errors, kind), match=match) as caught:
            run_ptx(START + body, {"out": out, **options.pop("more", {})}, block=block, **options)
        return caught.value

    return run


# -- undefined values -----------------------------------------------------------------------------


def test_undefined_register_in_an_address(fault: Any) -> None:
    error = fault("PoisonError", "the address is undefined", "st.shared.u32 [u], t;")
    assert (error.where.warp, error.where.lane, error.where.cta) == (0, 0, (0, 0, 0))
    assert error.where.text == "st.shared.u32 [u], t;"
    assert ">" in error.where.listing


def test_undefined_predicate_of_a_branch(fault: Any) -> None:
    body = "ld.shared.u32 v, [s]; setp.eq.u32 p, v, 0; @p bra L; mov.u32 v, 1; L: "
    fault("PoisonError", "decides what runs", body)


def test_undefined_guard(fault: Any) -> None:
    fault("PoisonError", "decides what runs", "@p mov.u32 v, 1;")


def test_undefined_value_stored_to_global_memory(fault: Any) -> None:
    body = "add.u32 s, s, 4; ld.shared.u32 v, [s]; add.u32 v, v, 1; st.global.u32 [at], v;"
    fault("PoisonError", "stored to global memory", body)


def test_undefined_output_read_back(fault: Any) -> None:
    body = "ld.global.u32 v, [at]; st.global.u32 [at], v;"
    fault("PoisonError", "stored to global memory", body, undefined=("out",))


def test_first_undefined_thread_is_named(fault: Any) -> None:
    body = """
      setp.ne.u32 p, t, 37; mov.u32 w, s;
      @p bra L; bra M; L: mov.u32 u, w; M:
      st.shared.u32 [u], t;
    """
    error = fault("PoisonError", "the address is undefined", body)
    assert (error.where.warp, error.where.lane) == (1, 5)


def test_undefined_bits_that_do_not_matter(run_ptx: Any) -> None:
    """Masked, selected away, multiplied into a part that nobody reads: no fault."""
    body = (
        START
        + """
      st.shared.u16 [s], 0x1234;
      bar.sync 0;
      ld.shared.u32 v, [s];
      and.b32 v, v, 0xFFFF;
      setp.eq.u32 p, v, 0x1234; selp.b32 v, v, u, p;
      or.b32 w, u, 0xFFFFFFFF; add.u32 v, v, w;
      prmt.b32 v, v, u, 0x3210;
      lop3.b32 v, v, u, 0, 0xF0;
      st.global.u32 [at], v;
    """
    )
    out = np.zeros(32, np.uint32)
    run_ptx(body, {"out": out})
    assert (out == 0x1233).all()


def test_undefined_operand_of_a_matrix_product_spoils_its_row(fault: Any, run_ptx: Any) -> None:
    code = """
      .reg .b32 a, c, d<4>; .reg .pred q;
      mov.u32 c, 0; mov.u32 a, 0x3C003C00;
      setp.ne.u32 q, t, 9;
      @!q mov.u32 a, u;
      mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
        {d0, d1, d2, d3}, {a, c, c, c}, {c, c}, {c, c, c, c};
      shr.u32 w, t, 2; setp.eq.u32 p, w, 2;
    """
    out = np.zeros(32, np.uint32)
    store = "@!p st.global.u32 [at], d0; st.global.u32 [at], d2;"
    run_ptx(START + code + store, {"out": out})
    error = fault("PoisonError", "global memory", code + "st.global.u32 [at], d0;", block=32)
    assert error.where.lane == 8


# -- memory ---------------------------------------------------------------------------------------


def test_global_access_behind_the_end(fault: Any) -> None:
    error = fault(
        "BoundsError", "at offset 256 of out, which has 256 bytes", "st.global.u32 [at+128], t;"
    )
    assert (error.where.warp, error.where.lane) == (1, 0)


def test_vector_access_over_the_end(fault: Any) -> None:
    body = "mad.wide.u32 at, t, 0, base; ld.global.v4.u32 {v, w, s, u}, [at+256];"
    fault("BoundsError", "16 bytes at global address", body)


@pytest.mark.parametrize(
    "text", ["atom.global.add.u32 v, [at+256], 1;", "red.add.u32 [at+256], 1;"]
)
def test_atomic_operation_behind_the_end(fault: Any, text: str) -> None:
    fault("BoundsError", "^an atomic operation of 4 bytes at .* offset 256 of out", text)


def test_atomic_operation_outside_of_shared_memory(fault: Any) -> None:
    fault("BoundsError", "^an atomic operation of 4 bytes", "red.shared.add.u32 [s+1024], 1;")


@pytest.mark.parametrize(
    "text", ["prefetch.global.L2 [base];", "prefetch.L1 [base];", "prefetchu.L1 [base];"]
)
def test_hint_of_an_undefined_address(fault: Any, text: str) -> None:
    body = ".reg .b64 other;" + text.replace("base", "other")
    fault("PoisonError", "the address is undefined", body)


def test_access_to_no_allocation(fault: Any) -> None:
    fault("BoundsError", "lies in no allocation", "mov.u64 at, 0; ld.global.u32 v, [at+64];")


def test_shared_access_outside(fault: Any) -> None:
    fault("BoundsError", "lies in no variable of the CTA", "st.shared.u32 [s+1024], t;")


def test_shared_variables_do_not_run_into_each_other(fault: Any) -> None:
    body = ".shared .align 16 .b8 other[64]; mov.u32 w, other; st.shared.u32 [w], t;"
    fault(
        "BoundsError",
        "lies in no variable",
        body + "st.shared.v4.u32 [s+1024], {t, t, t, t};",
        block=1,
    )


def test_store_to_constant_memory(fault: Any) -> None:
    declarations = ".const .align 4 .u32 fixed = 5;"
    body = "cvta.const.u64 at, fixed; mov.u64 at, fixed; st.u32 [at], t;"
    fault("BoundsError", "read-only", body, declarations=declarations)


@pytest.mark.parametrize("space", ["global", "shared"])
def test_misaligned_access(fault: Any, space: str) -> None:
    base = "at" if space == "global" else "s"
    error = fault(
        "AlignmentError", "8 bytes is misaligned", f"ld.{space}.v2.u32 {{v, w}}, [{base}+4];"
    )
    assert error.where.lane == 0


def test_local_memory_has_an_end(fault: Any) -> None:
    body = ".local .align 4 .b8 depot[8]; .reg .b64 d; mov.u64 d, depot; st.local.u32 [d+8], t;"
    fault("BoundsError", "outside of local memory", body)


# -- asynchronous copies --------------------------------------------------------------------------

COPY = """
  mad.lo.u32 s, t, 16, s; ld.param.u64 at, [p1]; mad.wide.u32 at, t, 16, at;
  cp.async.cg.shared.global [s], [at], 16;
  cp.async.commit_group;
"""
SOURCE = {"more": {"in": np.arange(256, dtype=np.uint32)}}


def test_copied_data_arrive_with_the_wait(run_ptx: Any) -> None:
    body = (
        START
        + COPY
        + """
      cp.async.wait_group 0; bar.sync 0;
      xor.b32 w, t, 33; mov.u32 s, tile; mad.lo.u32 s, w, 16, s;
      ld.shared.u32 v, [s+8];
      mad.wide.u32 at, t, 4, base; st.global.u32 [at], v;
    """
    )
    out = np.zeros(64, np.uint32)
    run_ptx(body, {"out": out, "in": SOURCE["more"]["in"]}, block=64)
    assert out[1:].tolist() == [4 * (t ^ 33) + 2 for t in range(1, 64)]


def test_source_size_fills_with_zeros(run_ptx: Any) -> None:
    body = (
        START
        + """
      mad.lo.u32 s, t, 16, s; ld.param.u64 at, [p1]; mad.wide.u32 at, t, 16, at;
      and.b32 w, t, 3; mul.lo.u32 w, w, 5; min.u32 w, w, 16;
      cp.async.ca.shared.global [s], [at], 16, w;
      cp.async.wait_all;
      ld.shared.u8 v, [s+4]; ld.shared.u8 u, [s+9]; mad.lo.u32 v, u, 256, v;
      mad.wide.u32 at, t, 4, base; st.global.u32 [at], v;
    """
    )
    data = np.arange(1, 513, dtype=np.uint16).view(np.uint8)[::2].copy()
    data = np.resize(data, 512) | 1
    out = np.zeros(32, np.uint32)
    run_ptx(body, {"out": out, "in": data})
    for t in range(32):
        size = min(16, 5 * (t & 3))
        low = int(data[16 * t + 4]) if size > 4 else 0
        high = int(data[16 * t + 9]) if size > 9 else 0
        assert out[t] == low | high << 8


def test_sources_of_size_zero_are_not_read(run_ptx: Any) -> None:
    body = (
        START
        + """
      mad.lo.u32 s, t, 16, s; mov.u64 at, 0; mov.u32 w, 0;
      cp.async.cg.shared.global [s], [at], 16, w;
      cp.async.wait_all; ld.shared.u32 v, [s];
      mad.wide.u32 at, t, 4, base; st.global.u32 [at], v;
    """
    )
    out = np.ones(32, np.uint32)
    run_ptx(body, {"out": out})
    assert not out.any()


def test_source_larger_than_the_copy(fault: Any) -> None:
    """9.7.9.25.3.1: the size of the source is not greater than that of the copy."""
    body = "setp.eq.u32 p, t, 37; selp.u32 w, 17, 16, p;"
    body += COPY.replace("[at], 16;", "[at], 16, w;")
    error = fault("UndefinedBehaviorError", "more than the 16 bytes", body, **SOURCE)
    assert (error.where.warp, error.where.lane) == (1, 5)


def test_reading_before_the_wait(fault: Any) -> None:
    error = fault("AsyncHazardError", "may still write", COPY + "ld.shared.u32 v, [s];", **SOURCE)
    assert error.where.text == "ld.shared.u32 v, [s];"


def test_waiting_for_too_few_groups(fault: Any) -> None:
    fault(
        "AsyncHazardError",
        "may still write",
        COPY + "cp.async.wait_group 1; ld.shared.u32 v, [s];",
        **SOURCE,
    )


def test_waiting_for_an_earlier_group_delivers_it(run_ptx: Any) -> None:
    body = (
        START
        + COPY
        + """
      mov.u32 w, 0; mov.u64 at, 0;
      .shared .align 16 .b8 other[1024]; mov.u32 u, other; mad.lo.u32 u, t, 16, u;
      cp.async.cg.shared.global [u], [at], 16, w;
      cp.async.commit_group;
      cp.async.wait_group 1;
      ld.shared.u32 v, [s]; mad.wide.u32 at, t, 4, base; st.global.u32 [at], v;
    """
    )
    out = np.zeros(32, np.uint32)
    run_ptx(body, {"out": out, "in": SOURCE["more"]["in"]})
    assert out.tolist() == [4 * t for t in range(32)]


def test_uncommitted_copies_are_not_covered(fault: Any) -> None:
    body = COPY.replace("cp.async.commit_group;", "") + "cp.async.wait_group 0;"
    fault("AsyncHazardError", "may still write", body + "ld.shared.u32 v, [s];", **SOURCE)


def test_overwriting_the_target_of_a_copy(fault: Any) -> None:
    fault(
        "AsyncHazardError", "a store to shared memory", COPY + "st.shared.u32 [s+4], t;", **SOURCE
    )


def test_two_copies_to_one_place(fault: Any) -> None:
    fault(
        "AsyncHazardError",
        "another asynchronous copy",
        COPY + "cp.async.cg.shared.global [s], [at], 16;",
        **SOURCE,
    )


def test_copy_from_outside(fault: Any) -> None:
    body = COPY.replace("[at], 16", "[at+512], 16")
    error = fault("BoundsError", "of in, which has 1024 bytes", body, **SOURCE)
    assert (error.where.warp, error.where.lane) == (1, 0)


# -- races ----------------------------------------------------------------------------------------

NEIGHBOUR = """
  add.u32 w, t, 32; and.b32 w, w, 63;
  mad.lo.u32 u, t, 4, s; mad.lo.u32 w, w, 4, s;
"""


def test_reading_what_another_warp_writes(fault: Any) -> None:
    error = fault(
        "RaceError",
        "warp 1 has written without a barrier",
        NEIGHBOUR + "st.shared.u32 [u], t; ld.shared.u32 v, [w];",
    )
    assert error.where.warp == 0


def test_overwriting_what_another_warp_reads(fault: Any) -> None:
    body = (
        NEIGHBOUR
        + """
      st.shared.u32 [u], t; bar.sync 0; ld.shared.u32 v, [w]; st.shared.u32 [u], v;
    """
    )
    fault("RaceError", "has read without a barrier", body)


def test_barriers_order(run_ptx: Any) -> None:
    body = (
        START
        + NEIGHBOUR
        + """
      st.shared.u32 [u], t; bar.sync 0; ld.shared.u32 v, [w]; bar.sync 0; st.shared.u32 [u], v;
      st.global.u32 [at], v;
    """
    )
    out = np.zeros(64, np.uint32)
    run_ptx(body, {"out": out}, block=64)
    assert out.tolist() == [(t + 32) % 64 for t in range(64)]


def test_copies_must_not_overtake_readers(fault: Any) -> None:
    body = (
        COPY
        + """
      cp.async.wait_all; bar.sync 0;
      xor.b32 w, t, 32; mov.u32 u, tile; mad.lo.u32 u, w, 16, u; ld.shared.u32 v, [u];
      cp.async.cg.shared.global [s], [at], 16;
    """
    )
    fault("RaceError", "has read without a barrier", body, **SOURCE)


def test_copied_data_are_for_others_only_behind_a_barrier(fault: Any) -> None:
    body = (
        COPY
        + """
      cp.async.wait_all;
      xor.b32 w, t, 32; mov.u32 u, tile; mad.lo.u32 u, w, 16, u; ld.shared.u32 v, [u];
    """
    )
    fault("RaceError", "has written without a barrier", body, **SOURCE)


# -- barriers and divergence ----------------------------------------------------------------------


def test_barrier_of_an_exited_warp(fault: Any) -> None:
    fault("BarrierError", "exited|exits", "setp.ge.u32 p, t, 32; @p exit; bar.sync 0;")


def test_barrier_with_two_counts(fault: Any) -> None:
    body = """
      setp.ge.u32 p, t, 32; @p bra L;
      bar.sync 1, 64; bra E; L: bar.sync 1, 96; E:
    """
    fault("BarrierError", "is used with", body, block=96)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("bar.red.and.pred q, 1, p", "bar.red.or.pred q, 1, p"),
        ("bar.red.popc.u32 v, 1, p", "bar.red.or.pred q, 1, p"),
        ("bar.red.and.pred q, 1, p", "bar.sync 1"),
        ("bar.sync 1, 64", "bar.red.popc.u32 v, 1, 64, p"),
        ("bar.red.and.pred q, 1, 64, p", "bar.arrive 1, 64"),
        ("bar.arrive 1, 64", "bar.red.or.pred q, 1, 64, p"),
    ],
)
def test_barrier_for_two_purposes(fault: Any, first: str, second: str) -> None:
    """9.7.13.1: while a barrier is active, reductions do not mix with anything else."""
    body = f".reg .pred q; setp.lt.u32 p, t, 32; @p {first}; @!p {second};"
    fault("BarrierError", "at which others have arrived by bar", body, block=64)


def test_barrier_count_that_is_no_multiple_of_32(fault: Any) -> None:
    fault("BarrierError", "a multiple of 32", "bar.sync 1, 40;")


def test_arrival_left_over_at_the_end(fault: Any) -> None:
    body = "setp.lt.u32 p, t, 32; @p exit; bar.arrive 1, 64;"
    where = fault("BarrierError", "ends with 32 of 64", body).where
    assert "bar.arrive" in where.text
    assert (where.cta, where.warp, where.lane) == ((0, 0, 0), 1, 0)


def test_deadlock_lists_who_waits_for_what(fault: Any) -> None:
    body = """
      setp.ge.u32 p, t, 32; @p bra L;
      bar.sync 1, 64; bra E; L: bar.sync 2, 64; E:
    """
    error = fault("DeadlockError", "no thread can go on", body)
    assert "barrier 1 has 32 of 64 threads" in str(error)
    assert "barrier 2 has 32 of 64 threads" in str(error)
    assert "warp 0" in str(error)
    assert "warp 1" in str(error)


def test_aligned_barrier_that_part_of_a_warp_skips(fault: Any) -> None:
    body = "setp.ge.u32 p, t, 16; @p bra L; bar.sync 0; bra E; L: bar.sync 1; E:"
    error = fault("DivergenceError", "must execute one instruction", body, block=32)
    assert "lanes 0, 1," in str(error)


def test_matrix_product_of_part_of_a_warp(fault: Any) -> None:
    body = """
      .reg .b32 a, d<4>; mov.u32 a, 0;
      setp.ge.u32 p, t, 16; @p exit;
      mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
        {d0, d1, d2, d3}, {a, a, a, a}, {a, a}, {a, a, a, a};
    """
    fault("DivergenceError", "needs all 32 threads", body, block=32)


def test_shuffle_with_a_mask_of_others(fault: Any) -> None:
    fault("UndefinedBehaviorError", "no member", "shfl.sync.idx.b32 v, t, 0, 31, 0xFFFF;", block=32)


def test_value_of_a_thread_that_is_not_there(fault: Any) -> None:
    body = """
      setp.ge.u32 p, t, 16; @p exit;
      shfl.sync.idx.b32 v, t, 20, 31, 0xFFFF; st.global.u32 [at], v;
    """
    fault("PoisonError", "global memory", body, block=32)


def test_endless_loop(fault: Any) -> None:
    fault("DeadlockError", "a loop that does not end", "L: bra L;")


def test_endless_counting(fault: Any) -> None:
    body = "mov.u32 v, 0; L: add.u32 v, v, 1; bra L;"
    fault("DeadlockError", "within 1000 basic blocks", body, max_basic_blocks=1000)


def test_trap(fault: Any) -> None:
    error = fault("TrapError", "executes trap", "setp.eq.u32 p, t, 40; @p trap;")
    assert (error.where.warp, error.where.lane) == (1, 8)


def test_division_by_zero_is_undefined(fault: Any) -> None:
    fault("PoisonError", "global memory", "mov.u32 v, 0; div.u32 v, t, v; st.global.u32 [at], v;")


# -- the front end --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("frobnicate.u32 v, t;", "does not know this instruction"),
        ("add.quickly.u32 v, t, t;", "modifiers .quickly are not known"),
        ("mul.u32 v, t, t;", "a modifier is missing"),
        ("add.u32 v, t;", "operands"),
    ],
)
def test_unknown_instructions(fault: Any, text: str, what: str) -> None:
    error = fault("UnknownInstructionError", what, text)
    assert error.where.text == text


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("mov.u32 nothing, t;", "'nothing' is not declared"),
        ("bra NOWHERE;", "'NOWHERE' is not declared"),
        ("L: L: mov.u32 v, t;", "defined twice"),
        ("mov.u32 v, \x01;", "starts no token"),
        ("mov.u32 v t;", "expected ','"),
    ],
)
def test_text_that_is_no_ptx(fault: Any, text: str, what: str) -> None:
    fault("PtxSyntaxError", what, text)


# -- what is told beside the place ----------------------------------------------------------------


def test_origins_of_undefined_values(fault: Any) -> None:
    body = """
      add.u32 s, s, 4; ld.shared.u32 v, [s]; xor.b32 w, v, t;
      add.u32 w, w, u; st.global.u32 [at], w;
    """
    told = str(fault("PoisonError", "stored to global memory", body))
    assert "it may come from register u, which nothing has written" in told
    assert "ld.shared.u32 v, [s]" in told.split("may come from", 2)[2]
    assert "nobody has written what it read: shared address 0x404, offset 4 of tile" in told


def test_origins_that_are_no_memory(fault: Any) -> None:
    body = "mov.u32 v, 0; div.u32 v, t, v; st.global.u32 [at], v;"
    told = str(fault("PoisonError", "global memory", body))
    assert "undefined where it divides by zero" in told
    assert "nothing has written" not in told


def test_origin_of_an_address(fault: Any) -> None:
    told = str(fault("PoisonError", "the address is undefined", "st.shared.u32 [u], t;"))
    assert "it may come from register u, which nothing has written" in told


@pytest.mark.parametrize(
    ("kind", "body", "told"),
    [
        ("AlignmentError", "ld.shared.u32 v, [s+6];", "shared address 0x406, offset 6 of tile"),
        ("AlignmentError", "ld.global.u32 v, [base+10];", "offset 10 of out"),
        ("BarrierError", "mbarrier.arrive.shared.b64 _, [s+8];", "offset 8 of tile"),
        ("RaceError", "st.shared.u32 [s+12], t;", "offset 12 of tile"),
    ],
)
def test_places_of_faults(fault: Any, kind: str, body: str, told: str) -> None:
    block = 64 if kind == "RaceError" else 32
    assert told in str(fault(kind, ".", body, block=block))
