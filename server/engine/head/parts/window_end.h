// What ends a window, as every replica of a head is told of it.
#ifndef LOSSD_SERVER_ENGINE_HEAD_PARTS_WINDOW_END_H_
#define LOSSD_SERVER_ENGINE_HEAD_PARTS_WINDOW_END_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "server/engine/chunk/session_marks.h"
#include "server/engine/head/parts/head_copy.h"
#include "server/engine/head/parts/optimizer_step.h"
#include "server/engine/head/parts/window.h"

namespace lossd::engine {

// A flush of all replicas' windows has one id.
struct FlushEnd {
  std::string flush_id;
  float gradient_scale = 1.0f;
};
// Somebody looks at what all windows come to, which are open again afterwards. Without marks: at what is in
// them when their turn comes.
struct LookEnd {
  double gradient_scale = 1;
};
// The weights of another head go into this one's. The window is open again afterwards.
struct BlendEnd {
  BlendRequest request;
  std::shared_ptr<const void> lease = {};  // at the coordinator: the source's (Head::Lend)
  double gradient_scale = 1;               // nothing is read
};
using EndsBy = std::variant<StepRequest, FlushEnd, LookEnd, BlendEnd>;
// What the gradient is multiplied by.
inline double ScaleOf(const EndsBy& by) {
  return std::visit([](const auto& one) { return static_cast<double>(one.gradient_scale); }, by);
}
inline bool ChangesWeights(const EndsBy& by) {
  return std::holds_alternative<StepRequest>(by) || std::holds_alternative<BlendEnd>(by);
}
// Empty if it is no flush.
inline std::string FlushIdOf(const EndsBy& by) {
  const auto* const flush = std::get_if<FlushEnd>(&by);
  return flush == nullptr ? "" : flush->flush_id;
}

struct WindowEnd {
  uint64_t generation = 0;
  std::vector<SessionMarks> marks;  // Canonical; those of all replicas' sessions
  EndsBy by;
  // What it is a step from: the same at all replicas.
  uint64_t weight_version = 0;
  int64_t optimizer_steps = 0;
  uint64_t ending = 0;  // at the coordinator: GradientWindow's number of it
  // The fate of a flush that holds all windows, once somebody asks for it.
  std::optional<FlushFate> fate = {};
};

// A replica's window, once it is sealed.
struct SealedWindow {
  uint64_t tokens = 0;
  std::vector<int32_t> ranks = {};  // of its deterministic sessions, in order: each has a gradient of its own
};

// What the replicas add up: their windows, and then what deterministic sessions have, one after the other, as
// one server does.
struct JointSum {
  uint64_t window_tokens = 0;          // of all of them; 0: there is nothing to sum
  std::vector<int32_t> sessions = {};  // in the order of their ranks: the replica of each
};

// What the replicas have found together: how the window ends.
struct JointStep {
  // StepResult's, without what follows from it at each replica.
  GradientStats stats = {};
  uint64_t window_tokens = 0;  // of all of them; 0: there is nothing to sum or to step by
  bool skipped = false;        // the window ends, and nothing is stepped
};

// How far a replica is with a checkpoint that all of them are put back to.
enum class RestorePhase {
  kNone,
  kBegun,        // nothing has changed yet
  kOverwritten,  // some rows are those of the checkpoint: only another restore mends it
  kReady,        // all of it is here, and counts as soon as all others have come as far
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_PARTS_WINDOW_END_H_
