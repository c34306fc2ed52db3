"""Control flow: threads diverge and come together, whatever the graph looks like."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

errors = importlib.import_module("humming.devices.simulator.errors")

SEEDS = [None, 1, 2, 3]


def collatz(value: int) -> int:
    steps = 0
    while value != 1:
        value = 3 * value + 1 if value & 1 else value // 2
        steps += 1
    return steps


COLLATZ = """
  .reg .pred p, q; .reg .b32 v, n, w;
  mov.u32 v, %a0; mov.u32 n, 0;
HEAD:
  setp.eq.u32 p, v, 1;
  @p bra DONE;
  add.u32 n, n, 1;
  and.b32 w, v, 1;
  setp.eq.u32 q, w, 1;
  @q bra ODD;
  shr.u32 v, v, 1;
  bra HEAD;
ODD:
  mad.lo.u32 v, v, 3, 1;
  bra.uni HEAD;
DONE:
  mov.u32 %d0, n;
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_loops_end_at_different_times(evaluate: Callable[..., Any], rng: Any, seed: Any) -> None:
    a = rng.integers(1, 200, 96, dtype=np.uint32)
    (found,) = evaluate(COLLATZ, [a], [np.uint32], seed=seed)
    assert found.tolist() == [collatz(x) for x in a.tolist()]


def test_threads_meet_again_behind_a_loop(evaluate: Callable[..., Any], rng: Any) -> None:
    """All active threads of a warp are together at the first place that all of them pass."""
    a = rng.integers(1, 100, 64, dtype=np.uint32)
    found = evaluate(COLLATZ + "activemask.b32 %d1;", [a], [np.uint32, np.uint32])
    assert (found[1] == 0xFFFFFFFF).all()


def test_code_out_of_line_still_meets(evaluate: Callable[..., Any]) -> None:
    """The part that some threads run lies behind the place where all meet."""
    body = """
      .reg .pred p;
      setp.lt.u32 p, %a0, 7;
      mov.u32 %d0, 1;
      @p bra AWAY;
    BACK:
      activemask.b32 %d1;
      add.u32 %d0, %d0, 1;
      bra END;
    AWAY:
      mov.u32 %d0, 10;
      bra BACK;
    END:
    """
    a = np.arange(64, dtype=np.uint32) % 32
    value, mask = evaluate(body, [a], [np.uint32, np.uint32])
    assert value.tolist() == [11 if x < 7 else 2 for x in a.tolist()]
    assert (mask == 0xFFFFFFFF).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_graph_with_two_entries_to_a_loop(
    evaluate: Callable[..., Any], rng: Any, seed: Any
) -> None:
    """Irreducible: threads enter the loop at either of its two blocks."""
    body = """
      .reg .pred p, q; .reg .b32 n, v, w;
      mov.u32 n, 0; mov.u32 v, %a0;
      and.b32 w, v, 1; setp.eq.u32 p, w, 1;
      @p bra SECOND;
    FIRST:
      add.u32 n, n, 1;
      setp.gt.u32 q, n, v;
      @q bra OUT;
    SECOND:
      add.u32 n, n, 3;
      setp.le.u32 q, n, v;
      @q bra FIRST;
    OUT:
      mov.u32 %d0, n;
    """

    def expected(value: int) -> int:
        n, second = 0, value & 1 == 1
        while True:
            if not second:
                n += 1
                if n > value:
                    return n
            second = False
            n += 3
            if n > value:
                return n

    a = rng.integers(0, 60, 64, dtype=np.uint32)
    (found,) = evaluate(body, [a], [np.uint32], seed=seed)
    assert found.tolist() == [expected(x) for x in a.tolist()]


@pytest.mark.parametrize("seed", SEEDS)
def test_threads_may_leave_from_a_loop(run_ptx: Callable[..., Any], seed: Any) -> None:
    body = """
      .reg .pred p; .reg .b32 t, i, s; .reg .b64 base, at;
      mov.u32 t, %tid.x; ld.param.u64 base, [p0]; mad.wide.u32 at, t, 4, base;
      mov.u32 i, 0; mov.u32 s, 0;
    LOOP:
      add.u32 s, s, i;
      st.global.u32 [at], s;
      setp.eq.u32 p, i, t;
      @p exit;
      add.u32 i, i, 1;
      bra LOOP;
    """
    out = np.zeros(64, np.uint32)
    run_ptx(body, {"out": out}, block=64, seed=seed)
    assert out.tolist() == [t * (t + 1) // 2 for t in range(64)]


def test_switch_by_a_table(evaluate: Callable[..., Any]) -> None:
    """PTX ISA 9.7.12.4."""
    body = """
      .reg .b32 k;
      and.b32 k, %a0, 3;
      TABLE: .branchtargets L0, L1, L2, L1;
      brx.idx k, TABLE;
    L0: mov.u32 %d0, 100; bra E;
    L1: mov.u32 %d0, 200; bra E;
    L2: mov.u32 %d0, 300;
    E:
      activemask.b32 %d1;
    """
    a = np.arange(64, dtype=np.uint32)
    value, mask = evaluate(body, [a], [np.uint32, np.uint32])
    assert value.tolist() == [[100, 200, 300, 200][x & 3] for x in a.tolist()]
    assert (mask == 0xFFFFFFFF).all()


def test_guarded_instructions_change_some_threads(evaluate: Callable[..., Any]) -> None:
    body = """
      .reg .pred p;
      setp.lt.u32 p, %a0, 10;
      mov.u32 %d0, 1;
      @p mov.u32 %d0, 2;
      @!p add.u32 %d0, %d0, %a0;
    """
    a = np.arange(64, dtype=np.uint32)
    (found,) = evaluate(body, [a], [np.uint32])
    assert found.tolist() == [2 if x < 10 else 1 + x for x in a.tolist()]


FUNCTIONS = """
.func (.param .b32 r) twice(.param .b32 a)
{
  .reg .b32 v;
  ld.param.u32 v, [a];
  shl.b32 v, v, 1;
  st.param.b32 [r], v;
  ret;
}
.func (.param .b32 result) count(.param .b32 n, .param .b32 m)
{
  .reg .b32 v, w; .reg .pred p;
  ld.param.u32 v, [n];
  ld.param.u32 w, [m];
  setp.gt.u32 p, v, w;
  @p bra L;
  { .param .b32 x; .param .b32 y;
    st.param.b32 [x], v;
    call.uni (y), twice, (x);
    ld.param.b32 v, [y]; }
L:
  add.u32 v, v, 1;
  st.param.b32 [result], v;
  ret;
}
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_functions_call_functions(evaluate: Callable[..., Any], seed: Any) -> None:
    """PTX ISA 9.7.12.5: each thread comes back to where it was called from."""
    body = """
      .reg .b32 u, w; .reg .pred q;
      setp.lt.u32 q, %a0, 5;
      @q bra SMALL;
      { .param .b32 a; .param .b32 b; .param .b32 r;
        st.param.b32 [a], %a0; st.param.b32 [b], 20;
        call (r), count, (a, b);
        ld.param.b32 u, [r]; }
      bra NEXT;
      SMALL:
      { .param .b32 a; .param .b32 b; .param .b32 r;
        st.param.b32 [a], 20; st.param.b32 [b], %a0;
        call (r), count, (a, b);
        ld.param.b32 u, [r]; }
      NEXT:
      mov.u32 %d0, u;
    """

    def count(n: int, m: int) -> int:
        return (n if n > m else 2 * n) + 1

    a = np.arange(32, dtype=np.uint32)
    (found,) = evaluate(body, [a], [np.uint32], FUNCTIONS, seed=seed)
    expected = [count(20, x) if x < 5 else count(x, 20) for x in a.tolist()]
    assert found.tolist() == expected


IN_REGISTERS = """
.func (.reg .b32 sum, .reg .b64 wide) both(.reg .b32 a, .reg .b32 b)
{
  .reg .pred p;
  add.u32 sum, a, b; mul.wide.u32 wide, a, b;
  setp.gt.u32 p, a, 20;
  @p mov.u32 sum, 0;
  @p ret;
  add.u32 sum, sum, 1;
}
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_functions_with_parameters_in_registers(evaluate: Callable[..., Any], seed: Any) -> None:
    """PTX ISA 7.1: arguments may be constants, calls predicated."""
    body = """
      .reg .b64 w; .reg .pred q; setp.lt.u32 q, %a0, 16;
      call (%d0, w), both, (%a0, 3);
      cvt.u32.u64 %d1, w; mov.u32 %d2, 99;
      @q call (%d2, _), both, (%a0, %a0);
    """
    a = np.arange(32, dtype=np.uint32)
    total, wide, some = evaluate(body, [a], [np.uint32] * 3, IN_REGISTERS, seed=seed)
    assert total.tolist() == [0 if x > 20 else x + 4 for x in range(32)]
    assert wide.tolist() == [3 * x for x in range(32)]
    assert some.tolist() == [2 * x + 1 if x < 16 else 99 for x in range(32)]


@pytest.mark.parametrize("seed", SEEDS)
def test_indirect_calls(evaluate: Callable[..., Any], seed: Any) -> None:
    """PTX ISA 9.7.12.5: threads call different functions by their addresses."""
    functions = (
        FUNCTIONS
        + """
      .func (.param .b32 r) negated(.param .b32 a)
      { .reg .b32 v; ld.param.b32 v, [a]; neg.s32 v, v; st.param.b32 [r], v; ret; }
    """
    )
    body = """
      .reg .b64 f, g; .reg .pred q; .reg .b32 v;
      mov.u64 f, twice; mov.u64 g, negated;
      setp.lt.u32 q, %a0, 10; selp.b64 f, f, g, q;
      { .param .b32 x; .param .b32 y;
        st.param.b32 [x], %a0;
        prototype: .callprototype (.param .b32 _) _ (.param .b32 _);
        call (y), f, (x), prototype;
        ld.param.b32 %d0, [y]; }
    """
    a = np.arange(32, dtype=np.uint32)
    (found,) = evaluate(body, [a], [np.int32], functions, seed=seed)
    assert found.tolist() == [2 * x if x < 10 else -x for x in range(32)]
    with pytest.raises(errors.UndefinedBehaviorError, match="no function"):
        evaluate(body.replace("mov.u64 g, negated;", "mov.u64 g, 3;"), [a], [np.int32], functions)


def test_names_in_scopes_hide_outer_ones(evaluate: Callable[..., Any]) -> None:
    body = """
      .reg .b32 v;
      mov.u32 v, 1;
      { .reg .b32 v; mov.u32 v, 2;
        { .reg .b32 v; .reg .pred p; mov.u32 v, 3;
          setp.eq.u32 p, %a0, 0;
          @p bra DONE;
          mov.u32 v, 4;
        DONE: mov.u32 %d0, v; }
        mov.u32 %d1, v; }
      mov.u32 %d2, v;
      { .reg .pred p; setp.ne.u32 p, %a0, 0; @p bra DONE; mov.u32 %d2, 7; DONE: }
    """
    a = np.arange(32, dtype=np.uint32)
    inner, middle, outer = evaluate(body, [a], [np.uint32] * 3)
    assert inner.tolist() == [3] + [4] * 31
    assert (middle == 2).all()
    assert outer.tolist() == [7] + [1] * 31


def test_special_registers_say_who_runs(run_ptx: Callable[..., Any]) -> None:
    body = """
      .reg .b32 x, y, z, c, d, n, t; .reg .b64 base, at;
      mov.u32 x, %tid.x; mov.u32 y, %tid.y; mov.u32 z, %tid.z;
      mov.u32 c, %ctaid.x; mov.u32 d, %ctaid.y;
      mad.lo.u32 t, z, 2, y; mad.lo.u32 t, t, 8, x;
      mov.u32 n, %nctaid.x; mad.lo.u32 d, d, n, c; mad.lo.u32 n, d, 48, t;
      ld.param.u64 base, [p0]; mad.wide.u32 at, n, 16, base;
      mov.u32 x, %laneid; mov.u32 y, %warpid; mov.u32 z, %lanemask_lt; mov.u32 c, %ntid.z;
      st.global.v4.u32 [at], {x, y, z, c};
    """
    out = np.zeros((6, 48, 4), np.uint32)
    run_ptx(body, {"out": out}, block=(8, 2, 3), grid=(3, 2, 1))
    thread = np.arange(48)
    assert (out[..., 0] == thread % 32).all()
    assert (out[..., 1] == thread // 32).all()
    assert (out[..., 2] == 2 ** (thread % 32) - 1).all()
    assert (out[..., 3] == 3).all()


UNIFORM = """
  .reg .b32 t, v; .reg .pred p; mov.u32 t, %tid.x; and.b32 v, t, {mask}; setp.ne.u32 p, v, 0;
"""
TABLE = "shr.u32 v, v, 4; T: .branchtargets A, B; brx.idx.uni v, T; A: B:"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("branch", ["@p bra.uni END; END:", "@!p ret.uni;", TABLE])
def test_branches_that_are_marked_uniform(
    run_ptx: Callable[..., Any], branch: str, seed: Any
) -> None:
    """PTX ISA 9.7.12.3: all threads of a warp agree; warps need not."""
    warps = UNIFORM.format(mask=32) + branch.replace("v, 4;", "v, 5;")
    run_ptx(warps, {}, block=64, seed=seed)
    with pytest.raises(errors.UndefinedBehaviorError, match="marked uniform") as caught:
        run_ptx(UNIFORM.format(mask=16) + branch, {}, block=64, seed=seed)
    where = caught.value.where
    assert ".uni" in where.text
    assert None not in (where.cta, where.warp, where.lane)
