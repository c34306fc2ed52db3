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
// "barrier.cluster"). Warps come whole, also from loops that their lanes leave one by one.
__device__ inline void cluster_sync() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Where another CTA of the cluster has what this one has at `address` of shared memory.
__device__ inline unsigned cluster_address(unsigned address, unsigned rank) {
  unsigned remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

__device__ inline void load_cluster_x4(float (&d)[4], unsigned from) {
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
               : "r"(from)
               : "memory");
}

__device__ inline void load_cluster_x4(int (&d)[4], unsigned from) {
  asm volatile("ld.shared::cluster.v4.s32 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(from)
               : "memory");
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
