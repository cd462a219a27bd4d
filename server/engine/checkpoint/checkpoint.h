// What a head is at one moment, but for its tensors: the plain data of a checkpoint.
#ifndef LOSSD_SERVER_ENGINE_CHECKPOINT_CHECKPOINT_H_
#define LOSSD_SERVER_ENGINE_CHECKPOINT_CHECKPOINT_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/engine/chunk/head_config.h"
#include "server/engine/device/head_backend.h"
#include "server/engine/head/accumulation_ledger.h"
#include "server/engine/head/deterministic_tiles.h"
#include "server/engine/head/window.h"

namespace lossd::engine {

// What lists show of one.
struct CheckpointInfo {
  std::string head;
  std::string tag;
  uint64_t generation = 0;
  uint64_t weight_version = 0;
  int64_t optimizer_steps = 0;
  uint64_t window_tokens = 0;
  int64_t bytes = 0;     // of all its files
  int64_t saved_at = 0;  // microseconds since the epoch; of one folder's checkpoints no two have the same
  int64_t ignored_deferred_bytes = 0;  // see HeadCheckpoint
};

struct DeletedCheckpoint {
  CheckpointInfo info;      // head and tag alone if the manifest could not be read
  int64_t bytes_freed = 0;  // on the disk; the rest is shared with other checkpoints
};

// Everything in it is applied: a lane's `accepted` counts for its other marks.
struct SessionCheckpoint {
  std::string id;
  AccumulationLedger::Session session;
  // Set for a deterministic session; the tensors of its tiles are in the file TilesFile(id).
  std::optional<DeterministicTiles::Content> tiles;
};

struct HeadCheckpoint {
  HeadConfig config;
  // An option of heads that earlier releases wrote into every manifest. It decided when dW was computed and
  // changed no bit of it: it is read, so that their checkpoints can be restored, and never written.
  std::optional<int64_t> ignored_deferred_bytes = {};
  std::string incarnation;  // of the server that saved it
  int64_t saved_at = 0;
  uint64_t restores = 0;
  uint64_t weight_version = 0;
  int64_t optimizer_steps = 0;
  std::string last_committed_write;
  uint64_t last_committed_version = 0;
  // Without those who wait. Frozen only where the server was drained.
  Window window;
  uint64_t last_session_number = 0;
  std::vector<SessionCheckpoint> sessions;
  // The backend's, a file each; none before there are weights.
  std::vector<StateTensor> tensors;
  // Files of gradients, [V, H] and of a bias [V] fp32, by their names; what is not there is zero.
  std::vector<std::string> gradients;
};

// What a head has after a restore.
struct RestoreNumbers {
  uint64_t restores = 0;
  uint64_t weight_version = 0;
};

// Names of files.
inline constexpr char kOwnGradient[] = "gradient";        // of the window
inline constexpr char kNextGradient[] = "next_gradient";  // of the window after a frozen one
inline constexpr char kClassWeightsFile[] = "class_weights";
std::string TensorFile(const std::string& tensor);
std::string SessionGradient(uint64_t session_number);
std::string BiasOf(const std::string& gradient);
std::string TilesFile(uint64_t session_number);

struct CheckpointFile {
  int64_t bytes = 0;
  uint64_t checksum = 0;  // XXH3, 64 bits
};
using CheckpointFiles = std::map<std::string, CheckpointFile>;

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_CHECKPOINT_CHECKPOINT_H_
