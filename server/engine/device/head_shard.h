// What a rank of a group has of a head.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_HEAD_SHARD_H_
#define LOSSD_SERVER_ENGINE_DEVICE_HEAD_SHARD_H_

#include <cstdint>

#include "kernels/exchange.h"
#include "kernels/shard.h"
#include "kernels/slices.h"

namespace lossd::engine {

// Rows of the vocabulary, by its layout over the ranks. Communicators move memory of the device and of the
// host, which are one where the device is the host; they are called by the device's owner thread alone, and
// outlive the head.
struct HeadShard {
  kernels::ShardLayout layout;
  int32_t rank = 0;
  kernels::collectives::Communicator* communicator = nullptr;  // null with one rank, as is the host's
  kernels::collectives::Communicator* host_communicator = nullptr;
  kernels::ExchangeObserver* observer = nullptr;  // of what goes over it; outlives the head; may be null
  // Servers that hold the head together, and which of them this is: it steps a slice of the rank's rows.
  int32_t replica = 0;
  int32_t replicas = 1;

  // Gets all results but those of batches that another rank holds.
  static constexpr int32_t kLeader = 0;

  // The whole head, on a device of its own.
  static HeadShard Whole(int64_t vocab) { return {.layout = kernels::ShardLayout(vocab, 1)}; }

  // It points into this one. `holder` answers.
  kernels::Shard For(kernels::Segments segments, int32_t holder = kLeader) const {
    kernels::Shard shard = layout.ShardOf(rank, segments, communicator);
    shard.answering_rank = holder;
    shard.observer = observer;
    return shard;
  }
  bool leads() const { return rank == kLeader; }
  bool whole() const { return layout.ranks() == 1; }
  kernels::SliceLayout slices() const { return {layout.rows(rank), replicas}; }
  // The rows of the rank that are stepped here.
  kernels::RowSpan stepped() const { return slices().Slice(replica); }
  // Where its rows begin, of the whole vocabulary.
  int64_t first_row() const { return layout.first(rank); }
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_HEAD_SHARD_H_
