// Batches under way that other ranks hold: where the leader puts what they answer.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_SHARDED_HELD_BATCHES_H_
#define LOSSD_SERVER_ENGINE_DEVICE_SHARDED_HELD_BATCHES_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <vector>

#include "server/engine/device/head_backend.h"
#include "server/engine/group/answered_chunk.h"

namespace lossd::engine {

// Belongs to the device's owner thread.
class HeldBatches {
 public:
  // `chunks` have memory for losses and returns until the batch ends.
  void Start(uint64_t number, std::span<const ChunkRows> chunks,
             std::function<void(size_t chunk)> on_answered);
  // As RankChannel::TakeAnswered gives it. A batch that has ended, since it failed here, wants no answer.
  void Answer(const AnsweredChunk& chunk);
  void End(uint64_t number) { batches_.erase(number); }

 private:
  struct Batch {
    std::vector<ChunkRows> chunks;
    std::function<void(size_t chunk)> on_answered;
  };

  std::map<uint64_t, Batch> batches_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_SHARDED_HELD_BATCHES_H_
