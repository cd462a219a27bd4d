// A batch's share on one lane: sends its chunks within the lane's byte credit while answers arrive, and after
// a lost stream sends again what was not answered.
#ifndef LOSSD_CLIENT_SRC_SESSION_LANE_RUN_H_
#define LOSSD_CLIENT_SRC_SESSION_LANE_RUN_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/batch/batch_loss.h"
#include "client/src/batch/batch_places.h"
#include "client/src/batch/batch_plan.h"
#include "client/src/batch/chunk_codec.h"
#include "client/src/batch/lent_memory.h"
#include "client/src/batch/sent_tokens.h"
#include "client/src/session/lane.h"
#include "lossd/client.h"
#include "lossd/v1/loss.pb.h"

namespace lossd::internal {

// How a batch's chunks come by their hidden states.
enum class HiddenStates {
  kSent,
  kSentToStay,  // and the server is to hold them
  kHeld,        // by the server, since an earlier phase
};

// What all lanes of a batch see. Constant while any of them runs.
struct BatchJob {
  const HeadConfig& head;
  const Batch& batch;
  const BatchOutputs& outputs;
  const BatchPlaces& places;
  const SentTokens& sent;
  const LentMemory& lent;  // of the batch
  const GradientScales scales;
  const HiddenStates hidden_states = HiddenStates::kSent;
  uint64_t generation = 0;
  std::optional<int64_t> window_token =
      {};  // of the first token, in that generation; of deterministic sessions

  // Whether its chunks add to a window.
  bool Accumulates() const { return batch.mode == ComputeMode::kLossAndGradients && !head.frozen; }
};

// One chunk and what became of it.
struct Piece {
  ChunkRange range;
  bool sent = false;             // and may have been accepted
  bool repeat_expected = false;  // the server is known to have it: sending it again only gets its answer
  bool answered = false;
  bool hidden_states_held = false;  // as its answer says
  bool repeated = false;
  double loss_sum = 0;
  v1::TokenSums sums = {};
  uint64_t weight_version = 0;  // 0 if it was rejected
  uint64_t teacher_weight_version = 0;
  absl::Status rejection = {};
  // With the timing that was asked for.
  std::chrono::system_clock::time_point sent_at = {};
  std::chrono::system_clock::time_point arrived_at = {};
  std::optional<v1::ChunkTiming> timing = {};
};

// Used by one thread at a time, which is the only one to use the lane meanwhile. Writes to the outputs of its
// own chunks only.
class LaneRun {
 public:
  // `pieces` are this lane's, in order: the first has the lane's next sequence. The job must outlive the run.
  // Chunks up to `expected_repeats` are known to be there already (Session::ResumeAt).
  LaneRun(Lane* lane, const BatchJob* job, std::vector<ChunkRange> ranges, uint64_t expected_repeats);

  enum class EndKind {
    kDone,       // every chunk is answered
    kUnsettled,  // all lanes have to look together (Lane::Recovery::kUnsettled), because of `status`
    kFailed,     // for good, with `status`
  };
  struct End {
    EndKind kind = EndKind::kDone;
    absl::Status status;
  };
  // Sends and reads until one of these ends. May be called again after kUnsettled, once the lane is attached
  // and Rewind or Restart was called.
  End Run();

  // UNIMPLEMENTED if its chunks need what the server lacks. Sends nothing.
  absl::Status CheckSupported() const;

  // The lane was attached again: what is not answered is to be sent again, as its mark says. An error if the
  // mark covers chunks that were not sent here.
  absl::Status Rewind();
  // The lane is one of a new session, and nothing was sent.
  void Restart();

  bool AnySent() const;
  // How many of its chunks the server accepted, and how many of these in the time of this run.
  int64_t Accepted() const;
  int64_t NewlyAccepted() const;

  uint64_t first_sequence() const { return first_sequence_; }
  const std::vector<Piece>& pieces() const { return pieces_; }
  uint64_t SequenceOf(size_t piece) const { return first_sequence_ + piece; }
  size_t answered() const { return answered_; }

 private:
  absl::Status Step(End* end);
  void SendAll();
  bool CreditAllows(const Piece& piece) const;
  bool SendNext();
  // The chunk without labels and hidden states; `runs` are those of its tokens.
  v1::Chunk Header(const ChunkRange& range, uint64_t sequence, std::span<const SentTokens::Run> runs) const;
  grpc::ByteBuffer Encode(const Piece& piece, uint64_t sequence) const;
  absl::Status Handle(grpc::ByteBuffer* message);
  absl::Status TakeResult(const DecodedResponse& response);
  absl::Status CheckResult(const v1::ChunkResult& result, const DecodedResponse& response,
                           const Piece& piece) const;
  void CopyOutputs(const DecodedResponse& response, const Piece& piece) const;
  void NoteRejected(const v1::ChunkResult& result, Piece* piece);
  void NoteTiming(const v1::ChunkTiming& timing, Piece* piece);
  // After the stream has ended: back on the lane, or *end says why not.
  void Resume(absl::Status cause, End* end);

  Lane* const lane_;
  const BatchJob* const job_;
  std::vector<Piece> pieces_;
  uint64_t first_sequence_;  // of pieces_[0]
  uint64_t accepted_before_;
  // Behind a lost stream what the server held may be gone, and everything travels.
  HiddenStates hidden_states_;
  int64_t credit_ = 0;
  size_t next_ = 0;  // the next piece to send
  size_t answered_ = 0;
  int64_t outstanding_ = 0;        // pieces sent on the present stream and not answered
  int64_t outstanding_bytes_ = 0;  // of these
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_SESSION_LANE_RUN_H_
