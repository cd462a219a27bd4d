// Steps of the optimizer that cannot be taken.
#include <cmath>
#include <string>
#include <vector>

#include "tests/integration/server/bad_input.h"

namespace lossd::testing {
namespace {

using engine::RejectReason;

Outcome CreateWith(Environment& environment, const std::string& name,
                   const std::function<void(v1::Optimizer&)>& set) {
  v1::CreateHeadRequest request;
  request.mutable_config()->set_name(name);
  request.mutable_config()->set_vocab_size(kInputVocab);
  request.mutable_config()->set_hidden_size(kInputHidden);
  request.mutable_config()->set_weight_dtype(v1::DATA_TYPE_FLOAT32);
  set(*request.mutable_config()->mutable_optimizer());
  return Call(*environment.stubs().heads, &v1::HeadService::Stub::CreateHead, request);
}

Outcome Step(Environment& environment, const v1::ApplyStepRequest& request) {
  return Call(*environment.stubs().gradients, &v1::GradientService::Stub::ApplyStep, request);
}

v1::ApplyStepRequest Request(double learning_rate, uint64_t generation = 1) {
  v1::ApplyStepRequest request;
  request.set_head("stepped");
  request.set_generation(generation);
  request.set_learning_rate(learning_rate);
  return request;
}

// A head "stepped" with SGD and weights, whose generation 1 was consumed with a learning rate of 0.5.
void MakeStepped(Environment& environment) {
  CreateWith(environment, "stepped",
             [](v1::Optimizer& optimizer) { optimizer.set_kind(v1::OPTIMIZER_KIND_SGD); });
  v1::BeginWriteRequest begin;
  begin.set_head("stepped");
  begin.set_write_key("key");
  v1::BeginWriteResponse write;
  grpc::ClientContext begin_context;
  environment.stubs().heads->BeginWrite(&begin_context, begin, &write);
  v1::WriteWeightsRequest rows;
  rows.set_head("stepped");
  rows.set_write_id(write.write_id());
  rows.set_rows(kInputVocab);
  rows.set_dtype(v1::DATA_TYPE_FLOAT32);
  rows.mutable_weights()->resize(static_cast<size_t>(kInputVocab * kInputHidden) * sizeof(float));
  grpc::ClientContext context;
  v1::WriteWeightsResponse written;
  auto writer = environment.stubs().heads->WriteWeights(&context, &written);
  writer->Write(rows);
  writer->WritesDone();
  writer->Finish();
  v1::CommitWriteRequest commit;
  commit.set_head("stepped");
  commit.set_write_id(write.write_id());
  Call(*environment.stubs().heads, &v1::HeadService::Stub::CommitWrite, commit);
  Step(environment, Request(0.5));
}

}  // namespace

std::vector<Case> StepCases() {
  return {
      {"step_of_a_head_without_an_optimizer",
       [](Environment& environment) {
         v1::ApplyStepRequest request = Request(1);
         request.set_head("h");
         return Step(environment, request);
       },
       grpc::StatusCode::FAILED_PRECONDITION,
       {"head h", "without an optimizer"},
       RejectReason::kConflict},
      {"step_of_a_consumed_generation_with_other_arguments",
       [](Environment& environment) {
         MakeStepped(environment);
         return Step(environment, Request(0.25));
       },
       grpc::StatusCode::FAILED_PRECONDITION,
       {"generation 1", "learning_rate 0.5", "this call names 0.25"},
       RejectReason::kFlushArguments},
      {"step_of_a_generation_to_come",
       [](Environment& environment) {
         MakeStepped(environment);
         return Step(environment, Request(0.5, 7));
       },
       grpc::StatusCode::ABORTED,
       {"generation is 7", "at 2"},
       RejectReason::kGeneration},
      {"step_with_marks_of_a_stranger",
       [](Environment& environment) {
         MakeStepped(environment);
         v1::ApplyStepRequest request = Request(0.5, 2);
         request.add_marks()->set_session_id("stranger");
         return Step(environment, request);
       },
       grpc::StatusCode::FAILED_PRECONDITION,
       {"stranger"},
       RejectReason::kMarks},
      {"step_with_a_learning_rate_that_is_no_number",
       [](Environment& environment) {
         MakeStepped(environment);
         return Step(environment, Request(std::nan(""), 2));
       },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"learning_rate is nan", "[0, 1e18]"},
       RejectReason::kOption},
      {"step_with_an_argument_of_another_optimizer",
       [](Environment& environment) {
         MakeStepped(environment);
         v1::ApplyStepRequest request = Request(0.5, 2);
         request.set_beta2(0.9);
         return Step(environment, request);
       },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"beta2", "Adam"},
       RejectReason::kOption},
      {"head_with_an_optimizer_that_does_not_exist",
       [](Environment& environment) {
         return CreateWith(environment, "odd", [](v1::Optimizer& optimizer) {
           optimizer.set_kind(static_cast<v1::OptimizerKind>(77));
         });
       },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"config.optimizer.kind is 77"},
       RejectReason::kUnknownField},
      {"head_with_a_beta_of_1",
       [](Environment& environment) {
         return CreateWith(environment, "odd", [](v1::Optimizer& optimizer) {
           optimizer.set_kind(v1::OPTIMIZER_KIND_ADAM);
           optimizer.set_beta1(1);
         });
       },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"optimizer.beta1 is 1", "[0, 1)"},
       RejectReason::kOption},
      {"statistics_of_another_generation",
       [](Environment& environment) {
         v1::GradientStatsRequest request;
         request.set_head("h");
         request.set_generation(2);
         return Call(*environment.stubs().gradients, &v1::GradientService::Stub::GradientStats, request);
       },
       grpc::StatusCode::ABORTED,
       {"generation is 2", "at 1"},
       RejectReason::kGeneration},
  };
}

}  // namespace lossd::testing
