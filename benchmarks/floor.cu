// The floor of a benchmark: reads `bytes` once and does nothing else.
// Bulk asynchronous copies into a ring in shared memory, one issuing thread; needs sm_90.
struct FloorParams {
  const unsigned char* data;  // 16-byte aligned
  long long bytes;            // a multiple of 16
  long long dependent;        // whether the launch overlaps with its predecessor
};

extern "C" __global__ void __launch_bounds__(128)
    floor_read(const __grid_constant__ FloorParams params) {
  const unsigned char* data = params.data;
  const long long bytes = params.bytes;
  const bool dependent = params.dependent != 0;
  constexpr int kPiece = 16384, kSlots = 6;
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ __align__(8) unsigned long long full[kSlots];
  if (dependent) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  }
  if (threadIdx.x == 0) {
    unsigned long long shared64;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(shared64) : "l"(ring));
    const unsigned base = unsigned(shared64);
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(shared64) : "l"(full));
    const unsigned barriers = unsigned(shared64);
    for (int i = 0; i < kSlots; ++i) {
      asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barriers + 8 * i) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    const long long pieces = (bytes + kPiece - 1) / kPiece;
    long long issued = 0;
    const long long mine =
        blockIdx.x < pieces ? (pieces - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
    for (long long done = 0; done < mine; ++done) {
      while (issued < mine && issued < done + kSlots) {
        const long long at = (blockIdx.x + issued * gridDim.x) * kPiece;
        const unsigned size = unsigned(bytes - at < kPiece ? bytes - at : kPiece);
        const unsigned slot = unsigned(issued % kSlots);
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barriers + 8 * slot),
                     "r"(size)
                     : "memory");
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
            "[%3];" ::"r"(base + slot * kPiece),
            "l"(data + at), "r"(size), "r"(barriers + 8 * slot)
            : "memory");
        ++issued;
      }
      const unsigned slot = unsigned(done % kSlots), parity = unsigned(done / kSlots) & 1;
      unsigned ready = 0;
      while (!ready) {
        asm volatile(
            "{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, "
            "p;}"
            : "=r"(ready)
            : "r"(barriers + 8 * slot), "r"(parity)
            : "memory");
      }
    }
  }
  if (dependent) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
  }
}
