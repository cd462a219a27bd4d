#include "server/startup/restart.h"

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/clock.h"
#include "server/engine/common/mutex.h"
#include "server/rpc/calls/rate_limit.h"
#include "server/telemetry/common/logging.h"

namespace lossd {

using telemetry::Log;
using telemetry::LogLevel;

absl::StatusOr<Restart> Restart::Open(const std::string& folder, Restore restore) {
  Restart restart;
  if (folder.empty()) return restart;
  absl::StatusOr<std::unique_ptr<engine::CheckpointStore>> store = engine::CheckpointStore::Open(folder);
  if (!store.ok()) return store.status();
  for (const std::string& warning : (*store)->warnings()) Log(LogLevel::kWarning, warning);
  restart.store_ = *std::move(store);
  restart.restore_ = restore;
  absl::StatusOr<std::optional<engine::DrainRecord>> drain = restart.store_->ReadDrain();
  if (!drain.ok()) return drain.status();
  restart.drain_ = *std::move(drain);
  if (restore == Restore::kNo && restart.drain_.has_value()) {
    // Otherwise this server's own drain would replace the record.
    return absl::FailedPreconditionError(
        "--checkpoint_dir holds the state of a server that was drained: add --restore to go on from it, or "
        "remove drain.json from that folder to start without (tagged checkpoints stay either way)");
  }
  return restart;
}

std::string Restart::incarnation() const {
  return restore_ == Restore::kYes && drain_.has_value() ? drain_->incarnation : "";
}

absl::Status Restart::RestoreHeads(engine::Engine& engine) const {
  if (restore_ == Restore::kNo) return absl::OkStatus();
  const absl::Time begun = absl::Now();
  const absl::StatusOr<std::vector<engine::CheckpointInfo>> heads = engine.RestoreAtStart(drain_);
  if (!heads.ok()) return heads.status();
  if (heads->empty() && !drain_.has_value()) {
    Log(LogLevel::kInfo, "there are no checkpoints to restore");
    return absl::OkStatus();
  }
  if (heads->empty()) {
    Log(LogLevel::kInfo, "the replicas went back to their newest checkpoints when they met");
    return absl::OkStatus();
  }
  for (const engine::CheckpointInfo& head : *heads) {
    Log(LogLevel::kInfo, "restored a head",
        {{"head", head.head},
         {"checkpoint", head.tag},
         {"generation", head.generation},
         {"window_tokens", head.window_tokens},
         {"weight_version", head.weight_version},
         {"optimizer_steps", head.optimizer_steps},
         {"bytes", head.bytes}});
  }
  Log(LogLevel::kInfo,
      drain_.has_value() ? "going on where the last server was drained"
                         : "restored the newest checkpoints: what came after them is lost",
      {{"heads", static_cast<int64_t>(heads->size())},
       {"seconds", absl::ToDoubleSeconds(absl::Now() - begun)}});
  return absl::OkStatus();
}

absl::Status Restart::Take() {
  if (!drain_.has_value()) return absl::OkStatus();
  absl::Status taken = store_->ConsumeDrain();
  // It may have failed after the rename.
  if (!taken.ok()) GiveBack();
  return taken;
}

void Restart::GiveBack() {
  if (!drain_.has_value()) return;
  const absl::Status returned = store_->ReturnDrain();
  if (returned.ok() || absl::IsNotFound(returned)) return;  // not found: it was not taken
  Log(LogLevel::kError,
      "drain.json could not be put back: the next server begins from the newest checkpoints, with another "
      "incarnation",
      {{"reason", std::string(returned.message())}});
}

namespace {

class StepSaveLog {
 public:
  void Take(const engine::StepSaveReport& report) {
    using Outcome = engine::StepSaveReport::Outcome;
    if (!report.deleted.empty()) {
      Log(LogLevel::kDebug, "deleted checkpoints beyond --checkpoint_keep",
          {{"head", report.head}, {"tags", report.deleted}, {"because_of", report.tag}});
    }
    if (!report.not_deleted.ok()) {
      Say(LogLevel::kWarning, "a checkpoint beyond --checkpoint_keep could not be deleted", report,
          report.not_deleted);
    }
    if (report.outcome == Outcome::kFailed) {
      Say(LogLevel::kError,
          "a save of --checkpoint_steps failed: the checkpoint before it stays, and the next that is due is "
          "tried",
          report, report.why);
    } else if (report.outcome == Outcome::kDropped) {
      Say(LogLevel::kInfo, "a save of --checkpoint_steps was dropped", report, report.why);
    } else if (report.outcome == Outcome::kPassedOver) {
      Say(LogLevel::kWarning,
          "a save of --checkpoint_steps is due, and the one before is still under way: it is passed over; "
          "raise "
          "--checkpoint_steps, or give --checkpoint_dir a faster disk",
          report, absl::OkStatus());
    }
  }

 private:
  void Say(LogLevel level, const char* message, const engine::StepSaveReport& report,
           const absl::Status& why) {
    std::optional<uint64_t> left_out;
    {
      const engine::MutexLock lock(mutex_);
      left_out = lines_.Take(std::chrono::steady_clock::now());
    }
    if (!left_out.has_value()) return;
    std::vector<telemetry::LogField> fields = {{"head", report.head}, {"tag", report.tag}};
    if (!why.ok()) fields.emplace_back("reason", std::string(why.message()));
    if (*left_out > 0) fields.emplace_back("lines_left_out", *left_out);
    Log(level, message, fields);
  }

  engine::Mutex mutex_;
  rpc::RateLimit lines_ ABSL_GUARDED_BY(mutex_){10, 0.1};
};

}  // namespace

std::function<void(const engine::StepSaveReport&)> LogStepSaves() {
  return [log = std::make_shared<StepSaveLog>()](const engine::StepSaveReport& report) { log->Take(report); };
}

bool SaveForRestart(engine::Engine& engine) {
  const absl::Time begun = absl::Now();
  const absl::StatusOr<engine::DrainedHeads> heads = engine.SaveForDrain();
  if (!heads.ok()) {
    Log(LogLevel::kError, "the heads could not be saved: --restore will find older checkpoints",
        {{"reason", std::string(heads.status().message())}});
    return false;
  }
  for (const auto& [head, status] : heads->failed) {
    Log(LogLevel::kError, "a head could not be saved: what came after its newest checkpoint is lost",
        {{"head", head}, {"reason", std::string(status.message())}});
  }
  int64_t bytes = 0;
  int64_t written = 0;
  for (const engine::SavedCheckpoint& head : heads->saved) {
    bytes += head.info.bytes;
    written += head.bytes_written;
  }
  const bool complete = heads->failed.empty();
  Log(complete ? LogLevel::kInfo : LogLevel::kError,
      complete ? "saved the heads for the next server"
               : "the drain failed: the next server goes back with the heads named above",
      {{"heads", static_cast<int64_t>(heads->saved.size())},
       {"heads_failed", static_cast<int64_t>(heads->failed.size())},
       {"bytes", bytes},
       {"bytes_written", written},
       {"seconds", absl::ToDoubleSeconds(absl::Now() - begun)}});
  return complete;
}

}  // namespace lossd
