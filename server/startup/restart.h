// From one server to the next: what --checkpoint_dir and --restore mean at start and at the end.
#ifndef LOSSD_SERVER_STARTUP_RESTART_H_
#define LOSSD_SERVER_STARTUP_RESTART_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/checkpoint/checkpoint_store.h"
#include "server/engine/engine.h"

namespace lossd {

enum class Restore { kYes, kNo };

class Restart {
 public:
  // An empty folder name: nothing is kept, and nothing else happens here. FAILED_PRECONDITION if the folder
  // cannot be used, DATA_LOSS if what a drain left cannot be read.
  static absl::StatusOr<Restart> Open(const std::string& folder, Restore restore);

  std::shared_ptr<engine::CheckpointStore> store() const { return store_; }
  // That of the drained server which is continued; empty for a new one.
  std::string incarnation() const;
  absl::Status RestoreHeads(engine::Engine& engine) const;
  // The drain is continued now, by this server alone: the last thing before it serves anybody. On an error it
  // is the next server's to continue.
  absl::Status Take();

 private:
  void GiveBack();

  std::shared_ptr<engine::CheckpointStore> store_;
  Restore restore_ = Restore::kNo;
  std::optional<engine::DrainRecord> drain_;
};

// EngineOptions::on_step_save that logs, a few lines a second at most. Thread-safe.
std::function<void(const engine::StepSaveReport&)> LogStepSaves();

// After the drain: every head, for the next server. False, and it is logged, if that failed for any of them.
bool SaveForRestart(engine::Engine& engine);

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_RESTART_H_
