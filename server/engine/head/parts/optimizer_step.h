// One step of a head's optimizer as a client asks for it, and what is remembered of it so that the same call,
// sent again, is not another step.
#ifndef LOSSD_SERVER_ENGINE_HEAD_PARTS_OPTIMIZER_STEP_H_
#define LOSSD_SERVER_ENGINE_HEAD_PARTS_OPTIMIZER_STEP_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/engine/chunk/head_config.h"
#include "server/engine/device/head_backend.h"
#include "server/engine/head/parts/accumulation_ledger.h"

namespace lossd::engine {

// What to do if an element of the gradient is NaN or infinite: step all the same, or leave weights and
// optimizer as they are. The window ends either way.
enum class NonFinite { kApply, kSkip };

// Fields that are unset have the values of the head's optimizer.
struct StepRequest {
  double learning_rate = 0;   // finite, at least 0
  double gradient_scale = 1;  // finite; multiplies the gradient first
  NonFinite non_finite = NonFinite::kApply;
  std::optional<double> weight_decay = {};
  std::optional<double> momentum = {};  // SGD; of one without a buffer for it, only 0
  std::optional<double> beta1 = {};     // Adam, AdamW
  std::optional<double> beta2 = {};

  bool operator==(const StepRequest&) const = default;
};

struct StepResult {
  uint64_t generation = 0;      // the new one
  uint64_t weight_version = 0;  // the new one, or if the step was skipped the old one
  int64_t step = 0;             // steps that the optimizer has taken, this one included
  bool skipped = false;         // for a gradient that is not finite, or a window without a token
  GradientStats stats;          // of the scaled gradient
  uint64_t window_tokens = 0;
};
using StepCallback = std::function<void(absl::StatusOr<StepResult>)>;

// The last step, with all of its arguments. It is part of what a head is: a checkpoint keeps it.
struct StepRecord {
  uint64_t generation = 0;          // that it consumed; 0: there was none yet
  std::vector<SessionMarks> marks;  // Canonical
  StepRequest request;
  StepResult result;
};

// Whether gradients can be multiplied by it in fp32.
bool IsScale(double value);

// INVALID_ARGUMENT naming the field and its value, FAILED_PRECONDITION if the head has no optimizer.
absl::Status CheckStep(const HeadConfig& head, const StepRequest& request);

// Everything resolved, for step number `step`.
StepArguments Resolve(const OptimizerConfig& optimizer, const StepRequest& request, int64_t step);

// Two requests for the same generation: ok if they are the same, else FAILED_PRECONDITION naming the first
// difference. `was`: what became of the first, for the message.
absl::Status CheckSameStep(const StepRecord& first, const std::vector<SessionMarks>& marks,
                           const StepRequest& request, absl::string_view was);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_PARTS_OPTIMIZER_STEP_H_
