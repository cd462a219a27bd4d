// What a rank that holds a batch tells the leader of one of its chunks: losses and returns. dX stays there.
#ifndef LOSSD_SERVER_ENGINE_GROUP_ANSWERED_CHUNK_H_
#define LOSSD_SERVER_ENGINE_GROUP_ANSWERED_CHUNK_H_

#include <cstdint>
#include <string>

#include "server/engine/chunk/chunk.h"

namespace lossd::engine {

struct AnsweredChunk {
  uint64_t batch = 0;    // StartBatchCommands are counted from 1
  uint32_t chunk = 0;    // of that batch, from 0
  std::string losses;    // fp32 [tokens]
  TokenReturns returns;  // what the batch's kind names
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_GROUP_ANSWERED_CHUNK_H_
