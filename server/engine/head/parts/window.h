// The gradient window of a head as plain data: what accumulates between two flushes or steps of the
// optimizer.
#ifndef LOSSD_SERVER_ENGINE_HEAD_PARTS_WINDOW_H_
#define LOSSD_SERVER_ENGINE_HEAD_PARTS_WINDOW_H_

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/engine/device/head_backend.h"
#include "server/engine/head/parts/accumulation_ledger.h"
#include "server/engine/head/parts/optimizer_step.h"

namespace lossd::engine {

//   open ──BeginFlush──▶ sealing ──everything applied──▶ sealed ──CommitFlush──▶ open (generation + 1)
//                           └──marks no longer true──▶ open        └──AbortFlush──▶ open (same generation)
//   open ──ApplyStep───▶ sealing ──everything applied, the step taken──▶ open (generation + 1)
//                           └──marks no longer true──▶ open
enum class WindowState { kOpen, kSealing, kSealed };
inline constexpr std::array kWindowStates = {WindowState::kOpen, WindowState::kSealing, WindowState::kSealed};
const char* Name(WindowState state);  // "open", "freezing", "frozen"

// How far a replica of a head is with what ends the windows of all of them. A head of its own ends its window
// all at once.
enum class EndingPhase {
  kOpen,      // it has yet to find that its sessions match
  kSealed,    // no chunk of the window is taken any more
  kSummed,    // has the sum of its slice; a flush stays so until it is committed or aborted
  kStepping,  // changes its slice, which nothing undoes
};

struct FlushInfo {
  std::string flush_id;
  int64_t rows = 0;
  int64_t columns = 0;
  uint64_t window_tokens = 0;
  GradientStats stats = {};
};

using FlushCallback = std::function<void(absl::StatusOr<FlushInfo>)>;

// A flush that is over, and the generation that its call was answered with.
struct FlushRecord {
  std::string flush_id;  // empty: there was none
  uint64_t generation = 0;
};
// What a flush that holds its window ends in; the new generation is the answer, or with kAbort the same one.
enum class FlushFate { kCommit, kAbort };
using FateCallback = std::function<void(absl::StatusOr<uint64_t>)>;

// Statistics of the gradient times a factor, and of how many tokens it is.
struct WindowStats {
  GradientStats gradient;
  uint64_t window_tokens = 0;
};
using StatsCallback = std::function<void(absl::StatusOr<WindowStats>)>;

// What a window is between two calls: GradientWindow works with it, and a checkpoint keeps it.
struct Window {
  uint64_t generation = 1;
  WindowState state = WindowState::kOpen;
  uint64_t tokens = 0;  // valid tokens that were answered
  // Tokens of the next window; 0 unless this one is sealed and the head has a second gradient.
  uint64_t next_tokens = 0;

  // While sealing or sealed: the marks that whatever ends the window was begun with, in canonical form.
  std::vector<SessionMarks> marks;
  // A flush's other argument, and its answer.
  float flush_scale = 1.0f;
  FlushInfo flush;

  // For repeated calls.
  FlushRecord committed;
  FlushRecord aborted;
  StepRecord last_step;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_PARTS_WINDOW_H_
