// The gradient window of a head: what accumulates between two flushes.
#ifndef LOSSD_SERVER_ENGINE_WINDOW_H_
#define LOSSD_SERVER_ENGINE_WINDOW_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/engine/accumulation_ledger.h"
#include "server/engine/gradient_summary.h"

namespace lossd::engine {

//   open ──BeginFlush──▶ freezing ──everything applied──▶ frozen ──CommitFlush──▶ open (generation + 1)
//                           └──marks no longer true──▶ open        └──AbortFlush──▶ open (same generation)
enum class WindowState { kOpen, kFreezing, kFrozen };

struct FlushInfo {
  std::string flush_id;
  int64_t rows = 0;
  int64_t columns = 0;
  uint64_t window_tokens = 0;
  GradientSummary summary;
  std::optional<GradientSummary> bias_summary = {};  // of db, if the head has a bias
};

using FlushCallback = std::function<void(absl::StatusOr<FlushInfo>)>;

// Plain state; Head guards it with its mutex.
struct Window {
  uint64_t generation = 1;
  WindowState state = WindowState::kOpen;
  uint64_t tokens = 0;  // valid tokens in dW

  // While freezing or frozen: the arguments it was begun with, sorted, and its answer.
  std::vector<SessionMarks> flush_marks;
  float flush_scale = 1.0f;
  FlushInfo flush;
  std::vector<FlushCallback> flush_waiters;
  absl::Time flush_begun;

  // For repeated calls.
  std::string last_committed_flush;
  uint64_t last_committed_generation = 0;
  std::string last_aborted_flush;
  uint64_t last_aborted_generation = 0;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_WINDOW_H_
