#include <google/protobuf/unknown_field_set.h>
#include <grpcpp/generic/generic_stub.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/integration/server/bad_input.h"

namespace lossd::testing {
namespace {

using engine::RejectReason;

// Sends these bytes as the messages of a client stream, and reads to its end. A typed stub cannot send them.
Outcome SendBytes(Environment& environment, const std::string& method,
                  const std::vector<std::string>& messages) {
  const auto channel = environment.server().Channel();
  grpc::CompletionQueue queue;
  void* tag = nullptr;
  bool ok = false;
  grpc::ClientContext context;
  grpc::GenericStub stub(channel);
  const auto call = stub.PrepareCall(&context, method, &queue);
  call->StartCall(nullptr);
  queue.Next(&tag, &ok);
  for (const std::string& message : messages) {
    const grpc::Slice slice(message);
    call->Write(grpc::ByteBuffer(&slice, 1), nullptr);
    queue.Next(&tag, &ok);
  }
  call->WritesDone(nullptr);
  queue.Next(&tag, &ok);
  for (ok = true; ok;) {
    grpc::ByteBuffer answer;
    call->Read(&answer, nullptr);
    queue.Next(&tag, &ok);
  }
  grpc::Status status;
  call->Finish(&status, nullptr);
  queue.Next(&tag, &ok);
  return FromStatus(status);
}

// All but the last byte of a message that was good.
template <typename Message>
std::string Truncated(const Message& message) {
  std::string bytes = message.SerializeAsString();
  bytes.pop_back();
  return bytes;
}

// A chunk with what this server does not know: it is not taken, not even as a rejected one.
Case Newer(std::string name, std::vector<std::string> message, std::function<void(v1::Chunk&)> change) {
  return {std::move(name),
          [change = std::move(change)](Environment& environment) {
            v1::Chunk chunk = environment.Good();
            change(chunk);
            return environment.Ending(chunk);
          },
          grpc::StatusCode::INVALID_ARGUMENT, std::move(message), RejectReason::kUnknownField};
}

}  // namespace

std::vector<Case> StreamCases() {
  return {
      Newer("unknown_dtype", {"hidden_dtype is 9", "field 5 of lossd.v1.Chunk", "DATA_TYPE_FLOAT32 (1)"},
            [](v1::Chunk& chunk) { chunk.set_hidden_dtype(static_cast<v1::DataType>(9)); }),
      Newer("unknown_dx_dtype", {"dx_dtype is 77"},
            [](v1::Chunk& chunk) { chunk.set_dx_dtype(static_cast<v1::DataType>(77)); }),
      Newer("unknown_divergence",
            {"options.distillation.divergence is 7", "field 3 of lossd.v1.Distillation"},
            [](v1::Chunk& chunk) {
              chunk.mutable_options()->mutable_distillation()->set_divergence(static_cast<v1::Divergence>(7));
            }),
      Newer("unknown_mode", {"mode is 42"},
            [](v1::Chunk& chunk) { chunk.set_mode(static_cast<v1::ComputeMode>(42)); }),
      Newer("unknown_field_of_the_options",
            {"field 11 of lossd.v1.LossOptions (chunk.options.11)", "lossd 0."},
            [](v1::Chunk& chunk) {
              v1::LossOptions* const options = chunk.mutable_options();
              options->GetReflection()->MutableUnknownFields(options)->AddFixed32(11, 1);
            }),
      {"gap_in_sequence",
       [](Environment& environment) {
         v1::Chunk chunk = environment.Good();
         chunk.set_sequence(chunk.sequence() + 4);
         return environment.Ending(chunk);
       },
       grpc::StatusCode::FAILED_PRECONDITION,
       {"sequence is 6", "expects 2"},
       RejectReason::kGap},
      {"hidden_states_that_are_not_held",
       [](Environment& environment) {
         v1::Chunk chunk = environment.Good();
         chunk.mutable_hold()->set_number(3);
         chunk.mutable_hold()->set_hidden_states(true);
         chunk.clear_hidden_states();
         return environment.Ending(chunk);
       },
       grpc::StatusCode::FAILED_PRECONDITION,
       {"sequence 2", "token 0 of hold 3", "with its hidden_states"},
       RejectReason::kUnknownHold},
      {"sequence_zero",
       [](Environment& environment) {
         v1::Chunk chunk = environment.Good();
         chunk.set_sequence(0);
         return environment.Ending(chunk);
       },
       grpc::StatusCode::FAILED_PRECONDITION,
       {"sequence is 0", "expects 2"},
       RejectReason::kGap},
      {"generation_ahead",
       [](Environment& environment) {
         v1::Chunk chunk = environment.Good();
         chunk.set_generation(2);
         return environment.Ending(chunk);
       },
       grpc::StatusCode::ABORTED,
       {"generation is 2", "at 1"},
       RejectReason::kGeneration},
      {"generation_zero",
       [](Environment& environment) {
         v1::Chunk chunk = environment.Good();
         chunk.set_generation(0);
         return environment.Ending(chunk);
       },
       grpc::StatusCode::ABORTED,
       {"generation is 0", "at 1"},
       RejectReason::kGeneration},
      {"wrong_incarnation",
       [](Environment& environment) {
         v1::OpenSessionResponse session = environment.session();
         session.set_incarnation("before");
         return StartWith(environment, session);
       },
       grpc::StatusCode::ABORTED,
       {"'before'"},
       RejectReason::kIncarnation},
      {"unknown_session",
       [](Environment& environment) {
         v1::OpenSessionResponse session = environment.session();
         session.set_session_id("nobody");
         return StartWith(environment, session);
       },
       grpc::StatusCode::NOT_FOUND,
       {"'nobody'", "OpenSession"},
       RejectReason::kUnknownSession},
      {"unknown_lane",
       [](Environment& environment) { return StartWith(environment, environment.session(), 3); },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"lane is 3", "has 1"},
       RejectReason::kOption},
      {"negative_lane",
       [](Environment& environment) { return StartWith(environment, environment.session(), -1); },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"lane is -1", "has 1"},
       RejectReason::kOption},
      {"empty_message",
       [](Environment& environment) { return environment.Ending(v1::ComputeRequest()); },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"start"},
       RejectReason::kMalformed},
      {"second_start",
       [](Environment& environment) {
         v1::ComputeRequest start;
         start.mutable_start()->set_session_id(environment.session().session_id());
         return environment.Ending(start);
       },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"start", "chunk"},
       RejectReason::kMalformed},
      {"chunk_before_start",
       [](Environment& environment) {
         grpc::ClientContext context;
         auto stream = environment.stubs().losses->Compute(&context);
         v1::ComputeRequest request;
         *request.mutable_chunk() = environment.Good();
         stream->Write(request);
         v1::ComputeResponse response;
         while (stream->Read(&response)) {
         }
         return FromStatus(stream->Finish());
       },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"start", "chunk"},
       RejectReason::kMalformed},
      {"chunk_that_cannot_be_parsed",
       [](Environment& environment) {
         const v1::OpenSessionResponse session = OpenSession(environment.stubs(), "h", "truncating");
         v1::ComputeRequest start;
         start.mutable_start()->set_session_id(session.session_id());
         start.mutable_start()->set_incarnation(session.incarnation());
         v1::ComputeRequest chunk;
         *chunk.mutable_chunk() = MakeChunk(1, 1, 16, kInputVocab, kInputHidden, 5);
         return SendBytes(environment, "/lossd.v1.LossService/Compute",
                          {start.SerializeAsString(), Truncated(chunk)});
       },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"no valid lossd.v1.ComputeRequest"},
       RejectReason::kMalformed},
      {"weights_that_cannot_be_parsed",
       [](Environment& environment) {
         v1::WriteWeightsRequest request;
         request.set_head("h");
         request.set_weights(std::string(32, '\0'));
         return SendBytes(environment, "/lossd.v1.HeadService/WriteWeights", {Truncated(request)});
       },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"no valid lossd.v1.WriteWeightsRequest"},
       RejectReason::kMalformed},
      {"call_for_logits_that_cannot_be_parsed",
       [](Environment& environment) {
         v1::LogitsRequest request;
         request.set_head("h");
         request.set_hidden_states(std::string(32, '\0'));
         return SendBytes(environment, "/lossd.v1.LossService/Logits", {Truncated(request)});
       },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"no valid lossd.v1.LogitsRequest"},
       RejectReason::kMalformed},
      {"stream_taken_by_another",
       [](Environment& environment) {
         ComputeStream other(environment.stubs(), environment.session());
         return FromStatus(environment.stream().Finish());
       },
       grpc::StatusCode::ABORTED,
       {"another stream", "lane 0"},
       RejectReason::kFenced},
      {"message_far_over_the_limit",
       [](Environment& environment) {
         v1::Chunk chunk = environment.Good();
         chunk.mutable_hidden_states()->resize(9 << 20);
         return environment.Ending(chunk);
       },
       grpc::StatusCode::RESOURCE_EXHAUSTED,
       {"9437"},
       std::nullopt},
  };
}

}  // namespace lossd::testing
