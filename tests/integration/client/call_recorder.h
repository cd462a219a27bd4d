// What the clients of this process send, seen from within gRPC: the messages themselves, as they go out.
#ifndef LOSSD_TESTS_INTEGRATION_CLIENT_CALL_RECORDER_H_
#define LOSSD_TESTS_INTEGRATION_CLIENT_CALL_RECORDER_H_

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "grpcpp/support/byte_buffer.h"
#include "lossd/v1/gradient.pb.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/loss.pb.h"

namespace lossd::testing {

// One at a time; it is there before the first call that it records, and after the last. Thread-safe.
class CallRecorder {
 public:
  CallRecorder();
  ~CallRecorder();
  CallRecorder(const CallRecorder&) = delete;
  CallRecorder& operator=(const CallRecorder&) = delete;

  // While there is one, calls that this thread begins are not recorded.
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
    int streams = 0;
    int commits = 0;  // calls of CommitFlush
    int aborts = 0;
    std::vector<int64_t> gradient_first_rows;
    int weight_write_streams = 0;
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

  // Called when a chunk is about to go out, which waits for it. Must make no call of gRPC: the threads that
  // would have to answer it may wait too. Set while nothing is sent.
  std::function<void(int lane, uint64_t sequence)> before_chunk;

 private:
  class Call;
  class Calls;

  void Started(const std::string& method);
  // `lane`: of the call, if it is a stream of chunks.
  void Sends(const std::string& method, const grpc::ByteBuffer& message, int* lane);

  mutable std::mutex mutex_;
  Observed observed_;
};

}  // namespace lossd::testing

#endif  // LOSSD_TESTS_INTEGRATION_CLIENT_CALL_RECORDER_H_
