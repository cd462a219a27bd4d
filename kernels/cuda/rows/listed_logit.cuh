// The logit of a list's token, from its product on.
#ifndef LOSSD_KERNELS_CUDA_ROWS_LISTED_LOGIT_CUH_
#define LOSSD_KERNELS_CUDA_ROWS_LISTED_LOGIT_CUH_

#include "kernels/cuda/rows/logit_transform.cuh"
#include "kernels/cuda/rows/row_kernels.h"

namespace lossd::kernels::cuda {

// s and its slope, of what GatherLogits has made.
__device__ inline CappedLogit<double> Capped(const TileRows& tile, float z) {
  if (tile.options.softcap == 0) return {z, 1.0};
  return CapLogit(static_cast<double>(z), static_cast<double>(tile.options.softcap));
}

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_ROWS_LISTED_LOGIT_CUH_
