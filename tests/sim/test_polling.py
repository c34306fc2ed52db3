"""Threads that poll what nobody will write are reported soon; those that only wait long are not."""

import importlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from humming import plugins

errors = importlib.import_module("humming.devices.simulator.errors")

START = """
  .reg .b32 t, c, v, w, n, k; .reg .b64 y, z, time; .reg .pred p, q; .reg .f32 f;
  mov.u32 t, %tid.x; mov.u32 c, %ctaid.x; ld.param.u64 y, [p0];
  .shared .align 16 .b8 tile[64];
"""
SEEDS = [None, 5]


def run(run_ptx: Callable[..., Any], body: str, **options: Any) -> np.ndarray:
    y = np.zeros(64, np.uint32)
    run_ptx(START + body, {"y": y}, **options)
    return y


def endless(run_ptx: Callable[..., Any], body: str, **options: Any) -> Any:
    began = time.monotonic()
    with pytest.raises(errors.DeadlockError, match="never ends") as caught:
        run(run_ptx, body, **options)
    assert time.monotonic() - began < 60
    return caught.value


@pytest.mark.parametrize("seed", SEEDS)
def test_a_load_that_nobody_writes(run_ptx: Callable[..., Any], seed: Any) -> None:
    body = "L: ld.volatile.global.f32 f, [y+8]; setp.eq.f32 p, f, 0f00000000; @p bra L;"
    error = endless(run_ptx, body, seed=seed)
    assert "offset 8 of y" in str(error)
    assert error.where.text.startswith("L: ld.volatile")


GRID_BARRIER = """
  bar.sync 0;
  setp.ne.u32 p, t, 0; @p bra E;
  membar.gl;
  atom.global.add.u32 v, [y], 1;
L:
  BACK_OFF
  ld.volatile.global.u32 v, [y];
  setp.lt.u32 p, v, 41;
  @p bra L;
  membar.gl;
E:
  bar.sync 0;
"""


@pytest.mark.parametrize("back_off", ["", "nanosleep.u32 100;"])
def test_a_grid_that_the_device_does_not_hold(run_ptx: Callable[..., Any], back_off: str) -> None:
    """41 CTAs of a whole SM each; the other 40 are there and wait."""
    t4 = plugins.capabilities("t4")
    body = GRID_BARRIER.replace("BACK_OFF", back_off)
    options = {"block": 1024, "device": t4, "target": "sm_75"}
    error = endless(run_ptx, body, grid=41, **options)
    assert "1 more CTAs start only when one of these 40 ends" in str(error)
    assert "barrier 0 has 992 of 1024 threads" in str(error)
    y = run(run_ptx, body.replace("41", "40"), grid=40, **options)
    assert y[0] == 40


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lock_that_is_never_given_back(run_ptx: Callable[..., Any], seed: Any) -> None:
    body = """
      setp.ne.u32 p, t, 0; @p exit;
    L: atom.global.cas.b32 v, [y], 0, 1; setp.ne.u32 p, v, 0; @p bra L;
    """
    error = endless(run_ptx, body, grid=3, seed=seed)
    assert "offset 0 of y" in str(error)


def test_a_flag_in_shared_memory_behind_barriers(run_ptx: Callable[..., Any]) -> None:
    """Warps meet again and again, and nothing changes."""
    body = """
      mov.u32 w, tile; st.volatile.shared.u32 [w+4], 0; bar.sync 0;
    L: ld.volatile.shared.u32 v, [w+4]; bar.sync 0; setp.eq.u32 p, v, 0; @p bra L;
    """
    assert "offset 4 of tile" in str(endless(run_ptx, body, block=96))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_rest_of_a_warp_waits_for_one_that_polls(
    run_ptx: Callable[..., Any], seed: Any
) -> None:
    body = """
      setp.ne.u32 p, t, 3; @p bra M;
    L: ld.volatile.global.u32 v, [y]; setp.eq.u32 q, v, 0; @q bra L;
    M: bar.warp.sync 0xffffffff;
    """
    assert "the rest of its warp" in str(endless(run_ptx, body, seed=seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_bounded_polls(run_ptx: Callable[..., Any], seed: Any) -> None:
    """A loop that gives up after some rounds ends, though nobody writes."""
    body = """
      mov.u32 n, 0;
    L: ld.volatile.global.u32 v, [y]; add.u32 n, n, 1;
      setp.eq.u32 p, v, 0; setp.lt.and.u32 p, n, 3000, p; @p bra L;
      setp.eq.u32 p, t, 0; @p st.global.u32 [y+4], n;
    """
    assert run(run_ptx, body, seed=seed)[1] == 3000


def test_a_clock_ends_the_polling(run_ptx: Callable[..., Any]) -> None:
    """No register keeps the time from one round to the next."""
    body = """
    L: ld.volatile.global.u32 v, [y]; mov.u64 time, %clock64;
      setp.lt.u64 p, time, 100000; mov.u64 time, 0; @p bra L;
      setp.eq.u32 p, t, 0; @p st.global.u32 [y+4], 1;
    """
    assert run(run_ptx, body)[1] == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_flag_that_comes_late(run_ptx: Callable[..., Any], seed: Any) -> None:
    """One CTA computes for long before it lets the others go."""
    body = """
      setp.ne.u32 p, c, 0; @p bra L;
      mov.u32 n, 0;
    W: add.u32 n, n, 1; setp.lt.u32 p, n, 20000; @p bra W;
      setp.eq.u32 p, t, 0; @p st.release.gpu.global.u32 [y], 1; bra E;
    L: ld.acquire.gpu.global.u32 v, [y]; setp.eq.u32 p, v, 0; @p bra L;
    E:
    """
    assert run(run_ptx, body, grid=3, seed=seed)[0] == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_counter_spread_over_a_warp(run_ptx: Callable[..., Any], seed: Any) -> None:
    """Lane k holds bit k of a counter: each lane alone soon looks as it did before."""
    body = """
      .reg .pred carry, bit; .reg .b32 all, below, ones;
      mov.u32 n, 0;
    L: setp.ne.u32 bit, n, 0; vote.sync.ballot.b32 all, bit, 0xffffffff;
      mov.u32 below, %lanemask_lt; and.b32 ones, all, below;
      setp.eq.u32 carry, ones, below; @carry xor.b32 n, n, 1;
      setp.ne.u32 p, all, 1023; @p bra L;
      setp.eq.u32 p, t, 0; @p st.global.u32 [y], all;
    """
    assert run(run_ptx, body, seed=seed)[0] == 1023


@pytest.mark.parametrize("seed", SEEDS)
def test_a_counter_passed_between_warps(run_ptx: Callable[..., Any], seed: Any) -> None:
    """Warps that meet have a state together, which is longer than that of each."""
    body = """
      .reg .pred carry, bit; .reg .b32 warp;
      shr.u32 warp, t, 5; mov.u32 n, 0; mov.u32 k, 0;
    L: setp.ne.u32 bit, n, 0;
      barrier.cta.red.popc.aligned.u32 v, 0, bit;
      xor.b32 n, n, 1;
      add.u32 k, k, 1; setp.lt.u32 p, k, 2000; @p bra L;
      setp.eq.u32 p, t, 0; @p st.global.u32 [y], k;
    """
    assert run(run_ptx, body, block=64, seed=seed)[0] == 2000
