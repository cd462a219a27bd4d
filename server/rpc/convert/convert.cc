#include "server/rpc/convert/convert.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/common/errors.h"

namespace lossd::rpc {
namespace {

using engine::MakeError;
using engine::RejectReason;
using kernels::DataType;

absl::Status Invalid(RejectReason reason, const std::string& field, const std::string& message) {
  return MakeError(absl::StatusCode::kInvalidArgument, reason, field, message);
}

}  // namespace

absl::StatusOr<DataType> ToEngine(v1::DataType type, const std::string& field) {
  switch (type) {
    case v1::DATA_TYPE_FLOAT32:
      return DataType::kFloat32;
    case v1::DATA_TYPE_BFLOAT16:
      return DataType::kBFloat16;
    case v1::DATA_TYPE_FLOAT16:
      return DataType::kFloat16;
    default:
      return Invalid(
          RejectReason::kDtype, field,
          absl::StrCat(
              field, " is ", static_cast<int>(type),
              "; it must be DATA_TYPE_FLOAT32 (1), DATA_TYPE_BFLOAT16 (2) or DATA_TYPE_FLOAT16 (3)"));
  }
}

absl::StatusOr<DataType> ToEngine(v1::DataType type, const std::string& field, DataType fallback) {
  if (type == v1::DATA_TYPE_UNSPECIFIED) return fallback;
  return ToEngine(type, field);
}

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

absl::StatusOr<engine::RegionKind> ToEngine(v1::RegionKind kind) {
  switch (kind) {
    case v1::REGION_KIND_SYSTEM:
      return engine::RegionKind::kSystem;
    case v1::REGION_KIND_DEVICE:
      return engine::RegionKind::kDevice;
    default:
      return Invalid(RejectReason::kOption, "kind",
                     absl::StrCat("kind is ", static_cast<int>(kind),
                                  "; it must be REGION_KIND_SYSTEM (1) or REGION_KIND_DEVICE (2)"));
  }
}

v1::RegionKind ToProto(engine::RegionKind kind) {
  return kind == engine::RegionKind::kSystem ? v1::REGION_KIND_SYSTEM : v1::REGION_KIND_DEVICE;
}

namespace {

absl::StatusOr<engine::OptimizerKind> OptimizerKindFrom(v1::OptimizerKind kind) {
  switch (kind) {
    case v1::OPTIMIZER_KIND_UNSPECIFIED:
      return engine::OptimizerKind::kNone;
    case v1::OPTIMIZER_KIND_SGD:
      return engine::OptimizerKind::kSgd;
    case v1::OPTIMIZER_KIND_ADAM:
      return engine::OptimizerKind::kAdam;
    case v1::OPTIMIZER_KIND_ADAMW:
      return engine::OptimizerKind::kAdamW;
    default:
      return Invalid(RejectReason::kOption, "optimizer.kind",
                     absl::StrCat("optimizer.kind is ", static_cast<int>(kind),
                                  "; it must be OPTIMIZER_KIND_SGD (1), OPTIMIZER_KIND_ADAM (2), "
                                  "OPTIMIZER_KIND_ADAMW (3) or unset"));
  }
}

v1::OptimizerKind OptimizerKindTo(engine::OptimizerKind kind) {
  switch (kind) {
    case engine::OptimizerKind::kNone:
      return v1::OPTIMIZER_KIND_UNSPECIFIED;
    case engine::OptimizerKind::kSgd:
      return v1::OPTIMIZER_KIND_SGD;
    case engine::OptimizerKind::kAdam:
      return v1::OPTIMIZER_KIND_ADAM;
    case engine::OptimizerKind::kAdamW:
      return v1::OPTIMIZER_KIND_ADAMW;
  }
  return v1::OPTIMIZER_KIND_UNSPECIFIED;
}

}  // namespace

absl::StatusOr<engine::OptimizerConfig> ToEngine(const v1::Optimizer& optimizer) {
  const absl::StatusOr<engine::OptimizerKind> kind = OptimizerKindFrom(optimizer.kind());
  if (!kind.ok()) return kind.status();
  engine::OptimizerConfig config;
  config.kind = *kind;
  if (config.kind == engine::OptimizerKind::kNone) return config;
  if (config.kind == engine::OptimizerKind::kAdamW) config.weight_decay = 0.01;
  if (optimizer.has_weight_decay()) config.weight_decay = optimizer.weight_decay();
  if (optimizer.has_beta1()) config.beta1 = optimizer.beta1();
  if (optimizer.has_beta2()) config.beta2 = optimizer.beta2();
  if (optimizer.has_eps()) config.eps = optimizer.eps();
  config.momentum = optimizer.momentum();
  config.dampening = optimizer.dampening();
  config.nesterov = optimizer.nesterov();
  config.maximize = optimizer.maximize();
  return config;
}

void ToProto(const engine::OptimizerConfig& config, v1::Optimizer* optimizer) {
  const auto& [kind, weight_decay, momentum, dampening, nesterov, beta1, beta2, eps, maximize] = config;
  optimizer->set_kind(OptimizerKindTo(kind));
  optimizer->set_weight_decay(weight_decay);
  optimizer->set_momentum(momentum);
  optimizer->set_dampening(dampening);
  optimizer->set_nesterov(nesterov);
  optimizer->set_beta1(beta1);
  optimizer->set_beta2(beta2);
  optimizer->set_eps(eps);
  optimizer->set_maximize(maximize);
}

absl::StatusOr<engine::HeadConfig> ToEngine(const v1::CreateHeadRequest& request) {
  const v1::HeadConfig& config = request.config();
  const absl::StatusOr<DataType> type = ToEngine(config.weight_dtype(), "weight_dtype");
  if (!type.ok()) return type.status();
  engine::HeadConfig head{.name = config.name(),
                          .vocab_size = config.vocab_size(),
                          .hidden_size = config.hidden_size(),
                          .weight_type = *type};
  if (config.logit_scale() != 0) head.logit_scale = config.logit_scale();
  head.softcap = config.softcap();
  head.bias = config.bias();
  if (config.frozen()) head.weight_gradients = engine::WeightGradients::kFrozen;
  const absl::StatusOr<engine::OptimizerConfig> optimizer = ToEngine(config.optimizer());
  if (!optimizer.ok()) return optimizer.status();
  head.optimizer = *optimizer;
  head.master_weights = config.master_weights();
  head.double_buffer = config.double_buffer();
  head.fixed_segments = config.fixed_segments();
  head.held_bytes = config.held_bytes();
  const std::string& class_weights = request.class_weights();
  if (class_weights.empty()) return head;
  if (class_weights.size() % sizeof(float) != 0) {
    return Invalid(
        RejectReason::kLength, "class_weights",
        absl::StrCat("class_weights holds ", class_weights.size(), " bytes; they must be whole fp32 values"));
  }
  std::vector<float> values(class_weights.size() / sizeof(float));
  std::memcpy(values.data(), class_weights.data(), class_weights.size());
  head.class_weights = std::make_shared<const std::vector<float>>(std::move(values));
  return head;
}

std::vector<engine::SessionMarks> ToEngine(
    const google::protobuf::RepeatedPtrField<v1::SessionMarks>& marks) {
  std::vector<engine::SessionMarks> all;
  for (const v1::SessionMarks& session : marks) {
    engine::SessionMarks one{
        session.session_id(), {}, {session.incarnation(), session.restores()}, session.generation()};
    for (const v1::LaneMarks& lane : session.lanes()) {
      one.lanes.push_back({lane.lane(), lane.accepted(), lane.applied()});
    }
    all.push_back(std::move(one));
  }
  return all;
}

absl::Status CheckMarks(const google::protobuf::RepeatedPtrField<v1::SessionMarks>& marks) {
  // Far above what a window can hold: keeps a request of nothing but empty marks from growing many times
  // over.
  constexpr int64_t kMostMarks = int64_t{1} << 18;
  int64_t count = marks.size();
  for (const v1::SessionMarks& session : marks) count += session.lanes_size();
  if (count <= kMostMarks) return absl::OkStatus();
  return engine::MakeError(
      absl::StatusCode::kInvalidArgument, engine::RejectReason::kMarks, "marks",
      absl::StrCat("marks name ", count, " sessions and lanes; the limit is ", kMostMarks));
}

absl::StatusOr<engine::LogitsRequest> ToEngine(v1::LogitsRequest* request) {
  const absl::StatusOr<DataType> hidden_type = ToEngine(request->hidden_dtype(), "hidden_dtype");
  if (!hidden_type.ok()) return hidden_type.status();
  const absl::StatusOr<DataType> logits_type =
      ToEngine(request->logits_dtype(), "logits_dtype", DataType::kFloat32);
  if (!logits_type.ok()) return logits_type.status();
  engine::LogitsRequest wanted;
  wanted.rows = request->rows();
  wanted.hidden_type = *hidden_type;
  wanted.logits_type = *logits_type;
  if (request->has_logit_scale()) wanted.logit_scale = request->logit_scale();
  if (request->has_softcap()) wanted.softcap = request->softcap();
  if (request->has_bias()) wanted.bias = request->bias() ? engine::Bias::kUse : engine::Bias::kIgnore;
  if (request->has_weight_version()) wanted.weight_version = request->weight_version();
  wanted.top_k = request->top_k();
  wanted.hidden_states = std::move(*request->mutable_hidden_states());
  return wanted;
}

engine::StepRequest ToEngine(const v1::ApplyStepRequest& request) {
  engine::StepRequest step{.learning_rate = request.learning_rate()};
  if (request.has_gradient_scale()) step.gradient_scale = request.gradient_scale();
  if (request.skip_non_finite()) step.non_finite = engine::NonFinite::kSkip;
  if (request.has_weight_decay()) step.weight_decay = request.weight_decay();
  if (request.has_momentum()) step.momentum = request.momentum();
  if (request.has_beta1()) step.beta1 = request.beta1();
  if (request.has_beta2()) step.beta2 = request.beta2();
  return step;
}

void ToProto(const engine::StepResult& step, v1::ApplyStepResponse* response) {
  response->set_generation(step.generation);
  response->set_weight_version(step.weight_version);
  response->set_step(step.step);
  response->set_skipped(step.skipped);
  response->set_norm(step.stats.norm);
  response->set_bias_norm(step.stats.bias_norm);
  response->set_non_finite(step.stats.non_finite);
  response->set_window_tokens(step.window_tokens);
}

void ToProto(const engine::CheckpointInfo& info, v1::Checkpoint* checkpoint) {
  checkpoint->set_head(info.head);
  checkpoint->set_tag(info.tag);
  checkpoint->set_generation(info.generation);
  checkpoint->set_weight_version(info.weight_version);
  checkpoint->set_optimizer_steps(info.optimizer_steps);
  checkpoint->set_window_tokens(info.window_tokens);
  checkpoint->set_bytes(info.bytes);
  checkpoint->set_saved_at(info.saved_at);
}

void ToProto(const engine::HeadConfig& config, v1::HeadConfig* proto) {
  const auto& [name, vocab_size, hidden_size, weight_type, logit_scale, softcap, class_weights,
               weight_gradients, bias, optimizer, master_weights, double_buffer, fixed_segments, held_bytes] =
      config;
  proto->set_name(name);
  proto->set_vocab_size(vocab_size);
  proto->set_hidden_size(hidden_size);
  proto->set_weight_dtype(ToProto(weight_type));
  proto->set_logit_scale(logit_scale);
  proto->set_softcap(softcap);
  proto->set_frozen(weight_gradients == engine::WeightGradients::kFrozen);
  proto->set_bias(bias);
  if (optimizer.kind != engine::OptimizerKind::kNone) ToProto(optimizer, proto->mutable_optimizer());
  proto->set_master_weights(master_weights);
  proto->set_double_buffer(double_buffer);
  proto->set_fixed_segments(fixed_segments);
  proto->set_held_bytes(held_bytes);
}

void ToProto(const engine::HeadConfig& config, v1::CreateHeadRequest* request) {
  ToProto(config, request->mutable_config());
  if (config.class_weights == nullptr) return;
  request->set_class_weights(config.class_weights->data(), static_cast<size_t>(config.class_weight_bytes()));
}

void ToProto(const engine::HeadInfo& info, v1::Head* head) {
  ToProto(info.config, head->mutable_config());
  head->set_optimizer_steps(info.optimizer_steps);
  head->set_has_class_weights(info.config.class_weights != nullptr);
  head->set_weight_version(info.weight_version);
  head->set_generation(info.generation);
  switch (info.window_state) {
    case engine::WindowState::kOpen:
      head->set_window_state(v1::WINDOW_STATE_OPEN);
      break;
    case engine::WindowState::kSealing:
      head->set_window_state(v1::WINDOW_STATE_FREEZING);
      break;
    case engine::WindowState::kSealed:
      head->set_window_state(v1::WINDOW_STATE_FROZEN);
      break;
  }
  head->set_window_tokens(info.window_tokens);
  for (const engine::SessionMarks& marks : info.window_marks) {
    v1::SessionMarks* session = head->add_sessions();
    session->set_session_id(marks.session_id);
    for (const engine::LaneMarks& lane : marks.lanes) ToProto(lane, session->add_lanes());
    session->set_incarnation(marks.past.incarnation);
    session->set_restores(marks.past.restores);
    session->set_generation(marks.generation);
  }
  head->set_staged_rows(info.staged_rows);
  head->set_max_logits_bytes(info.max_logits_bytes);
  head->set_max_logits_rows(info.max_logits_rows);
  for (const engine::MemoryItem& item : info.memory) ToProto(item, head->add_memory());
  head->set_open_sessions(info.open_sessions);
  head->set_flush_id(info.flush_id);
  head->set_parked_bytes(info.parked_bytes);
  if (info.steps_since_checkpoint.has_value()) head->set_steps_since_checkpoint(*info.steps_since_checkpoint);
  if (info.flush_since.has_value()) {
    head->set_flush_seconds(std::max(0.0, absl::ToDoubleSeconds(absl::Now() - *info.flush_since)));
  }
}

void ToProto(const engine::MemoryItem& item, v1::MemoryItem* proto) {
  proto->set_purpose(item.purpose);
  proto->set_bytes(item.bytes);
}

void ToProto(const engine::LaneMarks& marks, v1::LaneMarks* proto) {
  proto->set_lane(marks.lane);
  proto->set_accepted(marks.accepted);
  proto->set_applied(marks.applied);
}

absl::StatusOr<RowRange> ToRowRange(int64_t first_row, int64_t rows, int64_t vocab_size) {
  if (first_row < 0 || first_row >= vocab_size) {
    return Invalid(RejectReason::kShape, "first_row",
                   absl::StrCat("first_row is ", first_row, "; the head has ", vocab_size, " rows"));
  }
  if (rows < 0 || rows > vocab_size - first_row) {
    return Invalid(RejectReason::kShape, "rows",
                   absl::StrCat("rows is ", rows, "; from first_row ", first_row, " on there are ",
                                vocab_size - first_row));
  }
  return RowRange{first_row, rows == 0 ? vocab_size - first_row : rows};
}

}  // namespace lossd::rpc
