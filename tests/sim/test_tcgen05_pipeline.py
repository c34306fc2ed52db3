"""A warp-specialized kernel for tcgen05, as products of any size are written."""

import importlib
from typing import Any

import numpy as np
import pytest
import tensor_kernels as tk

errors = importlib.import_module("humming.devices.simulator.errors")

STAGES, STEPS, N = 2, 5, 32
SOURCE = r"""
typedef unsigned u32; typedef unsigned long long u64;
__device__ u32 address_of(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ void wait(u32 bar, u32 parity) {
  u32 done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
                 " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(bar), "r"(parity) : "memory");
}
__device__ void init(u32 bar) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(bar) : "memory");
}
__device__ void copy(u32 to, const void* from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1], %2, [%3];" :: "r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
__device__ void commit(u32 bar) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
               :: "r"(bar) : "memory");
}
extern "C" __global__ void __launch_bounds__(192) test(
    const unsigned char* a, const unsigned char* b, float* out, u64 desc_a, u64 desc_b, u64 idesc) {
  const u32 A = 128 * 32, B = 32 * 32, STAGES = 2, STEPS = 5;
  __shared__ __align__(1024) unsigned char stages[STAGES * (A + B)];
  __shared__ __align__(8) u64 full[STAGES], empty[STAGES], done;
  __shared__ u32 address;
  u32 thread = threadIdx.x, warp = thread / 32, smem = address_of(stages);
  if (warp == 0)
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 32;"
                 :: "r"(address_of(&address)) : "memory");
  if (thread == 0) {
    for (u32 s = 0; s < STAGES; ++s) { init(address_of(full + s)); init(address_of(empty + s)); }
    init(address_of(&done));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  __syncthreads();
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  u32 tmem = address;
  if (thread == 128) {  // the producer
    for (u32 k = 0; k < STEPS; ++k) {
      u32 s = k % STAGES, bar = address_of(full + s), at = smem + s * (A + B);
      if (k >= STAGES) wait(address_of(empty + s), (k / STAGES + 1) & 1);  // EMPTY
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                   :: "r"(bar), "r"(A + B) : "memory");
      copy(at, a + k * A, A, bar);
      copy(at + A, b + k * B, B, bar);
    }
  } else if (thread == 160) {  // the tensor core
    for (u32 k = 0; k < STEPS; ++k) {
      u32 s = k % STAGES;
      wait(address_of(full + s), k / STAGES & 1);  // FULL
      asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
      u64 base = ((smem + s * (A + B)) & 0x3FFFF) >> 4;
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %4, 0;"
        "tcgen05.mma.cta_group::1.kind::f8f6f4 [%0], %1, %2, %3, p; }"
        :: "r"(tmem), "l"(desc_a + base), "l"(desc_b + base + A / 16), "r"((u32)idesc), "r"(k)
        : "memory");
      commit(address_of(empty + s));
    }
    commit(address_of(&done));
  } else if (warp < 4) {  // the epilogue
    wait(address_of(&done), 0);
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    for (u32 n = 0; n < 32; n += 4) {
      u32 v[4];
      asm volatile("tcgen05.ld.sync.aligned.32x32b.x4.b32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(tmem + (warp << 21) + n));
      asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
      for (u32 i = 0; i < 4; ++i) out[thread * 32 + n + i] = __uint_as_float(v[i]);
    }
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  }
  __syncthreads();
  if (warp == 0)
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 32;" :: "r"(tmem));
}
"""


def run(rng: Any, source: str = SOURCE, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """(found, exact) of a product of 128 x 32 x 160 in five steps."""
    parts_a, parts_b, exact = [], [], np.zeros((128, N))
    for _ in range(STEPS):
        a_codes, a_values = tk.random_codes(rng, (128, 32), "e4m3")
        b_codes, b_values = tk.random_codes(rng, (N, 32), "e4m3")
        image, a_desc = tk.k_major(tk.element_bytes(a_codes, "e4m3"), 32)
        parts_a.append(image)
        image, b_desc = tk.k_major(tk.element_bytes(b_codes, "e4m3"), 32)
        parts_b.append(image)
        exact += a_values @ b_values.T
    room = [np.zeros(sum(map(len, parts)) + 16, np.uint8) for parts in (parts_a, parts_b)]
    a, b = (r[-r.ctypes.data % 16 :][: len(r) - 16] for r in room)  # copies are aligned to 16
    a[:], b[:] = np.concatenate(parts_a), np.concatenate(parts_b)
    out = np.zeros((128, N), np.float32)
    idesc = tk.instruction_descriptor("f8f6f4", "e4m3", "e4m3", "f32", 128, N)
    tk.launch(
        tk.ptx_of(source, "sm_100a"),
        {"a": a, "b": b, "out": out},
        ["a", "b", "out", a_desc, b_desc, idesc],
        block=192,
        undefined=("out",),
        **options,
    )
    return out, exact


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_pipeline(rng: Any, seed: int | None) -> None:
    found, exact = run(rng, seed=seed)
    assert np.allclose(found, exact, rtol=1e-5, atol=1e-3 * np.abs(exact).max())


def line(marker: str) -> str:
    (found,) = [text for text in SOURCE.splitlines() if marker in text]
    return found


@pytest.mark.parametrize(
    ("marker", "instead", "kind"),
    [
        # The copy before has come, but the product that reads it may not have run.
        (
            "// EMPTY",
            "if (k >= STAGES) wait(bar, (k / STAGES + 1) & 1);",
            "AsyncHazardError",
        ),
        ("// FULL", "", "AsyncHazardError"),
    ],
    ids=["empty", "full"],
)
def test_a_stage_is_not_reused_before_it_is_free(
    rng: Any, marker: str, instead: str, kind: str
) -> None:
    """Without the wait for the commit, or for the copy, both of which the other warp needs."""
    with pytest.raises(getattr(errors, kind)):
        run(rng, SOURCE.replace(line(marker), instead))
