#include "server/rpc/services/status_service.h"

#include <algorithm>
#include <memory>
#include <string>

#include "absl/time/clock.h"
#include "proto/wire/features.h"
#include "server/engine/memory/process_memory.h"
#include "server/rpc/convert/convert.h"
#include "server/version.h"

namespace lossd::rpc {
namespace {

void AddRanks(const engine::Engine& engine, v1::GetStatusResponse* response) {
  if (!engine.device().Group().IsGroup()) return;  // nothing is asked of one device
  const engine::GroupReport group = engine.Group();
  response->set_group_epoch(group.epoch);
  for (const engine::RankReport& rank : group.ranks) {
    const int32_t number = response->ranks_size();
    v1::RankStatus& status = *response->add_ranks();
    status.set_rank(number);
    status.set_device(rank.device);
    status.set_device_description(rank.description);
    status.set_pci_bus_id(rank.pci_bus_id);
    status.set_host(rank.host);
    status.set_memory_limit_bytes(rank.memory_limit);
    status.set_memory_reserved_bytes(rank.memory.reserved);
    status.set_uptime_seconds(rank.activity.uptime_seconds);
    status.set_waited_seconds(rank.activity.waited_seconds());
    status.set_command(rank.activity.command);
    status.set_command_seconds(rank.activity.command_seconds);
    if (rank.activity.waits_at.has_value()) status.set_waits_at(kernels::Name(*rank.activity.waits_at));
    status.set_stuck(group.IsStuck(rank));
  }
}

void AddReplicas(const engine::Engine& engine, v1::GetStatusResponse* response) {
  const engine::ReplicaReport report = engine.replicas().Read();
  if (!report.IsSet()) return;
  response->set_history(report.history);
  v1::ReplicaSetStatus& status = *response->mutable_replicas();
  status.set_name(report.name);
  status.set_replica(report.place.replica);
  status.set_replicas(report.place.replicas);
  status.set_whole(report.whole.ok());
  status.set_why_not(report.WhyNot());
  status.set_epochs(report.epochs);
  status.set_returns(report.returns);
  for (const engine::ReplicaReport::Answers& answers : report.replicas) {
    const int32_t number = status.members_size();
    v1::ReplicaStatus& replica = *status.add_members();
    replica.set_replica(number);
    replica.set_sessions_placed(answers.sessions_placed);
    for (const engine::ReplicaPhase phase : engine::kReplicaPhases) {
      v1::ReplicaLateness& late = *replica.add_late();
      late.set_phase(Name(phase));
      late.set_seconds(answers.late_seconds[static_cast<size_t>(phase)]);
    }
  }
}

void AddRanks(const engine::Engine& engine, v1::GetMemoryResponse* response) {
  const engine::GroupReport group = engine.Group();
  if (!group.IsGroup()) return;
  for (const engine::RankReport& rank : group.ranks) {
    const int32_t number = response->ranks_size();
    v1::RankMemory& memory = *response->add_ranks();
    memory.set_rank(number);
    memory.set_limit_bytes(rank.memory_limit);
    memory.set_reserved_bytes(rank.memory.reserved);
    memory.set_process_resident_bytes(rank.process.resident_bytes);
    memory.set_process_peak_bytes(rank.process.peak_bytes);
    for (const auto& [head, items] : rank.memory.heads) {
      v1::HeadMemory& of_head = *memory.add_heads();
      of_head.set_head(head);
      for (const engine::MemoryItem& item : items) ToProto(item, of_head.add_items());
    }
    for (const engine::MemoryItem& item : rank.memory.shared) ToProto(item, memory.add_shared());
    memory.set_device_total_bytes(rank.totals.total_bytes);
    memory.set_device_free_bytes(rank.totals.free_bytes);
  }
}

}  // namespace

grpc::ServerUnaryReactor* StatusService::GetStatus(grpc::CallbackServerContext* context,
                                                   const v1::GetStatusRequest* /*request*/,
                                                   v1::GetStatusResponse* response) {
  const engine::Counters& counters = engine_->counters();
  response->set_version(kVersion);
  response->set_incarnation(engine_->incarnation());
  response->set_state(engine_->draining() ? v1::SERVER_STATE_DRAINING : v1::SERVER_STATE_SERVING);
  response->set_device(engine_->device().name());
  response->set_device_description(engine_->device().description());
  response->set_uptime_seconds(absl::ToDoubleSeconds(absl::Now() - engine_->started()));
  response->set_chunks_applied(counters.chunks_accumulated);
  response->set_tokens_applied(counters.tokens_valid);
  response->set_queued_chunks(counters.queued_chunks);
  for (const std::shared_ptr<engine::Head>& head : engine_->Heads()) {
    ToProto(head->Info(), response->add_heads());
  }
  for (const std::string& feature : wire::KnownFeatures()) response->add_features(feature);
  AddRanks(*engine_, response);
  AddReplicas(*engine_, response);
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

grpc::ServerUnaryReactor* StatusService::GetMemory(grpc::CallbackServerContext* context,
                                                   const v1::GetMemoryRequest* /*request*/,
                                                   v1::GetMemoryResponse* response) {
  const engine::ProcessMemory process = engine::ReadProcessMemory();
  // All of one moment, so that the parts add up.
  engine::MemoryUsage usage = engine_->budget().Usage();
  response->set_limit_bytes(engine_->budget().limit());
  response->set_reserved_bytes(usage.reserved);
  response->set_head_quota_bytes(engine_->budget().head_quota());
  response->set_process_resident_bytes(process.resident_bytes);
  response->set_process_peak_bytes(process.peak_bytes);
  const engine::RowStreamUsage rows = engine_->row_streams().Total();
  response->set_staging_limit_bytes(engine_->options().staging_bytes);
  response->set_staging_reserved_bytes(engine_->staging_reserved());
  response->set_row_streams(rows.streams);
  response->set_row_stream_bytes(rows.bytes);
  for (const auto& [head, items] : usage.heads) {
    v1::HeadMemory* memory = response->add_heads();
    memory->set_head(head);
    const engine::RowStreamUsage of_head = engine_->row_streams().Of(head);
    memory->set_row_streams(of_head.streams);
    memory->set_row_stream_bytes(of_head.bytes);
    for (const engine::MemoryItem& item : items) ToProto(item, memory->add_items());
  }
  const auto is_regions = [](const engine::MemoryItem& item) { return item.purpose == "regions"; };
  if (engine_->regions().enabled() && std::none_of(usage.shared.begin(), usage.shared.end(), is_regions)) {
    usage.shared.push_back({"regions", 0});
  }
  for (const engine::MemoryItem& item : usage.shared) ToProto(item, response->add_shared());
  const engine::DeviceTotals totals = engine_->device().Totals();
  response->set_device_total_bytes(totals.total_bytes);
  response->set_device_free_bytes(totals.free_bytes);
  AddRanks(*engine_, response);
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

grpc::ServerUnaryReactor* StatusService::Drain(grpc::CallbackServerContext* context,
                                               const v1::DrainRequest* /*request*/,
                                               v1::DrainResponse* /*response*/) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  if (on_drain_ == nullptr) {
    reactor->Finish({grpc::StatusCode::UNIMPLEMENTED, "this server is drained by its process alone"});
    return reactor;
  }
  engine_->BeginDrain();
  on_drain_();
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

}  // namespace lossd::rpc
