// Hopper's instructions that CUDA C++ has no names for: transaction barriers, the tensor copy engine, matrix
// products of a warpgroup. Terms and semantics are those of the PTX ISA's chapters mbarrier,
// cp.async.bulk.tensor and wgmma.
#ifndef LOSSD_KERNELS_CUDA_SM90_PTX_CUH_
#define LOSSD_KERNELS_CUDA_SM90_PTX_CUH_

#include <cuda.h>

#include <cstdint>

namespace lossd::kernels::cuda::sm90 {

__device__ inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Barriers in shared memory; addresses are SharedAddress()es

__device__ inline void InitBarrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the other threads of the cluster and to the copy engine.
__device__ inline void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void ArriveExpecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ inline void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// At the barrier of the same place in another block of the cluster, or in this one. What it orders is the
// copy engine's and the tensor cores' work, which waits for barriers anyway; a release at cluster scope would
// also fence all of global memory, at every step of k.
__device__ inline void ArriveAt(uint32_t barrier, uint32_t block_in_cluster) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(barrier),
      "r"(block_in_cluster)
      : "memory");
}

__device__ inline bool TryWait(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

__device__ inline void Wait(uint32_t barrier, uint32_t parity) {
  while (!TryWait(barrier, parity)) {
  }
}

__device__ inline void ClusterSync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

__device__ inline uint32_t BlockInCluster() {
  uint32_t rank = 0;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The tensor copy engine

__device__ inline void PrefetchMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Box at element (x, y) of a two-dimensional map into shared memory; completes `barrier`'s transaction. With
// kShared into both blocks of a cluster, each at the same place, each block's own barrier.
template <bool kShared>
__device__ inline void CopyBox(uint32_t to, const CUtensorMap* map, int32_t x, int32_t y, uint32_t barrier) {
  if constexpr (kShared) {
    constexpr uint16_t kBoth = 3;
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(kBoth)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y)
        : "memory");
  }
}

// Matrix products of a warpgroup

__device__ inline void WarpgroupFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void WarpgroupCommit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ inline void WarpgroupWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

template <int kRegisters>
__device__ inline void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void GiveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Makes the compiler believe that `value` was read and written here.
__device__ inline void FenceOperand(float& value) { asm volatile("" : "+f"(value)::"memory"); }

// A matrix descriptor for the 128-byte swizzle. For a K-major operand, 8 rows of 128 bytes are one unit
// (`stride` 1024) and `leading` is unused; for an MN-major one, `leading` is the distance of 64-element
// columns and `stride` that of 8 rows of k.
__device__ inline uint64_t MatrixDescriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | (static_cast<uint64_t>(leading >> 4) << 16) |
         (static_cast<uint64_t>(stride >> 4) << 32) | (uint64_t{1} << 62);
}

}  // namespace lossd::kernels::cuda::sm90

#endif  // LOSSD_KERNELS_CUDA_SM90_PTX_CUH_
