#include "kernels/cpu/tile_step.h"

#include <algorithm>
#include <array>

#include "kernels/cpu/gathered/target_rows.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/segments/input_gradient.h"

namespace lossd::kernels::cpu {
namespace {

constexpr SoftPass kSoftPasses[] = {SoftPass::kLogits, SoftPass::kExponentials, SoftPass::kDivergence};

}  // namespace

TileStep::TileStep(const LinearCrossEntropyParams& params, const Vocabulary& vocabulary,
                   std::span<Segment> segments, const RowFinish& finish, const ShardExchange& exchange,
                   const TileMemory& memory)
    : params_(params),
      vocabulary_(vocabulary),
      segments_(segments),
      finish_(finish),
      exchange_(exchange),
      memory_(memory),
      tile_(memory.segments[0]),
      kept_(WantedTop(params.returns)),
      threads_(std::min(AvailableThreads(), tile_.threads)) {}

Status TileStep::ComputeLosses(int64_t* rows_redone) {
  if (const Status status = PackHiddenStates(); status != Status::kOk) return status;
  if (params_.returns.target_rank != nullptr) {
    if (const Status status = FindLabelLogits(); status != Status::kOk) return status;
  }
  for (Segment& segment : segments_) {
    if (!segment.step().ComputeSums()) return Status::kInternal;
  }
  if (params_.teacher != nullptr) {
    if (const Status status = SummariseSoftTargets(); status != Status::kOk) return status;
  }
  if (params_.target_lists.given()) SumTargetLists();
  if (const Status status = GatherSums(); status != Status::kOk) return status;
  if (const Status status = GatherTop(); status != Status::kOk) return status;
  *rows_redone = 0;
  for (int64_t r = 0; r < tile_.rows; ++r) *rows_redone += FinishRow(r) ? 1 : 0;
  for (Segment& segment : segments_) {
    if (!segment.step().FormGradients()) return Status::kInternal;
  }
  return Status::kOk;
}

// Both heads' rows, and the teacher's logits.
Status TileStep::PackHiddenStates() {
  if (params_.teacher != nullptr) {
    segments_[0].soft().PackTeacherRows(threads_);
    for (const Segment& segment : segments_) {
      if (!segment.soft().MultiplyTeacherLogits(threads_)) return Status::kInternal;
    }
  }
  segments_[0].step().PackHiddenStates();
  return Status::kOk;
}

Status TileStep::FindLabelLogits() {
  for (Segment& segment : segments_) {
    if (!segment.step().FindLabelLogits()) return Status::kInternal;
  }
  const auto own_segment = [this](int64_t r) {
    return static_cast<size_t>(vocabulary_.SegmentOf(Label(r)) - vocabulary_.first_segment());
  };
  float* gathered = memory_.exchange.label_logits;
  if (!exchange_.is_alone()) {
    float* own = gathered + vocabulary_.shard().rank * tile_.rows;
    for (int64_t r = 0; r < tile_.rows; ++r) {
      const size_t segment = own_segment(r);
      own[r] = segment < segments_.size() ? segments_[segment].tile().row_details[r].label_logit : 0.0f;
    }
    if (const Status status = exchange_.GatherRanks(gathered, tile_.rows); status != Status::kOk) {
      return status;
    }
  }
  for (int64_t r = 0; r < tile_.rows; ++r) {
    const float logit = exchange_.is_alone() ? segments_[own_segment(r)].tile().row_details[r].label_logit
                                             : gathered[vocabulary_.RankOf(Label(r)) * tile_.rows + r];
    for (const Segment& segment : segments_) segment.tile().row_details[r].label_logit = logit;
  }
  return Status::kOk;
}

// One rank goes through a row three times while it is in the cache. Over ranks a pass goes through all rows.
Status TileStep::SummariseSoftTargets() {
  if (exchange_.is_alone()) {
    ParallelFor(threads_, tile_.rows, [this](int64_t r, int64_t) {
      PerSegment<SoftSums> sums;
      for (const SoftPass pass : kSoftPasses) SummariseSoftTargets(pass, r, &sums);
    });
    return Status::kOk;
  }
  SoftSums* all = memory_.exchange.soft_sums;
  const auto first = static_cast<size_t>(vocabulary_.first_segment());
  const auto at = [&](size_t segment, int64_t r) -> SoftSums& {
    return all[static_cast<int64_t>(segment) * tile_.rows + r];
  };
  for (const SoftPass pass : kSoftPasses) {
    ParallelFor(threads_, tile_.rows, [&](int64_t r, int64_t) {
      for (size_t i = 0; i < segments_.size(); ++i) segments_[i].soft().Summarise(pass, r, &at(first + i, r));
    });
    if (const Status status = exchange_.GatherSegments(all, tile_.rows); status != Status::kOk) return status;
    for (int64_t r = 0; r < tile_.rows; ++r) {
      PerSegment<SoftSums> sums;
      for (size_t i = 0; i < segments(); ++i) sums[i] = at(i, r);
      MergeSoft(pass, params_.distillation, std::span(sums).first(segments()),
                vocabulary_.SegmentOf(Label(r)), &memory_.soft[0].rows[r]);
    }
  }
  return Status::kOk;
}

void TileStep::SummariseSoftTargets(SoftPass pass, int64_t r, PerSegment<SoftSums>* sums) const {
  for (size_t i = 0; i < segments_.size(); ++i) segments_[i].soft().Summarise(pass, r, &(*sums)[i]);
  MergeSoft(pass, params_.distillation, std::span(*sums).first(segments()), vocabulary_.SegmentOf(Label(r)),
            &memory_.soft[0].rows[r]);
}

void TileStep::SumTargetLists() const {
  ParallelFor(threads_, tile_.rows, [this](int64_t r, int64_t) {
    // Logits of a row that overflowed may be anything.
    if (!segments_[0].tile().row_states[r].overflowed) {
      tile_.row_details[r].targets = SumTargets(params_, tile_.row_states[r].index);
    }
  });
}

Status TileStep::GatherSums() {
  if (exchange_.is_alone()) return Status::kOk;
  RowSums* all = memory_.exchange.sums;
  ParallelFor(threads_, tile_.rows, [&](int64_t r, int64_t) {
    for (size_t i = 0; i < segments_.size(); ++i) {
      all[(vocabulary_.first_segment() + static_cast<int64_t>(i)) * tile_.rows + r] =
          segments_[i].step().Sums(r);
    }
  });
  return exchange_.GatherSegments(all, tile_.rows);
}

Status TileStep::GatherTop() {
  if (exchange_.is_alone() || kept_ == 0) return Status::kOk;
  TopEntry* all = memory_.exchange.top;
  for (size_t i = 0; i < segments_.size(); ++i) {
    TopEntry* own = all + (vocabulary_.first_segment() + static_cast<int64_t>(i)) * tile_.rows * kept_;
    for (int64_t r = 0; r < tile_.rows; ++r) {
      CopyTop(segments_[i].tile(), r, segments_[i].first(), kept_, own + r * kept_);
    }
  }
  return exchange_.GatherSegments(all, tile_.rows * kept_);
}

PerSegment<RowSums> TileStep::SumsOf(int64_t r) const {
  PerSegment<RowSums> sums;
  for (size_t i = 0; i < segments(); ++i) {
    sums[i] = exchange_.is_alone() ? segments_[i].step().Sums(r)
                                   : memory_.exchange.sums[static_cast<int64_t>(i) * tile_.rows + r];
  }
  return sums;
}

void TileStep::FindTop(int64_t r, TopEntry* top) const {
  std::fill_n(top, kept_, TopEntry{});
  std::array<TopEntry, kMostTopK> own;
  for (size_t i = 0; i < segments() && kept_ > 0; ++i) {
    const TopEntry* more = own.data();
    if (exchange_.is_alone()) {
      CopyTop(segments_[i].tile(), r, segments_[i].first(), kept_, own.data());
    } else {
      more = memory_.exchange.top + (static_cast<int64_t>(i) * tile_.rows + r) * kept_;
    }
    MergeTop(more, kept_, top);
  }
}

// Whether a segment had to do the row again.
bool TileStep::FinishRow(int64_t r) {
  const PerSegment<RowSums> sums = SumsOf(r);
  const int64_t label = Label(r);
  const RowTotals totals = Merge(std::span(sums).first(segments()), vocabulary_.SegmentOf(label));
  std::array<TopEntry, kMostTopK> top;
  FindTop(r, top.data());
  const RowState& row = tile_.row_states[r];
  const RowFactors factors =
      finish_.Finish({.index = row.index,
                      .label = label,
                      .largest = row.largest,
                      .totals = totals,
                      .soft = params_.teacher == nullptr ? nullptr : &memory_.soft[0].rows[r],
                      .targets = params_.target_lists.given() ? &tile_.row_details[r].targets : nullptr,
                      .top = top.data()});
  const auto first = static_cast<size_t>(vocabulary_.first_segment());
  for (size_t i = 0; i < segments_.size(); ++i) {
    segments_[i].step().SetFactors(r, factors, InUnits(totals.sum, totals.units, sums[first + i].units));
  }
  return totals.redone;
}

Status TileStep::ComputeInputGradient() {
  return InputGradient(params_, vocabulary_, segments_, exchange_, memory_).Compute();
}

Status TileStep::ComputeWeightGradient(Store store) {
  for (Segment& segment : segments_) {
    if (!segment.step().ComputeWeightGradient(store)) return Status::kInternal;
  }
  return Status::kOk;
}

void TileStep::ComputeBiasGradient(Store store) {
  for (Segment& segment : segments_) segment.step().ComputeBiasGradient(store);
}

}  // namespace lossd::kernels::cpu
