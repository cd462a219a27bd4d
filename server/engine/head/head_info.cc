#include "server/engine/head/parts/head_info.h"

#include <algorithm>

#include "server/engine/common/monotonic_clock.h"
#include "server/engine/head/head.h"

namespace lossd::engine {

HeadInfo Head::Info() const {
  const MutexLock lock(mutex_);
  HeadInfo info;
  info.config = config_;
  info.weight_version = weights_.version();
  info.generation = window_.generation();
  info.window_state = window_.state();
  info.window_tokens = window_.tokens();
  if (!frozen()) info.window_marks = sessions_.WindowMarks();
  for (SessionMarks& marks : info.window_marks) {
    marks.past = history_.now();
    marks.generation = window_.generation();
  }
  if (reservation_ != nullptr) info.memory = reservation_->plan();
  if (environment_.step_saver != nullptr) {
    const MemoryPlan copy = environment_.step_saver->memory();
    info.memory.insert(info.memory.end(), copy.begin(), copy.end());
  }
  const MemoryPlan sessions = sessions_.Memory();
  info.memory.insert(info.memory.end(), sessions.begin(), sessions.end());
  info.memory = Merged(info.memory);
  info.staged_rows = weights_.staged_rows();
  info.open_sessions = sessions_.open();
  info.optimizer_steps = weights_.optimizer_steps();
  info.steps_since_checkpoint = StepsSinceCheckpointLocked();
  info.max_logits_bytes = MostLogitsBytes(environment_.limits);
  info.max_logits_rows = environment_.limits.max_chunk_tokens;
  info.flush_since = window_.flush_since();
  info.flush_id = window_.flush_id();
  return info;
}

HeadSnapshot Head::Snapshot() const {
  const MutexLock lock(mutex_);
  return HeadSnapshot{.weight_version = weights_.version(),
                      .generation = window_.generation(),
                      .optimizer_steps = weights_.optimizer_steps(),
                      .window_state = window_.state(),
                      .window_tokens = window_.tokens(),
                      .window_since = window_.since(),
                      .flush_since = window_.flush_since(),
                      .open_sessions = sessions_.open(),
                      .steps_since_checkpoint = StepsSinceCheckpointLocked()};
}

std::vector<SessionSnapshot> Head::Sessions() const {
  const MutexLock lock(mutex_);
  return sessions_.Snapshots(MonotonicNow());
}

}  // namespace lossd::engine
