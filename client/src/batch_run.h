// One batch on its way through a lane: sends chunks within the byte credit while answers arrive, and after a
// lost stream sends again what was not answered.
#ifndef LOSSD_CLIENT_SRC_BATCH_RUN_H_
#define LOSSD_CLIENT_SRC_BATCH_RUN_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/batch_plan.h"
#include "client/src/chunk_codec.h"
#include "client/src/lane.h"
#include "client/src/lent_memory.h"
#include "lossd/client.h"

namespace lossd::internal {

// Used once, by one thread, while nobody else uses the lane. The batch and the outputs must outlive it.
class BatchRun {
 public:
  // Chunks up to `expected_repeats` are known to be there already (Session::ResumeAt).
  BatchRun(Lane* lane, const HeadConfig& head, const Batch& batch, const BatchOutputs& outputs,
           std::vector<ChunkRange> ranges, uint64_t expected_repeats);

  absl::StatusOr<BatchResult> Run();

  // After an error of Run: every chunk has its answer, or was never accepted, so the session may go on. If
  // not, the lane's stream must be ended before this is destroyed, which waits until gRPC no longer reads the
  // batch.
  bool session_usable() const { return session_usable_; }

 private:
  struct Piece {
    ChunkRange range;
    bool sent = false;             // and may have been accepted
    bool repeat_expected = false;  // the server is known to have it: sending it again only gets its answer
    bool answered = false;
    double loss_sum = 0;
    int64_t valid_tokens = 0;
    // With the timing that was asked for.
    std::chrono::system_clock::time_point sent_at = {};
    std::chrono::system_clock::time_point arrived_at = {};
    std::optional<v1::ChunkTiming> timing = {};
  };

  absl::Status Pump();
  bool CreditAllows(const Piece& piece) const;
  bool SendNext();
  grpc::ByteBuffer Encode(const Piece& piece, uint64_t sequence) const;
  absl::Status Handle(grpc::ByteBuffer* message);
  absl::Status TakeResult(const DecodedResponse& response);
  absl::Status CheckResult(const v1::ChunkResult& result, const DecodedResponse& response,
                           const Piece& piece) const;
  void CopyOutputs(const DecodedResponse& response, const Piece& piece);
  void NoteRejected(const v1::ChunkResult& result, const Piece& piece);
  void RewindTo(uint64_t accepted);
  absl::Status Resume(const absl::Status& cause);
  absl::Status FollowGeneration(const absl::Status& cause);
  std::vector<ChunkTiming> Timings() const;
  absl::StatusOr<BatchResult> Result() const;

  Lane* const lane_;
  const HeadConfig& head_;
  const Batch& batch_;
  const BatchOutputs& outputs_;
  const uint64_t accepted_before_;

  std::vector<Piece> pieces_;
  uint64_t first_sequence_;  // of pieces_[0]
  uint64_t generation_;
  size_t next_ = 0;  // the next piece to send
  size_t answered_ = 0;
  int64_t outstanding_ = 0;        // pieces sent on the present stream and not answered
  int64_t outstanding_bytes_ = 0;  // of these

  int64_t repeated_ = 0;
  int64_t rejected_ = 0;
  absl::Status rejection_;  // of the first chunk that was rejected
  uint64_t weight_version_ = 0;
  bool session_usable_ = false;
  const LentMemory lent_;  // of the batch
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_BATCH_RUN_H_
