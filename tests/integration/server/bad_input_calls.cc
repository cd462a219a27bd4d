#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "tests/integration/server/bad_input.h"

namespace lossd::testing {
namespace {

using engine::RejectReason;

Outcome CreateHeadWith(Environment& environment, const std::string& name, int64_t vocab, int64_t hidden,
                       v1::DataType type) {
  v1::CreateHeadRequest request;
  request.mutable_config()->set_name(name);
  request.mutable_config()->set_vocab_size(vocab);
  request.mutable_config()->set_hidden_size(hidden);
  request.mutable_config()->set_weight_dtype(type);
  return Call(*environment.stubs().heads, &v1::HeadService::Stub::CreateHead, request);
}

Outcome CreateHeadWithClassWeights(Environment& environment, const std::string& class_weights) {
  v1::CreateHeadRequest request;
  request.mutable_config()->set_name("new");
  request.mutable_config()->set_vocab_size(kInputVocab);
  request.mutable_config()->set_hidden_size(kInputHidden);
  request.mutable_config()->set_weight_dtype(v1::DATA_TYPE_FLOAT32);
  request.set_class_weights(class_weights);
  return Call(*environment.stubs().heads, &v1::HeadService::Stub::CreateHead, request);
}

Outcome OpenSessionWith(Environment& environment, const std::string& head, const std::string& key,
                        int32_t lanes, int64_t held_hidden_bytes = 0) {
  v1::OpenSessionRequest request;
  request.set_head(head);
  request.set_client_key(key);
  request.set_lanes(lanes);
  request.set_held_hidden_bytes(held_hidden_bytes);
  return Call(*environment.stubs().losses, &v1::LossService::Stub::OpenSession, request);
}

v1::BeginFlushRequest FlushRequest(Environment& environment) {
  v1::BeginFlushRequest request;
  request.set_head("h");
  request.set_generation(1);
  *request.mutable_marks() = GetHead(environment.stubs(), "h").sessions();
  return request;
}

Outcome BeginFlushWith(Environment& environment, const v1::BeginFlushRequest& request) {
  return Call(*environment.stubs().gradients, &v1::GradientService::Stub::BeginFlush, request);
}

void AbortFlush(Environment& environment, const std::string& flush_id) {
  v1::AbortFlushRequest request;
  request.set_head("h");
  request.set_flush_id(flush_id);
  Call(*environment.stubs().gradients, &v1::GradientService::Stub::AbortFlush, request);
}

Outcome WriteRows(Environment& environment, int64_t first_row, int64_t rows, int64_t bytes,
                  bool known_write) {
  v1::BeginWriteRequest begin;
  begin.set_head("h");
  begin.set_write_key("bad");
  v1::BeginWriteResponse write;
  grpc::ClientContext begin_context;
  environment.stubs().heads->BeginWrite(&begin_context, begin, &write);
  v1::WriteWeightsRequest request;
  request.set_head("h");
  request.set_write_id(known_write ? write.write_id() : "no-such-write");
  request.set_first_row(first_row);
  request.set_rows(rows);
  request.set_dtype(v1::DATA_TYPE_FLOAT32);
  request.mutable_weights()->resize(static_cast<size_t>(bytes));
  grpc::ClientContext context;
  v1::WriteWeightsResponse response;
  auto writer = environment.stubs().heads->WriteWeights(&context, &response);
  writer->Write(request);
  writer->WritesDone();
  return FromStatus(writer->Finish());
}

}  // namespace

std::vector<Case> CallCases() {
  constexpr v1::DataType kFp32 = v1::DATA_TYPE_FLOAT32;
  return {
      {"unknown_head",
       [](Environment& environment) { return OpenSessionWith(environment, "nowhere", "key", 1); },
       grpc::StatusCode::NOT_FOUND,
       {"'nowhere'", "create it first"},
       RejectReason::kUnknownHead},
      {"head_name_of_a_megabyte",
       [](Environment& environment) {
         return OpenSessionWith(environment, std::string(1000, 'x'), "key", 1);
       },
       grpc::StatusCode::NOT_FOUND,
       {"xxx"},
       RejectReason::kUnknownHead},
      {"empty_client_key",
       [](Environment& environment) { return OpenSessionWith(environment, "h", "", 1); },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"client_key", "0 bytes", "1 to 256"},
       RejectReason::kOption},
      {"too_many_lanes",
       [](Environment& environment) { return OpenSessionWith(environment, "h", "key", 17); },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"lanes is 17", "16"},
       RejectReason::kOption},
      {"lanes_beyond_the_staging_memory",
       [](Environment& environment) { return OpenSessionWith(environment, "h", "key", 9); },
       grpc::StatusCode::RESOURCE_EXHAUSTED,
       {"lanes is 9", "196608 of 262144"},
       RejectReason::kOverload},
      {"held_hidden_states_beyond_what_is_free",
       [](Environment& environment) { return OpenSessionWith(environment, "h", "key", 1, 196608); },
       grpc::StatusCode::RESOURCE_EXHAUSTED,
       {"held_hidden_bytes is 196608", "credit of 65536", "196608 of 262144"},
       RejectReason::kOverload},
      {"held_hidden_states_beyond_all_memory",
       [](Environment& environment) { return OpenSessionWith(environment, "h", "key", 1, 262145); },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"held_hidden_bytes is 262145", "[0, 262144]", "--staging_bytes"},
       RejectReason::kOption},
      {"held_hidden_states_of_fewer_bytes_than_none",
       [](Environment& environment) { return OpenSessionWith(environment, "h", "key", 1, -1); },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"held_hidden_bytes is -1", "[0, 262144]"},
       RejectReason::kOption},
      {"no_vocabulary",
       [](Environment& environment) { return CreateHeadWith(environment, "new", 0, 8, kFp32); },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"vocab_size is 0"},
       RejectReason::kShape},
      {"negative_hidden_size",
       [](Environment& environment) { return CreateHeadWith(environment, "new", 64, -1, kFp32); },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"hidden_size is -1"},
       RejectReason::kShape},
      {"head_name_with_a_slash",
       [](Environment& environment) { return CreateHeadWith(environment, "../etc", 64, 8, kFp32); },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"name"},
       RejectReason::kOption},
      {"head_without_dtype",
       [](Environment& environment) {
         return CreateHeadWith(environment, "new", 64, 8, v1::DATA_TYPE_UNSPECIFIED);
       },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"weight_dtype is 0"},
       RejectReason::kDtype},
      {"class_weights_of_another_vocabulary",
       [](Environment& environment) {
         return CreateHeadWithClassWeights(environment, std::string(63 * 4, 'a'));
       },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"class_weights holds 63 values", "64 entries"},
       RejectReason::kLength},
      {"class_weights_that_are_no_floats",
       [](Environment& environment) {
         return CreateHeadWithClassWeights(environment, std::string(255, 'a'));
       },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"class_weights holds 255 bytes"},
       RejectReason::kLength},
      {"class_weights_of_zero",
       [](Environment& environment) {
         return CreateHeadWithClassWeights(environment, std::string(64 * 4, '\0'));
       },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"the sum of class_weights is 0"},
       RejectReason::kOption},
      {"infinite_scale_of_a_flush",
       [](Environment& environment) {
         v1::BeginFlushRequest request = FlushRequest(environment);
         request.set_gradient_scale(std::numeric_limits<float>::infinity());
         return Call(*environment.stubs().gradients, &v1::GradientService::Stub::BeginFlush, request);
       },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"gradient_scale is inf", "finite"},
       RejectReason::kOption},
      {"head_that_does_not_fit",
       [](Environment& environment) { return CreateHeadWith(environment, "new", 100000, 1024, kFp32); },
       grpc::StatusCode::RESOURCE_EXHAUSTED,
       {"1228800000", "gradient", "free", "67108864"},
       RejectReason::kOutOfMemory},
      {"head_of_another_size",
       [](Environment& environment) {
         return CreateHeadWith(environment, "h", kInputVocab, kInputHidden + 1, kFp32);
       },
       grpc::StatusCode::ALREADY_EXISTS,
       {"[64, 8]", "[64, 9]"},
       RejectReason::kConflict},
      {"delete_a_head_that_holds_gradients",
       [](Environment& environment) {
         v1::DeleteHeadRequest request;
         request.set_name("h");
         return Call(*environment.stubs().heads, &v1::HeadService::Stub::DeleteHead, request);
       },
       grpc::StatusCode::FAILED_PRECONDITION,
       {"16 tokens", "discard_gradient"},
       RejectReason::kConflict},
      {"second_flush_with_other_arguments",
       [](Environment& environment) {
         v1::BeginFlushRequest request = FlushRequest(environment);
         v1::BeginFlushResponse flush;
         grpc::ClientContext context;
         environment.stubs().gradients->BeginFlush(&context, request, &flush);
         request.mutable_marks(0)->mutable_lanes(0)->set_accepted(99);
         Outcome outcome = BeginFlushWith(environment, request);
         AbortFlush(environment, flush.flush_id());
         return outcome;
       },
       grpc::StatusCode::FAILED_PRECONDITION,
       {"/0=1", "/0=99"},
       RejectReason::kFlushArguments},
      {"flush_with_wrong_marks",
       [](Environment& environment) {
         v1::BeginFlushRequest request = FlushRequest(environment);
         request.mutable_marks(0)->mutable_lanes(0)->set_accepted(99);
         return BeginFlushWith(environment, request);
       },
       grpc::StatusCode::FAILED_PRECONDITION,
       {"accepted 99", "accepted 1"},
       RejectReason::kMarks},
      {"flush_that_forgets_a_session",
       [](Environment& environment) {
         v1::BeginFlushRequest request = FlushRequest(environment);
         request.clear_marks();
         return BeginFlushWith(environment, request);
       },
       grpc::StatusCode::FAILED_PRECONDITION,
       {"rank 0", "up to 1"},
       RejectReason::kMarks},
      {"flush_that_names_a_stranger",
       [](Environment& environment) {
         v1::BeginFlushRequest request = FlushRequest(environment);
         request.add_marks()->set_session_id("stranger");
         return BeginFlushWith(environment, request);
       },
       grpc::StatusCode::FAILED_PRECONDITION,
       {"stranger"},
       RejectReason::kMarks},
      {"flush_of_another_generation",
       [](Environment& environment) {
         v1::BeginFlushRequest request = FlushRequest(environment);
         request.set_generation(3);
         return BeginFlushWith(environment, request);
       },
       grpc::StatusCode::ABORTED,
       {"generation is 3", "at 1"},
       RejectReason::kGeneration},
      {"commit_of_an_unknown_flush",
       [](Environment& environment) {
         v1::CommitFlushRequest request;
         request.set_head("h");
         request.set_flush_id("f");
         return Call(*environment.stubs().gradients, &v1::GradientService::Stub::CommitFlush, request);
       },
       grpc::StatusCode::ABORTED,
       {"'f'", "generation 1"},
       RejectReason::kUnknownFlush},
      {"commit_of_no_flush",
       [](Environment& environment) {
         v1::CommitFlushRequest request;
         request.set_head("h");
         return Call(*environment.stubs().gradients, &v1::GradientService::Stub::CommitFlush, request);
       },
       grpc::StatusCode::ABORTED,
       {"''"},
       RejectReason::kUnknownFlush},
      {"weight_rows_out_of_range",
       [](Environment& environment) { return WriteRows(environment, 60, 5, 160, true); },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"rows is 5", "are 4"},
       RejectReason::kShape},
      {"weight_rows_that_overflow",
       [](Environment& environment) {
         return WriteRows(environment, 1, std::numeric_limits<int64_t>::max(), 160, true);
       },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"9223372036854775807", "are 63"},
       RejectReason::kShape},
      {"weight_rows_before_the_first",
       [](Environment& environment) { return WriteRows(environment, -1, 1, 32, true); },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"first_row is -1", "64"},
       RejectReason::kShape},
      {"weight_rows_too_short",
       [](Environment& environment) { return WriteRows(environment, 0, 2, 60, true); },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"60", "64"},
       RejectReason::kLength},
      {"unknown_weight_write",
       [](Environment& environment) { return WriteRows(environment, 0, 1, 32, false); },
       grpc::StatusCode::NOT_FOUND,
       {"no-such-write"},
       RejectReason::kUnknownWrite},
      {"weights_committed_before_all_rows_came",
       [](Environment& environment) {
         v1::BeginWriteRequest begin;
         begin.set_head("h");
         begin.set_write_key("half");
         begin.set_replace(true);
         v1::BeginWriteResponse write;
         grpc::ClientContext context;
         environment.stubs().heads->BeginWrite(&context, begin, &write);
         v1::CommitWriteRequest request;
         request.set_head("h");
         request.set_write_id(write.write_id());
         return Call(*environment.stubs().heads, &v1::HeadService::Stub::CommitWrite, request);
       },
       grpc::StatusCode::FAILED_PRECONDITION,
       {"lacks 64 of 64", "row 0"},
       RejectReason::kWeightWrite},
      {"gradient_of_no_flush",
       [](Environment& environment) {
         v1::ReadGradientRequest request;
         request.set_head("h");
         request.set_flush_id("f");
         grpc::ClientContext context;
         auto reader = environment.stubs().gradients->ReadGradient(&context, request);
         return FromStatus(reader->Finish());
       },
       grpc::StatusCode::ABORTED,
       {"'f'"},
       RejectReason::kUnknownFlush},
      {"weights_from_row_out_of_range",
       [](Environment& environment) {
         v1::ReadWeightsRequest request;
         request.set_head("h");
         request.set_first_row(64);
         grpc::ClientContext context;
         auto reader = environment.stubs().heads->ReadWeights(&context, request);
         return FromStatus(reader->Finish());
       },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"first_row is 64", "64 rows"},
       RejectReason::kShape},
      {"session_on_a_head_without_weights",
       [](Environment& environment) {
         CreateHeadWith(environment, "bare", 8, 8, kFp32);
         const v1::OpenSessionResponse session = OpenSession(environment.stubs(), "bare", "key");
         return StartWith(environment, session);
       },
       grpc::StatusCode::FAILED_PRECONDITION,
       {"bare", "no weights"},
       RejectReason::kNoWeights},
  };
}

}  // namespace lossd::testing
