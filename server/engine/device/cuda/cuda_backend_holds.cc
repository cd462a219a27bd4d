// What phase one of batches leaves for phase two (kernels/cuda/rows/held_rows.h).
#include <algorithm>
#include <cstring>

#include "server/engine/device/cuda/cuda_backend.h"

namespace lossd::engine {

using kernels::cuda::BatchRows;
using kernels::cuda::HoldSpace;
using kernels::cuda::LinearCrossEntropy;
using kernels::cuda::Path;
using kernels::cuda::Result;

namespace {

HoldTable::Tokens TokensOf(const ChunkRows& chunk) {
  return {.name = chunk.hold,
          .labels = {chunk.labels, static_cast<size_t>(chunk.tokens)},
          .ignore_index = chunk.ignore_index};
}

HoldTerms TermsOf(const BatchKey& kind) {
  return {.logit_scale = kind.options.logit_scale, .softcap = kind.options.softcap, .bias = kind.bias};
}

}  // namespace

bool CudaBackend::CanHold(const HeadConfig& config, const HeadShard& shard, Path path) {
  return config.held_bytes > 0 && path == Path::kHopper && shard.whole() && !config.fixed_segments;
}

Result CudaBackend::AllocateHold() {
  if (!CanHold(config_, shard_, path_)) return {};
  LOSSD_CUDA_PASS_ON(kernels::cuda::DeviceBuffer::Create(config_.held_bytes, &hold_memory_));
  hold_space_ = HoldSpace::In(shape_, config_.held_bytes, hold_memory_.data());
  holds_.emplace(hold_space_.rows);
  return {};
}

// Of a batch without gradients: all of its rows are kept, for the chunks that want it.
void CudaBackend::KeepRows(const BatchKey& kind, const CudaSlot& slot, LinearCrossEntropy::Batch* batch) {
  if (!holds_.has_value() || batch->rows == 0 || !step_.Holds(*batch)) return;
  const std::optional<int64_t> first = holds_->Allocate(batch->rows);
  if (!first.has_value()) return;
  batch->hold = &hold_space_;
  batch->first_held = *first;
  int64_t row = *first;
  for (const ChunkRows& chunk : slot.chunks) {
    const HoldTable::Tokens tokens = TokensOf(chunk);
    const auto rows = static_cast<int64_t>(
        chunk.tokens - std::count(tokens.labels.begin(), tokens.labels.end(), chunk.ignore_index));
    holds_->Add(tokens, row, TermsOf(kind), LinearCrossEntropy::KeepsMoments(*batch));
    row += rows;
  }
  // Rows of no weight of which nothing else is wanted are no rows of the batch, and places are then others.
  if (row != *first + batch->rows) {
    for (const ChunkRows& chunk : slot.chunks) holds_->Release(TokensOf(chunk));
    batch->hold = nullptr;
  }
}

std::vector<int32_t> CudaBackend::FindRows(const BatchKey& kind, const CudaSlot& slot,
                                           const BatchRows& rows) const {
  if (!holds_.has_value()) return {};
  std::vector<int32_t> held;
  held.reserve(static_cast<size_t>(rows.rows));
  size_t next = 0;
  int64_t first = 0;
  for (const ChunkRows& chunk : slot.chunks) {
    std::vector<bool> wanted(static_cast<size_t>(chunk.tokens));
    for (; next < rows.batch_rows.size() && rows.batch_rows[next] < first + chunk.tokens; ++next) {
      wanted[static_cast<size_t>(rows.batch_rows[next] - first)] = true;
    }
    if (!holds_->Find(TokensOf(chunk), wanted, TermsOf(kind), kind.entropy_gradients, &held)) return {};
    first += chunk.tokens;
  }
  return held;
}

void CudaBackend::TakeRows(const CudaSlot& slot, const std::vector<int32_t>& held,
                           LinearCrossEntropy::Batch* batch) {
  for (const ChunkRows& chunk : slot.chunks) {
    if (holds_.has_value()) holds_->Release(TokensOf(chunk));
  }
  if (held.empty() || !step_.Holds(*batch)) return;
  batch->hold = &hold_space_;
  batch->first_held = held.front();
  const auto follows = [](int32_t one, int32_t next) { return next != one + 1; };
  if (std::adjacent_find(held.begin(), held.end(), follows) == held.end()) return;
  batch->held_rows =
      reinterpret_cast<const int32_t*>(static_cast<const char*>(slot.in.data()) + slot.layout.held_rows);
}

}  // namespace lossd::engine
