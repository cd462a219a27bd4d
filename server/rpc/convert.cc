#include "server/rpc/convert.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/errors.h"

namespace lossd::rpc {
namespace {

using engine::MakeError;
using engine::RejectReason;
using kernels::DataType;

constexpr int64_t kDefaultIgnoreIndex = -100;

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

absl::StatusOr<engine::HeadConfig> ToEngine(const v1::HeadConfig& config) {
  const absl::StatusOr<DataType> type = ToEngine(config.weight_dtype(), "weight_dtype");
  if (!type.ok()) return type.status();
  return engine::HeadConfig{config.name(), config.vocab_size(), config.hidden_size(), *type};
}

std::vector<engine::SessionMarks> ToEngine(
    const google::protobuf::RepeatedPtrField<v1::SessionMarks>& marks) {
  std::vector<engine::SessionMarks> all;
  for (const v1::SessionMarks& session : marks) {
    engine::SessionMarks one{session.session_id(), {}};
    for (const v1::LaneMarks& lane : session.lanes()) {
      one.lanes.push_back({lane.lane(), lane.accepted(), lane.applied()});
    }
    all.push_back(std::move(one));
  }
  return all;
}

engine::Chunk ToEngine(v1::Chunk* proto) {
  engine::Chunk chunk;
  chunk.received = absl::Now();
  chunk.sequence = proto->sequence();
  chunk.generation = proto->generation();
  chunk.first_token = proto->first_token();
  chunk.tokens = proto->tokens();
  chunk.ignore_index = proto->has_ignore_index() ? proto->ignore_index() : kDefaultIgnoreIndex;
  chunk.gradient_scale = proto->has_gradient_scale() ? proto->gradient_scale() : 1.0f;
  chunk.labels = std::move(*proto->mutable_labels());
  chunk.hidden_states = std::move(*proto->mutable_hidden_states());

  const absl::StatusOr<DataType> hidden_type = ToEngine(proto->hidden_dtype(), "hidden_dtype");
  if (!hidden_type.ok()) {
    chunk.decode_status = hidden_type.status();
    return chunk;
  }
  chunk.hidden_type = *hidden_type;
  const absl::StatusOr<DataType> dx_type = ToEngine(proto->dx_dtype(), "dx_dtype", *hidden_type);
  if (!dx_type.ok()) {
    chunk.decode_status = dx_type.status();
    return chunk;
  }
  chunk.dx_type = *dx_type;
  switch (proto->mode()) {
    case v1::COMPUTE_MODE_UNSPECIFIED:
    case v1::COMPUTE_MODE_LOSS_AND_GRADIENTS:
      chunk.mode = engine::ComputeMode::kLossAndGradients;
      break;
    case v1::COMPUTE_MODE_LOSS_ONLY:
      chunk.mode = engine::ComputeMode::kLossOnly;
      break;
    default:
      chunk.decode_status = Invalid(RejectReason::kOption, "mode",
                                    absl::StrCat("mode is ", static_cast<int>(proto->mode()),
                                                 "; it must be COMPUTE_MODE_LOSS_AND_GRADIENTS (1) or "
                                                 "COMPUTE_MODE_LOSS_ONLY (2)"));
  }
  return chunk;
}

void ToProto(const engine::HeadInfo& info, v1::Head* head) {
  v1::HeadConfig* config = head->mutable_config();
  config->set_name(info.config.name);
  config->set_vocab_size(info.config.vocab_size);
  config->set_hidden_size(info.config.hidden_size);
  config->set_weight_dtype(ToProto(info.config.weight_type));
  head->set_weight_version(info.weight_version);
  head->set_generation(info.generation);
  switch (info.window_state) {
    case engine::WindowState::kOpen:
      head->set_window_state(v1::WINDOW_STATE_OPEN);
      break;
    case engine::WindowState::kFreezing:
      head->set_window_state(v1::WINDOW_STATE_FREEZING);
      break;
    case engine::WindowState::kFrozen:
      head->set_window_state(v1::WINDOW_STATE_FROZEN);
      break;
  }
  head->set_window_tokens(info.window_tokens);
  for (const engine::SessionMarks& marks : info.window_marks) {
    v1::SessionMarks* session = head->add_sessions();
    session->set_session_id(marks.session_id);
    for (const engine::LaneMarks& lane : marks.lanes) ToProto(lane, session->add_lanes());
  }
  for (const engine::MemoryItem& item : info.memory) ToProto(item, head->add_memory());
  head->set_open_sessions(info.open_sessions);
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

void ToProto(engine::ChunkAnswer answer, v1::ChunkResult* result) {
  result->set_sequence(answer.sequence);
  result->set_first_token(answer.first_token);
  result->set_tokens(answer.tokens);
  switch (answer.disposition) {
    case engine::Disposition::kAccumulated:
      result->set_disposition(v1::DISPOSITION_ACCUMULATED);
      break;
    case engine::Disposition::kRepeated:
      result->set_disposition(v1::DISPOSITION_REPEATED);
      break;
    case engine::Disposition::kRejected:
      result->set_disposition(v1::DISPOSITION_REJECTED);
      result->mutable_error()->set_code(static_cast<int>(answer.error.code()));
      result->mutable_error()->set_message(std::string(answer.error.message()));
      result->mutable_error()->set_field(engine::FieldOf(answer.error));
      return;
  }
  result->set_valid_tokens(answer.valid_tokens);
  result->set_loss_sum(answer.loss_sum);
  result->set_weight_version(answer.weight_version);
  result->set_dx_dtype(ToProto(answer.dx_type));
  result->set_losses(std::move(answer.losses));
  result->set_dx(std::move(answer.dx));
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
