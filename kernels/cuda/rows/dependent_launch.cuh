// Kernels that are launched while the one before them in their stream still runs: their blocks take the
// places that become free, and wait. What would be a gap between two kernels is then no longer one. CUDA
// calls it programmatic dependent launch; it exists from compute capability 9.0 on.
#ifndef LOSSD_KERNELS_CUDA_ROWS_DEPENDENT_LAUNCH_CUH_
#define LOSSD_KERNELS_CUDA_ROWS_DEPENDENT_LAUNCH_CUH_

#include <cuda_runtime.h>

namespace lossd::kernels::cuda {

// Lets the next kernel be launched, and waits until the one before is complete and what it wrote is visible.
// Every thread of a kernel that may be launched this way calls it before it touches global memory; and since
// all do, complete means that all before that one are complete too. Nothing happens in a plain launch.
__device__ inline void AwaitPreviousKernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

inline cudaLaunchAttribute DependentLaunch() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_ROWS_DEPENDENT_LAUNCH_CUH_
