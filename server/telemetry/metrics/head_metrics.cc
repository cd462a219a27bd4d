// Metrics of each head. Each series has at most --max_heads values, and those of heads that are being
// deleted.
#include <array>
#include <memory>
#include <utility>

#include "absl/time/clock.h"
#include "server/telemetry/common/age.h"
#include "server/telemetry/metrics/collect.h"

namespace lossd::telemetry {
namespace {

double Count(const engine::Counter& counter) { return static_cast<double>(counter.load()); }

constexpr Metric kGeneration{"lossd_head_generation", "Generation of the open window.", kGauge, {"head"}};
constexpr Metric kWeightVersion{
    "lossd_head_weight_version", "Version of the weights; 0: none yet.", kGauge, {"head"}};
constexpr Metric kStepsSinceCheckpoint{
    "lossd_head_steps_since_checkpoint",
    "Steps of the optimizer since the newest checkpoint that was saved of the head or that it was restored "
    "from; 0 where no checkpoints are kept.",
    kGauge,
    {"head"}};
constexpr Metric kWindowTokens{"lossd_head_window_tokens", "Valid tokens in the window.", kGauge, {"head"}};
constexpr Metric kWindowAge{"lossd_head_window_age_seconds",
                            "Time since the window took its first chunk; 0: it is empty.",
                            kGauge,
                            {"head"}};
constexpr Metric kFlushPhase{"lossd_head_flush_phase",
                             "1 for the phase the window is in, 0 for the others.",
                             kGauge,
                             {"head", "phase"}};
constexpr Metric kFlushAge{
    "lossd_head_flush_age_seconds", "Time since BeginFlush; 0: no flush is under way.", kGauge, {"head"}};
constexpr Metric kSessions{"lossd_head_sessions", "Open sessions.", kGauge, {"head"}};
// What a head counts: a line here is all that one more counter takes.
struct HeadCounter {
  Metric metric;
  double (*value)(const engine::HeadCounters& counters);
};

const std::array kHeadCounters = {
    HeadCounter{{"lossd_head_loss",
                 "Mean loss per valid token of the last batch that trained, in nats; 0: none yet.",
                 kGauge,
                 {"head"}},
                [](const auto& counters) { return counters.loss.load(); }},
    HeadCounter{{"lossd_head_loss_nats_total",
                 "Sum of the finite losses of valid tokens that train.",
                 kCounter,
                 {"head"}},
                [](const auto& counters) { return counters.loss_nats.load(); }},
    HeadCounter{
        {"lossd_head_loss_tokens_total", "Valid tokens whose losses that sum has.", kCounter, {"head"}},
        [](const auto& counters) { return Count(counters.loss_tokens); }},
    HeadCounter{{"lossd_head_evaluation_loss_nats_total",
                 "Sum of the finite losses of valid tokens whose losses alone were wanted.",
                 kCounter,
                 {"head"}},
                [](const auto& counters) { return counters.evaluation_nats.load(); }},
    HeadCounter{{"lossd_head_evaluation_loss_tokens_total",
                 "Valid tokens whose losses that sum has.",
                 kCounter,
                 {"head"}},
                [](const auto& counters) { return Count(counters.evaluation_tokens); }},
    HeadCounter{{"lossd_head_tokens_total", "Valid tokens.", kCounter, {"head"}},
                [](const auto& counters) { return Count(counters.tokens); }},
    HeadCounter{{"lossd_head_rows_skipped_total",
                 "Valid tokens that nothing was computed of: all their factors are 0.",
                 kCounter,
                 {"head"}},
                [](const auto& counters) { return Count(counters.rows_skipped); }},
    HeadCounter{{"lossd_head_gradient_norm",
                 "Frobenius norm of dW as a step, a flush or GradientStats last told it; 0: none yet.",
                 kGauge,
                 {"head"}},
                [](const auto& counters) { return counters.gradient_norm.load(); }},
    HeadCounter{{"lossd_head_queued_chunks", "Chunks accepted and not yet started.", kGauge, {"head"}},
                [](const auto& counters) { return static_cast<double>(counters.queued_chunks.load()); }},
    HeadCounter{{"lossd_head_chunks_rejected_total",
                 "Chunks answered with an error inside their streams.",
                 kCounter,
                 {"head"}},
                [](const auto& counters) { return Count(counters.chunks_rejected); }},
};

constexpr Metric kMemory{"lossd_head_memory_reserved_bytes",
                         "The part of lossd_memory_reserved_bytes that is a head's.",
                         kGauge,
                         {"head", "purpose", "place"}};
constexpr Metric kStaging{"lossd_head_staging_reserved_bytes",
                          "Credits of a head's open sessions, and memory for what they hold.",
                          kGauge,
                          {"head"}};

struct HeadAtOnce {
  std::shared_ptr<engine::Head> head;
  engine::HeadSnapshot snapshot;
};

// Adds the metric with one value for each head.
void AddEach(const Metric& metric, const std::vector<HeadAtOnce>& heads, Exposition& out, auto value) {
  out.Begin(metric);
  for (const HeadAtOnce& each : heads) out.Add({each.head->config().name}, value(each));
}

void CollectCounters(const std::vector<HeadAtOnce>& heads, Exposition& out) {
  for (const HeadCounter& counter : kHeadCounters) {
    AddEach(counter.metric, heads, out,
            [&counter](const HeadAtOnce& each) { return counter.value(each.head->counters()); });
  }
}

void CollectWindowsOf(const std::vector<HeadAtOnce>& heads, Exposition& out) {
  const absl::Time now = absl::Now();
  const auto age = [now](const std::optional<absl::Time>& since) {
    return since.has_value() ? AgeAt(now, *since) : 0;
  };
  AddEach(kGeneration, heads, out, [](const HeadAtOnce& each) { return each.snapshot.generation; });
  AddEach(kWeightVersion, heads, out, [](const HeadAtOnce& each) { return each.snapshot.weight_version; });
  AddEach(kWindowTokens, heads, out, [](const HeadAtOnce& each) { return each.snapshot.window_tokens; });
  AddEach(kWindowAge, heads, out, [&](const HeadAtOnce& each) { return age(each.snapshot.window_since); });
  AddEach(kFlushAge, heads, out, [&](const HeadAtOnce& each) { return age(each.snapshot.flush_since); });
  AddEach(kSessions, heads, out, [](const HeadAtOnce& each) { return each.snapshot.open_sessions; });
  AddEach(kStepsSinceCheckpoint, heads, out,
          [](const HeadAtOnce& each) { return each.snapshot.steps_since_checkpoint.value_or(0); });
  out.Begin(kFlushPhase);
  for (const auto& [head, snapshot] : heads) {
    for (const engine::WindowState state : engine::kWindowStates) {
      out.Add({head->config().name, engine::Name(state)}, snapshot.window_state == state ? 1 : 0);
    }
  }
}

}  // namespace

void CollectHeads(const engine::Engine& engine, const engine::GroupReport& group, Exposition& out) {
  std::vector<HeadAtOnce> heads;
  for (std::shared_ptr<engine::Head>& head : engine.Heads()) {
    const engine::HeadSnapshot snapshot = head->Snapshot();
    heads.push_back({std::move(head), snapshot});
  }
  CollectCounters(heads, out);
  CollectWindowsOf(heads, out);
  out.OfEachRank(kMemory, group, [&out](const engine::RankReport& rank) {
    for (const auto& [head, items] : rank.memory.heads) {
      for (const engine::MemoryItem& item : items) {
        out.Add({head, item.purpose, engine::Name(item.place)}, item.bytes);
      }
    }
  });
  out.Begin(kStaging);
  for (const auto& [head, bytes] : engine.StagingByHead()) out.Add({head}, bytes);
}

}  // namespace lossd::telemetry
