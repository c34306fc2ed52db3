"""Strong accesses to shared memory, planted around operations of the async proxy (PTX ISA 8.6)."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hopper_kernels import aligned, errors, placed, run
from test_blackwell_faults import product
from test_hopper_faults import COPY, FILL, PRODUCT, SEND, START

WRITES = {
    "volatile": "st.volatile.shared.u32 [%0], 5;",
    "relaxed": "st.relaxed.cta.shared.u32 [%0], 5;",
    "release": "st.release.cta.shared.u32 [%0], 5;",
    "atom": "{ .reg .b32 old; atom.shared.add.u32 old, [%0], 1; }",
    "exch": "{ .reg .b32 old; atom.shared.exch.b32 old, [%0], 7; }",
    "cas": "{ .reg .b32 old; atom.shared.cas.b32 old, [%0], 1, 2; }",
    "red": "red.shared.add.u32 [%0], 1;",
    "remote": "st.relaxed.cluster.shared::cluster.u32 [%0], 5;",
    "generic": "{ .reg .b64 q; cvt.u64.u32 q, %0; cvta.shared.u64 q, q; red.add.u32 [q], 5; }",
}
READS = {
    "volatile": "{ .reg .b32 got; ld.volatile.shared.u32 got, [%0]; }",
    "relaxed": "{ .reg .b32 got; ld.relaxed.cta.shared.u32 got, [%0]; }",
    "acquire": "{ .reg .b32 got; ld.acquire.cta.shared.u32 got, [%0]; }",
}


def strong(text: str, place: str) -> str:
    """A statement in CUDA that accesses a place in shared memory."""
    return f'asm volatile("{text}" :: "r"(shared({place})) : "memory");\n'


def run_copy(body: str, **options: Any) -> np.ndarray:
    """Runs a body between bulk copies; returns what it has written."""
    out, data = aligned(256, np.uint32), placed(np.arange(256, dtype=np.uint32))
    run(COPY.replace("BODY", body), out, data, block=64, **options)
    return out


def run_product(body: str) -> None:
    """Runs a product by a warpgroup behind a body."""
    body += "begin(); multiply(d, da, db, 1); end_group(); wait_groups<0>();"
    body += "for (int i = 0; i < 16; ++i) out[16 * (t % 128) + i] = d[i];"
    run(PRODUCT.replace("BODY", body), aligned((64, 32), np.float32), 0, 0)


def fails(kind: str, match: str, body: str, runs: Callable[[str], Any] = run_copy) -> None:
    """The body must fail in a given way."""
    with pytest.raises(getattr(errors, kind), match=match) as caught:
        runs(body)
    assert caught.value.where is not None
    assert caught.value.where.line > 0


every_write = pytest.mark.parametrize("text", WRITES.values(), ids=WRITES)
every_read = pytest.mark.parametrize("text", READS.values(), ids=READS)
UNFENCED = "what warp 0 has written, and no fence.proxy.async"


@every_write
def test_copy_of_what_no_fence_covers(text: str) -> None:
    body = FILL + strong(text, "tile + t") + "__syncthreads();\n" + SEND
    fails("AsyncHazardError", f"reads {UNFENCED}", body)


@every_write
def test_copy_over_what_no_fence_covers(text: str) -> None:
    body = FILL + strong(text, "tile + t") + "__syncthreads();\n" + START
    fails("AsyncHazardError", f"writes {UNFENCED}", body)


@every_write
def test_product_of_what_no_fence_covers(text: str) -> None:
    body = strong(text, "sb + t") + "__syncthreads();\n"
    fails("AsyncHazardError", f"reads {UNFENCED}", body, run_product)


@every_write
def test_copy_beside_a_write(text: str) -> None:
    body = FILL + "if (t == 32) " + strong(text, "tile") + SEND
    fails("RaceError", "warp 1 has written without a barrier that an asynchronous", body)
    fails("RaceError", "warp 1 has written without a barrier", body.replace(SEND, START))


@every_write
def test_product_beside_a_write(text: str) -> None:
    body = "if (t == 32) " + strong(text, "sb")
    fails("RaceError", "has written without a barrier that an async", body, run_product)


@every_read
def test_copy_over_what_is_read(text: str) -> None:
    body = FILL + "if (t == 32) " + strong(text, "tile") + START
    fails("RaceError", "warp 1 has read without a barrier that an asynchronous", body)


@every_write
def test_fences_cover(text: str) -> None:
    """No fault: a fence and a barrier lie in between, on the side of the writes."""
    body = FILL + strong(text, "tile + t") + "fence_async(); __syncthreads();\n"
    body += "if (t == 0) { store(out, tile, 512); commit(); wait_all(); }"
    out = run_copy(body)
    assert (out[64:128] == np.arange(64)).all()
    assert (out[:64] != np.arange(64)).any()
    run_product(strong(text, "sb + t") + "fence_async(); __syncthreads();\n")


@every_read
def test_reads_need_a_barrier_alone(text: str) -> None:
    """No fault: what has been read is overwritten behind a barrier."""
    body = FILL + strong(text, "tile + t") + "__syncthreads();\n" + START
    body += "wait(&bar, 0); out[t] = tile[t];"
    assert (run_copy(body)[:64] == np.arange(64)).all()


def test_operands_of_tensor_cores_take_the_same_check() -> None:
    def edit(text: str) -> str:
        text, stores = re.subn(r"\bst\.shared", "st.volatile.shared", text)
        text, fences = re.subn(r"fence\.proxy\.async\S*;", "", text)
        assert stores
        assert fences
        return text

    with pytest.raises(errors.AsyncHazardError, match="and no fence"):
        product(edit=edit)
