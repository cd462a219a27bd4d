// One batch on its way: its chunks dealt out to the session's lanes, which run side by side, and what has to
// be decided for all of them together.
#ifndef LOSSD_CLIENT_SRC_SESSION_BATCH_RUN_H_
#define LOSSD_CLIENT_SRC_SESSION_BATCH_RUN_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/batch/batch_places.h"
#include "client/src/batch/batch_plan.h"
#include "client/src/batch/lent_memory.h"
#include "client/src/connection/backoff.h"
#include "client/src/session/lane_run.h"
#include "client/src/session/lane_set.h"
#include "lossd/client.h"

namespace lossd::internal {

// Used once, by one thread, while nobody else uses the lanes. The batch, the outputs, the places and the sent
// tokens must outlive it.
class BatchRun {
 public:
  // `expected_repeats`, by lane: sequences up to it are known to be there already (Session::ResumeAt).
  BatchRun(LaneSet* lanes, const HeadConfig& head, const Batch& batch, const BatchOutputs& outputs,
           const BatchPlaces& places, const SentTokens& sent, const BatchPlan& plan,
           const std::vector<uint64_t>& expected_repeats, HiddenStates hidden_states);

  absl::StatusOr<BatchResult> Run();
  // After Run: chunks of which the server has said that it holds their hidden states.
  std::vector<ChunkRange> HeldRanges() const;

  // After an error of Run: every chunk has its answer, or was never accepted, so the session may go on. If
  // not, the lanes' streams must be ended before this is destroyed, which waits until gRPC no longer reads
  // the batch.
  bool session_usable() const { return session_usable_; }

 private:
  // Every lane in a thread, the first in the caller's. Ends when all are done, or soon after the first that
  // is not.
  LaneRun::End RunLanes();
  // With no lane running: finds out where every lane stands, and whether the batch can go on.
  absl::Status Settle(const absl::Status& cause, Backoff* backoff);
  // With another session in the place of the one that the batch was begun in: begins it anew, if nothing of
  // it can be in a window.
  absl::Status BeginAnew();
  // What the batch goes to: a window, and its place there.
  void GoTo(uint64_t generation);
  absl::Status FollowGeneration(const absl::Status& cause);
  const Piece& PieceOf(size_t chunk) const;
  std::vector<ChunkTiming> Timings() const;
  absl::StatusOr<BatchResult> Result() const;

  LaneSet* const lanes_;
  std::vector<LaneRun> runs_;  // of the first lanes; chunk i belongs to lane i % runs_.size()
  size_t chunks_ = 0;
  std::vector<uint64_t> first_sequences_;  // of every lane
  const bool marks_told_;                  // and by them the window may have ended before this batch
  bool session_usable_ = false;
  const LentMemory lent_;
  BatchJob job_;
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_SESSION_BATCH_RUN_H_
