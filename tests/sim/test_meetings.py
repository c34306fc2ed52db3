"""Threads of a warp that execute one instruction together, from different places (PTX ISA 9.7.13).

What waits for the threads of a mask wants the same instruction, qualifiers and mask of them, and
`barrier` without `.aligned` the same barrier; none of these asks for the same place.
"""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

errors = importlib.import_module("humming.devices.simulator.errors")

SEEDS = [None, 1, 2]
START = ".reg .pred p, q, low; .reg .b32 t, v, w, n; mov.u32 t, %laneid; setp.lt.u32 low, t, 16;"
ALL = 0xFFFFFFFF


def arms(first: str, second: str) -> str:
    """One half of the warp does the first, the other half the second."""
    return START + f"@!low bra H; {first} bra E; H: {second} E:"


@pytest.mark.parametrize("seed", SEEDS)
def test_shuffles(evaluate: Callable[..., Any], rng: Any, seed: Any) -> None:
    """PTX ISA 9.7.9.6, by registers of its own in either arm."""
    a = rng.integers(0, 2**32, 96, dtype=np.uint32)
    body = arms(
        "add.u32 v, %a0, 1; shfl.sync.bfly.b32 %d0, v, 16, 31, 0xffffffff;",
        "add.u32 w, %a0, 2; shfl.sync.bfly.b32 %d0|q, w, 16, 31, 0xffffffff;",
    )
    (found,) = evaluate(body, [a], [np.uint32], seed=seed)
    halves = a.reshape(-1, 2, 16)
    wanted = np.stack([halves[:, 1] + np.uint32(2), halves[:, 0] + np.uint32(1)], axis=1)
    assert (found == wanted.ravel()).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_votes_and_matches(evaluate: Callable[..., Any], rng: Any, seed: Any) -> None:
    a = rng.integers(0, 4, 64, dtype=np.uint32)
    arm = """
      setp.eq.u32 p, %a0, {0}; vote.sync.ballot.b32 %d0, p, 0xffffffff;
      match.any.sync.b32 %d1, %a0, 0xffffffff; redux.sync.max.u32 %d2, %a0, 0xffffffff;
      bar.warp.sync 0xffffffff;
    """
    found = evaluate(
        arms(arm.format(1), arm.format(2)), [a], [np.uint32, np.uint32, np.uint32], seed=seed
    )
    for warp, values in enumerate(a.reshape(2, 32)):
        yes = np.where(np.arange(32) < 16, values == 1, values == 2)
        own = slice(32 * warp, 32 * warp + 32)
        assert (found[0][own] == sum(1 << i for i in range(32) if yes[i])).all()
        same = [sum(1 << i for i in range(32) if values[i] == v) for v in values]
        assert found[1][own].tolist() == same
        assert (found[2][own] == values.max()).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_masks_of_some_threads(evaluate: Callable[..., Any], rng: Any, seed: Any) -> None:
    """Threads 8 to 23 of both arms exchange; the others do not come at all."""
    a = rng.integers(0, 2**32, 32, dtype=np.uint32)
    inner = "add.u32 v, t, 24; and.b32 v, v, 31; setp.lt.u32 q, v, 16; mov.u32 %d0, 0;"
    body = arms(
        inner + "@q shfl.sync.idx.b32 %d0, %a0, 20, 31, 0x00ffff00;",
        inner + "@q shfl.sync.idx.b32 %d0, %a0, 10, 31, 0x00ffff00;",
    )
    (found,) = evaluate(body, [a], [np.uint32], seed=seed)
    wanted = [0] * 8 + [a[20]] * 8 + [a[10]] * 8 + [0] * 8
    assert found.tolist() == wanted


@pytest.mark.parametrize("seed", SEEDS)
def test_undefined_values_are_passed_on(evaluate: Callable[..., Any], seed: Any) -> None:
    body = arms(
        "shfl.sync.bfly.b32 %d0, t, 16, 31, 0xffffffff;",
        "shfl.sync.bfly.b32 %d0, n, 16, 31, 0xffffffff;",
    )
    with pytest.raises(errors.PoisonError, match="global memory") as caught:
        evaluate(body, [np.zeros(32, np.uint32)], [np.uint32], seed=seed)
    assert caught.value.where.lane == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("bar.warp.sync 0xffffffff;", "vote.sync.any.pred p, low, 0xffffffff;"),
        ("vote.sync.any.pred p, low, 0xffffffff;", "vote.sync.all.pred p, low, 0xffffffff;"),
        ("bar.sync 0;", "bar.sync 0;"),
        ("barrier.sync.aligned 0;", "barrier.sync.aligned 0;"),
    ],
)
def test_other_instructions_do_not_meet(
    evaluate: Callable[..., Any], first: str, second: str
) -> None:
    with pytest.raises(errors.DivergenceError, match="wait in vain"):
        evaluate(arms(first, second), [np.zeros(32, np.uint32)], [np.uint32])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("operands", ["3", "3, 64"])
def test_barriers(evaluate: Callable[..., Any], rng: Any, operands: str, seed: Any) -> None:
    """A store ahead of the barrier in one arm is seen behind it in the other, of another warp."""
    a = rng.integers(0, 2**32, 64, dtype=np.uint32)
    store = """
      .shared .align 4 .b8 tile[256]; .reg .b32 at, to;
      mov.u32 w, %tid.x; mad.lo.u32 at, w, 4, tile_at; st.shared.u32 [at], %a0;
    """.replace("mad.lo.u32 at, w, 4, tile_at", "mov.u32 at, tile; mad.lo.u32 at, w, 4, at")
    body = (
        START
        + store
        + f"@!low bra H; barrier.sync {operands}; bra E; H: barrier.sync {operands}; E:"
    )
    body += "xor.b32 w, w, 48; mov.u32 to, tile; mad.lo.u32 to, w, 4, to; ld.shared.u32 %d0, [to];"
    (found,) = evaluate(body, [a], [np.uint32], seed=seed)
    assert (found == a[np.arange(64) ^ 48]).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_reductions_of_barriers(evaluate: Callable[..., Any], rng: Any, seed: Any) -> None:
    a = rng.integers(0, 2, 64, dtype=np.uint32)
    body = arms(
        "setp.eq.u32 p, %a0, 1; barrier.red.popc.u32 %d0, 2, p;",
        "setp.eq.u32 q, %a0, 0; barrier.red.popc.u32 %d0, 2, q;",
    )
    (found,) = evaluate(body, [a], [np.uint32], seed=seed)
    halves = a.reshape(2, 2, 16)
    assert (found == (halves[:, 0] == 1).sum() + (halves[:, 1] == 0).sum()).all()


def test_threads_of_a_warp_at_two_barriers(evaluate: Callable[..., Any]) -> None:
    with pytest.raises(errors.UndefinedBehaviorError, match="disagree about the number"):
        evaluate(arms("barrier.sync 1;", "barrier.sync 2;"), [np.zeros(32, np.uint32)], [np.uint32])
