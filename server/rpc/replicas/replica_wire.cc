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
  if (proto.has_blend()) return engine::BlendEnd{ToEngine(proto.blend())};
  return ToEngine(proto.step());
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
  if (const auto* const blend = std::get_if<engine::BlendEnd>(&end.by); blend != nullptr) {
    ToProto(blend->request, proto->mutable_blend());
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

void ToProto(const engine::MetReplica& replica, group::v1::ReplicaHello* proto) {
  proto->set_history(replica.history);
  for (const auto& [name, met] : replica.heads) {
    group::v1::MetHead& head = *proto->add_heads();
    const auto& [place, broken] = met.part;
    const auto& [generation, weight_version, optimizer_steps, restores, flush_id] = place;
    head.set_name(name);
    head.set_fingerprint(met.fingerprint);
    head.set_generation(generation);
    head.set_weight_version(weight_version);
    head.set_optimizer_steps(optimizer_steps);
    head.set_restores(restores);
    head.set_flush_id(flush_id);
    head.set_broken(broken);
  }
}

engine::MetReplica ToEngine(const group::v1::ReplicaHello& proto) {
  engine::MetReplica replica{.history = proto.history(), .heads = {}};
  for (const group::v1::MetHead& head : proto.heads()) {
    replica.heads[head.name()] = {.fingerprint = head.fingerprint(),
                                  .part = {.place = {.generation = head.generation(),
                                                     .weight_version = head.weight_version(),
                                                     .optimizer_steps = head.optimizer_steps(),
                                                     .restores = head.restores(),
                                                     .flush_id = head.flush_id()},
                                           .broken = head.broken()}};
  }
  return replica;
}

uint64_t FingerprintOf(const engine::HeadConfig& config) {
  v1::CreateHeadRequest request;
  ToProto(config, &request);
  const std::string bytes = request.SerializeAsString();
  return XXH3_64bits(bytes.data(), bytes.size());
}

}  // namespace lossd::rpc
