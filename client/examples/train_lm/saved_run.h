// A run as it was between two steps, in one file: the trainer's part of it, and the tag under which the
// server has the head's.
#ifndef LOSSD_CLIENT_EXAMPLES_TRAIN_LM_SAVED_RUN_H_
#define LOSSD_CLIENT_EXAMPLES_TRAIN_LM_SAVED_RUN_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/examples/train_lm/trainer.h"

namespace lossd::train_lm {

struct SavedRun {
  std::string settings;  // what must be the same for the run to be the same
  std::string head_tag;
  TrainerState trainer;
  // The results so far.
  int64_t tokens = 0;
  double training_seconds = 0;
  std::vector<double> losses;
  std::vector<std::pair<int64_t, double>> evaluations;  // perplexities by step
};

// "DIR/train_lm.run" appears complete or not at all; the one before is gone then.
absl::Status WriteSavedRun(const std::string& folder, const SavedRun& run);
// Nothing if there is none. DATA_LOSS if the file is no such run.
absl::StatusOr<std::optional<SavedRun>> ReadSavedRun(const std::string& folder);

}  // namespace lossd::train_lm

#endif  // LOSSD_CLIENT_EXAMPLES_TRAIN_LM_SAVED_RUN_H_
