// Checkpoints that a server keeps of its heads (--checkpoint_dir).
#ifndef LOSSD_CHECKPOINT_H_
#define LOSSD_CHECKPOINT_H_

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace lossd {

// A head as it was at one moment: weights, optimizer, gradient window, and what of which session is in it.
struct CheckpointInfo {
  std::string head;
  std::string tag;
  uint64_t generation = 0;
  uint64_t weight_version = 0;
  int64_t optimizer_steps = 0;
  uint64_t window_tokens = 0;
  int64_t bytes = 0;
  std::chrono::system_clock::time_point saved_at;
};

struct SavedCheckpoint {
  CheckpointInfo info;
  int64_t bytes_written = 0;              // the rest is shared with earlier checkpoints
  std::vector<std::string> deleted = {};  // older tags that went because of the server's --checkpoint_keep
};

struct DeletedCheckpoint {
  CheckpointInfo info;      // of a damaged one head and tag alone
  int64_t bytes_freed = 0;  // on the server's disk; the rest is shared with other checkpoints
};

}  // namespace lossd

#endif  // LOSSD_CHECKPOINT_H_
