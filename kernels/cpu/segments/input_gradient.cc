#include "kernels/cpu/segments/input_gradient.h"

#include <algorithm>
#include <bit>

#include "kernels/cpu/constants.h"
#include "kernels/cpu/parallel.h"

namespace lossd::kernels::cpu {

InputGradient::InputGradient(const LinearCrossEntropyParams& params, const Vocabulary& vocabulary,
                             std::span<Segment> segments, const ShardExchange& exchange,
                             const TileMemory& memory)
    : params_(params),
      vocabulary_(vocabulary),
      segments_(segments),
      exchange_(exchange),
      memory_(memory),
      tile_(memory.segments[0]) {}

Status InputGradient::Compute() {
  for (Segment& segment : segments_) {
    if (!segment.step().MultiplyInputGradient()) return Status::kInternal;
  }
  if (exchange_.is_alone()) {
    ForEachRow({0, tile_.rows}, [this](int64_t r, float* scratch) {
      SumOwn(r, scratch);
      Write(r, OwnParts(r)[0]);
    });
    return Status::kOk;
  }
  ForEachRow({0, tile_.rows}, [this](int64_t r, float* scratch) { SumOwn(r, scratch); });
  for (int64_t begin = 0; begin < tile_.rows; begin += memory_.exchange.dx_rows) {
    const Range rows{begin, std::min(begin + memory_.exchange.dx_rows, tile_.rows)};
    if (const Status status = Exchange(rows); status != Status::kOk) return status;
    if (!vocabulary_.answers()) continue;
    ForEachRow(rows, [&](int64_t r, float*) {
      const Parts parts = AllParts(r, rows);
      ForEachSegmentSum(vocabulary_.segments(), [&](const SegmentSum& sum) {
        if (!IsWithinOneRank(sum)) Add(sum, parts);
      });
      Write(r, parts[0]);
    });
  }
  return Status::kOk;
}

template <class Function>
void InputGradient::ForEachRow(Range rows, const Function& function) const {
  const int64_t threads = std::min(AvailableThreads(), tile_.threads);
  ParallelFor(threads, CeilDivide(rows.end - rows.begin, kRowAlignment), [&](int64_t task, int64_t thread) {
    const int64_t begin = rows.begin + task * kRowAlignment;
    for (int64_t r = begin; r < std::min(begin + kRowAlignment, rows.end); ++r) {
      function(r, tile_.Scratch(thread));
    }
  });
}

bool InputGradient::IsWithinOneRank(const SegmentSum& sum) const {
  for (int32_t rank = 0; rank < vocabulary_.shard().ranks(); ++rank) {
    if (sum.IsWithin(vocabulary_.FirstSegment(rank), vocabulary_.FirstSegment(rank + 1))) return true;
  }
  return false;
}

SegmentBits InputGradient::UnsummedOf(int32_t rank) const {
  return UnsummedWithin(vocabulary_.segments(), vocabulary_.FirstSegment(rank),
                        vocabulary_.FirstSegment(rank + 1));
}

InputGradient::Parts InputGradient::OwnParts(int64_t r) const {
  Parts parts{};
  const auto first = static_cast<size_t>(vocabulary_.first_segment());
  for (size_t i = 0; i < segments_.size(); ++i) {
    parts[first + i] = segments_[i].tile().dx + r * tile_.padded_hidden;
  }
  return parts;
}

void InputGradient::Add(const SegmentSum& sum, const Parts& parts) const {
  float* to = parts[static_cast<size_t>(sum.left)];
  const float* from = parts[static_cast<size_t>(sum.right)];
  for (int64_t i = 0; i < params_.hidden; ++i) to[i] += from[i];
}

void InputGradient::SumOwn(int64_t r, float* scratch) const {
  for (const Segment& segment : segments_) segment.step().ScaleInputGradient(r, scratch);
  const Parts parts = OwnParts(r);
  ForEachSegmentSum(vocabulary_.segments(), [&](const SegmentSum& sum) {
    if (sum.IsWithin(vocabulary_.first_segment(), vocabulary_.end_segment())) Add(sum, parts);
  });
}

// Moves the unsummed parts of these rows to the rank that answers: of each rank [its unsummed, rows, hidden].
Status InputGradient::Exchange(Range rows) const {
  PerSegment<int64_t> bytes{};
  for (int32_t rank = 0; rank < vocabulary_.shard().ranks(); ++rank) {
    if (rank == vocabulary_.shard().answering_rank) continue;
    bytes[static_cast<size_t>(rank)] = std::popcount(UnsummedOf(rank)) * (rows.end - rows.begin) *
                                       params_.hidden * static_cast<int64_t>(sizeof(float));
  }
  if (!vocabulary_.answers()) PackUnsummed(rows);
  const float* send = vocabulary_.answers() ? nullptr : memory_.exchange.dx;
  float* received = vocabulary_.answers() ? memory_.exchange.dx : nullptr;
  return exchange_.SendToAnswering(kernels::Exchange::kInputGradients, send, bytes, received);
}

void InputGradient::PackUnsummed(Range rows) const {
  const SegmentBits unsummed = UnsummedOf(vocabulary_.shard().rank);
  float* to = memory_.exchange.dx;
  for (int32_t i = 0; i < vocabulary_.segments(); ++i) {
    if (!Has(unsummed, i)) continue;
    for (int64_t r = rows.begin; r < rows.end; ++r, to += params_.hidden) {
      std::copy_n(OwnParts(r)[static_cast<size_t>(i)], params_.hidden, to);
    }
  }
}

InputGradient::Parts InputGradient::AllParts(int64_t r, Range rows) const {
  Parts parts = OwnParts(r);
  float* received = memory_.exchange.dx + (r - rows.begin) * params_.hidden;
  for (int32_t rank = 0; rank < vocabulary_.shard().ranks(); ++rank) {
    if (rank == vocabulary_.shard().rank) continue;
    const SegmentBits unsummed = UnsummedOf(rank);
    for (int32_t i = 0; i < vocabulary_.segments(); ++i) {
      if (!Has(unsummed, i)) continue;
      parts[static_cast<size_t>(i)] = received;
      received += (rows.end - rows.begin) * params_.hidden;
    }
  }
  return parts;
}

void InputGradient::Write(int64_t r, float* dx) const {
  const RowState& row = tile_.row_states[r];
  // A weight of 0 gives exactly that, whatever the products hold.
  const bool weighted = params_.token_weights != nullptr || params_.class_weights != nullptr ||
                        params_.teacher != nullptr || params_.target_lists.given();
  if (weighted && row.weightless) std::fill(dx, dx + params_.hidden, 0.0f);
  if (row.overflowed) std::fill(dx, dx + params_.hidden, kNaN);
  char* to = static_cast<char*>(params_.dx) + row.index * params_.hidden * SizeOf(params_.dx_type);
  Convert(DataType::kFloat32, dx, params_.dx_type, to, params_.hidden);
}

}  // namespace lossd::kernels::cpu
