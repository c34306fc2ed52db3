"""Exchange between the threads of a warp (PTX ISA 9.7.9.6, 9.7.13.5-10)."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

FULL = 0xFFFFFFFF


def shuffled(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """The pseudo code of PTX ISA 9.7.9.6."""
    bval, cval, segment = b & 31, c & 31, c >> 8 & 31
    most, least = (lane & segment) | (cval & ~segment & 31), lane & segment
    place, good = {
        "up": (lane - bval, lane - bval >= most),
        "down": (lane + bval, lane + bval <= most),
        "bfly": (lane ^ bval, lane ^ bval <= most),
        "idx": ((least | (bval & ~segment)), (least | (bval & ~segment)) <= most),
    }[mode]
    return (place if good else lane), good


@pytest.mark.parametrize("width", [32, 8, 2])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffle(evaluate: Callable[..., Any], rng: Any, mode: str, width: int) -> None:
    a = rng.integers(0, 2**32, 64, dtype=np.uint32)
    b = rng.integers(0, 32, 64, dtype=np.uint32)
    c = (32 - width) << 8 | (0 if mode == "up" else 31)
    body = f"""
      .reg .pred p;
      shfl.sync.{mode}.b32 %d0|p, %a0, %a1, {c}, -1;
      selp.b32 %d1, 1, 0, p;
    """
    value, valid = evaluate(body, [a, b], [np.uint32, np.uint32])
    for thread in range(64):
        place, good = shuffled(mode, thread % 32, int(b[thread]), c)
        assert value[thread] == a[thread // 32 * 32 + place]
        assert valid[thread] == good


def test_votes(evaluate: Callable[..., Any], rng: Any) -> None:
    a = rng.integers(0, 2, 128, dtype=np.uint32)
    a[32:64], a[64:96] = 1, 0
    body = """
      .reg .pred p, q;
      setp.ne.u32 p, %a0, 0;
      vote.sync.ballot.b32 %d0, p, -1;
      vote.sync.any.pred q, p, -1; selp.b32 %d1, 1, 0, q;
      vote.sync.all.pred q, !p, -1; selp.b32 %d2, 1, 0, q;
      vote.sync.uni.pred q, p, -1; selp.b32 %d3, 1, 0, q;
    """
    ballot, some, none, same = evaluate(body, [a], [np.uint32] * 4)
    for warp in range(4):
        votes = a[32 * warp : 32 * warp + 32].astype(bool)
        own = slice(32 * warp, 32 * warp + 32)
        assert (ballot[own] == sum(int(v) << i for i, v in enumerate(votes))).all()
        assert (some[own] == votes.any()).all()
        assert (none[own] == (not votes.any())).all()
        assert (same[own] == (votes.all() or not votes.any())).all()


def test_matches(evaluate: Callable[..., Any], rng: Any) -> None:
    a = rng.integers(0, 4, 64, dtype=np.uint32)
    a[32:] = 9
    body = """
      .reg .pred p;
      match.any.sync.b32 %d0, %a0, -1;
      match.all.sync.b32 %d1|p, %a0, -1;
      selp.b32 %d2, 1, 0, p;
    """
    some, every, agreed = evaluate(body, [a], [np.uint32] * 3)
    for thread in range(64):
        warp = a[thread // 32 * 32 :][:32]
        assert some[thread] == sum(1 << i for i, v in enumerate(warp) if v == a[thread])
    assert every.tolist() == [0] * 32 + [FULL] * 32
    assert agreed.tolist() == [0] * 32 + [1] * 32


@pytest.mark.parametrize("operation", ["add.u32", "min.s32", "max.u32", "and.b32", "xor.b32"])
def test_reductions(evaluate: Callable[..., Any], rng: Any, operation: str) -> None:
    a = rng.integers(0, 2**32, 64, dtype=np.uint32)
    (found,) = evaluate(f"redux.sync.{operation} %d0, %a0, -1;", [a], [np.uint32])
    for warp in (a[:32], a[32:]):
        expected = {
            "add.u32": warp.sum(dtype=np.uint32),
            "min.s32": warp.view(np.int32).min().view(np.uint32),
            "max.u32": warp.max(),
            "and.b32": np.bitwise_and.reduce(warp),
            "xor.b32": np.bitwise_xor.reduce(warp),
        }[operation]
        own = found[:32] if warp is not a[32:] and warp.ctypes.data == a.ctypes.data else found[32:]
        assert (own == expected).all()


def test_one_thread_is_elected(evaluate: Callable[..., Any]) -> None:
    a = np.zeros(64, np.uint32)
    body = "{ .reg .pred p; elect.sync %d0|p, -1; selp.b32 %d1, 1, 0, p; }"
    leader, elected = evaluate(body, [a], [np.uint32, np.uint32])
    assert elected[:32].sum() == elected[32:].sum() == 1
    assert (leader == np.argmax(elected[:32])).all()


@pytest.mark.parametrize("seed", [None, 5, 6])
def test_halves_of_a_warp_with_masks_of_their_own(
    evaluate: Callable[..., Any], rng: Any, seed: Any
) -> None:
    """Each half meets for itself, in a loop that it leaves at its own time."""
    body = """
      .reg .pred p; .reg .b32 m, n, l, x;
      mov.u32 l, %laneid;
      setp.lt.u32 p, l, 16;
      selp.b32 m, 0x0000FFFF, 0xFFFF0000, p;
      selp.b32 n, 3, 5, p;
      mov.u32 %d0, %a0;
    LOOP:
      shfl.sync.bfly.b32 x, %d0, 1, 31, m;
      add.u32 %d0, %d0, x;
      sub.u32 n, n, 1;
      setp.ne.u32 p, n, 0;
      @p bra LOOP;
      redux.sync.max.u32 %d1, %d0, m;
    """
    a = rng.integers(0, 1000, 64, dtype=np.uint32)
    total, most = evaluate(body, [a], [np.uint32, np.uint32], seed=seed)
    pairs = np.repeat(a.reshape(-1, 2).sum(axis=1), 2).astype(np.uint32)
    lane = np.arange(64) % 32
    expected = np.where(lane < 16, pairs * 4, pairs * 16).astype(np.uint32)
    assert total.tolist() == expected.tolist()
    assert most.tolist() == np.repeat(expected.reshape(-1, 16).max(axis=1), 16).tolist()
