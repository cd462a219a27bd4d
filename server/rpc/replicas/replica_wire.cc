#include "server/rpc/replicas/replica_wire.h"

#include <xxhash.h>

#include <string>

#include "server/rpc/convert/convert.h"

namespace lossd::rpc {

void ToProto(const std::string& head, const engine::WindowEnd& end, group::v1::SealWindow* proto) {
  proto->set_weight_version(end.weight_version);
  proto->set_optimizer_steps(end.optimizer_steps);
  v1::ApplyStepRequest* request = proto->mutable_step();
  request->set_head(head);
  request->set_generation(end.generation);
  for (const engine::SessionMarks& session : end.marks) {
    v1::SessionMarks* marks = request->add_marks();
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
  const engine::StepRequest& step = end.step;
  request->set_learning_rate(step.learning_rate);
  request->set_gradient_scale(step.gradient_scale);
  request->set_skip_non_finite(step.non_finite == engine::NonFinite::kSkip);
  if (step.weight_decay.has_value()) request->set_weight_decay(*step.weight_decay);
  if (step.momentum.has_value()) request->set_momentum(*step.momentum);
  if (step.beta1.has_value()) request->set_beta1(*step.beta1);
  if (step.beta2.has_value()) request->set_beta2(*step.beta2);
}

engine::WindowEnd ToEnd(const group::v1::SealWindow& proto) {
  return {.generation = proto.step().generation(),
          .marks = engine::Canonical(ToEngine(proto.step().marks())),
          .step = ToEngine(proto.step()),
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

void ToProto(const std::string& head, const engine::PartState& part, group::v1::HeadPart* proto) {
  proto->set_head(head);
  proto->set_generation(part.generation);
  proto->set_phase(static_cast<int32_t>(part.phase));
  ToProto(part.step, proto->mutable_step());
  ToProto(part.before, proto->mutable_before());
}

engine::PartState ToEngine(const group::v1::HeadPart& proto) {
  return {.generation = proto.generation(),
          .phase = static_cast<engine::EndingPhase>(proto.phase()),
          .step = ToEngine(proto.step()),
          .before = ToEngine(proto.before())};
}

uint64_t FingerprintOf(const engine::HeadConfig& config) {
  v1::CreateHeadRequest request;
  ToProto(config, &request);
  const std::string bytes = request.SerializeAsString();
  return XXH3_64bits(bytes.data(), bytes.size());
}

}  // namespace lossd::rpc
