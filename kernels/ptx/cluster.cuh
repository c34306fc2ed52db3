// CTAs of a cluster: where one is, and where all meet.
// Needs: clusters.
#pragma once

namespace humming::ptx {

// Which of its cluster's CTAs this one is.
__device__ inline unsigned cluster_ctarank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of a cluster meet; what was written before is seen after (PTX ISA 9.7.13.4
// "barrier.cluster").
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Arrives at the barrier object that another CTA of the cluster has where this one has `barrier`. Of
// the thread's accesses only those to its CTA's shared memory are ordered before it: a release for all
// of the cluster would wait for memory, some 500 clocks.
__device__ inline void mbarrier_arrive_at(unsigned barrier, unsigned rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

}  // namespace humming::ptx
