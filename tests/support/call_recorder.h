// What the clients of this process send, seen from within gRPC: the messages themselves, as they go out.
// Calls can be made to fail there, at exact points: the server is a real one, and the way to it is scripted.
#ifndef LOSSD_TESTS_SUPPORT_CALL_RECORDER_H_
#define LOSSD_TESTS_SUPPORT_CALL_RECORDER_H_

#include <google/protobuf/message.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/status.h"
#include "lossd/v1/gradient.pb.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/loss.pb.h"

namespace lossd::testing {

// What happens to one chunk. Where its stream breaks, the chunks before it have been answered, and those
// behind it do not arrive.
enum class Fate {
  kTake,
  kCutBeforeTaking,  // the stream breaks; the chunk does not arrive
  kEndBeforeTaking,  // likewise, and the call ends with OK
  kCutBeforeAnswer,  // the chunk is taken; the stream breaks before its answer comes
  kCutAfterAnswer,   // the stream breaks right behind the answer
  kLoseAnswer        // of a stream that breaks at a later chunk
};

// As gRPC says that a connection broke.
inline grpc::Status Broken() { return {grpc::StatusCode::UNAVAILABLE, "cut by the test"}; }
// As lossd marks its own errors.
grpc::Status Refused(grpc::StatusCode code, const google::protobuf::Message* detail = nullptr);

// One at a time; it is there before the first call that it records, and after the last. A fault that was
// scripted (row_cuts, LoseAnswers, Refuse) and did not happen fails the test. Thread-safe.
class CallRecorder {
 public:
  CallRecorder();
  ~CallRecorder();
  CallRecorder(const CallRecorder&) = delete;
  CallRecorder& operator=(const CallRecorder&) = delete;

  // While there is one, calls that this thread begins are not recorded, and nothing happens to them.
  class Pause {
   public:
    Pause();
    ~Pause();
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;
  };

  struct Observed {
    std::vector<int> stream_lanes;  // of each stream, in the order of their starts
    std::vector<int> chunk_lanes;   // of each of `chunks`
    int64_t peak_outstanding = 0;   // chunks of one stream that were not answered
    int streams = 0;
    std::vector<std::string> stream_ends;  // of those that no script has cut
    int commits = 0;                       // calls of CommitFlush
    int aborts = 0;
    std::vector<int64_t> gradient_first_rows;
    int weight_write_streams = 0;
    std::vector<v1::BeginWriteRequest> begun_writes;
    std::vector<v1::WriteWeightsRequest> weight_writes;  // without their rows
    std::vector<v1::ReadWeightsRequest> weight_reads;
    int64_t largest_weight_bytes = 0;  // of a message of rows
    std::vector<v1::Chunk> chunks;     // payload and all
    std::vector<v1::BeginFlushRequest> flushes;
    std::vector<v1::CreateHeadRequest> creations;
    std::vector<v1::ApplyStepRequest> steps;
    std::vector<v1::GradientStatsRequest> stats;
    std::vector<int64_t> logits_rows;  // of each call
  };
  Observed observed() const;

  // Scripts; set while nothing is sent.

  // `attempt`: how often this chunk of the session was sent before.
  std::function<Fate(int lane, uint64_t sequence, int attempt)> on_chunk;
  // Called before a chunk goes out, and before the answer to one is handed on, which waits for it; in threads
  // of their own.
  std::function<void(int lane, uint64_t sequence)> before_chunk;
  std::function<void(int lane, uint64_t sequence)> before_answer;
  // A stream of rows breaks where this row is next: the first of them, and then the next one.
  std::deque<int64_t> row_cuts;
  std::function<void()> on_row_cut;
  // A stream of rows to the server breaks before this message; counted from 0 over all of them.
  std::function<bool(int message)> cut_weight_write;
  // Called in the caller's thread before a call with one answer goes out; counted from 1 by method.
  std::function<void(const std::string& method, int number)> before_call;

  // So many calls of `method` are done, but their answers are lost; or they are not done, and answered so.
  void LoseAnswers(const std::string& method, int calls, const grpc::Status& with = Broken());
  void Refuse(const std::string& method, int calls, const grpc::Status& with = Broken());
  // Each message that `method` answers with is changed so.
  template <class Response>
  void Edit(const std::string& method, std::function<void(Response*)> change) {
    const std::lock_guard lock(mutex_);
    edits_[method] = [change = std::move(change)](google::protobuf::MessageLite* message) {
      change(static_cast<Response*>(message));
    };
  }

 private:
  class Call;
  class Calls;
  struct Fault {
    int calls = 0;
    grpc::Status with;
  };
  using Change = std::function<void(google::protobuf::MessageLite*)>;

  void Started(const std::string& method);
  void Note(const std::string& method, const grpc::ByteBuffer& message);
  void NoteStream(int lane);
  void NoteStreamEnd(const grpc::Status& status);
  void NoteChunk(int lane, const v1::Chunk& chunk);
  void NoteOutstanding(int64_t chunks);
  Fate FateOf(const std::string& session_id, int lane, uint64_t sequence);
  bool CutsRows(int64_t next_row);
  bool CutsWeightWrite();
  int CountCall(const std::string& method);
  std::optional<grpc::Status> TakeFault(std::map<std::string, Fault>* faults, const std::string& method);
  Change EditOf(const std::string& method) const;
  void RunInThread(std::function<void()> work);

  mutable std::mutex mutex_;
  Observed observed_;
  std::map<std::tuple<std::string, int, uint64_t>, int> attempts_;  // by session, lane and sequence
  std::map<std::string, int> calls_;                                // by method, as what follows
  std::map<std::string, Fault> lost_;
  std::map<std::string, Fault> refused_;
  std::map<std::string, Change> edits_;
  int weight_write_messages_ = 0;
  std::vector<std::thread> threads_;
};

}  // namespace lossd::testing

#endif  // LOSSD_TESTS_SUPPORT_CALL_RECORDER_H_
