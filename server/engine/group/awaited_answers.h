// The answers that the leader of a group waits for, so that a rank which says anything else is found out.
#ifndef LOSSD_SERVER_ENGINE_GROUP_AWAITED_ANSWERS_H_
#define LOSSD_SERVER_ENGINE_GROUP_AWAITED_ANSWERS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "absl/status/status.h"
#include "server/engine/group/answered_chunk.h"
#include "server/engine/group/group_command.h"

namespace lossd::engine {

// External synchronization. Errors are INTERNAL, and change nothing.
class AwaitedAnswers {
 public:
  // The next batch goes to all ranks.
  void Start(const StartBatchCommand& command);
  uint64_t started() const { return started_; }

  // The rank has answered a chunk, which has to be the next one of a batch that it holds.
  absl::Status Take(int32_t rank, const AnsweredChunk& chunk);
  // The rank has applied this batch: what it holds of it must be answered.
  absl::Status CheckApplied(int32_t rank, uint64_t batch) const;

 private:
  struct Batch {
    int32_t holder = 0;
    WantedReturns returns;
    std::vector<int64_t> tokens;  // of each chunk
    size_t answered = 0;          // chunks
  };

  uint64_t started_ = 0;
  std::map<uint64_t, Batch> batches_;  // by number: those that another rank holds and has not answered yet
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_GROUP_AWAITED_ANSWERS_H_
