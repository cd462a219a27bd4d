#include "tests/integration/server/bad_input.h"

#include <cstring>
#include <utility>

namespace lossd::testing {
namespace {

TestServerOptions SmallLimits() {
  TestServerOptions options;
  options.engine.memory_limit_bytes = 64 << 20;
  options.engine.parking_bytes = 1 << 20;
  options.engine.chunk_limits.max_chunk_bytes = kMaxChunkBytes;
  options.engine.chunk_limits.max_chunk_tokens = 256;
  options.engine.lane_credit_bytes = kCredit;
  options.engine.staging_bytes = 4 * kCredit;
  return options;
}

}  // namespace

Outcome FromStatus(const grpc::Status& status) {
  Outcome outcome{status.error_code(), status.error_message()};
  v1::RichStatus rich;
  if (rich.ParseFromString(status.error_details()) && rich.details_size() > 0) {
    v1::PositionInfo position;
    if (rich.details(0).UnpackTo(&position)) outcome.position = position;
  }
  return outcome;
}

Environment::Environment() : server_(SmallLimits()), stubs_(server_.Channel()) {
  CreateHead(stubs_, "h", kInputVocab, kInputHidden);
  session_ = OpenSession(stubs_, "h", "client");
  Restart();
  Compute(Good());
  stream_->ReadApplied(sequence_);
}

Outcome Environment::Content(const v1::Chunk& chunk) {
  const std::optional<v1::ChunkResult> result = Compute(chunk);
  if (!result.has_value()) return FromStatus(stream_->Finish());
  if (result->disposition() != v1::DISPOSITION_REJECTED) return {0, "not rejected"};
  return {result->error().code(), result->error().message(), result->error().field()};
}

Outcome Environment::Ending(const v1::ComputeRequest& request) {
  stream_->SendRaw(request);
  return FromStatus(stream_->Finish());
}

Outcome Environment::Ending(const v1::Chunk& chunk) {
  v1::ComputeRequest request;
  *request.mutable_chunk() = chunk;
  return Ending(request);
}

std::optional<v1::ChunkResult> Environment::Compute(const v1::Chunk& chunk) {
  std::optional<v1::ChunkResult> result = stream_->Compute(chunk);
  if (result.has_value() && chunk.sequence() == sequence_ + 1) ++sequence_;
  return result;
}

void Environment::Restart() {
  stream_ = std::make_unique<ComputeStream>(stubs_, session_);
  sequence_ = stream_->ready().marks().accepted();
}

std::ostream& operator<<(std::ostream& out, const Case& test_case) { return out << test_case.name; }

void SetLabel(v1::Chunk& chunk, int64_t row, int64_t label) {
  std::memcpy(chunk.mutable_labels()->data() + row * 8, &label, 8);
}

Outcome StartWith(Environment& environment, const v1::OpenSessionResponse& session, int32_t lane) {
  ComputeStream stream(environment.stubs(), session, lane);
  return FromStatus(stream.Finish());
}

}  // namespace lossd::testing
