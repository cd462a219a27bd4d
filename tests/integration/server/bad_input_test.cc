// Whatever a client sends, it gets the right status with a message that names the field and both values, a metric counts it,
// nothing of it reaches dW, and the server goes on.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/integration/server/test_server.h"

namespace lossd::testing {
namespace {

using engine::RejectReason;
using ::testing::HasSubstr;

constexpr int64_t kVocab = 64;
constexpr int64_t kHidden = 8;
constexpr int64_t kMaxChunkBytes = 4096;  // 128 tokens
constexpr int64_t kCredit = 64 << 10;

// What the client saw. `position` is the PositionInfo of the error's details.
struct Outcome {
  int code = 0;
  std::string message;
  std::string field = {};
  std::optional<v1::PositionInfo> position = {};
};

Outcome FromStatus(const grpc::Status& status) {
  Outcome outcome{status.error_code(), status.error_message()};
  v1::RichStatus rich;
  if (rich.ParseFromString(status.error_details()) && rich.details_size() > 0) {
    v1::PositionInfo position;
    if (rich.details(0).UnpackTo(&position)) outcome.position = position;
  }
  return outcome;
}

// One server with one head, a session with something in the window, and a stream that a case may use.
class Environment {
 public:
  Environment() : stubs_(server_.Channel()) {
    CreateHead(stubs_, "h", kVocab, kHidden);
    session_ = OpenSession(stubs_, "h", "client");
    Restart();
    Compute(Good());
    stream_->ReadApplied(sequence_);
  }

  TestServer& server() { return server_; }
  Stubs& stubs() { return stubs_; }
  const v1::OpenSessionResponse& session() const { return session_; }
  ComputeStream& stream() { return *stream_; }

  // A valid chunk with the next sequence.
  v1::Chunk Good() { return MakeChunk(sequence_ + 1, 1, 16, kVocab, kHidden, 5); }
  // Sends a chunk whose content is wrong: its sequence is consumed.
  Outcome Content(const v1::Chunk& chunk) {
    const std::optional<v1::ChunkResult> result = Compute(chunk);
    if (!result.has_value()) return FromStatus(stream_->Finish());
    if (result->disposition() != v1::DISPOSITION_REJECTED) return {0, "not rejected"};
    return {result->error().code(), result->error().message(), result->error().field()};
  }
  // Sends something after which the stream ends.
  Outcome Ending(const v1::ComputeRequest& request) {
    stream_->SendRaw(request);
    return FromStatus(stream_->Finish());
  }
  Outcome Ending(const v1::Chunk& chunk) {
    v1::ComputeRequest request;
    *request.mutable_chunk() = chunk;
    return Ending(request);
  }
  std::optional<v1::ChunkResult> Compute(const v1::Chunk& chunk) {
    std::optional<v1::ChunkResult> result = stream_->Compute(chunk);
    if (result.has_value() && chunk.sequence() == sequence_ + 1) ++sequence_;
    return result;
  }
  void Restart() {
    stream_ = std::make_unique<ComputeStream>(stubs_, session_);
    sequence_ = stream_->ready().marks().accepted();
  }

 private:
  static TestServerOptions Options() {
    TestServerOptions options;
    options.engine.memory_limit_bytes = 64 << 20;
    options.engine.chunk_limits.max_chunk_bytes = kMaxChunkBytes;
    options.engine.chunk_limits.max_chunk_tokens = 256;
    options.engine.lane_credit_bytes = kCredit;
    options.engine.staging_bytes = 4 * kCredit;
    return options;
  }

  TestServer server_{Options()};
  Stubs stubs_;
  v1::OpenSessionResponse session_;
  std::unique_ptr<ComputeStream> stream_;
  uint64_t sequence_ = 0;
};

struct Case {
  std::string name;
  std::function<Outcome(Environment&)> act;
  int code = 0;
  std::vector<std::string> message;     // all of these are in it
  std::optional<RejectReason> reason;   // counted
  std::string field = {};               // of in-stream errors
};

std::ostream& operator<<(std::ostream& out, const Case& test_case) { return out << test_case.name; }

// --- Chunks: content --------------------------------------------------------------------------------------------------

Case Content(std::string name, RejectReason reason, std::string field, std::vector<std::string> message,
             std::function<void(v1::Chunk&)> spoil) {
  return {std::move(name),
          [spoil = std::move(spoil)](Environment& environment) {
            v1::Chunk chunk = environment.Good();
            spoil(chunk);
            return environment.Content(chunk);
          },
          grpc::StatusCode::INVALID_ARGUMENT, std::move(message), reason, std::move(field)};
}

void SetLabel(v1::Chunk& chunk, int64_t row, int64_t label) {
  std::memcpy(chunk.mutable_labels()->data() + row * 8, &label, 8);
}

void SetHidden(v1::Chunk& chunk, int64_t index, float value) {
  std::memcpy(chunk.mutable_hidden_states()->data() + index * 4, &value, 4);
}

std::vector<Case> ContentCases() {
  return {
      Content("wrong_shape", RejectReason::kLength, "hidden_states", {"576", "512", "[16, 8]"},
              [](v1::Chunk& chunk) { chunk.mutable_hidden_states()->resize(16 * 9 * 4); }),
      Content("wrong_dtype", RejectReason::kDtype, "hidden_dtype", {"hidden_dtype is 9", "DATA_TYPE_FLOAT32"},
              [](v1::Chunk& chunk) { chunk.set_hidden_dtype(static_cast<v1::DataType>(9)); }),
      Content("dtype_not_given", RejectReason::kDtype, "hidden_dtype", {"hidden_dtype is 0"},
              [](v1::Chunk& chunk) { chunk.set_hidden_dtype(v1::DATA_TYPE_UNSPECIFIED); }),
      Content("wrong_dx_dtype", RejectReason::kDtype, "dx_dtype", {"dx_dtype is 77"},
              [](v1::Chunk& chunk) { chunk.set_dx_dtype(static_cast<v1::DataType>(77)); }),
      Content("payload_of_another_dtype", RejectReason::kLength, "hidden_states", {"512", "256", "bfloat16"},
              [](v1::Chunk& chunk) { chunk.set_hidden_dtype(v1::DATA_TYPE_BFLOAT16); }),
      Content("label_too_large", RejectReason::kLabel, "labels", {"labels[3] is 64", "[0, 64)", "-100"},
              [](v1::Chunk& chunk) { SetLabel(chunk, 3, kVocab); }),
      Content("label_negative", RejectReason::kLabel, "labels", {"labels[15] is -1", "[0, 64)"},
              [](v1::Chunk& chunk) { SetLabel(chunk, 15, -1); }),
      Content("label_not_the_ignore_index", RejectReason::kLabel, "labels", {"labels[0] is -100", "ignore_index -7"},
              [](v1::Chunk& chunk) {
                SetLabel(chunk, 0, -100);
                chunk.set_ignore_index(-7);
              }),
      Content("hidden_states_too_short", RejectReason::kLength, "hidden_states", {"511", "512"},
              [](v1::Chunk& chunk) { chunk.mutable_hidden_states()->resize(511); }),
      Content("hidden_states_too_long", RejectReason::kLength, "hidden_states", {"513", "512"},
              [](v1::Chunk& chunk) { chunk.mutable_hidden_states()->resize(513); }),
      Content("labels_too_short", RejectReason::kLength, "labels", {"120", "128"},
              [](v1::Chunk& chunk) { chunk.mutable_labels()->resize(120); }),
      Content("no_payload", RejectReason::kLength, "labels", {"0", "128"},
              [](v1::Chunk& chunk) {
                chunk.clear_labels();
                chunk.clear_hidden_states();
              }),
      Content("chunk_over_the_limit", RejectReason::kChunkTooLarge, "hidden_states", {"4128", "4096"},
              [](v1::Chunk& chunk) { chunk = MakeChunk(chunk.sequence(), 1, 129, kVocab, kHidden, 5); }),
      Content("too_many_tokens", RejectReason::kChunkTooLarge, "tokens", {"257", "256"},
              [](v1::Chunk& chunk) { chunk.set_tokens(257); }),
      Content("tokens_that_overflow", RejectReason::kChunkTooLarge, "tokens", {"4611686018427387904", "256"},
              [](v1::Chunk& chunk) { chunk.set_tokens(int64_t{1} << 62); }),
      Content("zero_rows", RejectReason::kNoTokens, "tokens", {"tokens is 0", "at least 1"},
              [](v1::Chunk& chunk) {
                chunk.set_tokens(0);
                chunk.clear_labels();
                chunk.clear_hidden_states();
              }),
      Content("negative_rows", RejectReason::kNoTokens, "tokens", {"tokens is -5", "at least 1"},
              [](v1::Chunk& chunk) { chunk.set_tokens(-5); }),
      Content("nan_hidden_state", RejectReason::kNonFinite, "hidden_states", {"1 non-finite", "128"},
              [](v1::Chunk& chunk) { SetHidden(chunk, 77, std::numeric_limits<float>::quiet_NaN()); }),
      Content("infinite_hidden_states", RejectReason::kNonFinite, "hidden_states", {"2 non-finite"},
              [](v1::Chunk& chunk) {
                SetHidden(chunk, 0, std::numeric_limits<float>::infinity());
                SetHidden(chunk, 127, -std::numeric_limits<float>::infinity());
              }),
      Content("nan_gradient_scale", RejectReason::kOption, "gradient_scale", {"nan", "finite"},
              [](v1::Chunk& chunk) { chunk.set_gradient_scale(std::numeric_limits<float>::quiet_NaN()); }),
      Content("unknown_mode", RejectReason::kOption, "mode", {"mode is 42"},
              [](v1::Chunk& chunk) { chunk.set_mode(static_cast<v1::ComputeMode>(42)); }),
  };
}

// --- Streams: position ------------------------------------------------------------------------------------------------

Outcome StartWith(Environment& environment, const v1::OpenSessionResponse& session, int32_t lane = 0) {
  ComputeStream stream(environment.stubs(), session, lane);
  return FromStatus(stream.Finish());
}

std::vector<Case> StreamCases() {
  return {
      {"gap_in_sequence",
       [](Environment& environment) {
         v1::Chunk chunk = environment.Good();
         chunk.set_sequence(chunk.sequence() + 4);
         return environment.Ending(chunk);
       },
       grpc::StatusCode::FAILED_PRECONDITION, {"sequence is 6", "expects 2"}, RejectReason::kGap},
      {"sequence_zero",
       [](Environment& environment) {
         v1::Chunk chunk = environment.Good();
         chunk.set_sequence(0);
         return environment.Ending(chunk);
       },
       grpc::StatusCode::FAILED_PRECONDITION, {"sequence is 0", "expects 2"}, RejectReason::kGap},
      {"generation_ahead",
       [](Environment& environment) {
         v1::Chunk chunk = environment.Good();
         chunk.set_generation(2);
         return environment.Ending(chunk);
       },
       grpc::StatusCode::ABORTED, {"generation is 2", "at 1"}, RejectReason::kGeneration},
      {"generation_zero",
       [](Environment& environment) {
         v1::Chunk chunk = environment.Good();
         chunk.set_generation(0);
         return environment.Ending(chunk);
       },
       grpc::StatusCode::ABORTED, {"generation is 0", "at 1"}, RejectReason::kGeneration},
      {"wrong_incarnation",
       [](Environment& environment) {
         v1::OpenSessionResponse session = environment.session();
         session.set_incarnation("before");
         return StartWith(environment, session);
       },
       grpc::StatusCode::ABORTED, {"'before'"}, RejectReason::kIncarnation},
      {"unknown_session",
       [](Environment& environment) {
         v1::OpenSessionResponse session = environment.session();
         session.set_session_id("nobody");
         return StartWith(environment, session);
       },
       grpc::StatusCode::NOT_FOUND, {"'nobody'", "OpenSession"}, RejectReason::kUnknownSession},
      {"unknown_lane", [](Environment& environment) { return StartWith(environment, environment.session(), 3); },
       grpc::StatusCode::INVALID_ARGUMENT, {"lane is 3", "has 1"}, RejectReason::kOption},
      {"negative_lane", [](Environment& environment) { return StartWith(environment, environment.session(), -1); },
       grpc::StatusCode::INVALID_ARGUMENT, {"lane is -1", "has 1"}, RejectReason::kOption},
      {"empty_message", [](Environment& environment) { return environment.Ending(v1::ComputeRequest()); },
       grpc::StatusCode::INVALID_ARGUMENT, {"start"}, RejectReason::kMalformed},
      {"second_start",
       [](Environment& environment) {
         v1::ComputeRequest start;
         start.mutable_start()->set_session_id(environment.session().session_id());
         return environment.Ending(start);
       },
       grpc::StatusCode::INVALID_ARGUMENT, {"start", "chunk"}, RejectReason::kMalformed},
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
       grpc::StatusCode::INVALID_ARGUMENT, {"start", "chunk"}, RejectReason::kMalformed},
      {"stream_taken_by_another",
       [](Environment& environment) {
         ComputeStream other(environment.stubs(), environment.session());
         return FromStatus(environment.stream().Finish());
       },
       grpc::StatusCode::ABORTED, {"another stream", "lane 0"}, RejectReason::kFenced},
      {"message_far_over_the_limit",
       [](Environment& environment) {
         v1::Chunk chunk = environment.Good();
         chunk.mutable_hidden_states()->resize(1 << 20);
         return environment.Ending(chunk);
       },
       grpc::StatusCode::RESOURCE_EXHAUSTED, {"1048"}, std::nullopt},
  };
}

// --- Calls ------------------------------------------------------------------------------------------------------------

template <typename Request, typename Response, typename Stub>
Outcome Call(Stub& stub, grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
             const Request& request) {
  grpc::ClientContext context;
  Response response;
  return FromStatus((stub.*method)(&context, request, &response));
}

Outcome CreateHeadWith(Environment& environment, const std::string& name, int64_t vocab, int64_t hidden,
                       v1::DataType type) {
  v1::CreateHeadRequest request;
  request.mutable_config()->set_name(name);
  request.mutable_config()->set_vocab_size(vocab);
  request.mutable_config()->set_hidden_size(hidden);
  request.mutable_config()->set_weight_dtype(type);
  return Call(*environment.stubs().heads, &v1::HeadService::Stub::CreateHead, request);
}

Outcome OpenSessionWith(Environment& environment, const std::string& head, const std::string& key, int32_t lanes) {
  v1::OpenSessionRequest request;
  request.set_head(head);
  request.set_client_key(key);
  request.set_lanes(lanes);
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

Outcome WriteRows(Environment& environment, int64_t first_row, int64_t rows, int64_t bytes, bool known_write) {
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

std::vector<Case> CallCases() {
  constexpr v1::DataType kFp32 = v1::DATA_TYPE_FLOAT32;
  return {
      {"unknown_head",
       [](Environment& environment) { return OpenSessionWith(environment, "nowhere", "key", 1); },
       grpc::StatusCode::NOT_FOUND, {"'nowhere'", "CreateHead"}, RejectReason::kUnknownHead},
      {"head_name_of_a_megabyte",
       [](Environment& environment) { return OpenSessionWith(environment, std::string(1000, 'x'), "key", 1); },
       grpc::StatusCode::NOT_FOUND, {"xxx"}, RejectReason::kUnknownHead},
      {"empty_client_key", [](Environment& environment) { return OpenSessionWith(environment, "h", "", 1); },
       grpc::StatusCode::INVALID_ARGUMENT, {"client_key", "0 bytes", "1 to 256"}, RejectReason::kOption},
      {"too_many_lanes", [](Environment& environment) { return OpenSessionWith(environment, "h", "key", 17); },
       grpc::StatusCode::INVALID_ARGUMENT, {"lanes is 17", "16"}, RejectReason::kOption},
      {"lanes_beyond_the_staging_memory",
       [](Environment& environment) { return OpenSessionWith(environment, "h", "key", 9); },
       grpc::StatusCode::RESOURCE_EXHAUSTED, {"lanes is 9", "3 of 4"}, RejectReason::kOverload},
      {"no_vocabulary",
       [](Environment& environment) { return CreateHeadWith(environment, "new", 0, 8, kFp32); },
       grpc::StatusCode::INVALID_ARGUMENT, {"vocab_size is 0"}, RejectReason::kShape},
      {"negative_hidden_size",
       [](Environment& environment) { return CreateHeadWith(environment, "new", 64, -1, kFp32); },
       grpc::StatusCode::INVALID_ARGUMENT, {"hidden_size is -1"}, RejectReason::kShape},
      {"head_name_with_a_slash",
       [](Environment& environment) { return CreateHeadWith(environment, "../etc", 64, 8, kFp32); },
       grpc::StatusCode::INVALID_ARGUMENT, {"name"}, RejectReason::kOption},
      {"head_without_dtype",
       [](Environment& environment) { return CreateHeadWith(environment, "new", 64, 8, v1::DATA_TYPE_UNSPECIFIED); },
       grpc::StatusCode::INVALID_ARGUMENT, {"weight_dtype is 0"}, RejectReason::kDtype},
      {"head_that_does_not_fit",
       [](Environment& environment) { return CreateHeadWith(environment, "new", 100000, 1024, kFp32); },
       grpc::StatusCode::RESOURCE_EXHAUSTED, {"1228800000", "gradient", "free", "67108864"},
       RejectReason::kOutOfMemory},
      {"head_of_another_size",
       [](Environment& environment) { return CreateHeadWith(environment, "h", kVocab, kHidden + 1, kFp32); },
       grpc::StatusCode::ALREADY_EXISTS, {"[64, 8]", "[64, 9]"}, RejectReason::kConflict},
      {"delete_a_head_that_holds_gradients",
       [](Environment& environment) {
         v1::DeleteHeadRequest request;
         request.set_name("h");
         return Call(*environment.stubs().heads, &v1::HeadService::Stub::DeleteHead, request);
       },
       grpc::StatusCode::FAILED_PRECONDITION, {"16 tokens", "discard_gradient"}, RejectReason::kConflict},
      {"second_flush_with_other_arguments",
       [](Environment& environment) {
         v1::BeginFlushRequest request = FlushRequest(environment);
         v1::BeginFlushResponse flush;
         grpc::ClientContext context;
         environment.stubs().gradients->BeginFlush(&context, request, &flush);
         request.mutable_marks(0)->mutable_lanes(0)->set_accepted(99);
         const Outcome outcome = BeginFlushWith(environment, request);
         AbortFlush(environment, flush.flush_id());
         return outcome;
       },
       grpc::StatusCode::FAILED_PRECONDITION, {"/0=1", "/0=99"}, RejectReason::kFlushArguments},
      {"flush_with_wrong_marks",
       [](Environment& environment) {
         v1::BeginFlushRequest request = FlushRequest(environment);
         request.mutable_marks(0)->mutable_lanes(0)->set_accepted(99);
         return BeginFlushWith(environment, request);
       },
       grpc::StatusCode::FAILED_PRECONDITION, {"accepted 99", "accepted 1"}, RejectReason::kMarks},
      {"flush_that_forgets_a_session",
       [](Environment& environment) {
         v1::BeginFlushRequest request = FlushRequest(environment);
         request.clear_marks();
         return BeginFlushWith(environment, request);
       },
       grpc::StatusCode::FAILED_PRECONDITION, {"'client'", "up to 1"}, RejectReason::kMarks},
      {"flush_that_names_a_stranger",
       [](Environment& environment) {
         v1::BeginFlushRequest request = FlushRequest(environment);
         request.add_marks()->set_session_id("stranger");
         return BeginFlushWith(environment, request);
       },
       grpc::StatusCode::FAILED_PRECONDITION, {"stranger"}, RejectReason::kMarks},
      {"flush_of_another_generation",
       [](Environment& environment) {
         v1::BeginFlushRequest request = FlushRequest(environment);
         request.set_generation(3);
         return BeginFlushWith(environment, request);
       },
       grpc::StatusCode::ABORTED, {"generation is 3", "at 1"}, RejectReason::kGeneration},
      {"commit_of_an_unknown_flush",
       [](Environment& environment) {
         v1::CommitFlushRequest request;
         request.set_head("h");
         request.set_flush_id("f");
         return Call(*environment.stubs().gradients, &v1::GradientService::Stub::CommitFlush, request);
       },
       grpc::StatusCode::ABORTED, {"'f'", "generation 1"}, RejectReason::kUnknownFlush},
      {"commit_of_no_flush",
       [](Environment& environment) {
         v1::CommitFlushRequest request;
         request.set_head("h");
         return Call(*environment.stubs().gradients, &v1::GradientService::Stub::CommitFlush, request);
       },
       grpc::StatusCode::ABORTED, {"''"}, RejectReason::kUnknownFlush},
      {"weight_rows_out_of_range", [](Environment& environment) { return WriteRows(environment, 60, 5, 160, true); },
       grpc::StatusCode::INVALID_ARGUMENT, {"rows is 5", "are 4"}, RejectReason::kShape},
      {"weight_rows_that_overflow",
       [](Environment& environment) {
         return WriteRows(environment, 1, std::numeric_limits<int64_t>::max(), 160, true);
       },
       grpc::StatusCode::INVALID_ARGUMENT, {"9223372036854775807", "are 63"}, RejectReason::kShape},
      {"weight_rows_before_the_first",
       [](Environment& environment) { return WriteRows(environment, -1, 1, 32, true); },
       grpc::StatusCode::INVALID_ARGUMENT, {"first_row is -1", "64"}, RejectReason::kShape},
      {"weight_rows_too_short", [](Environment& environment) { return WriteRows(environment, 0, 2, 60, true); },
       grpc::StatusCode::INVALID_ARGUMENT, {"60", "64"}, RejectReason::kLength},
      {"unknown_weight_write", [](Environment& environment) { return WriteRows(environment, 0, 1, 32, false); },
       grpc::StatusCode::NOT_FOUND, {"no-such-write"}, RejectReason::kUnknownWrite},
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
       grpc::StatusCode::FAILED_PRECONDITION, {"lacks 64 of 64", "row 0"}, RejectReason::kWeightWrite},
      {"gradient_of_no_flush",
       [](Environment& environment) {
         v1::ReadGradientRequest request;
         request.set_head("h");
         request.set_flush_id("f");
         grpc::ClientContext context;
         auto reader = environment.stubs().gradients->ReadGradient(&context, request);
         return FromStatus(reader->Finish());
       },
       grpc::StatusCode::ABORTED, {"'f'"}, RejectReason::kUnknownFlush},
      {"weights_from_row_out_of_range",
       [](Environment& environment) {
         v1::ReadWeightsRequest request;
         request.set_head("h");
         request.set_first_row(64);
         grpc::ClientContext context;
         auto reader = environment.stubs().heads->ReadWeights(&context, request);
         return FromStatus(reader->Finish());
       },
       grpc::StatusCode::INVALID_ARGUMENT, {"first_row is 64", "64 rows"}, RejectReason::kShape},
      {"session_on_a_head_without_weights",
       [](Environment& environment) {
         CreateHeadWith(environment, "bare", 8, 8, kFp32);
         const v1::OpenSessionResponse session = OpenSession(environment.stubs(), "bare", "key");
         return StartWith(environment, session);
       },
       grpc::StatusCode::FAILED_PRECONDITION, {"bare", "no weights"}, RejectReason::kNoWeights},
  };
}

// --- Clients that misbehave -------------------------------------------------------------------------------------------

void WaitUntil(const std::function<bool()>& condition) {
  while (!condition()) std::this_thread::sleep_for(std::chrono::milliseconds(2));
}

// Ignored rows leave dW alone but are answered with a full dX.
v1::Chunk AllIgnored(uint64_t sequence) {
  v1::Chunk chunk = MakeChunk(sequence, 1, 128, kVocab, kHidden, 3);
  for (int64_t row = 0; row < 128; ++row) SetLabel(chunk, row, -100);
  return chunk;
}

Outcome VanishMidStream(Environment& environment) {
  const engine::Gauge& live = environment.server().engine().counters().live_streams;
  const int64_t before = live;
  {
    Stubs own(environment.server().Channel());
    const v1::OpenSessionResponse session = OpenSession(own, "h", "vanishing");
    ComputeStream stream(own, session);
    for (uint64_t sequence = 1; sequence <= 20; ++sequence) stream.Send(AllIgnored(sequence));
  }  // cancelled without a word, and its connection closed
  WaitUntil([&] { return live == before; });
  return {0, ""};
}

Outcome NeverRead(Environment& environment) {
  const engine::Counters& counters = environment.server().engine().counters();
  const uint64_t before = counters.payload_bytes_in;
  Stubs own(environment.server().Channel());
  const v1::OpenSessionResponse session = OpenSession(own, "h", "mute");
  ComputeStream stream(own, session);
  constexpr uint64_t kChunks = 4096;  // 20 MiB and as much again in answers
  std::thread writer([&] {
    for (uint64_t sequence = 1; sequence <= kChunks && stream.Send(AllIgnored(sequence)); ++sequence) {
    }
  });
  // The server stops taking chunks once the answers it could not deliver have used up the credit.
  uint64_t taken = 0;
  for (uint64_t last = 1; taken != last;) {
    last = taken;
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    taken = counters.payload_bytes_in - before;
  }
  stream.Cancel();
  writer.join();
  stream.Finish();
  const uint64_t sent = kChunks * (4096 + 1024);
  if (taken >= sent) return {0, "everything was taken: " + std::to_string(taken)};
  return {0, "bounded"};
}

Outcome Garbage(Environment& environment) {
  const int descriptor = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(environment.server().port()));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(descriptor, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) return {0, "no connection"};
  std::string bytes;
  for (const float value : RandomFloats(4096, 11)) bytes.append(reinterpret_cast<const char*>(&value), 4);
  size_t sent = 0;
  while (sent < bytes.size()) {
    const ssize_t now = send(descriptor, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (now <= 0) break;
    sent += static_cast<size_t>(now);
  }
  std::array<char, 512> buffer{};
  while (recv(descriptor, buffer.data(), buffer.size(), 0) > 0) {
  }
  close(descriptor);
  return {0, "closed"};
}

// lossctl with a limit on file size, which is what a full disk looks like to it.
Outcome FlushToAFullDisk(Environment& environment) {
  std::array<int, 2> channel{};
  if (pipe(channel.data()) != 0) return {0, "no pipe"};
  const std::string server = environment.server().target();
  const std::string out = ::testing::TempDir() + "/full_disk.safetensors";
  const pid_t child = fork();
  if (child == 0) {
    const rlimit limit{1024, 1024};
    setrlimit(RLIMIT_FSIZE, &limit);
    signal(SIGXFSZ, SIG_IGN);
    dup2(channel[1], STDERR_FILENO);
    dup2(channel[1], STDOUT_FILENO);
    close(channel[0]);
    execl(LOSSCTL_BINARY, "lossctl", "--server", server.c_str(), "flush", "h", "--out", out.c_str(), nullptr);
    _exit(127);
  }
  close(channel[1]);
  Outcome outcome;
  std::array<char, 512> buffer{};
  for (ssize_t n = 0; (n = read(channel[0], buffer.data(), buffer.size())) > 0;) {
    outcome.message.append(buffer.data(), static_cast<size_t>(n));
  }
  close(channel[0]);
  int status = 0;
  waitpid(child, &status, 0);
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  if (access(out.c_str(), F_OK) == 0) outcome.message += " and left a file";
  return outcome;
}

std::vector<Case> ClientCases() {
  return {
      {"client_vanishes_mid_stream", VanishMidStream, 0, {}, std::nullopt},
      {"client_never_reads", NeverRead, 0, {"bounded"}, std::nullopt},
      {"garbage_on_the_port", Garbage, 0, {"closed"}, std::nullopt},
      {"full_disk_under_out", FlushToAFullDisk, 6, {"full_disk.safetensors"}, std::nullopt},
      {"repeated_sequence",
       [](Environment& environment) {
         const std::optional<v1::ChunkResult> result =
             environment.Compute(MakeChunk(1, 1, 16, kVocab, kHidden, 5));
         if (!result.has_value() || result->disposition() != v1::DISPOSITION_REPEATED) return Outcome{0, "not repeated"};
         return Outcome{0, result->dx().size() == 16 * kHidden * 4 ? "computed again" : "no dx"};
       },
       0, {"computed again"}, std::nullopt},
  };
}

std::vector<Case> AllCases() {
  std::vector<Case> all;
  for (const auto& cases : {ContentCases(), StreamCases(), CallCases(), ClientCases()}) {
    all.insert(all.end(), cases.begin(), cases.end());
  }
  return all;
}

class BadInput : public ::testing::TestWithParam<Case> {};

TEST_P(BadInput, GetsAClearErrorAndNothingIsLost) {
  const Case& test_case = GetParam();
  Environment environment;
  const WindowContent before = PeekWindow(environment.stubs(), "h");
  ASSERT_EQ(before.tokens, 16U);
  const uint64_t counted =
      test_case.reason.has_value() ? environment.server().rejected(*test_case.reason) : 0;

  const Outcome outcome = test_case.act(environment);

  EXPECT_EQ(outcome.code, test_case.code) << outcome.message;
  for (const std::string& part : test_case.message) EXPECT_THAT(outcome.message, HasSubstr(part));
  if (!test_case.field.empty()) {
    EXPECT_EQ(outcome.field, test_case.field);
  }
  if (test_case.reason.has_value()) {
    EXPECT_EQ(environment.server().rejected(*test_case.reason), counted + 1);
  }
  const bool positional = test_case.code == grpc::StatusCode::ABORTED &&
                          (test_case.reason == RejectReason::kGeneration || test_case.reason == RejectReason::kIncarnation);
  if (positional || test_case.reason == RejectReason::kGap) {
    ASSERT_TRUE(outcome.position.has_value());
    EXPECT_EQ(outcome.position->incarnation(), environment.session().incarnation());
  }
  EXPECT_EQ(PeekWindow(environment.stubs(), "h"), before) << "dW changed";

  environment.Restart();
  const std::optional<v1::ChunkResult> good = environment.Compute(environment.Good());
  ASSERT_TRUE(good.has_value()) << "the server no longer computes";
  EXPECT_EQ(good->disposition(), v1::DISPOSITION_ACCUMULATED);
}

INSTANTIATE_TEST_SUITE_P(Table, BadInput, ::testing::ValuesIn(AllCases()),
                         [](const ::testing::TestParamInfo<Case>& param) { return param.param.name; });

}  // namespace
}  // namespace lossd::testing
