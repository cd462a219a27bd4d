// What phase one of batches leaves for phase two (kernels/cuda/rows/held_rows.h).
#include <algorithm>
#include <cstring>
#include <utility>

#include "server/engine/device/cuda/cuda_backend.h"

namespace lossd::engine {

using kernels::cuda::BatchRows;
using kernels::cuda::HoldSpace;
using kernels::cuda::LinearCrossEntropy;
using kernels::cuda::Path;
using kernels::cuda::Result;

using HoldUse = LinearCrossEntropy::HoldUse;

namespace {

HoldTerms TermsOf(const BatchKey& kind) {
  return {.logit_scale = kind.options.logit_scale, .softcap = kind.options.softcap, .bias = kind.bias};
}

// The tokens of a batch's chunks that are not ignored, and which row of the batch each of them is.
class HeldTokens {
 public:
  HeldTokens(const CudaSlot& slot, const BatchRows& rows) : slot_(slot), rows_(rows) {}

  // Calls visit(tokens, their rows or HoldTable::kNoRow) for each chunk.
  template <typename Visit>
  void ForEachChunk(const Visit& visit) const {
    size_t row = 0;
    int64_t place = 0;  // in the batch
    for (const ChunkRows& chunk : slot_.chunks) {
      HoldTable::Tokens tokens{.name = chunk.hold, .labels = {}};
      std::vector<int32_t> found;
      for (int64_t i = 0; i < chunk.tokens; ++i, ++place) {
        if (chunk.labels[i] == chunk.ignore_index) continue;
        const bool has_row = row < rows_.batch_rows.size() && rows_.batch_rows[row] == place;
        tokens.labels.push_back(static_cast<int32_t>(chunk.labels[i]));
        found.push_back(has_row ? static_cast<int32_t>(row++) : HoldTable::kNoRow);
      }
      visit(std::move(tokens), std::move(found));
    }
  }

 private:
  const CudaSlot& slot_;
  const BatchRows& rows_;
};

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

void CudaBackend::UseHold(const BatchKey& kind, CudaSlot& slot, const BatchRows& rows,
                          const std::vector<int32_t>& held, LinearCrossEntropy::Batch* batch) {
  if (!kind.holds || !holds_.has_value() || rows.rows == 0) return;
  if (kind.mode == ComputeMode::kLossOnly) {
    KeepRows(kind, slot, rows, batch);
    if (batch->hold_use == HoldUse::kKeep) slot.report.rows_held = rows.rows;
    return;
  }
  TakeRows(slot, rows, held, batch);
  int64_t& rows_done =
      batch->hold_use == HoldUse::kTake ? slot.report.rows_taken : slot.report.rows_recomputed;
  rows_done = rows.rows;
}

void CudaBackend::KeepRows(const BatchKey& kind, const CudaSlot& slot, const BatchRows& rows,
                           LinearCrossEntropy::Batch* batch) {
  if (!step_.Holds(*batch)) return;
  const std::optional<int64_t> first = holds_->Allocate(rows.rows);
  if (!first.has_value()) return;
  batch->hold_use = HoldUse::kKeep;
  batch->hold = &hold_space_;
  batch->first_held = *first;
  const Moments moments = LinearCrossEntropy::KeepsMoments(*batch) ? Moments::kYes : Moments::kNo;
  HeldTokens(slot, rows).ForEachChunk([&](HoldTable::Tokens tokens, std::vector<int32_t> found) {
    for (int32_t& row : found) {
      if (row != HoldTable::kNoRow) row += static_cast<int32_t>(*first);
    }
    holds_->Add(std::move(tokens), std::move(found), TermsOf(kind), moments);
  });
}

std::vector<int32_t> CudaBackend::FindRows(const BatchKey& kind, const CudaSlot& slot,
                                           const BatchRows& rows) const {
  if (!holds_.has_value()) return {};
  std::vector<int32_t> held;
  held.reserve(static_cast<size_t>(rows.rows));
  const Moments needed = kind.entropy_gradients ? Moments::kYes : Moments::kNo;
  bool all = true;
  HeldTokens(slot, rows)
      .ForEachChunk([&](const HoldTable::Tokens& tokens, const std::vector<int32_t>& found) {
        std::vector<bool> wanted(found.size());
        for (size_t i = 0; i < found.size(); ++i) wanted[i] = found[i] != HoldTable::kNoRow;
        all = all && holds_->Find(tokens, wanted, TermsOf(kind), needed, &held);
      });
  return all ? held : std::vector<int32_t>();
}

void CudaBackend::TakeRows(const CudaSlot& slot, const BatchRows& rows, const std::vector<int32_t>& held,
                           LinearCrossEntropy::Batch* batch) {
  HeldTokens(slot, rows)
      .ForEachChunk([&](const HoldTable::Tokens& tokens, const std::vector<int32_t>& /*found*/) {
        holds_->Release(tokens);
      });
  // A frozen head's batch without dX, say, has nothing to take them for.
  const bool gradients = batch->dx != nullptr || batch->weight_gradient != kernels::WeightGradient::kNone;
  if (held.empty() || !gradients || !step_.Holds(*batch)) return;
  batch->hold_use = HoldUse::kTake;
  batch->hold = &hold_space_;
  batch->first_held = held.front();
  const auto follows = [](int32_t one, int32_t next) { return next != one + 1; };
  if (std::adjacent_find(held.begin(), held.end(), follows) == held.end()) return;
  batch->held_rows =
      reinterpret_cast<const int32_t*>(static_cast<const char*>(slot.in.data()) + slot.layout.held_rows);
}

}  // namespace lossd::engine
