#ifndef LOSSD_KERNELS_CUDA_SEGMENT_PART_H_
#define LOSSD_KERNELS_CUDA_SEGMENT_PART_H_

#include <cstdint>

#include "kernels/cuda/rows/row_kernels.h"

namespace lossd::kernels::cuda {

// What one segment of the vocabulary has of a tile, for one rank or device.
struct SegmentPart {
  TileRows tile;            // with its entries and arrays; without entries the vocabulary is empty
  int32_t number = 0;       // among the segments of all ranks
  int64_t first = 0;        // of its entries, from the rank's first
  int64_t stride = 0;       // of rows of what follows: the vocabulary rounded up to a multiple of 8
  void* entries = nullptr;  // [rows, stride] of the head's type: what the products for dX and dW take
  float* logits = nullptr;  // of some of the rows: a product's sums before bias, scale and softcap
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_SEGMENT_PART_H_
