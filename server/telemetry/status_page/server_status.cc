#include "server/telemetry/status_page/server_status.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/time/clock.h"
#include "server/telemetry/common/age.h"
#include "server/version.h"

namespace lossd::telemetry {
namespace {

using Json = nlohmann::ordered_json;

std::vector<HeadStatus> ReadHeads(const engine::Engine& engine, engine::MemoryUsage& usage) {
  std::map<std::string, int64_t> staging = engine.StagingByHead();
  std::vector<HeadStatus> heads;
  for (const std::shared_ptr<engine::Head>& head : engine.Heads()) {
    const engine::HeadConfig& config = head->config();
    HeadStatus status;
    status.name = config.name;
    status.vocab_size = config.vocab_size;
    status.hidden_size = config.hidden_size;
    status.weight_type = kernels::Name(config.weight_type);
    status.frozen = config.weight_gradients == engine::WeightGradients::kFrozen;
    status.snapshot = head->Snapshot();
    status.tokens = head->counters().tokens;
    status.loss_tokens = head->counters().loss_tokens;
    status.loss = head->counters().loss;
    status.gradient_norm = head->counters().gradient_norm;
    status.queued_chunks = head->counters().queued_chunks;
    status.staging_bytes = staging[config.name];
    status.memory = usage.heads[config.name];
    status.sessions = head->Sessions();
    std::sort(status.sessions.begin(), status.sessions.end(),
              [](const auto& a, const auto& b) { return a.number < b.number; });
    heads.push_back(std::move(status));
  }
  return heads;
}

// Null if there is none.
Json AgeOrNull(absl::Time now, const std::optional<absl::Time>& since) {
  return since.has_value() ? Json(AgeAt(now, *since)) : Json();
}

std::string Text(absl::Time time) {
  return absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", time, absl::UTCTimeZone());
}

Json ToJson(const engine::MemoryPlan& plan) {
  Json items = Json::array();
  for (const engine::MemoryItem& item : plan) {
    items.push_back({{"purpose", item.purpose}, {"place", engine::Name(item.place)}, {"bytes", item.bytes}});
  }
  return items;
}

Json ToJson(const engine::SessionSnapshot& session) {
  return {{"number", session.number},
          {"rank", session.rank},
          {"lanes", session.lanes},
          {"streams", session.streams},
          {"accepted", session.accepted},
          {"applied", session.applied},
          {"idle_seconds", absl::ToDoubleSeconds(session.idle)}};
}

Json ToJson(const HeadStatus& head, absl::Time now) {
  const engine::HeadSnapshot& snapshot = head.snapshot;
  Json sessions = Json::array();
  for (const engine::SessionSnapshot& session : head.sessions) sessions.push_back(ToJson(session));
  return {{"name", head.name},
          {"vocab_size", head.vocab_size},
          {"hidden_size", head.hidden_size},
          {"weight_dtype", head.weight_type},
          {"frozen", head.frozen},
          {"generation", snapshot.generation},
          {"weight_version", snapshot.weight_version},
          {"optimizer_steps", snapshot.optimizer_steps},
          {"steps_since_checkpoint",
           snapshot.steps_since_checkpoint.has_value() ? Json(*snapshot.steps_since_checkpoint) : Json()},
          {"window_state", engine::Name(snapshot.window_state)},
          {"window_tokens", snapshot.window_tokens},
          {"window_age_seconds", AgeOrNull(now, snapshot.window_since)},
          {"flush_age_seconds", AgeOrNull(now, snapshot.flush_since)},
          {"open_sessions", snapshot.open_sessions},
          {"queued_chunks", head.queued_chunks},
          {"tokens", head.tokens},
          {"loss", HasLoss(head) ? Json(head.loss) : Json()},
          {"gradient_norm", head.gradient_norm},
          {"staging_reserved_bytes", head.staging_bytes},
          {"memory", ToJson(head.memory)},
          {"sessions", std::move(sessions)}};
}

Json ToJson(const engine::RankReport& rank, bool stuck) {
  const engine::RankActivity& activity = rank.activity;
  Json waited = Json::object();
  for (const kernels::Exchange exchange : kernels::kExchanges) {
    waited[kernels::Name(exchange)] = activity.waits[static_cast<size_t>(exchange)].sum();
  }
  Json heads = Json::object();
  for (const auto& [head, plan] : rank.memory.heads) heads[head] = ToJson(plan);
  const bool executes = !activity.command.empty();
  return {{"device", rank.device},
          {"device_description", rank.description},
          {"pci_bus_id", rank.pci_bus_id},
          {"host", rank.host},
          {"limit_bytes", rank.memory_limit},
          {"reserved_bytes", rank.memory.reserved},
          {"reserved_peak_bytes", rank.memory_peak},
          {"heads", std::move(heads)},
          {"shared", ToJson(rank.memory.shared)},
          {"device_total_bytes", rank.totals.total_bytes},
          {"device_free_bytes", rank.totals.free_bytes},
          {"process_resident_bytes", rank.process.resident_bytes},
          {"process_peak_bytes", rank.process.peak_bytes},
          {"uptime_seconds", activity.uptime_seconds},
          {"waited_seconds", std::move(waited)},
          {"command", executes ? Json(activity.command) : Json()},
          {"command_seconds", executes ? Json(activity.command_seconds) : Json()},
          {"waits_at", activity.waits_at.has_value() ? Json(kernels::Name(*activity.waits_at)) : Json()},
          {"stuck", stuck}};
}

// Null if there is none.
Json GroupJson(const engine::GroupReport& group) {
  if (!group.IsGroup()) return {};
  Json ranks = Json::array();
  for (const engine::RankReport& rank : group.ranks) ranks.push_back(ToJson(rank, group.IsStuck(rank)));
  return {{"epoch", group.epoch}, {"ranks", std::move(ranks)}};
}

// Null if there is none.
Json ReplicasJson(const engine::ReplicaReport& set) {
  if (!set.IsSet()) return {};
  Json members = Json::array();
  for (const engine::ReplicaReport::Answers& answers : set.replicas) {
    Json late = Json::object();
    for (const engine::ReplicaPhase phase : engine::kReplicaPhases) {
      late[Name(phase)] = answers.late_seconds[static_cast<size_t>(phase)];
    }
    members.push_back({{"sessions_placed", answers.sessions_placed}, {"late_seconds", std::move(late)}});
  }
  return {{"name", set.name},        {"replica", set.place.replica}, {"replicas", set.place.replicas},
          {"whole", set.whole.ok()}, {"why_not", set.WhyNot()},      {"epochs", set.epochs},
          {"returns", set.returns},  {"members", std::move(members)}};
}

Json MemoryJson(const ServerStatus& status) {
  return {
      {"limit_bytes", status.memory_limit},
      {"reserved_bytes", status.memory_reserved},
      {"reserved_peak_bytes", status.memory_peak},
      {"reserved", ToJson(status.memory)},
      {"device_total_bytes", status.device_memory.total_bytes},
      {"device_free_bytes", status.device_memory.free_bytes},
      {"pinned_pool_capacity_bytes", status.pinned_pool.capacity},
      {"pinned_pool_used_bytes", status.pinned_pool.used},
      {"staging_reserved_bytes", status.staging_reserved},
      {"staging_limit_bytes", status.staging_limit},
      {"credit_bytes", status.credit_bytes},
      {"process_resident_bytes", status.process.resident_bytes},
      {"process_peak_bytes", status.process.peak_bytes},
  };
}

}  // namespace

bool HasLoss(const HeadStatus& head) { return head.loss_tokens > 0 || !std::isfinite(head.loss); }

ServerStatus ReadStatus(const engine::Engine& engine, const ServiceCounters& counters,
                        const Throughput& throughput) {
  engine::MemoryUsage usage = engine.budget().Usage();
  ServerStatus status;
  status.now = absl::Now();
  status.version = kVersion;
  status.device = engine.device().name();
  status.device_description = engine.device().description();
  status.incarnation = engine.incarnation();
  status.started = engine.started();
  status.serving = counters.serving;
  status.draining = engine.draining();
  status.heads = ReadHeads(engine, usage);
  for (const engine::HeadInfo& head : engine.ParkedHeads()) {
    status.parked.emplace(head.config.name, head.parked_bytes);
  }
  status.sessions = engine.sessions();
  status.streams = engine.counters().live_streams;
  status.queued_chunks = engine.counters().queued_chunks;
  status.credit_bytes = engine.counters().credit_bytes;
  status.staging_reserved = engine.staging_reserved();
  status.staging_limit = engine.options().staging_bytes;
  status.memory_limit = engine.budget().limit();
  status.memory_peak = engine.budget().peak();
  status.memory = engine.ReservedMemory();
  status.memory_reserved = engine::TotalBytes(status.memory);
  std::erase_if(status.memory, [](const engine::MemoryItem& item) { return item.bytes == 0; });
  status.device_memory = engine.device().Totals();
  status.pinned_pool = engine.device().RegisteredUsage();
  status.process = engine::ReadProcessMemory();
  status.group = engine.Group();
  status.replicas = engine.replicas().Read();
  status.throughput = throughput.Read();
  for (const auto& method : counters.rpcs.methods()) {
    if (const int64_t in_flight = method->in_flight; in_flight > 0) {
      status.calls.push_back({method->name, in_flight});
    }
  }
  status.errors = counters.errors.Read();
  return status;
}

std::string StatusJson(const ServerStatus& status) {
  Json heads = Json::array();
  for (const HeadStatus& head : status.heads) heads.push_back(ToJson(head, status.now));
  Json calls = Json::object();
  for (const MethodStatus& call : status.calls) calls[call.method] = call.in_flight;
  Json errors = Json::array();
  for (const RecentError& error : status.errors) {
    errors.push_back({{"time", Text(error.time)},
                      {"method", error.method},
                      {"code", StatusCodeName(error.code)},
                      {"message", error.message},
                      {"trace_id", error.trace_id}});
  }
  const WorkRates& rates = status.throughput.rates;
  const Json json = {{"time", Text(status.now)},
                     {"version", status.version},
                     {"device", status.device},
                     {"device_description", status.device_description},
                     {"incarnation", WithoutIds(status.incarnation)},
                     {"uptime_seconds", AgeAt(status.now, status.started)},
                     {"serving", status.serving},
                     {"draining", status.draining},
                     {"sessions", status.sessions},
                     {"streams", status.streams},
                     {"queued_chunks", status.queued_chunks},
                     {"per_second",
                      {{"tokens", rates.tokens},
                       {"chunks", rates.chunks},
                       {"payload_bytes_in", rates.bytes_in},
                       {"payload_bytes_out", rates.bytes_out}}},
                     {"memory", MemoryJson(status)},
                     {"group", GroupJson(status.group)},
                     {"replicas", ReplicasJson(status.replicas)},
                     {"heads", std::move(heads)},
                     {"parked", status.parked},
                     {"rpcs_in_flight", std::move(calls)},
                     {"recent_errors", std::move(errors)}};
  // A message may have bytes of a client's that are no UTF-8. Numbers that are not finite become null.
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace lossd::telemetry
