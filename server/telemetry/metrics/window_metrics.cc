// Flushes, steps, weights and checkpoints.
#include "server/telemetry/metrics/collect.h"

namespace lossd::telemetry {
namespace {

constexpr Metric kFlushes{
    "lossd_flushes_total", "Flushes of gradient windows, by phase reached.", kCounter, {"phase"}};
constexpr Metric kFlushSeconds{
    "lossd_flush_seconds",
    "Time of flushes by phase: freeze (BeginFlush until frozen), read (frozen until "
    "commit or abort), commit (the call).",
    kHistogram,
    {"phase"}};
constexpr Metric kSteps{
    "lossd_steps_total",
    "Steps of heads' optimizers; skipped: the gradient was not finite, and it was asked for; empty: no token "
    "was in the window.",
    kCounter,
    {"outcome"}};
constexpr Metric kStepSeconds{"lossd_step_seconds", "Time from ApplyStep until the next window is open.",
                              kHistogram};
constexpr Metric kWeightVersions{"lossd_weight_versions_total", "Weight versions published.", kCounter};
constexpr Metric kCheckpoints{"lossd_checkpoints_total",
                              "Checkpoints of heads, those of drains and starts too.",
                              kCounter,
                              {"operation", "outcome"}};
constexpr Metric kCheckpointSeconds{
    "lossd_checkpoint_seconds", "Time that they took.", kHistogram, {"operation"}};
constexpr Metric kCheckpointBytes{"lossd_checkpoint_bytes_total",
                                  "Bytes written to checkpoints; what is linked is not written.", kCounter};
constexpr Metric kLastSave{"lossd_checkpoint_last_success_timestamp_seconds",
                           "When the last save ended well, seconds since the epoch; 0: none since the start.",
                           kGauge};
constexpr Metric kStepInterval{"lossd_checkpoint_interval_steps",
                               "--checkpoint_steps: heads are saved by themselves so often; 0: never.",
                               kGauge};
constexpr Metric kStepSaves{
    "lossd_step_checkpoints_total",
    "Saves that --checkpoint_steps made due; passed_over: the one before was under way; dropped: the server "
    "drained, or the head was deleted, parked or restored.",
    kCounter,
    {"outcome"}};
constexpr Metric kStepSaveSeconds{
    "lossd_step_checkpoint_last_seconds",
    "Time of the last of them that ended well, from the end of its step; 0: none yet.", kGauge};
constexpr Metric kCheckpointDisk{
    "lossd_checkpoint_disk_bytes",
    "The disk of --checkpoint_dir: used (by what is in it), free and total (of its file system); 0 without.",
    kGauge,
    {"kind"}};

}  // namespace

void CollectWindows(const engine::Engine& engine, Exposition& out) {
  const engine::Counters& counters = engine.counters();
  out.Begin(kFlushes);
  out.Add({"begun"}, counters.flushes_begun);
  out.Add({"committed"}, counters.flushes_committed);
  out.Add({"aborted"}, counters.flushes_aborted);
  out.Begin(kFlushSeconds);
  out.Add({"freeze"}, counters.flush_freeze_seconds);
  out.Add({"read"}, counters.flush_read_seconds);
  out.Add({"commit"}, counters.flush_commit_seconds);
  out.Begin(kSteps);
  out.Add({"applied"}, counters.steps_applied);
  out.Add({"skipped"}, counters.steps_skipped);
  out.Add({"empty"}, counters.steps_empty);
  out.Only(kStepSeconds, counters.step_seconds);
  out.Only(kWeightVersions, counters.weight_versions);
  out.Begin(kCheckpoints);
  out.Add({"save", "ok"}, counters.checkpoint_saves.ok);
  out.Add({"save", "failed"}, counters.checkpoint_saves.failed);
  out.Add({"restore", "ok"}, counters.checkpoint_restores.ok);
  out.Add({"restore", "failed"}, counters.checkpoint_restores.failed);
  out.Begin(kCheckpointSeconds);
  out.Add({"save"}, counters.checkpoint_saves.seconds);
  out.Add({"restore"}, counters.checkpoint_restores.seconds);
  out.Only(kCheckpointBytes, counters.checkpoint_bytes);
  out.Only(kLastSave, counters.checkpoint_saved_at_seconds);
  out.Only(kStepInterval, engine.options().checkpoint_steps);
  out.Begin(kStepSaves);
  out.Add({"ok"}, counters.step_saves_ok);
  out.Add({"failed"}, counters.step_saves_failed);
  out.Add({"passed_over"}, counters.step_saves_passed_over);
  out.Add({"dropped"}, counters.step_saves_dropped);
  out.Only(kStepSaveSeconds, static_cast<double>(counters.step_save_milliseconds) / 1000);
  const engine::CheckpointDisk disk = engine.ReadCheckpointDisk();
  out.Begin(kCheckpointDisk);
  out.Add({"used"}, disk.used);
  out.Add({"free"}, disk.free);
  out.Add({"total"}, disk.total);
}

}  // namespace lossd::telemetry
