#include "kernels/cuda/kept_step.h"

#include "kernels/cuda/rows/kept_rows.h"
#include "kernels/cuda/rows/row_kernels.h"
#include "kernels/cuda/rows/tile_buffers.h"

namespace lossd::kernels::cuda {

struct KeptStep::Buffers {
  char* x = nullptr;
  float* values = nullptr;
  int32_t* entry_rows = nullptr;
  RowArrays rows;
};

int64_t KeptStep::Divide(const HeadShape& shape, int64_t rows, int64_t entries, void* base,
                         Buffers* buffers) {
  Divider divider(base);
  divider.Take(&buffers->x, rows * PaddedHidden(shape.hidden) * SizeOf(shape.weight_type));
  divider.Take(&buffers->values, entries * static_cast<int64_t>(sizeof(float)));
  divider.Take(&buffers->entry_rows, entries * static_cast<int64_t>(sizeof(int32_t)));
  buffers->rows.Take(rows, &divider);
  return divider.used();
}

int64_t KeptStep::WorkspaceBytes(const HeadShape& shape, int64_t rows, int64_t entries) {
  Buffers buffers;
  return Divide(shape, rows, entries, nullptr, &buffers);
}

std::vector<KeptTile> KeptStep::Cut(const HeadShape& shape, std::span<const int32_t> offsets,
                                    int64_t workspace_bytes) {
  std::vector<KeptTile> tiles;
  for (size_t row = 0; row + 1 < offsets.size(); ++row) {
    const int64_t entries = offsets[row + 1] - offsets[row];
    const bool fits = !tiles.empty() && WorkspaceBytes(shape, tiles.back().rows + 1,
                                                       tiles.back().entries + entries) <= workspace_bytes;
    if (!fits) {
      if (WorkspaceBytes(shape, 1, entries) > workspace_bytes) return {};
      tiles.push_back({.first_row = static_cast<int64_t>(row), .first_entry = offsets[row]});
    }
    ++tiles.back().rows;
    tiles.back().entries += entries;
  }
  return tiles;
}

KeptStep::KeptStep(const HeadShape& shape, Path path, void* workspace, int64_t workspace_bytes)
    : shape_(shape), path_(path), workspace_(workspace), workspace_bytes_(workspace_bytes) {}

Result KeptStep::Run(const Batch& batch, const KeptTile& tile, cudaStream_t stream,
                     cudaEvent_t input_gradients, const StepObserver& observer) const {
  Buffers buffers;
  if (Divide(shape_, tile.rows, tile.entries, workspace_, &buffers) > workspace_bytes_) {
    return {cudaErrorInvalidValue, "a tile of lists within the workspace"};
  }
  TileRows rows = LinearCrossEntropy::DescribeRows(shape_, path_, batch, tile.first_row, tile.rows);
  rows.smoothing = Smoothing::kNone;
  rows.x = buffers.x;
  buffers.rows.GiveTo(&rows);
  const KeptLists lists{.offsets = batch.kept.offsets + tile.first_row,
                        .tokens = batch.kept.tokens,
                        .by_token = batch.kept.by_token,
                        .token_starts = batch.kept.token_starts + tile.first_token,
                        .different_tokens = tile.tokens,
                        .first_entry = tile.first_entry,
                        .values = buffers.values,
                        .rows = buffers.entry_rows};
  LOSSD_CUDA_PASS_ON(PrepareRows(rows, batch.hidden_type, batch.hidden_states, stream));
  observer.Report("prepare");
  LOSSD_CUDA_PASS_ON(GatherLogits(rows, lists, stream));
  observer.Report("logits");
  LOSSD_CUDA_PASS_ON(FinishLists(rows, lists, stream));
  observer.Report("rows");
  if (batch.dx != nullptr) {
    LOSSD_CUDA_PASS_ON(SumLists(rows, lists, batch.dx_type, batch.dx, stream));
    observer.Report("dx");
  }
  if (input_gradients != nullptr) LOSSD_CUDA_TRY(cudaEventRecord(input_gradients, stream));
  if (batch.weight_gradient == WeightGradient::kNone) return {};
  LOSSD_CUDA_PASS_ON(AddLists(rows, lists, batch.dw, batch.bias == nullptr ? nullptr : batch.db, stream));
  observer.Report("dw");
  return {};
}

}  // namespace lossd::kernels::cuda
