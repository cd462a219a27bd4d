// Descriptions of checkpoints and of their files.
#ifndef LOSSD_SERVER_ENGINE_CHECKPOINT_CHECKPOINT_H_
#define LOSSD_SERVER_ENGINE_CHECKPOINT_CHECKPOINT_H_

#include <cstdint>
#include <map>
#include <string>

namespace lossd::engine {

// The entry of one checkpoint in a list.
struct CheckpointInfo {
  std::string head;
  std::string tag;
  uint64_t generation = 0;
  uint64_t weight_version = 0;
  int64_t optimizer_steps = 0;
  uint64_t window_tokens = 0;
  int64_t bytes = 0;     // of all its files
  int64_t saved_at = 0;  // microseconds since the epoch; of one folder's checkpoints no two have the same
};

struct DeletedCheckpoint {
  CheckpointInfo info;      // head and tag alone if the manifest could not be read
  int64_t bytes_freed = 0;  // on the disk; the rest is shared with other checkpoints
};

// Names of files; those that belong to the head's state are in head_state.h.
inline constexpr char kManifestFile[] = "manifest.json";
inline constexpr char kClassWeightsFile[] = "class_weights";

struct CheckpointFile {
  int64_t bytes = 0;
  uint64_t checksum = 0;  // XXH3, 64 bits
};
using CheckpointFiles = std::map<std::string, CheckpointFile>;

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_CHECKPOINT_CHECKPOINT_H_
