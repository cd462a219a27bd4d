// Logits of rows from those that each rank has computed of its part of the vocabulary.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_LOGIT_PARTS_H_
#define LOSSD_SERVER_ENGINE_DEVICE_LOGIT_PARTS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "server/engine/device/head_backend.h"
#include "server/engine/device/head_shard.h"

namespace lossd::engine {

// A rank's part of the outputs, in memory of its own, laid out for sending: of all logits [rows, entries], or
// of the largest [rows, k] tokens, logits, and [rows] log-sum-exps, where k is no more than the rank has
// entries.
class LogitPart {
 public:
  // That of rank `rank`, for what `wanted` asks for.
  LogitPart(const LogitRows& wanted, const kernels::ShardLayout& layout, int32_t rank);

  int64_t bytes() const { return bytes_; }
  int64_t entries() const { return entries_; }
  // Its arrays, where `memory` of bytes() begins. Tokens count from the rank's first entry.
  kernels::LogitOutputs In(std::byte* memory) const;

 private:
  const kernels::LogitOutputs wanted_;
  const int64_t rows_;
  const int64_t entries_;
  int64_t bytes_ = 0;
};

// From all ranks' parts, in their order without gaps: what `wanted.outputs` has arrays for. Logits of one
// value are in the order of tokens; a row that has overflowed in one part has so as a whole.
void MergeLogits(const LogitRows& wanted, const kernels::ShardLayout& layout, std::byte* parts);

// Called by every rank with its own part; the one that answers gets all of them, and merges them.
absl::Status GatherLogits(const LogitRows& wanted, const HeadShard& shard, const std::vector<std::byte>& own);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_LOGIT_PARTS_H_
