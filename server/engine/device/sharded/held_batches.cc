#include "server/engine/device/sharded/held_batches.h"

#include <cstring>
#include <utility>

#include "server/engine/chunk/chunk_options.h"

namespace lossd::engine {

void HeldBatches::Start(uint64_t number, std::span<const ChunkRows> chunks,
                        std::function<void(size_t chunk)> on_answered) {
  batches_[number] = {{chunks.begin(), chunks.end()}, std::move(on_answered)};
}

void HeldBatches::Answer(const AnsweredChunk& chunk) {
  const auto found = batches_.find(chunk.batch);
  if (found == batches_.end()) return;
  const ChunkRows& rows = found->second.chunks[chunk.chunk];
  if (rows.losses != nullptr) std::memcpy(rows.losses, chunk.losses.data(), chunk.losses.size());
  PutInto(rows.returns, chunk.returns);
  found->second.on_answered(chunk.chunk);
}

}  // namespace lossd::engine
