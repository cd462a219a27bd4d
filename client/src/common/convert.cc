#include "client/src/common/convert.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace lossd::internal {
namespace {

std::vector<MemoryItem> FromProto(const google::protobuf::RepeatedPtrField<v1::MemoryItem>& items) {
  std::vector<MemoryItem> result;
  result.reserve(static_cast<size_t>(items.size()));
  for (const auto& item : items) result.push_back({.purpose = item.purpose(), .bytes = item.bytes()});
  return result;
}

ServerMemory::Head FromProto(const v1::HeadMemory& head) {
  return {.name = head.head(),
          .items = FromProto(head.items()),
          .row_streams = head.row_streams(),
          .row_stream_bytes = head.row_stream_bytes()};
}

WindowState FromProto(v1::WindowState state) {
  switch (state) {
    case v1::WINDOW_STATE_FREEZING:
      return WindowState::kFreezing;
    case v1::WINDOW_STATE_FROZEN:
      return WindowState::kFrozen;
    default:
      return WindowState::kOpen;
  }
}

ReplicaSetStatus FromProto(const v1::ReplicaSetStatus& proto) {
  ReplicaSetStatus status{.name = proto.name(),
                          .replica = proto.replica(),
                          .replicas = proto.replicas(),
                          .whole = proto.whole(),
                          .why_not = proto.why_not(),
                          .epochs = proto.epochs(),
                          .returns = proto.returns(),
                          .members = {}};
  for (const v1::ReplicaStatus& replica : proto.members()) {
    ReplicaSetStatus::Replica& added = status.members.emplace_back();
    added.replica = replica.replica();
    added.sessions_placed = replica.sessions_placed();
    for (const v1::ReplicaLateness& late : replica.late()) {
      added.late_seconds.emplace_back(late.phase(), late.seconds());
    }
  }
  return status;
}

}  // namespace

v1::DataType ToProto(DataType type) {
  switch (type) {
    case DataType::kFloat32:
      return v1::DATA_TYPE_FLOAT32;
    case DataType::kBFloat16:
      return v1::DATA_TYPE_BFLOAT16;
    case DataType::kFloat16:
      return v1::DATA_TYPE_FLOAT16;
  }
  return v1::DATA_TYPE_UNSPECIFIED;
}

absl::StatusOr<DataType> FromProto(v1::DataType type) {
  switch (type) {
    case v1::DATA_TYPE_FLOAT32:
      return DataType::kFloat32;
    case v1::DATA_TYPE_BFLOAT16:
      return DataType::kBFloat16;
    case v1::DATA_TYPE_FLOAT16:
      return DataType::kFloat16;
    default:
      return absl::InternalError(absl::StrCat("the server named data type ", static_cast<int>(type),
                                              ", which this client does not know"));
  }
}

namespace {

v1::OptimizerKind ToProto(OptimizerKind kind) {
  switch (kind) {
    case OptimizerKind::kNone:
      return v1::OPTIMIZER_KIND_UNSPECIFIED;
    case OptimizerKind::kSgd:
      return v1::OPTIMIZER_KIND_SGD;
    case OptimizerKind::kAdam:
      return v1::OPTIMIZER_KIND_ADAM;
    case OptimizerKind::kAdamW:
      return v1::OPTIMIZER_KIND_ADAMW;
  }
  return v1::OPTIMIZER_KIND_UNSPECIFIED;
}

OptimizerKind FromProto(v1::OptimizerKind kind) {
  switch (kind) {
    case v1::OPTIMIZER_KIND_SGD:
      return OptimizerKind::kSgd;
    case v1::OPTIMIZER_KIND_ADAM:
      return OptimizerKind::kAdam;
    case v1::OPTIMIZER_KIND_ADAMW:
      return OptimizerKind::kAdamW;
    default:
      return OptimizerKind::kNone;
  }
}

void ToProto(const OptimizerConfig& config, v1::Optimizer* optimizer) {
  optimizer->set_kind(ToProto(config.kind));
  if (config.weight_decay.has_value()) optimizer->set_weight_decay(*config.weight_decay);
  optimizer->set_momentum(config.momentum);
  optimizer->set_dampening(config.dampening);
  optimizer->set_nesterov(config.nesterov);
  optimizer->set_beta1(config.beta1);
  optimizer->set_beta2(config.beta2);
  optimizer->set_eps(config.eps);
  optimizer->set_maximize(config.maximize);
}

OptimizerConfig FromProto(const v1::Optimizer& optimizer) {
  OptimizerConfig config{.kind = FromProto(optimizer.kind())};
  if (config.kind == OptimizerKind::kNone) return config;
  config.weight_decay = optimizer.weight_decay();  // a server tells what counts
  config.momentum = optimizer.momentum();
  config.dampening = optimizer.dampening();
  config.nesterov = optimizer.nesterov();
  config.beta1 = optimizer.beta1();
  config.beta2 = optimizer.beta2();
  config.eps = optimizer.eps();
  config.maximize = optimizer.maximize();
  return config;
}

}  // namespace

v1::HeadConfig ToProto(const HeadConfig& config) {
  v1::HeadConfig result;
  result.set_name(config.name);
  result.set_vocab_size(config.vocab_size);
  result.set_hidden_size(config.hidden_size);
  result.set_weight_dtype(ToProto(config.weight_type));
  result.set_logit_scale(config.logit_scale);
  result.set_softcap(config.softcap);
  result.set_frozen(config.frozen);
  result.set_bias(config.bias);
  if (config.optimizer.kind != OptimizerKind::kNone) ToProto(config.optimizer, result.mutable_optimizer());
  result.set_master_weights(config.master_weights);
  result.set_double_buffer(config.double_buffer);
  result.set_fixed_segments(config.fixed_segments);
  result.set_held_bytes(config.held_bytes);
  return result;
}

v1::CreateHeadRequest ToRequest(const HeadConfig& config) {
  v1::CreateHeadRequest request;
  *request.mutable_config() = ToProto(config);
  const auto weights = std::as_bytes(std::span(config.class_weights));
  request.mutable_class_weights()->assign(reinterpret_cast<const char*>(weights.data()), weights.size());
  return request;
}

absl::StatusOr<HeadConfig> FromProto(const v1::HeadConfig& config) {
  const auto type = FromProto(config.weight_dtype());
  if (!type.ok()) return type.status();
  return HeadConfig{.name = config.name(),
                    .vocab_size = config.vocab_size(),
                    .hidden_size = config.hidden_size(),
                    .weight_type = *type,
                    .logit_scale = config.logit_scale() == 0 ? 1 : config.logit_scale(),
                    .softcap = config.softcap(),
                    .frozen = config.frozen(),
                    .bias = config.bias(),
                    .optimizer = FromProto(config.optimizer()),
                    .master_weights = config.master_weights(),
                    .double_buffer = config.double_buffer(),
                    .fixed_segments = config.fixed_segments(),
                    .held_bytes = config.held_bytes()};
}

CheckpointInfo FromProto(const v1::Checkpoint& checkpoint) {
  return {
      .head = checkpoint.head(),
      .tag = checkpoint.tag(),
      .generation = checkpoint.generation(),
      .weight_version = checkpoint.weight_version(),
      .optimizer_steps = checkpoint.optimizer_steps(),
      .window_tokens = checkpoint.window_tokens(),
      .bytes = checkpoint.bytes(),
      .saved_at = std::chrono::system_clock::time_point(std::chrono::microseconds(checkpoint.saved_at()))};
}

absl::StatusOr<HeadInfo> FromProto(const v1::Head& head) {
  auto config = FromProto(head.config());
  if (!config.ok()) return config.status();
  config->has_class_weights = head.has_class_weights();
  HeadInfo info{.config = *std::move(config),
                .weight_version = head.weight_version(),
                .generation = head.generation(),
                .window_state = FromProto(head.window_state()),
                .window_tokens = head.window_tokens(),
                .sessions = {},
                .open_sessions = head.open_sessions(),
                .memory = FromProto(head.memory()),
                .optimizer_steps = head.optimizer_steps(),
                .staged_rows = head.staged_rows(),
                .flush_id = head.flush_id(),
                .flush_seconds = head.flush_seconds(),
                .parked_bytes = head.parked_bytes()};
  if (head.has_steps_since_checkpoint()) info.steps_since_checkpoint = head.steps_since_checkpoint();
  for (const auto& session : head.sessions()) info.sessions.push_back(FromProto(session));
  return info;
}

absl::StatusOr<ServerStatus> FromProto(const v1::GetStatusResponse& response) {
  ServerStatus status{.version = response.version(),
                      .incarnation = response.incarnation(),
                      .draining = response.state() == v1::SERVER_STATE_DRAINING,
                      .device = response.device(),
                      .device_description = response.device_description(),
                      .uptime_seconds = response.uptime_seconds(),
                      .chunks_applied = response.chunks_applied(),
                      .tokens_applied = response.tokens_applied(),
                      .queued_chunks = response.queued_chunks(),
                      .heads = {},
                      .features = {response.features().begin(), response.features().end()},
                      .ranks = {},
                      .group_epoch = response.group_epoch(),
                      .replicas = {}};
  for (const auto& rank : response.ranks()) {
    status.ranks.push_back({.rank = rank.rank(),
                            .device = rank.device(),
                            .device_description = rank.device_description(),
                            .pci_bus_id = rank.pci_bus_id(),
                            .host = rank.host(),
                            .memory_limit_bytes = rank.memory_limit_bytes(),
                            .memory_reserved_bytes = rank.memory_reserved_bytes(),
                            .uptime_seconds = rank.uptime_seconds(),
                            .waited_seconds = rank.waited_seconds(),
                            .command = rank.command(),
                            .command_seconds = rank.command_seconds(),
                            .waits_at = rank.waits_at(),
                            .stuck = rank.stuck()});
  }
  if (response.has_replicas()) {
    status.replicas = FromProto(response.replicas());
    status.replicas.history = response.history();
  }
  for (const auto& head : response.heads()) {
    auto info = FromProto(head);
    if (!info.ok()) return info.status();
    status.heads.push_back(*std::move(info));
  }
  return status;
}

ServerMemory FromProto(const v1::GetMemoryResponse& response) {
  ServerMemory memory{.limit_bytes = response.limit_bytes(),
                      .reserved_bytes = response.reserved_bytes(),
                      .process_resident_bytes = response.process_resident_bytes(),
                      .process_peak_bytes = response.process_peak_bytes(),
                      .heads = {},
                      .shared = FromProto(response.shared()),
                      .device_total_bytes = response.device_total_bytes(),
                      .device_free_bytes = response.device_free_bytes(),
                      .head_quota_bytes = response.head_quota_bytes(),
                      .staging_limit_bytes = response.staging_limit_bytes(),
                      .staging_reserved_bytes = response.staging_reserved_bytes(),
                      .row_streams = response.row_streams(),
                      .row_stream_bytes = response.row_stream_bytes(),
                      .ranks = {}};
  for (const auto& head : response.heads()) memory.heads.push_back(FromProto(head));
  for (const auto& rank : response.ranks()) {
    ServerMemory::Rank& added = memory.ranks.emplace_back();
    added = {.rank = rank.rank(),
             .limit_bytes = rank.limit_bytes(),
             .reserved_bytes = rank.reserved_bytes(),
             .process_resident_bytes = rank.process_resident_bytes(),
             .process_peak_bytes = rank.process_peak_bytes(),
             .heads = {},
             .shared = FromProto(rank.shared()),
             .device_total_bytes = rank.device_total_bytes(),
             .device_free_bytes = rank.device_free_bytes()};
    for (const auto& head : rank.heads()) added.heads.push_back(FromProto(head));
  }
  return memory;
}

v1::ApplyStepRequest ToProto(const StepOptions& options) {
  v1::ApplyStepRequest request;
  request.set_learning_rate(options.learning_rate);
  if (options.gradient_scale != 1) request.set_gradient_scale(options.gradient_scale);
  request.set_skip_non_finite(options.skip_non_finite);
  if (options.weight_decay.has_value()) request.set_weight_decay(*options.weight_decay);
  if (options.momentum.has_value()) request.set_momentum(*options.momentum);
  if (options.beta1.has_value()) request.set_beta1(*options.beta1);
  if (options.beta2.has_value()) request.set_beta2(*options.beta2);
  return request;
}

StepResult FromProto(const v1::ApplyStepResponse& response) {
  return {.generation = response.generation(),
          .weight_version = response.weight_version(),
          .step = response.step(),
          .skipped = response.skipped(),
          .norm = response.norm(),
          .bias_norm = response.bias_norm(),
          .non_finite = response.non_finite(),
          .window_tokens = response.window_tokens()};
}

GradientStats FromProto(const v1::GradientStatsResponse& response) {
  return {.norm = response.norm(),
          .bias_norm = response.bias_norm(),
          .largest = response.largest(),
          .non_finite = response.non_finite(),
          .window_tokens = response.window_tokens()};
}

v1::SessionMarks ToProto(const SessionMarks& marks) {
  v1::SessionMarks result;
  result.set_session_id(marks.session_id);
  result.set_incarnation(marks.incarnation);
  result.set_restores(marks.restores);
  result.set_generation(marks.generation);
  for (const LaneMarks& lane : marks.lanes) {
    auto* added = result.add_lanes();
    added->set_lane(lane.lane);
    added->set_accepted(lane.accepted);
    added->set_applied(lane.applied);
  }
  return result;
}

SessionMarks FromProto(const v1::SessionMarks& marks) {
  SessionMarks result{.session_id = marks.session_id(),
                      .lanes = {},
                      .incarnation = marks.incarnation(),
                      .restores = marks.restores(),
                      .generation = marks.generation()};
  for (const auto& lane : marks.lanes()) {
    result.lanes.push_back({.lane = lane.lane(), .accepted = lane.accepted(), .applied = lane.applied()});
  }
  return result;
}

}  // namespace lossd::internal
