#include "kernels/cuda/distillation.h"

#include <algorithm>

#include "kernels/cuda/losses/soft_targets.h"
#include "kernels/cuda/portable/products.h"
#include "kernels/cuda/portable/softmax_rows.h"
#include "kernels/cuda/rows/bias.h"
#include "kernels/cuda/rows/row_returns.h"
#include "kernels/cuda/sm90/products.h"

namespace lossd::kernels::cuda {
namespace {

int64_t LogitRowsOf(int64_t tile_rows) { return std::min(tile_rows, DistillationStep::kLogitRows); }

}  // namespace

struct DistillationStep::Buffers {
  char* gradients = nullptr;  // of the logits [rows, stride], of the weight's type
  float* logits = nullptr;    // [logit rows, stride]
  float* teacher_logits = nullptr;
  int64_t stride = 0;  // of rows of all of them, in elements
  char* x = nullptr;
  char* scaled_x = nullptr;
  char* teacher_x = nullptr;
  float* product = nullptr;  // of the portable path
  char* library = nullptr;   // cuBLAS's own
  RowArrays rows;
  RowArrays teacher_rows;
};

int64_t DistillationStep::Divide(const HeadShape& shape, Path path, const TeacherShape& teacher,
                                 int64_t tile_rows, void* base, Buffers* buffers) {
  Divider divider(base);
  Buffers& b = *buffers;
  const int64_t padded = PaddedHidden(shape.hidden);
  const int64_t element = SizeOf(shape.weight_type);
  constexpr auto kFloat = static_cast<int64_t>(sizeof(float));
  b.stride = RoundUp(shape.vocab, 8);
  divider.Take(&b.gradients, tile_rows * b.stride * element);
  divider.Take(&b.logits, LogitRowsOf(tile_rows) * b.stride * kFloat);
  divider.Take(&b.teacher_logits, LogitRowsOf(tile_rows) * b.stride * kFloat);
  divider.Take(&b.x, tile_rows * padded * element);
  divider.Take(&b.scaled_x, tile_rows * padded * element);
  divider.Take(&b.teacher_x, tile_rows * PaddedHidden(teacher.hidden) * SizeOf(teacher.weight_type));
  if (path == Path::kPortable) divider.Take(&b.product, tile_rows * padded * kFloat);
  if (path == Path::kPortable || teacher.path == Path::kPortable) {
    divider.Take(&b.library, CublasLt::kWorkspaceBytes);
  }
  b.rows.Take(tile_rows, &divider);
  b.teacher_rows.Take(tile_rows, &divider);
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
  return fits > kLogitRows ? fits / kLogitRows * kLogitRows : fits;
}

DistillationStep::DistillationStep(const HeadShape& shape, Path path, const TeacherShape& teacher,
                                   int64_t most_rows, void* workspace, CublasLt* library)
    : shape_(shape),
      path_(path),
      teacher_(teacher),
      most_rows_(most_rows),
      logit_rows_(LogitRowsOf(most_rows)),
      workspace_(workspace),
      library_(library) {}

DistillationStep::Tiles DistillationStep::Describe(const Batch& batch, int64_t first, int64_t rows,
                                                   const Buffers& b) const {
  Tiles tiles;
  TileRows& own = tiles.own;
  own = LinearCrossEntropy::DescribeRows(shape_, path_, batch, first, rows);
  // Every entry has its own gradient in any case.
  if (own.smoothing == Smoothing::kRankOne) own.smoothing = Smoothing::kElementwise;
  own.x = b.x;
  own.scaled_x = b.scaled_x;
  b.rows.GiveTo(&own);

  const Teacher& head = batch.teacher->head;
  TileRows& teacher = tiles.teacher;
  teacher.rows = own.rows;
  teacher.vocab = own.vocab;
  teacher.hidden = head.hidden;
  teacher.padded_hidden = PaddedHidden(head.hidden);
  teacher.type = head.weight_type;
  teacher.weight = head.weight;
  teacher.bias = head.bias;
  teacher.weight_largest = batch.teacher->weight_largest;
  teacher.bias_largest = batch.teacher->bias_largest;
  teacher.batch_rows = own.batch_rows;
  teacher.labels = own.labels;
  teacher.options = {.logit_scale = head.logit_scale, .softcap = head.softcap};
  teacher.dependent_launches = own.dependent_launches;
  teacher.x = b.teacher_x;
  b.teacher_rows.GiveTo(&teacher);
  return tiles;
}

Result DistillationStep::Run(const Batch& batch, int64_t tile_rows, cudaStream_t stream,
                             cudaEvent_t input_gradients, const Observer& observer) const {
  Buffers buffers;
  Divide(shape_, path_, teacher_, most_rows_, workspace_, &buffers);
  for (int64_t first = 0; first < batch.rows; first += tile_rows) {
    const Tiles tiles = Describe(batch, first, std::min(tile_rows, batch.rows - first), buffers);
    LOSSD_CUDA_PASS_ON(Prepare(batch, tiles, stream));
    observer.Report("prepare");
    LOSSD_CUDA_PASS_ON(Losses(batch, tiles, buffers, stream, observer));
    if (batch.dx != nullptr) {
      LOSSD_CUDA_PASS_ON(InputGradient(batch, tiles.own, buffers, stream));
      observer.Report("dx");
    }
    const bool last = first + tile_rows >= batch.rows;
    if (last && input_gradients != nullptr) LOSSD_CUDA_TRY(cudaEventRecord(input_gradients, stream));
    if (batch.weight_gradient == WeightGradient::kNone) continue;
    const bool overwrite = first == 0 && batch.weight_gradient == WeightGradient::kOverwrite;
    LOSSD_CUDA_PASS_ON(AddWeightGradient(batch, tiles.own, buffers, overwrite, stream));
    observer.Report("dw");
  }
  if (batch.rows == 0 && input_gradients != nullptr) LOSSD_CUDA_TRY(cudaEventRecord(input_gradients, stream));
  return {};
}

Result DistillationStep::Prepare(const Batch& batch, const Tiles& tiles, cudaStream_t stream) const {
  const Teacher& head = batch.teacher->head;
  LOSSD_CUDA_PASS_ON(PrepareRows(tiles.own, batch.hidden_type, batch.hidden_states, stream));
  LOSSD_CUDA_PASS_ON(PrepareRows(tiles.teacher, head.hidden_type, head.hidden_states, stream));
  // Products of the library take whole pieces: what is beyond the rows is zero, its results are not read.
  for (const TileRows* tile : {&tiles.own, &tiles.teacher}) {
    if ((tile == &tiles.own ? path_ : teacher_.path) != Path::kPortable) continue;
    const int64_t row_bytes = tile->padded_hidden * SizeOf(tile->type);
    const int64_t more = RoundUp(tile->rows, logit_rows_) - tile->rows;
    LOSSD_CUDA_TRY(cudaMemsetAsync(static_cast<char*>(tile->x) + tile->rows * row_bytes, 0,
                                   static_cast<size_t>(more * row_bytes), stream));
  }
  return {};
}

// `rows` rows of the tile from `first` on, at most logit_rows_.
Result DistillationStep::MultiplyLogits(const TileRows& tile, Path path, CublasLt* library, int64_t first,
                                        int64_t rows, float* logits, const Buffers& b,
                                        cudaStream_t stream) const {
  TileRows part = tile;
  part.rows = static_cast<int32_t>(rows);
  part.x = static_cast<char*>(tile.x) + first * tile.padded_hidden * SizeOf(tile.type);
  if (path == Path::kHopper) return sm90::StoreLogits(part, logits, b.stride, stream);
  const PortableProducts products({tile.vocab, tile.hidden, tile.type}, library, b.library);
  return products.Logits(logit_rows_, part.x, tile.weight, logits, b.stride, stream);
}

Result DistillationStep::Losses(const Batch& batch, const Tiles& tiles, const Buffers& b, cudaStream_t stream,
                                const Observer& observer) const {
  const TileRows& tile = tiles.own;
  SoftTargets targets;
  targets.options = batch.distillation;
  targets.teacher_options = tiles.teacher.options;
  targets.teacher_bias = tiles.teacher.bias;
  targets.teacher_target_logits = tiles.teacher.target_logits;
  targets.teacher_overflowed = tiles.teacher.overflowed;
  targets.sums = b.logits;
  targets.teacher_sums = b.teacher_logits;
  targets.gradients = tile.gradient_wanted ? b.gradients : nullptr;
  targets.stride = b.stride;
  for (int32_t first = 0; first < tile.rows; first += static_cast<int32_t>(logit_rows_)) {
    const auto rows = static_cast<int32_t>(std::min<int64_t>(logit_rows_, tile.rows - first));
    LOSSD_CUDA_PASS_ON(MultiplyLogits(tiles.teacher, teacher_.path, batch.teacher->library, first, rows,
                                      b.teacher_logits, b, stream));
    observer.Report("teacher");
    LOSSD_CUDA_PASS_ON(MultiplyLogits(tile, path_, library_, first, rows, b.logits, b, stream));
    observer.Report("logits");
    if (tile.returns.whole_row()) {
      LOSSD_CUDA_PASS_ON(TellWholeRows(tile, first, rows, b.logits, b.stride, stream));
      observer.Report("returns");
    }
    LOSSD_CUDA_PASS_ON(FinishSoftRows(tile, first, rows, targets, stream));
    observer.Report("rows");
  }
  if (tile.returns.whole_row()) LOSSD_CUDA_PASS_ON(ForgetOverflowedRows(tile, stream));
  return {};
}

Result DistillationStep::InputGradient(const Batch& batch, const TileRows& tile, const Buffers& b,
                                       cudaStream_t stream) const {
  if (path_ == Path::kHopper) {
    return sm90::MultiplyInputGradient(tile, b.gradients, b.stride, batch.dx_type, batch.dx, stream);
  }
  const PortableProducts products(shape_, library_, b.library);
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
  const PortableProducts products(shape_, library_, b.library);
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
  if (teacher_.path == Path::kPortable) {
    const PortableProducts products(ShapeOfTeacher(), teacher.library, b.library);
    LOSSD_CUDA_PASS_ON(
        products.Logits(logit_rows_, b.teacher_x, teacher.head.weight, b.teacher_logits, b.stride, stream));
  }
  if (path_ != Path::kPortable) return {};
  const PortableProducts products(shape_, library_, b.library);
  LOSSD_CUDA_PASS_ON(products.Logits(logit_rows_, b.x, weight, b.logits, b.stride, stream));
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
