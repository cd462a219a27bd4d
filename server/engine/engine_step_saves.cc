// Saves of heads by themselves, behind every so many steps: EngineOptions::checkpoint_steps.
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/checkpoint/checkpoint_store.h"
#include "server/engine/common/errors.h"
#include "server/engine/engine.h"

namespace lossd::engine {

std::string StepTag(int64_t optimizer_steps) { return absl::StrCat("auto-", optimizer_steps); }

absl::StatusOr<std::shared_ptr<StepSaver>> Engine::MakeStepSaver(const HeadConfig& config,
                                                                 const HeadBackend& backend) {
  const bool saves = options_.checkpoint_steps > 0 && options_.checkpoints != nullptr &&
                     config.optimizer.kind != OptimizerKind::kNone;
  if (!saves) return nullptr;
  // Replicas are saved from where they lie.
  const std::vector<StateTensor> copied =
      options_.place.shared() ? std::vector<StateTensor>() : backend.StateTensors();
  // Beside a GPU it is the host's memory, of which the budget is none.
  MemoryBudget* const budget = device_->IsHost() ? budget_.get() : nullptr;
  return StepSaver::Create(options_.checkpoint_steps, config.name, copied, device_.get(), budget);
}

// The device thread's, which goes on at once.
void Engine::OnStepSave(std::shared_ptr<Head> head, StepSaver::Due due) {
  if (due == StepSaver::Due::kBegins) {
    step_saves_.Run([this, head = std::move(head)] {
      const MutexLock saving(checkpoint_mutex_);
      WriteStepSave(*head);
    });
    return;
  }
  ++counters_.step_saves_passed_over;
  const std::optional<StepSaver::Pending> pending = head->step_saver()->pending();
  if (!pending.has_value() || pending->passed_over != 1) return;
  options_.on_step_save({.head = head->config().name,
                         .tag = StepTag(pending->steps),
                         .outcome = StepSaveReport::Outcome::kPassedOver});
}

void Engine::WriteStepSave(Head& head) {
  StepSaver& saver = *head.step_saver();
  const std::optional<StepSaver::Pending> pending = saver.pending();
  if (!pending.has_value()) return;  // written by who held the mutex before
  const absl::Time begun = absl::Now();
  absl::StatusOr<SavedCheckpoint> saved = WriteStepSaveUncounted(head, *pending);
  const bool dropped = absl::IsCancelled(saved.status());
  if (!dropped) saved = Counted(begun, std::move(saved));
  if (saved.ok()) {
    counters_.step_save_milliseconds = absl::ToInt64Milliseconds(absl::Now() - pending->begun);
    DeleteBeyondKept(options_.checkpoint_keep > 0 ? options_.checkpoint_keep : kStepSavesKept, &*saved);
  }
  MeasureCheckpoints();
  StepSaveReport report{.head = head.config().name, .tag = StepTag(pending->steps), .why = saved.status()};
  if (saved.ok()) {
    ++counters_.step_saves_ok;
    report.deleted = std::move(saved->deleted);
    report.not_deleted = std::move(saved->not_deleted);
  } else {
    ++(dropped ? counters_.step_saves_dropped : counters_.step_saves_failed);
    report.outcome = dropped ? StepSaveReport::Outcome::kDropped : StepSaveReport::Outcome::kFailed;
  }
  report.passed_over = saver.End();
  options_.on_step_save(report);
}

absl::StatusOr<SavedCheckpoint> Engine::WriteStepSaveUncounted(Head& head,
                                                               const StepSaver::Pending& pending) {
  StepSaver& saver = *head.step_saver();
  // First: the next copy goes to the same memory, whatever becomes of this one.
  if (absl::Status copied = saver.AwaitCopy(); !copied.ok()) {
    OnDeviceFailure(copied);
    return copied;
  }
  if (absl::Status wanted = CheckStepSave(head, pending); !wanted.ok()) return wanted;
  absl::StatusOr<std::unique_ptr<CheckpointWriter>> writer =
      options_.checkpoints->Begin(head.config().name, StepTag(pending.steps));
  if (!writer.ok()) return writer.status();
  absl::StatusOr<HeadCheckpoint> checkpoint =
      options_.place.shared() ? WriteStepOfAll(head, pending, writer->get())
                              : saver.WriteTo(writer->get(), [&] { return CheckStepSave(head, pending); });
  if (!checkpoint.ok()) return checkpoint.status();
  return Commit(head, **writer, *std::move(checkpoint));
}

// Where they lie, while no window ends: if one has ended first, the step is gone.
absl::StatusOr<HeadCheckpoint> Engine::WriteStepOfAll(Head& head, const StepSaver::Pending& pending,
                                                      StateSink* sink) {
  absl::StatusOr<HeadCheckpoint> checkpoint = WriteStateOfAll(head, {}, SavedWindow::kAsItBegan, sink);
  if (absl::IsUnavailable(checkpoint.status())) return absl::CancelledError(checkpoint.status().message());
  if (!checkpoint.ok() || checkpoint->optimizer_steps == pending.steps) return checkpoint;
  return absl::CancelledError("the replicas have stepped on before they could be saved");
}

absl::Status Engine::CheckStepSave(const Head& head, const StepSaver::Pending& pending) const {
  // The drain's own save is of a later moment, and must be the newest.
  if (draining_) return absl::CancelledError("the server drains, and saves the head as it is then");
  const absl::StatusOr<std::shared_ptr<Head>> here = FindHere(head.config().name);
  if (!here.ok() || here->get() != &head) return absl::CancelledError("the head was deleted or parked");
  if (head.restores() != pending.restores) {
    return absl::CancelledError("the head was restored from a checkpoint");
  }
  return absl::OkStatus();
}

}  // namespace lossd::engine
