"""Products of warpgroups with a sparse A (PTX ISA 9.7.15.6)."""

import importlib
from typing import Any

import numpy as np
import pytest
import warpgroup_matrices as wm
from hopper_kernels import aligned, placed
from test_sparse_mma import ANY, INCREASING, chunks, expanded, metadata
from test_wgmma import _D, PAIRS, check, product_body

errors = importlib.import_module("humming.devices.simulator.errors")

K = {"f16": 32, "bf16": 32, "tf32": 16, "e4m3": 64, "e5m2": 64, "s8": 64, "u8": 64}
SPARSE_PAIRS = [pair for pair in PAIRS if pair[1] != "b1"]
SELECTORS = {"f16": 2, "bf16": 2, "tf32": 2}
FENCE = "wgmma.fence.sync.aligned;"


class Sparse:
    """A random sparse A: what is kept, its metadata by thread, and its values."""

    def __init__(self, rng: np.random.Generator, kind: str, selector: int, pairs: Any) -> None:
        k = K[kind]
        self.codes = wm.random_codes(rng, kind, (64, k // 2))
        self.words, columns = [], []
        for _ in range(4):
            nibbles, found = chunks(rng, k, wm.BITS[kind], pairs)
            self.words.append(metadata(rng, nibbles, wm.BITS[kind], selector))
            columns.append(found)
        self.columns = np.concatenate(columns)
        self.selector = selector

    def values(self, kind: str) -> np.ndarray:
        """float64 [64, K]."""
        return expanded(wm.values_of(self.codes, kind), self.columns)


def multiply(
    run_ptx: Any,
    rng: np.random.Generator,
    n: int,
    kinds: tuple[str, str, str],
    sparse: Sparse,
    *,
    a: wm.Stored | np.ndarray,
    b: wm.Stored,
    tail: str,
    b_step: int = 0,
    change: str = "",
    in_flight: str = "",
    defined: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """(accumulators before, accumulators behind) of one product, both [64, N].

    The metadata of the threads lies behind A. `change` is what threads do behind the fence,
    `in_flight` ahead of the wait; unless they are `defined`, the metadata are never read.
    """
    kind, a_kind, b_kind = kinds
    half = kind == "f16"
    count = n // (4 if half else 2)
    before = np.zeros((128, count), _D[kind])
    if kind == "f32":
        before[:] = rng.standard_normal(before.shape)
    elif kind == "s32":
        before[:] = rng.integers(-(2**31), 2**31, before.shape)
    else:
        before[:] = rng.standard_normal((128, 2 * count)).astype(np.float16).view(np.uint32)
    in_registers = isinstance(a, np.ndarray)
    image = np.ascontiguousarray(a if isinstance(a, np.ndarray) else a.image).view(np.uint8)
    given = np.concatenate([image.reshape(-1), np.concatenate(sparse.words).view(np.uint8)])
    words = 0 if in_registers else image.size // 4
    opcode = f"wgmma.mma_async.sp.sync.aligned.m64n{n}k{K[a_kind]}.{kind}.{a_kind}.{b_kind}"
    body = product_body(opcode, count, kind, words, len(b.image) // 4, tail, in_registers)
    load = f".reg .b32 e; mad.wide.u32 at, t, 4, pa; ld.global.u32 e, [at+{image.size}];"
    load = load if defined else ".reg .b32 e;"
    body = body.replace(FENCE, f"{load} {FENCE} {change}")
    body = body.replace("wgmma.wait_group", f"{in_flight} wgmma.wait_group")
    body = body.replace("descriptor_b, adds", f"descriptor_b, e, {sparse.selector}, adds")
    out = aligned(before.shape, before.dtype)
    run_ptx(
        body,
        {"out": out, "before": placed(before), "a": placed(given), "b": placed(b.image)},
        scalars=(0 if isinstance(a, np.ndarray) else a.descriptor, b.descriptor + (b_step >> 4), 1),
        block=128,
        target="sm_90a",
    )
    return wm.accumulator(before, half), wm.accumulator(out, half)


def tail_of(kind: str, in_registers: bool, turn_b: int = 0) -> str:
    """Factors and transpositions."""
    if kind in ("s8", "u8"):
        return ""
    turns = f", {turn_b}" if in_registers else f", 0, {turn_b}"
    return ", 1, 1" + (turns if kind in ("f16", "bf16") else "")


@pytest.mark.parametrize("order", ["increasing", "any-order"])
@pytest.mark.parametrize("in_registers", [False, True], ids=["SS", "RS"])
@pytest.mark.parametrize(
    ("kind", "a_kind", "b_kind", "selector"),
    [(*pair, f) for pair in SPARSE_PAIRS for f in range(SELECTORS.get(pair[1], 1))],
)
def test_types(
    run_ptx: Any,
    rng: np.random.Generator,
    kind: str,
    a_kind: str,
    b_kind: str,
    selector: int,
    in_registers: bool,
    order: str,
) -> None:
    """9.7.15.6.3, all types and selectors, both places of A, a random N."""
    n = int(rng.choice([8, 16, 24, 32, 48, 96]))
    sparse = Sparse(rng, a_kind, selector, ANY if order == "any-order" else INCREASING)
    b = wm.random_codes(rng, b_kind, (n, K[a_kind]))
    if kind == "f16" and a_kind[0] == "e":  # keep in the range of the result
        b = np.where(rng.random(b.shape) < 0.5, b & 0x80 | 0x20, 0).astype(np.uint8)
        sparse.codes = sparse.codes & 0x80 | 0x34
    exact = sparse.values(a_kind) @ wm.values_of(b, b_kind).T
    rows = wm.packed(sparse.codes, a_kind)
    left = wm.fragment_a(rows) if in_registers else wm.k_major(rows, "none")
    right = wm.k_major(wm.packed(b, b_kind), "none")
    before, found = multiply(
        run_ptx,
        rng,
        n,
        (kind, a_kind, b_kind),
        sparse,
        a=left,
        b=right,
        tail=tail_of(a_kind, in_registers),
    )
    check(kind, found, before, exact)


@pytest.mark.parametrize("layout", ["none", "64B", "128B"])
@pytest.mark.parametrize("kind", ["bf16", "e4m3", "tf32"])
def test_b_along_k(run_ptx: Any, rng: np.random.Generator, kind: str, layout: str) -> None:
    """9.7.15.5.1.2: B has 64 bytes along K, a row of the swizzle or half of one."""
    n, width = 24, max(64, wm.SPANS[layout])
    sparse = Sparse(rng, kind, 0, INCREASING)
    whole = wm.random_codes(rng, kind, (n, K[kind] * width // 64))
    step = int(rng.integers(0, width // 64))
    b = np.ascontiguousarray(whole[:, K[kind] * step : K[kind] * (step + 1)])
    exact = sparse.values(kind) @ wm.values_of(b, kind).T
    before, found = multiply(
        run_ptx,
        rng,
        n,
        ("f32", kind, kind),
        sparse,
        a=wm.k_major(wm.packed(sparse.codes, kind), "none"),
        b=wm.k_major(wm.packed(whole, kind), layout, 32),
        tail=tail_of(kind, False),
        b_step=64 * step,
    )
    check("f32", found, before, exact)


@pytest.mark.parametrize("layout", wm.MODES)
def test_b_along_n(run_ptx: Any, rng: np.random.Generator, layout: str) -> None:
    """The same for a transposed B, which has 32 columns of K."""
    n = max(int(rng.choice([8, 40, 64])), wm.SPANS[layout] // 2)
    sparse = Sparse(rng, "f16", 1, INCREASING)
    b = wm.random_codes(rng, "f16", (n, 32))
    exact = sparse.values("f16") @ wm.values_of(b, "f16").T
    before, found = multiply(
        run_ptx,
        rng,
        n,
        ("f32", "f16", "f16"),
        sparse,
        a=wm.k_major(wm.packed(sparse.codes, "f16"), "none"),
        b=wm.mn_major(wm.packed(np.ascontiguousarray(b.T), "f16"), layout, 32),
        tail=tail_of("f16", False, 1),
    )
    check("f32", found, before, exact)


def of_halves(run_ptx: Any, rng: np.random.Generator, sparse: Sparse, **options: Any) -> None:
    """A product of random halves, with N = 8."""
    b = wm.k_major(wm.packed(wm.random_codes(rng, "f16", (8, 32)), "f16"), "none")
    options = {"a": wm.k_major(wm.packed(sparse.codes, "f16"), "none"), "b": b, **options}
    tail = tail_of("f16", False)
    multiply(run_ptx, rng, 8, ("f32", "f16", "f16"), sparse, tail=tail, **options)


def test_metadata_without_a_meaning(run_ptx: Any, rng: np.random.Generator) -> None:
    sparse = Sparse(rng, "f16", 1, ANY)
    sparse.words[2][:] = sparse.words[2] | np.where(np.arange(32) % 4 < 2, 0xF, 0)
    of_halves(run_ptx, rng, sparse)
    sparse.words[2][6] |= 0xF
    with pytest.raises(errors.UndefinedBehaviorError, match="two numbers of a chunk differ"):
        of_halves(run_ptx, rng, sparse)


def test_metadata_written_behind_the_fence(run_ptx: Any, rng: np.random.Generator) -> None:
    sparse = Sparse(rng, "f16", 0, INCREASING)
    with pytest.raises(errors.UndefinedBehaviorError, match="written since the last"):
        of_halves(run_ptx, rng, sparse, change="xor.b32 e, e, 0xcc;")


def test_metadata_written_before_the_wait(run_ptx: Any, rng: np.random.Generator) -> None:
    sparse = Sparse(rng, "f16", 0, INCREASING)
    told = "the register e of an operand has been written before a wait covered it"
    with pytest.raises(errors.AsyncHazardError, match=told):
        of_halves(run_ptx, rng, sparse, in_flight="xor.b32 e, e, 0xcc;")


def test_undefined_metadata(run_ptx: Any, rng: np.random.Generator) -> None:
    sparse = Sparse(rng, "f16", 0, INCREASING)
    with pytest.raises(errors.PoisonError, match="metadata"):
        of_halves(run_ptx, rng, sparse, defined=False)


def test_rows_of_the_swizzle_that_are_shorter_than_k(
    run_ptx: Any, rng: np.random.Generator
) -> None:
    sparse = Sparse(rng, "f16", 0, INCREASING)
    b = wm.k_major(wm.packed(wm.random_codes(rng, "f16", (8, 16)), "f16"), "32B")
    with pytest.raises(errors.UndefinedBehaviorError, match="64 bytes along K in rows of 32"):
        of_halves(run_ptx, rng, sparse, b=b)
