// Descriptions of a head, its sessions and its state.
#ifndef LOSSD_SERVER_ENGINE_HEAD_PARTS_HEAD_INFO_H_
#define LOSSD_SERVER_ENGINE_HEAD_PARTS_HEAD_INFO_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "server/engine/chunk/head_config.h"
#include "server/engine/head/parts/accumulation_ledger.h"
#include "server/engine/head/parts/window.h"
#include "server/engine/memory/memory_budget.h"

namespace lossd::engine {

// For callers: all of it.
struct HeadInfo {
  HeadConfig config;
  uint64_t weight_version = 0;
  uint64_t generation = 0;
  WindowState window_state = WindowState::kOpen;
  uint64_t window_tokens = 0;
  std::vector<SessionMarks> window_marks;
  MemoryPlan memory;
  int64_t open_sessions = 0;
  int64_t optimizer_steps = 0;
  int64_t staged_rows = 0;       // that have arrived of a weight write which is not committed
  int64_t max_logits_bytes = 0;  // MostLogitsBytes
  int64_t max_logits_rows = 0;
  std::string flush_id;                   // of the flush that holds the window; empty: none does
  std::optional<absl::Time> flush_since;  // BeginFlush, until it is committed or aborted
  int64_t parked_bytes = 0;               // of the host; 0: it is not parked
  // Steps of the optimizer since the newest checkpoint that was saved of the head or that it was restored
  // from; none where no checkpoints are kept, or without an optimizer.
  std::optional<int64_t> steps_since_checkpoint;
};

// For those who look often: of one moment, and at little cost.
struct HeadSnapshot {
  uint64_t weight_version = 0;
  uint64_t generation = 0;
  int64_t optimizer_steps = 0;
  WindowState window_state = WindowState::kOpen;
  uint64_t window_tokens = 0;
  std::optional<absl::Time> window_since;  // when the first chunk in it was taken, or it was restored
  std::optional<absl::Time> flush_since;   // BeginFlush, until it is committed or aborted
  int64_t open_sessions = 0;
  std::optional<int64_t> steps_since_checkpoint;  // HeadInfo's
};

// Nothing in it lets anybody speak for the session.
struct SessionSnapshot {
  uint64_t number = 0;  // of the head's
  int32_t rank = 0;
  int64_t lanes = 0;
  int64_t streams = 0;    // lanes that have one
  uint64_t accepted = 0;  // chunks of the window, of all lanes
  uint64_t applied = 0;   // of these
  absl::Duration idle;    // since its last chunk or call
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_PARTS_HEAD_INFO_H_
