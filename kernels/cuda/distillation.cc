#include "kernels/cuda/distillation.h"

#include <algorithm>

#include "kernels/cuda/portable/products.h"
#include "kernels/cuda/portable/softmax_rows.h"
#include "kernels/cuda/rows/bias.h"
#include "kernels/cuda/sm90/products.h"
#include "kernels/cuda/soft_losses.h"

namespace lossd::kernels::cuda {

struct DistillationStep::Buffers {
  char* gradients = nullptr;  // of the logits [rows, stride], of the weight's type
  int64_t stride = 0;         // in elements
  char* x = nullptr;
  char* scaled_x = nullptr;
  float* product = nullptr;  // of the portable path
  RowArrays rows;
  SoftLosses::Buffers losses;
};

int64_t DistillationStep::Divide(const HeadShape& shape, Path path, const TeacherShape& teacher,
                                 int64_t tile_rows, void* base, Buffers* buffers) {
  Divider divider(base);
  Buffers& b = *buffers;
  const int64_t padded = PaddedHidden(shape.hidden);
  const int64_t element = SizeOf(shape.weight_type);
  b.stride = RoundUp(shape.vocab, 8);
  divider.Take(&b.gradients, tile_rows * b.stride * element);
  divider.Take(&b.x, tile_rows * padded * element);
  divider.Take(&b.scaled_x, tile_rows * padded * element);
  if (path == Path::kPortable) {
    divider.Take(&b.product, tile_rows * padded * static_cast<int64_t>(sizeof(float)));
  }
  b.rows.Take(tile_rows, &divider);
  b.losses.Take({&shape.vocab, 1}, path, teacher, nullptr, tile_rows, &divider);
  return divider.used();
}

int64_t DistillationStep::WorkspaceBytes(const HeadShape& shape, Path path, const TeacherShape& teacher,
                                         int64_t tile_rows) {
  Buffers buffers;
  return Divide(shape, path, teacher, tile_rows, nullptr, &buffers);
}

int64_t DistillationStep::RowsWithin(const HeadShape& shape, Path path, const TeacherShape& teacher,
                                     int64_t workspace_bytes) {
  int64_t fits = 0;
  int64_t too_many =
      (path == Path::kHopper ? LinearCrossEntropy::kMostTileRows : LinearCrossEntropy::kMostPortableRows) + 1;
  while (too_many - fits > 1) {
    const int64_t middle = fits + (too_many - fits) / 2;
    (WorkspaceBytes(shape, path, teacher, middle) <= workspace_bytes ? fits : too_many) = middle;
  }
  return SoftLosses::InPieces(fits);
}

DistillationStep::DistillationStep(const HeadShape& shape, Path path, const TeacherShape& teacher,
                                   int64_t most_rows, void* workspace, CublasLt* library)
    : shape_(shape),
      path_(path),
      teacher_(teacher),
      most_rows_(most_rows),
      workspace_(workspace),
      library_(library) {}

TileRows DistillationStep::Describe(const Batch& batch, int64_t first, int64_t rows, const Buffers& b) const {
  TileRows tile = LinearCrossEntropy::DescribeRows(shape_, path_, batch, first, rows);
  tile.x = b.x;
  tile.scaled_x = b.scaled_x;
  b.rows.GiveTo(&tile);
  return tile;
}

Result DistillationStep::Run(const Batch& batch, int64_t tile_rows, cudaStream_t stream,
                             cudaEvent_t input_gradients, const Observer& observer) const {
  Buffers buffers;
  Divide(shape_, path_, teacher_, most_rows_, workspace_, &buffers);
  const SoftLosses losses(path_, most_rows_, buffers.losses, library_, {});
  for (int64_t first = 0; first < batch.rows; first += tile_rows) {
    const TileRows tile = Describe(batch, first, std::min(tile_rows, batch.rows - first), buffers);
    LOSSD_CUDA_PASS_ON(losses.Prepare(batch, tile, stream));
    observer.Report("prepare");
    const SegmentPart part{.tile = tile, .stride = buffers.stride, .entries = buffers.gradients};
    LOSSD_CUDA_PASS_ON(losses.Run(batch, tile, {part}, stream, observer));
    if (batch.dx != nullptr) {
      LOSSD_CUDA_PASS_ON(InputGradient(batch, tile, buffers, stream));
      observer.Report("dx");
    }
    const bool last = first + tile_rows >= batch.rows;
    if (last && input_gradients != nullptr) LOSSD_CUDA_TRY(cudaEventRecord(input_gradients, stream));
    if (batch.weight_gradient == WeightGradient::kNone) continue;
    const bool overwrite = first == 0 && batch.weight_gradient == WeightGradient::kOverwrite;
    LOSSD_CUDA_PASS_ON(AddWeightGradient(batch, tile, buffers, overwrite, stream));
    observer.Report("dw");
  }
  if (batch.rows == 0 && input_gradients != nullptr) LOSSD_CUDA_TRY(cudaEventRecord(input_gradients, stream));
  return {};
}

Result DistillationStep::InputGradient(const Batch& batch, const TileRows& tile, const Buffers& b,
                                       cudaStream_t stream) const {
  if (path_ == Path::kHopper) {
    return sm90::MultiplyInputGradient(tile, b.gradients, b.stride, batch.dx_type, batch.dx, stream);
  }
  const PortableProducts products(shape_, library_, b.losses.library);
  LOSSD_CUDA_PASS_ON(
      products.InputGradient(most_rows_, b.gradients, b.stride, tile.weight, b.product, stream));
  return FinishInputGradient(tile, b.product, batch.dx_type, batch.dx, stream);
}

Result DistillationStep::AddWeightGradient(const Batch& batch, const TileRows& tile, const Buffers& b,
                                           bool overwrite, cudaStream_t stream) const {
  LOSSD_CUDA_PASS_ON(ScaleRows(tile, stream));
  if (path_ == Path::kHopper) {
    const sm90::Store store = overwrite ? sm90::Store::kOverwrite : sm90::Store::kAdd;
    LOSSD_CUDA_PASS_ON(sm90::MultiplyWeightGradient(tile, b.gradients, b.stride, store, batch.dw, stream));
  } else {
    LOSSD_CUDA_PASS_ON(AddPortableWeightGradient(tile, b, overwrite, batch.dw, stream));
  }
  LOSSD_CUDA_PASS_ON(AddTargets(tile, batch.dw, stream));
  return StoreBiasGradient(tile, b.gradients, b.stride, overwrite, batch.db, stream);
}

// Always adds, so that there is one product to be loaded: it can be while dW has its values.
Result DistillationStep::AddPortableWeightGradient(const TileRows& tile, const Buffers& b, bool overwrite,
                                                   float* dw, cudaStream_t stream) const {
  const int64_t rows = PortableProducts::ReductionRows(tile.rows, most_rows_);
  const auto more = static_cast<size_t>(rows - tile.rows);
  const auto entry_bytes = static_cast<size_t>(b.stride * SizeOf(tile.type));
  const auto x_bytes = static_cast<size_t>(tile.padded_hidden * SizeOf(tile.type));
  const auto valid = static_cast<size_t>(tile.rows);
  LOSSD_CUDA_TRY(cudaMemsetAsync(b.gradients + valid * entry_bytes, 0, more * entry_bytes, stream));
  LOSSD_CUDA_TRY(cudaMemsetAsync(b.scaled_x + valid * x_bytes, 0, more * x_bytes, stream));
  if (overwrite) {
    const auto dw_bytes = static_cast<size_t>(tile.vocab * tile.padded_hidden) * sizeof(float);
    LOSSD_CUDA_TRY(cudaMemsetAsync(dw, 0, dw_bytes, stream));
  }
  const PortableProducts products(shape_, library_, b.losses.library);
  return products.WeightGradient(rows, b.gradients, b.stride, b.scaled_x, WeightGradient::kAccumulate,
                                 b.rows.factors, dw, stream);
}

Result DistillationStep::LoadProducts(const void* weight, float* dw, const TeacherHead& teacher,
                                      cudaStream_t stream) const {
  if (path_ != Path::kPortable && teacher_.path != Path::kPortable) return {};
  Buffers b;
  const int64_t bytes = Divide(shape_, path_, teacher_, most_rows_, workspace_, &b);
  // Zeros: what is added to dW is nothing.
  LOSSD_CUDA_TRY(cudaMemsetAsync(workspace_, 0, static_cast<size_t>(bytes), stream));
  const SoftLosses losses(path_, most_rows_, b.losses, library_, {});
  LOSSD_CUDA_PASS_ON(losses.LoadProducts(shape_, b.x, weight, teacher, stream));
  if (path_ != Path::kPortable) return {};
  const PortableProducts products(shape_, library_, b.losses.library);
  LOSSD_CUDA_PASS_ON(products.InputGradient(most_rows_, b.gradients, b.stride, weight, b.product, stream));
  if (dw == nullptr) return {};
  static constexpr float kFactors[] = {1.0f, 1.0f, 0.0f, 1.0f};  // TileRows'
  LOSSD_CUDA_TRY(cudaMemcpyAsync(b.rows.factors, kFactors, sizeof(kFactors), cudaMemcpyHostToDevice, stream));
  for (int64_t rows = 0; rows < most_rows_;) {
    rows = PortableProducts::ReductionRows(rows + 1, most_rows_);
    LOSSD_CUDA_PASS_ON(products.WeightGradient(rows, b.gradients, b.stride, b.scaled_x,
                                               WeightGradient::kAccumulate, b.rows.factors, dw, stream));
  }
  return {};
}

}  // namespace lossd::kernels::cuda
