// The table of bad input: what each case does, and what must come of it. One file a kind of case.
#ifndef LOSSD_TESTS_INTEGRATION_SERVER_BAD_INPUT_H_
#define LOSSD_TESTS_INTEGRATION_SERVER_BAD_INPUT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "server/engine/common/errors.h"
#include "tests/support/test_server.h"

namespace lossd::testing {

inline constexpr int64_t kInputVocab = 64;
inline constexpr int64_t kInputHidden = 8;
inline constexpr int64_t kMaxChunkBytes = 4096;  // 128 tokens
inline constexpr int64_t kCredit = 64 << 10;

// What the client saw. `position` is the PositionInfo of the error's details.
struct Outcome {
  int code = 0;
  std::string message;
  std::string field = {};
  std::optional<v1::PositionInfo> position = {};
};

Outcome FromStatus(const grpc::Status& status);

template <typename Request, typename Response, typename Stub>
Outcome Call(Stub& stub, grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
             const Request& request) {
  grpc::ClientContext context;
  Response response;
  return FromStatus((stub.*method)(&context, request, &response));
}

// One server with one head "h" and a session with one chunk of 16 tokens in the window, and a stream that a
// case may use.
class Environment {
 public:
  Environment();

  TestServer& server() { return server_; }
  Stubs& stubs() { return stubs_; }
  const v1::OpenSessionResponse& session() const { return session_; }
  ComputeStream& stream() { return *stream_; }

  // A valid chunk with the next sequence.
  v1::Chunk Good() const { return MakeChunk(sequence_ + 1, 1, 16, kInputVocab, kInputHidden, 5); }
  // Sends a chunk whose content is wrong: its sequence is consumed.
  Outcome Content(const v1::Chunk& chunk);
  // Sends something after which the stream ends.
  Outcome Ending(const v1::ComputeRequest& request);
  Outcome Ending(const v1::Chunk& chunk);
  std::optional<v1::ChunkResult> Compute(const v1::Chunk& chunk);
  // A new stream of the same lane.
  void Restart();

 private:
  TestServer server_;
  Stubs stubs_;
  v1::OpenSessionResponse session_;
  std::unique_ptr<ComputeStream> stream_;
  uint64_t sequence_ = 0;
};

struct Case {
  std::string name;
  std::function<Outcome(Environment&)> act;
  int code = 0;
  std::vector<std::string> message;            // all of these are in it
  std::optional<engine::RejectReason> reason;  // counted once
  std::string field = {};                      // of errors inside the stream
};

std::ostream& operator<<(std::ostream& out, const Case& test_case);

std::vector<Case> ContentCases();  // chunks with wrong content
std::vector<Case> StreamCases();   // messages in the wrong place
std::vector<Case> CallCases();     // unary calls and row streams
std::vector<Case> StepCases();     // the optimizer
std::vector<Case> CopyCases();     // copies of heads and averages
std::vector<Case> ParkingCases();  // heads that are put aside
std::vector<Case> LogitsCases();   // calls for logits
std::vector<Case> ClientCases();   // clients that vanish, stall, talk nonsense or run out of disk

void SetLabel(v1::Chunk& chunk, int64_t row, int64_t label);
// A Compute stream that is started with this; its end.
Outcome StartWith(Environment& environment, const v1::OpenSessionResponse& session, int32_t lane = 0);

}  // namespace lossd::testing

#endif  // LOSSD_TESTS_INTEGRATION_SERVER_BAD_INPUT_H_
