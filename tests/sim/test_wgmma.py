"""Products of warpgroups: shapes, types, layouts, groups and fences (PTX ISA 9.7.15)."""

from typing import Any

import numpy as np
import pytest
import warpgroup_matrices as wm
from hopper_kernels import aligned, placed, run, tensor_map

K = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32, "b1": 256}
_D = {"f32": np.float32, "f16": np.uint32, "s32": np.int32}


def product_body(
    opcode: str, count: int, kind: str, a_words: int, b_words: int, tail: str, in_registers: bool
) -> str:
    """PTX that copies A and B to shared memory, multiplies them, and stores the accumulators.

    Parameters: results, accumulators before, A (memory or registers), B, descriptors, scale-d.
    """
    letter = "f32" if kind == "f32" else "b32"
    d = ", ".join(f"d{i}" for i in range(count))
    load_a = f"""
      mov.u32 i, t;
      LA: setp.ge.u32 p, i, {a_words}; @p bra EA;
      mad.wide.u32 at, i, 4, pa; ld.global.u32 v, [at];
      mad.lo.u32 w, i, 4, sa; st.shared.u32 [w], v; add.u32 i, i, 128; bra LA; EA:
    """
    first = "descriptor_a"
    if in_registers:
        load_a = "mad.wide.u32 at, t, 16, pa; ld.global.v4.u32 {a0, a1, a2, a3}, [at];"
        first = "{a0, a1, a2, a3}"
    loads = "\n".join(f"ld.global.{letter} d{i}, [pc+{4 * i}];" for i in range(count))
    stores = "\n".join(f"st.global.{letter} [pd+{4 * i}], d{i};" for i in range(count))
    return f"""
      .reg .b32 t, i, v, w, sa, sb, a<4>, scale; .reg .{letter} d<{count}>;
      .reg .b64 at, pa, pb, pc, pd, descriptor_a, descriptor_b, start; .reg .pred p, adds;
      .shared .align 1024 .b8 ma[{max(4 * a_words, 4)}];
      .shared .align 1024 .b8 mb[{4 * b_words}];
      mov.u32 t, %tid.x; mov.u32 sa, ma; mov.u32 sb, mb;
      ld.param.u64 pd, [p0]; ld.param.u64 pc, [p1]; ld.param.u64 pa, [p2]; ld.param.u64 pb, [p3];
      ld.param.u64 descriptor_a, [p4]; ld.param.u64 descriptor_b, [p5]; ld.param.u32 scale, [p6];
      mad.wide.u32 pd, t, {4 * count}, pd; mad.wide.u32 pc, t, {4 * count}, pc;
      {load_a}
      mov.u32 i, t;
      LB: setp.ge.u32 p, i, {b_words}; @p bra EB;
      mad.wide.u32 at, i, 4, pb; ld.global.u32 v, [at];
      mad.lo.u32 w, i, 4, sb; st.shared.u32 [w], v; add.u32 i, i, 128; bra LB; EB:
      shr.u32 w, sa, 4; cvt.u64.u32 start, w; add.u64 descriptor_a, descriptor_a, start;
      shr.u32 w, sb, 4; cvt.u64.u32 start, w; add.u64 descriptor_b, descriptor_b, start;
      {loads}
      setp.ne.u32 adds, scale, 0;
      fence.proxy.async.shared::cta; bar.sync 0;
      wgmma.fence.sync.aligned;
      {opcode} {{{d}}}, {first}, descriptor_b, adds{tail};
      wgmma.commit_group.sync.aligned;
      wgmma.wait_group.sync.aligned 0;
      {stores}
    """


def multiply(
    run_ptx: Any,
    rng: np.random.Generator,
    n: int,
    kind: str,
    a_kind: str,
    b_kind: str,
    *,
    a: wm.Stored | np.ndarray,
    b: wm.Stored,
    tail: str = "",
    scale: int = 1,
    a_step: int = 0,
    b_step: int = 0,
    modifiers: str = "",
    before: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(accumulators before, accumulators behind) of one product, both [64, N]."""
    half = kind == "f16"
    count = n // (4 if half else 2)
    if before is None:
        before = np.zeros((128, count), _D[kind])
        if kind == "f32":
            before[:] = rng.standard_normal(before.shape)
        elif half:
            values = rng.standard_normal((128, 2 * count)).astype(np.float16)
            before[:] = values.view(np.uint32)
        else:
            before[:] = rng.integers(-(2**31), 2**31, before.shape)
    in_registers = isinstance(a, np.ndarray)
    image = a if isinstance(a, np.ndarray) else a.image
    words = 0 if in_registers else len(image) // 4
    types = f"{kind}.{a_kind}.{b_kind}" + (".and.popc" if a_kind == "b1" else "")
    opcode = f"wgmma.mma_async.sync.aligned.m64n{n}k{K[a_kind]}.{types}{modifiers}"
    body = product_body(opcode, count, kind, words, len(b.image) // 4, tail, in_registers)
    out = aligned(before.shape, before.dtype)
    first = 0 if isinstance(a, np.ndarray) else a.descriptor + (a_step >> 4)
    run_ptx(
        body,
        {"out": out, "before": placed(before), "a": placed(image), "b": placed(b.image)},
        scalars=(first, b.descriptor + (b_step >> 4), scale),
        block=128,
        target="sm_90a",
    )
    return wm.accumulator(before, half), wm.accumulator(out, half)


def check(kind: str, found: np.ndarray, before: np.ndarray, exact: np.ndarray) -> None:
    """Compares with sums that are exact up to float64's precision."""
    total = exact + before.astype(np.float64)
    if kind == "s32":
        wrapped = total.astype(np.int64).astype(np.int32)
        np.testing.assert_array_equal(found, wrapped)
    else:
        eps = 2.0**-23 if kind == "f32" else 2.0**-10
        slack = eps * np.abs(total) + 2.0**-24
        assert (np.abs(found.astype(np.float64) - total) <= slack).all()


PAIRS = [
    *(("f32", t, t) for t in ("f16", "bf16", "tf32")),
    ("f16", "f16", "f16"),
    *((d, a, b) for d in ("f32", "f16") for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")),
    *(("s32", a, b) for a in ("s8", "u8") for b in ("s8", "u8")),
    ("s32", "b1", "b1"),
]


@pytest.mark.parametrize("in_registers", [False, True], ids=["SS", "RS"])
@pytest.mark.parametrize(("kind", "a_kind", "b_kind"), PAIRS)
def test_types(
    run_ptx: Any,
    rng: np.random.Generator,
    kind: str,
    a_kind: str,
    b_kind: str,
    in_registers: bool,
) -> None:
    """9.7.15.5.2, all types, both places of A, a random N."""
    integers = kind == "s32"
    n = int(rng.choice([8, 16, 24, 32, 48, 96, 256] if integers else np.arange(8, 257, 8)))
    a, b = (
        wm.random_codes(rng, a_kind, (64, K[a_kind])),
        wm.random_codes(rng, b_kind, (n, K[b_kind])),
    )
    exact = wm.values_of(a, a_kind) @ wm.values_of(b, b_kind).T
    if kind == "f16" and a_kind[0] == "e":  # keep in the range of the result
        b = np.where(rng.random(b.shape) < 0.5, b & 0x80 | 0x20, 0).astype(np.uint8)
        a = a & 0x80 | 0x34
        exact = wm.values_of(a, a_kind) @ wm.values_of(b, b_kind).T
    rows = wm.packed(a, a_kind)
    left = wm.fragment_a(rows) if in_registers else wm.k_major(rows, "none")
    tail = "" if integers else ", 1, 1"
    if a_kind in ("f16", "bf16"):
        tail += ", 0" if in_registers else ", 0, 0"
    right = wm.k_major(wm.packed(b, b_kind), "none")
    before, found = multiply(run_ptx, rng, n, kind, a_kind, b_kind, a=left, b=right, tail=tail)
    check(kind, found, before, exact)


@pytest.mark.parametrize("n", range(8, 257, 8))
def test_every_number_of_columns(run_ptx: Any, rng: np.random.Generator, n: int) -> None:
    a, b = (wm.random_codes(rng, "bf16", (size, 16)) for size in (64, n))
    exact = wm.values_of(a, "bf16") @ wm.values_of(b, "bf16").T
    left, right = (wm.k_major(wm.packed(m, "bf16"), "none") for m in (a, b))
    before, found = multiply(
        run_ptx, rng, n, "f32", "bf16", "bf16", a=left, b=right, tail=", 1, 1, 0, 0"
    )
    check("f32", found, before, exact)


@pytest.mark.parametrize("pad", [0, 32], ids=["dense", "padded"])
@pytest.mark.parametrize("layout", wm.MODES)
@pytest.mark.parametrize("kind", ["f16", "e4m3", "tf32"])
def test_k_major_layouts(
    run_ptx: Any, rng: np.random.Generator, kind: str, layout: str, pad: int
) -> None:
    """9.7.15.5.1.2, with a start address inside of the swizzled row."""
    n, width = 24, max(32, wm.SPANS[layout])
    per = K[kind]
    whole = [wm.random_codes(rng, kind, (size, per * width // 32)) for size in (64, n)]
    left, right = (wm.k_major(wm.packed(m, kind), layout, pad) for m in whole)
    step = int(rng.integers(0, width // 32))
    a, b = (m[:, per * step : per * (step + 1)] for m in whole)
    exact = (
        wm.values_of(np.ascontiguousarray(a), kind) @ wm.values_of(np.ascontiguousarray(b), kind).T
    )
    tail = ", 1, 1" + (", 0, 0" if kind == "f16" else "")
    before, found = multiply(
        run_ptx,
        rng,
        n,
        "f32",
        kind,
        kind,
        a=left,
        b=right,
        tail=tail,
        a_step=32 * step,
        b_step=32 * step,
    )
    check("f32", found, before, exact)


@pytest.mark.parametrize("pad", [0, 32], ids=["dense", "padded"])
@pytest.mark.parametrize("layout", wm.MODES)
@pytest.mark.parametrize("which", ["a", "b", "both", "b_of_registers"])
def test_mn_major_layouts(
    run_ptx: Any, rng: np.random.Generator, which: str, layout: str, pad: int
) -> None:
    """Transposed operands, which have 16 bits."""
    n = int(rng.choice([8, 40, 64, 128, 192]))
    if layout != "none":
        n = max(n, wm.SPANS[layout] // 2)
    a, b = (wm.random_codes(rng, "bf16", (size, 16)) for size in (64, n))
    exact = wm.values_of(a, "bf16") @ wm.values_of(b, "bf16").T

    def stored(matrix: np.ndarray, turned: bool) -> wm.Stored:
        if turned:
            return wm.mn_major(wm.packed(np.ascontiguousarray(matrix.T), "bf16"), layout, pad)
        return wm.k_major(wm.packed(matrix, "bf16"), "none")

    turn_a, turn_b = which in ("a", "both"), which != "a"
    left: Any = stored(a, turn_a)
    tail = f", 1, 1, {int(turn_a)}, {int(turn_b)}"
    if which == "b_of_registers":
        left, tail = wm.fragment_a(wm.packed(a, "bf16")), ", 1, 1, 1"
    before, found = multiply(
        run_ptx, rng, n, "f32", "bf16", "bf16", a=left, b=stored(b, turn_b), tail=tail
    )
    check("f32", found, before, exact)


@pytest.mark.parametrize(("sign_a", "sign_b"), [(1, -1), (-1, 1), (-1, -1)])
@pytest.mark.parametrize("scale", [0, 1], ids=["overwrites", "adds"])
def test_factors(
    run_ptx: Any, rng: np.random.Generator, sign_a: int, sign_b: int, scale: int
) -> None:
    """scale-d, imm-scale-a and imm-scale-b."""
    a, b = (wm.random_codes(rng, "f16", (size, 16)) for size in (64, 16))
    exact = sign_a * sign_b * (wm.values_of(a, "f16") @ wm.values_of(b, "f16").T)
    left, right = (wm.k_major(wm.packed(m, "f16"), "none") for m in (a, b))
    tail = f", {sign_a}, {sign_b}, 0, 0"
    before, found = multiply(
        run_ptx, rng, 16, "f32", "f16", "f16", a=left, b=right, tail=tail, scale=scale
    )
    check("f32", found, scale * before, exact)


@pytest.mark.parametrize("saturates", [False, True], ids=["wraps", "saturates"])
def test_integer_overflow(run_ptx: Any, rng: np.random.Generator, saturates: bool) -> None:
    a, b = (wm.random_codes(rng, "s8", (size, 32)) for size in (64, 8))
    exact = wm.values_of(a, "s8") @ wm.values_of(b, "s8").T
    left, right = (wm.k_major(wm.packed(m, "s8"), "none") for m in (a, b))
    start = np.where(rng.random((128, 4)) < 0.5, 2**31 - 5, -(2**31) + 5).astype(np.int32)
    modifiers = ".satfinite" if saturates else ""
    before, found = multiply(
        run_ptx, rng, 8, "s32", "s8", "s8", a=left, b=right, before=start, modifiers=modifiers
    )
    total = exact + before
    if saturates:
        total = np.clip(total, -(2.0**31), 2.0**31 - 1)
    np.testing.assert_array_equal(found, total.astype(np.int64).astype(np.int32))


# -- kernels --------------------------------------------------------------------------------------

MAINLOOP = r"""
u64 describe(const void* p, u32 leading, u32 stride, u64 mode) {
  return mode << 62 | (u64)(stride >> 4) << 32 | (u64)(leading >> 4) << 16 | (shared(p) >> 4);
}
void begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
void end_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> void wait_groups() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
}
void multiply(float (&d)[16], u64 a, u64 b, int adds) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %18, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9,"
    " %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1, 0, 0; }"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
      "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
      "+f"(d[14]), "+f"(d[15]) : "l"(a), "l"(b), "r"(adds));
}
void multiply_rs(float (&d)[16], const u32 (&a)[4], u64 b, int adds) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %21, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9,"
    " %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, p, 1, 1, 0; }"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
      "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
      "+f"(d[14]), "+f"(d[15])
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}
void put(float* out, u32 ld, const float (&d)[16]) {
  u32 w = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int i = 0; i < 16; ++i)
    out[(16 * w + g + 8 * ((i >> 1) & 1)) * ld + 8 * (i >> 2) + 2 * t + (i & 1)] = d[i];
}
"""

PIPELINE = (
    MAINLOOP
    + r"""
constexpr int STAGES = 3;
extern "C" __global__ void __launch_bounds__(384) test(
    const __grid_constant__ Map ma, const __grid_constant__ Map mb, float* out, u32 steps) {
  __shared__ alignas(1024) u8 a[STAGES][2][64 * 128];
  __shared__ alignas(1024) u8 b[STAGES][32 * 128];
  __shared__ u64 full[STAGES], empty[STAGES];
  u32 group = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) { init(&full[s], 1); init(&empty[s], 2); }
    fence_init();
  }
  __syncthreads();
  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 256)
      for (u32 k = 0; k < steps; ++k) {
        u32 s = k % STAGES;
        wait(&empty[s], (k / STAGES + 1) & 1);
        expect(&full[s], 2 * 64 * 128 + 32 * 128);
        for (int half = 0; half < 2; ++half)
          load_2d(a[s][half], &ma, 64 * k, 128 * blockIdx.x + 64 * half, &full[s]);
        load_2d(b[s], &mb, 64 * k, 32 * blockIdx.y, &full[s]);
      }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    float d[16];
    for (int i = 0; i < 16; ++i) d[i] = 0;
    for (u32 k = 0; k < steps; ++k) {
      u32 s = k % STAGES;
      wait(&full[s], k / STAGES & 1);
      begin();
      for (int i = 0; i < 4; ++i)
        multiply(d, describe(a[s][group] + 32 * i, 16, 1024, 1),
                 describe(b[s] + 32 * i, 16, 1024, 1), 1);
      end_group();
      wait_groups<1>();
      if (k > 0 && threadIdx.x % 128 == 0) arrive(&empty[(k - 1) % STAGES]);
    }
    wait_groups<0>();
    u32 n = 32 * gridDim.y;
    put(out + (128 * blockIdx.x + 64 * group) * n + 32 * blockIdx.y, n, d);
  }
}
"""
)


@pytest.mark.parametrize("seed", [None, 5, 6])
def test_warp_specialized_pipeline(rng: np.random.Generator, seed: int | None) -> None:
    """TMA, three stages, two warpgroups that leave one group in flight."""
    steps, m, n = 5, 256, 64
    a, b = (wm.random_codes(rng, "bf16", (size, 64 * steps)) for size in (m, n))
    out = aligned((m, n), np.float32)
    maps = [
        tensor_map(placed(matrix), "bfloat16", (64, rows), swizzle=3)
        for matrix, rows in ((a, 64), (b, 32))
    ]
    run(PIPELINE, *maps, out, steps, grid=(2, 2, 1), block=384, undefined=(2,), seed=seed)
    exact = wm.values_of(a, "bf16") @ wm.values_of(b, "bf16").T
    bound = np.abs(wm.values_of(a, "bf16")) @ np.abs(wm.values_of(b, "bf16")).T * 2.0**-20
    assert (np.abs(out - exact) <= bound).all()


RS_LOOP = (
    MAINLOOP
    + r"""
extern "C" __global__ void test(float* out, const u32* in, const u32* weights, u32 steps) {
  __shared__ alignas(1024) u32 b[2][32 * 8];
  float d[16];
  u32 a[2][4];
  for (u32 k = 0; k < steps; ++k) {
    u32 s = k & 1;
    for (u32 i = threadIdx.x; i < 256; i += 128) b[s][i] = in[256 * k + i];
    fence_async();
    __syncthreads();
    if (s)
      for (int i = 0; i < 4; ++i) a[1][i] = weights[(128 * k + threadIdx.x) * 4 + i] ^ 0x80008000;
    else
      for (int i = 0; i < 4; ++i) a[0][i] = weights[(128 * k + threadIdx.x) * 4 + i] ^ 0x80008000;
    begin();
    if (s) multiply_rs(d, a[1], describe(b[1], 512, 128, 0), 1);
    else multiply_rs(d, a[0], describe(b[0], 512, 128, 0), k > 0);
    end_group();
    wait_groups<0>();
    __syncthreads();
  }
  for (int i = 0; i < 16; ++i) d[i] *= 0.5f;
  put(out, 32, d);
}
"""
)


def test_weights_from_registers(rng: np.random.Generator) -> None:
    """A is made in registers for each step, as dequantized weights are."""
    steps = 5
    a = [wm.random_codes(rng, "bf16", (64, 16)) for _ in range(steps)]
    b = [wm.random_codes(rng, "bf16", (32, 16)) for _ in range(steps)]
    fragments = np.stack([wm.fragment_a(wm.packed(m, "bf16")) for m in a])
    images = np.stack([wm.k_major(wm.packed(m, "bf16"), "none").image for m in b])
    out = aligned((64, 32), np.float32)
    run(RS_LOOP, out, placed(images), placed(fragments), steps, undefined=(0,))
    exact = sum(
        wm.values_of(x, "bf16") @ wm.values_of(y, "bf16").T for x, y in zip(a, b, strict=True)
    )
    np.testing.assert_allclose(out, -0.5 * exact, atol=1e-4)
