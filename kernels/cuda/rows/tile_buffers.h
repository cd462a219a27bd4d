// How a workspace is divided, and the arrays of a tile that have one element a row.
#ifndef LOSSD_KERNELS_CUDA_ROWS_TILE_BUFFERS_H_
#define LOSSD_KERNELS_CUDA_ROWS_TILE_BUFFERS_H_

#include <cstdint>

#include "kernels/cuda/rows/row_kernels.h"
#include "kernels/rounding.h"

namespace lossd::kernels::cuda {

// Gives out pieces of a workspace, or only adds up their sizes if there is none.
class Divider {
 public:
  static constexpr int64_t kAlignment = 256;

  explicit Divider(void* base) : base_(static_cast<char*>(base)) {}

  template <class T>
  void Take(T** pointer, int64_t bytes) {
    *pointer = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += RoundUp(bytes, kAlignment);
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

struct RowArrays {
  float* target_logits = nullptr;
  float* target_slopes = nullptr;
  double* smoothing_logits = nullptr;
  float* largest = nullptr;
  int32_t* overflowed = nullptr;
  float* offsets = nullptr;
  int32_t* exponents = nullptr;
  float* scales = nullptr;
  float* target_gradients = nullptr;
  float* smoothing_factors = nullptr;
  float* gradient_factors = nullptr;
  float* entropy_factors = nullptr;
  float* means = nullptr;
  TargetSums* target_sums = nullptr;  // of batches that have them; GiveTo leaves them
  TargetFactors* target_factors = nullptr;
  int32_t* redo_rows = nullptr;
  int32_t* redo_count = nullptr;
  float* factors = nullptr;

  void Take(int64_t rows, Divider* divider) {
    const int64_t bytes = rows * static_cast<int64_t>(sizeof(float));
    for (float** array : {&target_logits, &target_slopes, &largest, &offsets, &scales, &target_gradients,
                          &smoothing_factors, &gradient_factors, &entropy_factors, &means}) {
      divider->Take(array, bytes);
    }
    divider->Take(&smoothing_logits, 2 * bytes);
    divider->Take(&target_sums, rows * static_cast<int64_t>(sizeof(TargetSums)));
    divider->Take(&target_factors, rows * static_cast<int64_t>(sizeof(TargetFactors)));
    for (int32_t** array : {&overflowed, &exponents, &redo_rows}) divider->Take(array, bytes);
    divider->Take(&redo_count, sizeof(int32_t));
    divider->Take(&factors, 4 * sizeof(float));
  }

  void GiveTo(TileRows* tile) const {
    tile->target_logits = target_logits;
    tile->target_slopes = target_slopes;
    tile->smoothing_logits = smoothing_logits;
    tile->largest = largest;
    tile->overflowed = overflowed;
    tile->offsets = offsets;
    tile->exponents = exponents;
    tile->scales = scales;
    tile->target_gradients = target_gradients;
    tile->smoothing_factors = smoothing_factors;
    tile->gradient_factors = gradient_factors;
    tile->entropy_factors = entropy_factors;
    tile->means = means;
    tile->redo_rows = redo_rows;
    tile->redo_count = redo_count;
    tile->factors = factors;
  }
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_ROWS_TILE_BUFFERS_H_
