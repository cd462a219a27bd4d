// What ends a window, as every replica of a head is told of it.
#ifndef LOSSD_SERVER_ENGINE_HEAD_PARTS_WINDOW_END_H_
#define LOSSD_SERVER_ENGINE_HEAD_PARTS_WINDOW_END_H_

#include <cstdint>
#include <vector>

#include "server/engine/chunk/session_marks.h"
#include "server/engine/head/parts/optimizer_step.h"

namespace lossd::engine {

struct WindowEnd {
  uint64_t generation = 0;
  std::vector<SessionMarks> marks;  // Canonical; those of all replicas' sessions
  StepRequest step;
};

// What the replicas have found together: how the window ends.
struct JointStep {
  // StepResult's, without what follows from it at each replica.
  GradientStats stats = {};
  uint64_t window_tokens = 0;  // of all of them; 0: there is nothing to sum or to step by
  bool skipped = false;        // the window ends, and nothing is stepped
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_PARTS_WINDOW_END_H_
