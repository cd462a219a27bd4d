// The state of a head at one moment: plain data, and tensors in files of their own.
#ifndef LOSSD_SERVER_ENGINE_HEAD_PARTS_HEAD_STATE_H_
#define LOSSD_SERVER_ENGINE_HEAD_PARTS_HEAD_STATE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/engine/chunk/head_config.h"
#include "server/engine/device/head_backend.h"
#include "server/engine/head/parts/accumulation_ledger.h"
#include "server/engine/head/parts/deterministic_tiles.h"
#include "server/engine/head/parts/head_history.h"
#include "server/engine/head/parts/window.h"

namespace lossd::engine {

// Everything in it is applied: a lane's `accepted` counts for its other marks.
struct SessionCheckpoint {
  std::string id;
  AccumulationLedger::Session session;
  // Set for a deterministic session; the tensors of its tiles are in the file TilesFile(id).
  std::optional<DeterministicTiles::Content> tiles;
};

struct HeadCheckpoint {
  HeadConfig config;
  std::string incarnation;  // of the server that saved it
  int64_t saved_at = 0;
  uint64_t restores = 0;
  std::vector<Ancestor> ancestors = {};
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

// What a head that is put back to `state` goes on from.
Ancestor AncestorOf(const HeadCheckpoint& state);

// What a head has after a restore.
struct RestoreNumbers {
  uint64_t restores = 0;
  uint64_t weight_version = 0;
};

// Whether every replica of a head has all rows of it; of the others those that it steps.
inline bool IsWhole(const std::string& tensor) { return tensor == "weight" || tensor == "bias"; }

// Names of files.
inline constexpr char kOwnGradient[] = "gradient";        // of the window
inline constexpr char kNextGradient[] = "next_gradient";  // of the window after a sealed one
inline std::string TensorFile(const std::string& tensor) { return absl::StrCat("tensor.", tensor); }
inline std::string SessionGradient(uint64_t session_number) {
  return absl::StrCat("gradient.", session_number);
}
inline std::string BiasOf(const std::string& gradient) { return absl::StrCat(gradient, ".bias"); }
inline std::string TilesFile(uint64_t session_number) { return absl::StrCat("tiles.", session_number); }

// Where the files go when a head is saved.
class StateSink {
 public:
  using Append = std::function<absl::Status(std::span<const std::byte> bytes)>;

  virtual ~StateSink() = default;
  // A file: what `fill` appends, unless the content of this key is there already. An empty key is that of
  // content which is never there.
  virtual absl::Status Add(const std::string& name, const std::string& key,
                           absl::FunctionRef<absl::Status(const Append& append)> fill) = 0;
};

// Where the files come from when a head is restored: checked, and the same as long as this lives.
class StateSource {
 public:
  virtual ~StateSource() = default;
  // Complete: with class weights, and the chunks that tiles keep.
  virtual const HeadCheckpoint& checkpoint() const = 0;
  virtual absl::Status Read(const std::string& name, int64_t offset, std::span<std::byte> out) const = 0;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_PARTS_HEAD_STATE_H_
