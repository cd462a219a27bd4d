// The three products of the step, and the search for maxima, on Hopper. bf16 and fp16 only.
//
// All pointers are device memory; functions enqueue on `stream` and return at once. Matrices are row-major,
// 16-byte aligned, their strides in elements and multiples of 8.
#ifndef LOSSD_KERNELS_CUDA_SM90_PRODUCTS_H_
#define LOSSD_KERNELS_CUDA_SM90_PRODUCTS_H_

#include <cstdint>

#include "kernels/cuda/memory/result.h"
#include "kernels/cuda/rows/row_kernels.h"
#include "kernels/rounding.h"

namespace lossd::kernels::cuda::sm90 {

// Columns of the vocabulary whose sums of E are one entry of `sums`. The same in every variant, so that a
// row's sum is added up in the same order however many rows there are.
inline constexpr int64_t kLogitColumns = 192;
struct Exponentials {
  void* values = nullptr;  // E, or E f [rows, stride], or null if only the sums are wanted
  int64_t stride = 0;
  float* sums = nullptr;  // [vocab / kLogitColumns, rounded up][sums_stride]
  int64_t sums_stride = 0;
  float* moments = nullptr;  // of E (s - offset), as `sums` is; null: not wanted. Not with a softcap
};
// For kRedo x is tile.scaled_x, where GatherRedoRows put the rows; what it makes goes where they came from.
Result MultiplyLogits(const TileRows& tile, Which which, const Exponentials& out, cudaStream_t stream);
// What that is of options with a logit scale or a softcap, or with a bias.
Result MultiplyTransformedLogits(const TileRows& tile, Which which, const Exponentials& out,
                                 cudaStream_t stream);
// What that is where moments are wanted.
Result MultiplyMomentLogits(const TileRows& tile, Which which, const Exponentials& out, cudaStream_t stream);

// Smoothing::kElementwise, unless TileRows::spread, has sums of E, of C s and of E (s - offset), without the
// label's, in the same pieces and with the same bits of the first; and then, when each row's factors are
// known, the entries of the logits' gradient [rows, stride].
struct EntrySums {
  float* exponentials = nullptr;
  float* logits = nullptr;
  float* moments = nullptr;
  int64_t stride = 0;
};
// The second and the third are in `memory`, which has room for `stride` rows of the entries themselves.
inline EntrySums EntrySumsIn(void* memory, float* exponentials, int64_t vocab, int64_t stride) {
  auto* logits = static_cast<float*>(memory);
  return {exponentials, logits, logits + CeilDivide(vocab, kLogitColumns) * stride, stride};
}
Result SumEntries(const TileRows& tile, Which which, const EntrySums& out, cudaStream_t stream);
Result FormEntries(const TileRows& tile, void* entries, int64_t stride, cudaStream_t stream);

// The product's sums as they are, before bias, scale and softcap: [rows, stride] in fp32.
Result StoreLogits(const TileRows& tile, float* sums, int64_t stride, cudaStream_t stream);

// The largest sums of each row, with the bias, before scale and softcap, in each of MaximumTiles pieces,
// maxima [pieces][stride], over the whole vocabulary or over kSampleRows rows of W that are spread evenly. At
// most MostMaximumTiles pieces.
inline constexpr int64_t kSampleRows = 128;
int32_t MaximumTiles(int64_t vocab, Which which, Maximum maximum);
int64_t MostMaximumTiles(int64_t vocab);
Result FindMaxima(const TileRows& tile, Which which, Maximum maximum, float* maxima, int64_t stride,
                  cudaStream_t stream);

// dX = v (E W) + c W_y into out [*, hidden] of out_type, at batch_rows; of Smoothing::kRankOne also
// - τ γ Σ C_v W_v.
Result MultiplyInputGradient(const TileRows& tile, const void* exponentials, int64_t stride,
                             DataType out_type, void* out, cudaStream_t stream);

// What that is of Smoothing::kRankOne.
Result MultiplySmoothedInputGradient(const TileRows& tile, const void* exponentials, int64_t stride,
                                     DataType out_type, void* out, cudaStream_t stream);

// The time that takes, as the number of rows that would take as long if they kept all of the device busy.
double InputGradientCost(int64_t rows, int64_t hidden, int32_t multiprocessors);

// dW [V, padded_hidden] = or += Eᵀ scaled_x.
enum class Store { kOverwrite, kAdd };
Result MultiplyWeightGradient(const TileRows& tile, const void* exponentials, int64_t stride, Store store,
                              float* gradient, cudaStream_t stream);

// Loads every kernel that the functions above may launch for operands of this type.
Result LoadLogitKernels(DataType type);
Result LoadTransformedLogitKernels(DataType type);
Result LoadMomentLogitKernels(DataType type);
Result LoadEntryKernels(DataType type);
Result LoadMaximumKernels(DataType type);
Result LoadInputGradientKernels(DataType type);
Result LoadSmoothedInputGradientKernels(DataType type);
Result LoadWeightGradientKernels(DataType type);

}  // namespace lossd::kernels::cuda::sm90

#endif  // LOSSD_KERNELS_CUDA_SM90_PRODUCTS_H_
