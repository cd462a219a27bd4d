// The step of linear_cross_entropy.h for rows whose lists of kept tokens are short: gathered products in
// place of those with the whole of the weights, the same on every path.
#ifndef LOSSD_KERNELS_CUDA_KEPT_STEP_H_
#define LOSSD_KERNELS_CUDA_KEPT_STEP_H_

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cuda/linear_cross_entropy.h"
#include "kernels/cuda/memory/heads.h"
#include "kernels/cuda/memory/result.h"
#include "kernels/cuda/step_observer.h"

namespace lossd::kernels::cuda {

class KeptStep {
 public:
  using Batch = LinearCrossEntropy::Batch;

  // The bytes that a tile of so many rows with so many entries needs.
  static int64_t WorkspaceBytes(const HeadShape& shape, int64_t rows, int64_t entries);
  // The fewest tiles that fit so many bytes, of rows with lists at these offsets [rows + 1]: dW is passed
  // over once for each. None if a row does not fit.
  static std::vector<KeptTile> Cut(const HeadShape& shape, std::span<const int32_t> offsets,
                                   int64_t workspace_bytes);

  KeptStep(const HeadShape& shape, Path path, void* workspace, int64_t workspace_bytes);

  // As LinearCrossEntropy::Run, of one tile of a batch whose weight_gradient is kNone or kAccumulate.
  Result Run(const Batch& batch, const KeptTile& tile, cudaStream_t stream, cudaEvent_t input_gradients,
             const StepObserver& observer) const;

 private:
  struct Buffers;  // the workspace, divided
  static int64_t Divide(const HeadShape& shape, int64_t rows, int64_t entries, void* base, Buffers* buffers);

  const HeadShape shape_;
  const Path path_;
  void* const workspace_;
  const int64_t workspace_bytes_;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KEPT_STEP_H_
