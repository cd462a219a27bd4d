#include "server/rpc/replicas/replica_wire.h"

#include <xxhash.h>

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "server/rpc/convert/convert.h"

namespace lossd::rpc {

void ToProto(const std::vector<engine::SessionMarks>& named,
             google::protobuf::RepeatedPtrField<v1::SessionMarks>* proto) {
  for (const engine::SessionMarks& session : named) {
    v1::SessionMarks* marks = proto->Add();
    marks->set_session_id(session.session_id);
    marks->set_incarnation(session.past.incarnation);
    marks->set_restores(session.past.restores);
    marks->set_generation(session.generation);
    for (const engine::LaneMarks& lane : session.lanes) {
      v1::LaneMarks* to = marks->add_lanes();
      to->set_lane(lane.lane);
      to->set_accepted(lane.accepted);
    }
  }
}

namespace {

void ToProto(const std::string& head, uint64_t generation, const std::vector<engine::SessionMarks>& named,
             const engine::StepRequest& step, v1::ApplyStepRequest* request) {
  request->set_head(head);
  request->set_generation(generation);
  lossd::rpc::ToProto(named, request->mutable_marks());
  const auto& [learning_rate, gradient_scale, non_finite, weight_decay, momentum, beta1, beta2] = step;
  request->set_learning_rate(learning_rate);
  request->set_gradient_scale(gradient_scale);
  request->set_skip_non_finite(non_finite == engine::NonFinite::kSkip);
  if (weight_decay.has_value()) request->set_weight_decay(*weight_decay);
  if (momentum.has_value()) request->set_momentum(*momentum);
  if (beta1.has_value()) request->set_beta1(*beta1);
  if (beta2.has_value()) request->set_beta2(*beta2);
}

engine::EndsBy EndedBy(const group::v1::SealWindow& proto) {
  if (proto.has_flush()) return engine::FlushEnd{proto.flush().flush_id(), proto.flush().gradient_scale()};
  if (proto.has_look()) return engine::LookEnd{proto.look().gradient_scale()};
  return ToEngine(proto.step());
}

void ToProto(const engine::FlushRecord& record, group::v1::FlushRecord* proto) {
  proto->set_flush_id(record.flush_id);
  proto->set_generation(record.generation);
}

engine::FlushRecord RecordOf(const group::v1::FlushRecord& proto) {
  return {proto.flush_id(), proto.generation()};
}

engine::StepRecord ToRecord(const group::v1::HeadPart& proto) {
  const v1::ApplyStepResponse& result = proto.last_result();
  return {.generation = proto.last_step().generation(),
          .marks = engine::Canonical(ToEngine(proto.last_step().marks())),
          .request = ToEngine(proto.last_step()),
          .result = {.generation = result.generation(),
                     .weight_version = result.weight_version(),
                     .step = result.step(),
                     .skipped = result.skipped(),
                     .stats = {.norm = result.norm(),
                               .bias_norm = result.bias_norm(),
                               .largest = proto.last_largest(),
                               .non_finite = result.non_finite()},
                     .window_tokens = result.window_tokens()}};
}

}  // namespace

void ToProto(const std::string& head, const engine::WindowEnd& end, group::v1::SealWindow* proto) {
  proto->set_weight_version(end.weight_version);
  proto->set_optimizer_steps(end.optimizer_steps);
  const auto* const step = std::get_if<engine::StepRequest>(&end.by);
  ToProto(head, end.generation, end.marks, step == nullptr ? engine::StepRequest() : *step,
          proto->mutable_step());
  if (const auto* const flush = std::get_if<engine::FlushEnd>(&end.by); flush != nullptr) {
    proto->mutable_flush()->set_flush_id(flush->flush_id);
    proto->mutable_flush()->set_gradient_scale(flush->gradient_scale);
  }
  if (const auto* const look = std::get_if<engine::LookEnd>(&end.by); look != nullptr) {
    proto->mutable_look()->set_gradient_scale(look->gradient_scale);
  }
}

engine::WindowEnd ToEnd(const group::v1::SealWindow& proto) {
  return {.generation = proto.step().generation(),
          .marks = engine::Canonical(ToEngine(proto.step().marks())),
          .by = EndedBy(proto),
          .weight_version = proto.weight_version(),
          .optimizer_steps = proto.optimizer_steps()};
}

void ToProto(const engine::JointStep& step, group::v1::JointStep* proto) {
  proto->set_norm(step.stats.norm);
  proto->set_bias_norm(step.stats.bias_norm);
  proto->set_largest(step.stats.largest);
  proto->set_non_finite(step.stats.non_finite);
  proto->set_window_tokens(step.window_tokens);
  proto->set_skipped(step.skipped);
}

engine::JointStep ToEngine(const group::v1::JointStep& proto) {
  return {.stats = {.norm = proto.norm(),
                    .bias_norm = proto.bias_norm(),
                    .largest = proto.largest(),
                    .non_finite = proto.non_finite()},
          .window_tokens = proto.window_tokens(),
          .skipped = proto.skipped()};
}

void ToProto(const engine::FlushInfo& flush, group::v1::FlushSealed* proto) {
  proto->set_flush_id(flush.flush_id);
  proto->set_rows(flush.rows);
  proto->set_columns(flush.columns);
  proto->set_window_tokens(flush.window_tokens);
  proto->set_norm(flush.stats.norm);
  proto->set_bias_norm(flush.stats.bias_norm);
  proto->set_largest(flush.stats.largest);
  proto->set_non_finite(flush.stats.non_finite);
}

engine::FlushInfo ToEngine(const group::v1::FlushSealed& proto) {
  return {.flush_id = proto.flush_id(),
          .rows = proto.rows(),
          .columns = proto.columns(),
          .window_tokens = proto.window_tokens(),
          .stats = {.norm = proto.norm(),
                    .bias_norm = proto.bias_norm(),
                    .largest = proto.largest(),
                    .non_finite = proto.non_finite()}};
}

void ToProto(const engine::PartRows& rows, group::v1::HeldRows* proto) {
  proto->set_tensor(rows.tensor);
  proto->set_first_row(rows.rows.first);
  proto->set_rows(rows.rows.count);
}

engine::PartRows ToEngine(const group::v1::HeldRows& proto) {
  return {.tensor = proto.tensor(), .rows = {proto.first_row(), proto.rows()}};
}

void ToProto(const engine::HeadConfig& config, const engine::PartState& part, group::v1::HeadPart* proto) {
  ToProto(config, proto->mutable_config());
  proto->set_generation(part.generation);
  proto->set_phase(static_cast<int32_t>(part.phase));
  if (part.end.has_value()) ToProto(config.name, *part.end, proto->mutable_end());
  ToProto(part.step, proto->mutable_step());
  const engine::StepRecord& last = part.last_step;
  ToProto(config.name, last.generation, last.marks, last.request, proto->mutable_last_step());
  ToProto(last.result, proto->mutable_last_result());
  proto->set_last_largest(last.result.stats.largest);
  proto->set_weight_version(part.weight_version);
  proto->set_optimizer_steps(part.optimizer_steps);
  proto->set_prepared_write(part.prepared_write);
  proto->set_last_write(part.last_write);
  if (part.flush.has_value()) ToProto(*part.flush, proto->mutable_flush());
  ToProto(part.committed, proto->mutable_committed());
  ToProto(part.aborted, proto->mutable_aborted());
  proto->set_restoring(static_cast<int32_t>(part.restoring));
  proto->set_restores(part.restores);
  proto->set_leans(part.leans);
}

engine::PartState ToEngine(const group::v1::HeadPart& proto) {
  engine::PartState part{.generation = proto.generation(),
                         .phase = static_cast<engine::EndingPhase>(proto.phase()),
                         .end = std::nullopt,
                         .step = ToEngine(proto.step()),
                         .flush = std::nullopt,
                         .last_step = ToRecord(proto),
                         .committed = RecordOf(proto.committed()),
                         .aborted = RecordOf(proto.aborted()),
                         .weight_version = proto.weight_version(),
                         .optimizer_steps = proto.optimizer_steps(),
                         .prepared_write = proto.prepared_write(),
                         .last_write = proto.last_write(),
                         .restoring = static_cast<engine::RestorePhase>(proto.restoring()),
                         .restores = proto.restores(),
                         .leans = proto.leans()};
  if (proto.has_end()) part.end = ToEnd(proto.end());
  if (proto.has_flush()) part.flush = ToEngine(proto.flush());
  return part;
}

uint64_t FingerprintOf(const engine::HeadConfig& config) {
  v1::CreateHeadRequest request;
  ToProto(config, &request);
  const std::string bytes = request.SerializeAsString();
  return XXH3_64bits(bytes.data(), bytes.size());
}

}  // namespace lossd::rpc
