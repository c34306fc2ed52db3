"""Products of the fifth-generation tensor cores (PTX ISA 9.7.16.10) against float64."""

from typing import Any

import numpy as np
import pytest
import tensor_kernels as tk

MASK = {"f16": 0xFFFF, "f32": 0xFFFFFFFF, "s32": 0xFFFFFFFF}


def noise(rng: Any, columns: int, ctas: int = 1) -> np.ndarray:
    """Numbers for tensor memory that a product is to overwrite."""
    return rng.normal(size=(ctas, 128, columns)).astype(np.float32).view(np.uint32)


def rounded(exact: np.ndarray, d: str) -> np.ndarray:
    """Exact sums as an accumulator holds them."""
    if d == "f16":
        with np.errstate(over="ignore"):
            return exact.astype(np.float16).view(np.uint16).astype(np.uint32)
    if d == "s32":
        return exact.astype(np.int64).astype(np.int32).view(np.uint32)
    return exact.astype(np.float32).view(np.uint32)


def agrees(found: np.ndarray, exact: np.ndarray, d: str) -> bool:
    """Whether D is the exact sum, rounded once: float64 sums may differ in their last bits."""
    if d == "s32":
        return bool((found == rounded(exact, d)).all())
    if d == "f16":
        got = (found & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64)
        with np.errstate(over="ignore"):
            want = exact.astype(np.float16).astype(np.float64)
        return np.array_equal(got, want, equal_nan=True)
    return np.allclose(found.view(np.float32), exact, rtol=2**-23, atol=1e-30, equal_nan=True)


def plain(
    rng: Any,
    kind: str,
    a: str,
    b: str,
    d: str = "f32",
    m: int = 128,
    n: int = 32,
    swizzle: Any = 128,
    **more: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """(D words, exact) of a random product with both operands in shared memory."""
    depth = more.pop("depth", {"f16": 16, "tf32": 8}.get(kind, 32))
    a_codes, a_values = tk.random_codes(rng, (m, depth), a)
    b_codes, b_values = tk.random_codes(rng, (n, depth), b)
    a_image, a_desc = tk.k_major(tk.element_bytes(a_codes, a), swizzle)
    b_image, b_desc = tk.k_major(tk.element_bytes(b_codes, b), swizzle)
    image, (_, b_start) = tk.joined(a_image, b_image)
    idesc = tk.instruction_descriptor(kind, a, b, d, m, n, **more.pop("fields", {}))
    args = [a_desc, b_desc + (b_start >> 4), idesc, 0, 0]
    found = tk.run(f"{tk.mma(kind)} COMMIT", image, noise(rng, n), args, mask=MASK[d], **more)[0]
    return found[lanes(m), :n], a_values @ b_values.T


def lanes(m: int) -> np.ndarray:
    row = np.arange(m)
    return row % 16 + row // 16 * 32 if m == 64 else row


KINDS = [
    *(("f16", name, name, d) for name in ("f16", "bf16") for d in ("f32", "f16")),
    ("tf32", "tf32", "tf32", "f32"),
    *(
        ("f8f6f4", a, b, "f32")
        for a in ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
        for b in ("e4m3", "e3m2", "e2m1")
    ),
    ("f8f6f4", "e2m1", "e5m2", "f16"),
    *(("i8", a, b, "s32") for a in ("s8", "u8") for b in ("s8", "u8")),
]


@pytest.mark.parametrize(("kind", "a", "b", "d"), KINDS)
def test_kinds(rng: Any, kind: str, a: str, b: str, d: str) -> None:
    found, exact = plain(rng, kind, a, b, "f32" if d == "f16" and a == "bf16" else d)
    assert agrees(found, exact, "f32" if d == "f16" and a == "bf16" else d)


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_k_major_swizzles(rng: Any, swizzle: int) -> None:
    """9.7.16.10.6."""
    found, exact = plain(rng, "f16", "bf16", "bf16", swizzle=swizzle)
    assert agrees(found, exact, "f32")


@pytest.mark.parametrize("swizzle", [32, 64, 128])
@pytest.mark.parametrize("shift", [1, 3, 6])
def test_matrices_that_begin_inside_of_a_pattern(rng: Any, swizzle: int, shift: int) -> None:
    """9.7.16.4.1, base offset: the row of 128 bytes at which the pattern begins."""
    a_codes, a_values = tk.random_codes(rng, (128, 16), "bf16")
    b_codes, b_values = tk.random_codes(rng, (32, 16), "bf16")
    a_image, a_desc = tk.k_major(tk.element_bytes(a_codes, "bf16"), swizzle)
    b_image, b_desc = tk.k_major(tk.element_bytes(b_codes, "bf16"), swizzle)
    # The swizzles of 64 and 32 bytes repeat after 4 and 2 of these rows.
    moved = np.concatenate([np.zeros(128 * shift, np.uint8), a_image])
    image, (_, b_start) = tk.joined(moved, b_image)
    idesc = tk.instruction_descriptor("f16", "bf16", "bf16", "f32", 128, 32)
    a_desc += 128 * shift >> 4 | shift << 49
    args = [a_desc, b_desc + (b_start >> 4), idesc, 0, 0]
    found = tk.run(f"{tk.mma('f16')} COMMIT", image, noise(rng, 32), args)[0]
    assert agrees(found[:128, :32], a_values @ b_values.T, "f32")


@pytest.mark.parametrize(("m", "n"), [(64, 8), (64, 24), (64, 256), (128, 16), (128, 256)])
def test_shapes(rng: Any, m: int, n: int) -> None:
    """Layouts D and F: M = 64 has its rows in the lower 16 lanes of each quarter."""
    found, exact = plain(rng, "f8f6f4", "e4m3", "e4m3", m=m, n=n)
    assert agrees(found, exact, "f32")


@pytest.mark.parametrize(
    ("kind", "name", "swizzle"),
    [
        *(("f16", "bf16", swizzle) for swizzle in (0, 32, 64, 128)),
        *(("f8f6f4", "e4m3", swizzle) for swizzle in (0, 32, 64, 128)),
        ("i8", "s8", 128),
        ("tf32", "tf32", "128/32"),
    ],
)
def test_operands_along_m_and_n(rng: Any, kind: str, name: str, swizzle: Any) -> None:
    """9.7.16.10.6, MN-major: the instruction descriptor's transpose bits."""
    m, n, depth = 128, 64, {"f16": 16, "tf32": 8}.get(kind, 32)
    a_codes, a_values = tk.random_codes(rng, (m, depth), name)
    b_codes, b_values = tk.random_codes(rng, (n, depth), name)
    a_image, a_desc = tk.mn_major(a_codes, name, swizzle)
    b_image, b_desc = tk.mn_major(b_codes, name, swizzle)
    image, (_, b_start) = tk.joined(a_image, b_image)
    d = "s32" if kind == "i8" else "f32"
    idesc = tk.instruction_descriptor(kind, name, name, d, m, n, _15=1, _16=1)
    args = [a_desc, b_desc + (b_start >> 4), idesc, 0, 0]
    found = tk.run(f"{tk.mma(kind)} COMMIT", image, noise(rng, n), args)[0]
    assert agrees(found, a_values @ b_values.T, d)


def test_negation(rng: Any) -> None:
    found, exact = plain(rng, "f16", "f16", "f16", fields={"_13": 1})
    assert agrees(found, -exact, "f32")
    found, exact = plain(rng, "f16", "f16", "f16", fields={"_13": 1, "_14": 1})
    assert agrees(found, exact, "f32")


@pytest.mark.parametrize("m", [64, 128])
@pytest.mark.parametrize(
    ("kind", "a"),
    [
        ("f16", "f16"),
        ("tf32", "tf32"),
        ("f8f6f4", "e5m2"),
        ("f8f6f4", "e3m2"),
        ("f8f6f4", "e2m1"),
        ("i8", "s8"),
    ],
)
def test_a_in_tensor_memory(rng: Any, kind: str, a: str, m: int) -> None:
    """Lane = row, columns hold consecutive K; elements below 8 bits have a byte each."""
    depth = {"f16": 16, "tf32": 8}.get(kind, 32)
    a_codes, a_values = tk.random_codes(rng, (m, depth), a)
    b = "e4m3" if kind == "f8f6f4" else a
    b_codes, b_values = tk.random_codes(rng, (32, depth), b)
    containers = a_codes << 2 if a == "e2m1" else a_codes
    size = {"f16": 2, "tf32": 4}.get(kind, 1)
    words = np.ascontiguousarray(containers.astype(f"<u{size}")).view(np.uint32)
    filled = noise(rng, 48)[0]
    filled[lanes(m), 40:48] = words
    image, b_desc = tk.k_major(tk.element_bytes(b_codes, b), 32)
    d = "s32" if kind == "i8" else "f32"
    idesc = tk.instruction_descriptor(kind, a, b, d, m, 32)
    found = tk.run(f"{tk.mma(kind, 'ts')} COMMIT", image, filled, [40, b_desc, idesc, 0, 0])[0]
    assert agrees(found[lanes(m), :32], a_values @ b_values.T, d)


def test_accumulation_and_lanes_that_are_left_out(rng: Any) -> None:
    """A sequence of products in order, the last one with a mask of lanes and a scale for D."""
    m, n = 128, 32
    a_codes, a_values = tk.random_codes(rng, (m, 16), "f16")
    b_codes, b_values = tk.random_codes(rng, (n, 16), "f16")
    a_image, a_desc = tk.k_major(tk.element_bytes(a_codes, "f16"), 32)
    b_image, b_desc = tk.k_major(tk.element_bytes(b_codes, "f16"), 32)
    image, (_, b_start) = tk.joined(a_image, b_image)
    idesc = tk.instruction_descriptor("f16", "f16", "f16", "f32", m, n)
    start = noise(rng, n)
    words = rng.integers(0, 2**32, 4, dtype=np.uint32)
    text = (
        tk.mma("f16")
        + f"""
    asm volatile("{{ .reg .pred p; setp.ne.b32 p, 1, 0;"
      "tcgen05.mma.cta_group::1.kind::f16.collector::a::lastuse [%0], %1, %2, %3,"
      " {{%4, %5, %6, {words[3]}}}, p, 3; }}" :: "r"(tmem), "l"(args[0] + base),
      "l"(args[1] + base), "r"((u32)args[2]), "r"((u32)args[5]), "r"((u32)args[6]),
      "r"((u32)args[7]) : "memory");
    COMMIT
    """
    )
    args = [a_desc, b_desc + (b_start >> 4), idesc, 0, 1, *map(int, words[:3])]
    found = tk.run(text, image, start, args)[0]
    once = start[0].view(np.float32) + a_values @ b_values.T
    twice = once.astype(np.float32) / 8 + a_values @ b_values.T
    lane = np.arange(128)
    skipped = (words[lane // 32] >> (lane % 32) & 1).astype(bool)
    exact = np.where(skipped[:, None], once, twice)
    assert np.allclose(found.view(np.float32), exact, rtol=2**-22, atol=1e-6)


def test_integers_saturate_if_asked(rng: Any) -> None:
    ones = np.full((128, 32), 127, np.uint32)
    image, desc = tk.k_major(tk.element_bytes(ones, "s8"), 32)
    start = np.full((1, 128, 16), 2**31 - 10, np.uint32)
    for saturates in (0, 1):
        idesc = tk.instruction_descriptor("i8", "s8", "s8", "s32", 128, 16, _3=saturates)
        found = tk.run(f"{tk.mma('i8')} COMMIT", image, start, [desc, desc, idesc, 0, 1])
        exact = 2**31 - 10 + 32 * 127 * 127
        assert (found.view(np.int32) == (2**31 - 1 if saturates else exact - 2**32)).all()


@pytest.mark.parametrize("operands", ["ss", "ts"])
@pytest.mark.parametrize("m", [32, 64, 128])
def test_weight_stationary(rng: Any, m: int, operands: str) -> None:
    """Layouts E and G: parts of D along N lie below each other, each with its own copy of A."""
    n, parts = 64, 128 // m
    a_codes, a_values = tk.random_codes(rng, (m, 16), "bf16")
    b_codes, b_values = tk.random_codes(rng, (n, 16), "bf16")
    a_image, a_desc = tk.k_major(tk.element_bytes(a_codes, "bf16"), 32)
    b_image, b_desc = tk.k_major(tk.element_bytes(b_codes, "bf16"), 32)
    image, (_, b_start) = tk.joined(a_image, b_image)
    idesc = tk.instruction_descriptor("f16", "bf16", "bf16", "f32", m, n)
    filled = noise(rng, 72)
    if operands == "ts":
        words = np.ascontiguousarray(a_codes.astype("<u2")).view(np.uint32)
        filled[0, :, 64:72] = np.tile(words, (parts, 1))
    # Columns 3, 4, 5 of each 8 of B count as zeros.
    mask = 1 << 39 | 2 << 40 | 4 << 48
    starts = [2] * 4
    mask |= sum(start << 8 * i for i, start in enumerate(starts))
    args = [64 if operands == "ts" else a_desc, b_desc + (b_start >> 4), idesc, 0, 0, mask]
    text = tk.mma("f16", operands, op=".ws", more=", %5").replace(
        '"r"((u32)args[4])', '"r"((u32)args[4]), "l"(args[5])'
    )
    found = tk.run(f"{text} COMMIT", image, filled, args)[0]
    column = np.arange(n)
    zero = (column % (n // parts) + 2) % 8 >= 5
    exact = a_values @ np.where(zero[:, None], 0, b_values).T
    row = np.arange(m)[:, None]
    place = row + m * (column // (n // parts))[None], column[None] % (n // parts)
    assert agrees(found[place[0], np.broadcast_to(place[1], place[0].shape)], exact, "f32")


@pytest.mark.parametrize("operands", ["ss", "ts"])
@pytest.mark.parametrize("m", [128, 256])
def test_pair_of_ctas(rng: Any, m: int, operands: str) -> None:
    """Layouts A and B: each CTA has half of the rows of A, and half of the columns of B."""
    n, half = 64, m // 2
    a_codes, a_values = tk.random_codes(rng, (m, 16), "bf16")
    b_codes, b_values = tk.random_codes(rng, (n, 16), "bf16")
    images, filled = [], noise(rng, 72, 2)
    for cta in range(2):
        own = a_codes[half * cta : half * (cta + 1)]
        a_image, a_desc = tk.k_major(tk.element_bytes(own, "bf16"), 128)
        own_b = b_codes[n // 2 * cta : n // 2 * (cta + 1)]
        b_image, b_desc = tk.k_major(tk.element_bytes(own_b, "bf16"), 128)
        image, (_, b_start) = tk.joined(a_image, b_image)
        images.append(image)
        words = np.ascontiguousarray(own.astype("<u2")).view(np.uint32)
        filled[cta, :, 64:72] = np.tile(words, (128 // half, 1))
    idesc = tk.instruction_descriptor("f16", "bf16", "bf16", "f32", m, n)
    args = [64 if operands == "ts" else a_desc, b_desc + (b_start >> 4), idesc, 0, 0]
    text = tk.mma("f16", operands, group=2)
    found = tk.run(f"{text} COMMIT", np.stack(images), filled, args, group=2)
    exact = a_values @ b_values.T
    for cta in range(2):
        own = exact[half * cta : half * (cta + 1)]
        if m == 256:
            assert agrees(found[cta, :, :64], own, "f32")
        else:
            assert agrees(found[cta, :64, :32], own[:, :32], "f32")
            assert agrees(found[cta, 64:, :32], own[:, 32:], "f32")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_schedules(rng: Any, seed: int) -> None:
    found, exact = plain(rng, "f16", "bf16", "bf16", seed=seed)
    assert agrees(found, exact, "f32")


@pytest.mark.parametrize("swizzle", [64, 128])
def test_steps_along_k(rng: Any, swizzle: int) -> None:
    """The start address moves inside of the rows of the swizzling pattern."""
    m, n, depth = 128, 32, swizzle // 2
    a_codes, a_values = tk.random_codes(rng, (m, depth), "bf16")
    b_codes, b_values = tk.random_codes(rng, (n, depth), "bf16")
    a_image, a_desc = tk.k_major(tk.element_bytes(a_codes, "bf16"), swizzle)
    b_image, b_desc = tk.k_major(tk.element_bytes(b_codes, "bf16"), swizzle)
    image, (_, b_start) = tk.joined(a_image, b_image)
    idesc = tk.instruction_descriptor("f16", "bf16", "bf16", "f32", m, n)
    one = tk.mma("f16")
    steps = [
        one.replace("args[0]", f"args[0] + {2 * k}").replace("args[1]", f"args[1] + {2 * k}")
        for k in range(depth // 16)
    ]
    first, rest = steps[0].replace("args[4]", "0"), [s.replace("args[4]", "1") for s in steps[1:]]
    args = [a_desc, b_desc + (b_start >> 4), idesc, 0, 0]
    found = tk.run(f"{first} {' '.join(rest)} COMMIT", image, noise(rng, n), args)[0]
    assert np.allclose(found.view(np.float32), a_values @ b_values.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("offset", [0, 64, 160])
def test_k_of_96_inside_of_rows(rng: Any, offset: int) -> None:
    """sm_103: 256 elements of a 128-byte row are K 64 + 96 + 96; bit 52 of the descriptors."""
    m, n = 128, 32
    a_codes, a_values = tk.random_codes(rng, (m, 256), "e2m1")
    b_codes, b_values = tk.random_codes(rng, (n, 256), "e2m1")
    a_image, a_desc = tk.k_major(tk.element_bytes(a_codes, "e2m1", True), 128)
    b_image, b_desc = tk.k_major(tk.element_bytes(b_codes, "e2m1", True), 128)
    image, (_, b_start) = tk.joined(a_image, b_image)
    filled = noise(rng, n + 16)
    filled[:, :, n:] = 0x7F7F7F7F
    depth = 96 if offset else 64
    wide = int(depth == 96)
    idesc = tk.scaled_descriptor("mxf4", "e2m1", "e2m1", "ue8m0", m, n, _31=wide)
    step = offset // 32
    a_desc += step | wide << 52
    b_desc += (b_start >> 4) + (step | wide << 52)
    args = [a_desc, b_desc, idesc, 0, 0, n, n + 8]
    text = tk.scaled_mma("mxf4.block_scale")
    found = tk.run(f"{text} COMMIT", image, filled, args, arch="sm_103a")[0]
    part = slice(offset, offset + depth)
    exact = a_values[:, part] @ b_values[:, part].T
    assert (found[:, :n].view(np.float32) == exact).all()


def test_a_copy_and_a_product_of_other_threads(rng: Any) -> None:
    """9.7.16.6.4.3: pipelined instructions of two warps need fences and a barrier, no wait."""
    m, n = 128, 32
    a_codes, a_values = tk.random_codes(rng, (m, 16), "bf16")
    b_codes, b_values = tk.random_codes(rng, (n, 16), "bf16")
    a_image, a_desc = tk.k_major(tk.element_bytes(a_codes, "bf16"), 0)
    b_image, b_desc = tk.k_major(tk.element_bytes(b_codes, "bf16"), 32)
    image, (_, b_start) = tk.joined(a_image, b_image)
    idesc = tk.instruction_descriptor("f16", "bf16", "bf16", "f32", m, n)
    copy = """}
    if (thread == 32) {
      asm volatile("tcgen05.cp.cta_group::1.128x256b [%0], %1;"
                   :: "r"(tmem + 40), "l"(args[5] + base) : "memory");
      fence_before();
    }
    __syncthreads();
    if (thread == 0) {
      fence_after();
    """
    args = [40, b_desc + (b_start >> 4), idesc, 0, 0, a_desc]
    text = f"{copy} {tk.mma('f16', 'ts')} COMMIT"
    found = tk.run(text, image, noise(rng, 48), args)[0]
    assert agrees(found[:, :n], a_values @ b_values.T, "f32")
    with pytest.raises(Exception, match="nothing orders them"):
        tk.run(text.replace("fence_before();", ""), image, noise(rng, 48), args)
