#include "client/src/batch_run.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/chunk_times.h"
#include "client/src/convert.h"

namespace lossd::internal {
namespace {

// Chunks under way on the stream. Each is answered by up to two messages, a result and a mark: all of them
// fit what the stream takes off the wire unread (GrpcComputeStream), so that a write which the server does
// not read yet never stands in the way of the answers that the server waits to get rid of.
constexpr int64_t kMostOutstanding = 80;

std::span<const std::byte> Bytes(const void* data, int64_t begin, int64_t size) {
  return {static_cast<const std::byte*>(data) + begin, static_cast<size_t>(size)};
}

}  // namespace

BatchRun::BatchRun(Lane* lane, const HeadConfig& head, const Batch& batch, const BatchOutputs& outputs,
                   std::vector<ChunkRange> ranges, uint64_t expected_repeats)
    : lane_(lane),
      head_(head),
      batch_(batch),
      outputs_(outputs),
      accepted_before_(lane->accepted()),
      first_sequence_(lane->next_sequence()),
      generation_(lane->generation()) {
  pieces_.reserve(ranges.size());
  for (size_t i = 0; i < ranges.size(); ++i) {
    pieces_.push_back({.range = ranges[i], .repeat_expected = first_sequence_ + i <= expected_repeats});
  }
}

absl::StatusOr<BatchResult> BatchRun::Run() {
  if (absl::Status status = Pump(); !status.ok()) return status;
  lane_->set_next_sequence(first_sequence_ + pieces_.size());
  session_usable_ = true;
  return Result();
}

absl::Status BatchRun::Pump() {
  grpc::ByteBuffer message;
  while (answered_ < pieces_.size()) {
    // Look without waiting as long as there is something to send; what cannot be sent leaves its reason to be
    // read.
    const bool sent = next_ < pieces_.size() && CreditAllows(pieces_[next_]) && SendNext();
    const auto timeout = sent ? std::make_optional(std::chrono::milliseconds(0)) : std::nullopt;
    absl::Status status;
    switch (lane_->stream().Read(&message, timeout)) {
      case ComputeStream::ReadResult::kMessage:
        status = Handle(&message);
        break;
      case ComputeStream::ReadResult::kTimeout:
        break;
      case ComputeStream::ReadResult::kEnded:
        status = Resume(lane_->stream().EndStatus());
        break;
    }
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

bool BatchRun::CreditAllows(const Piece& piece) const {
  return outstanding_ == 0 ||
         (outstanding_ < kMostOutstanding &&
          piece.range.payload_bytes <= lane_->limits().byte_credit() - outstanding_bytes_);
}

bool BatchRun::SendNext() {
  Piece& piece = pieces_[next_];
  if (!piece.sent && batch_.mode == ComputeMode::kLossAndGradients) lane_->NoteContribution(generation_);
  piece.sent = true;
  ++outstanding_;
  outstanding_bytes_ += piece.range.payload_bytes;
  const bool written = lane_->stream().Write(Encode(piece, first_sequence_ + next_));
  piece.sent_at = lane_->stream().WriteTime();
  do {
    ++next_;
  } while (next_ < pieces_.size() && pieces_[next_].answered);
  return written;
}

grpc::ByteBuffer BatchRun::Encode(const Piece& piece, uint64_t sequence) const {
  const auto [first, tokens, payload_bytes] = piece.range;
  v1::Chunk chunk;
  chunk.set_sequence(sequence);
  chunk.set_generation(generation_);
  chunk.set_first_token(batch_.first_token + first);
  chunk.set_tokens(tokens);
  chunk.set_hidden_dtype(ToProto(batch_.hidden_type));
  chunk.set_dx_dtype(ToProto(DxTypeOnWire(outputs_)));
  chunk.set_mode(batch_.mode == ComputeMode::kLossOnly ? v1::COMPUTE_MODE_LOSS_ONLY
                                                       : v1::COMPUTE_MODE_LOSS_AND_GRADIENTS);
  chunk.set_ignore_index(batch_.ignore_index);
  chunk.set_gradient_scale(batch_.gradient_scale);
  const int64_t row_bytes = head_.hidden_size * SizeOf(batch_.hidden_type);
  return EncodeChunk(
      chunk, std::as_bytes(batch_.labels.subspan(static_cast<size_t>(first), static_cast<size_t>(tokens))),
      Bytes(batch_.hidden_states, first * row_bytes, tokens * row_bytes), lent_);
}

absl::Status BatchRun::Handle(grpc::ByteBuffer* message) {
  const auto response = DecodedResponse::Decode(message);
  if (!response.ok()) return response.status();
  if (response->header().has_applied()) {
    lane_->NoteApplied(response->header().applied().applied());
  } else if (response->header().has_result()) {
    return TakeResult(*response);
  }
  return absl::OkStatus();
}

absl::Status BatchRun::TakeResult(const DecodedResponse& response) {
  const v1::ChunkResult& result = response.header().result();
  // Unsigned: a sequence before the first one becomes a very large index.
  const uint64_t index = result.sequence() - first_sequence_;
  if (index >= pieces_.size() || !pieces_[index].sent || pieces_[index].answered) {
    return absl::InternalError(absl::StrCat("the server answered sequence ", result.sequence(),
                                            " of session ", lane_->session_id(),
                                            ", which waits for no answer"));
  }
  Piece& piece = pieces_[index];
  if (result.disposition() == v1::DISPOSITION_REPEATED && !piece.repeat_expected) {
    return absl::FailedPreconditionError(
        absl::StrCat("sequence ", result.sequence(), " of session ", lane_->session_id(),
                     " was taken before this process sent it: another one uses client_key '",
                     lane_->client_key(), "', and what this one sent is in no window"));
  }
  if (absl::Status status = CheckResult(result, response, piece); !status.ok()) return status;

  if (result.disposition() == v1::DISPOSITION_REJECTED) {
    NoteRejected(result, piece);
  } else {
    CopyOutputs(response, piece);
    piece.loss_sum = result.loss_sum();
    piece.valid_tokens = result.valid_tokens();
    weight_version_ = std::max(weight_version_, result.weight_version());
    repeated_ += static_cast<int64_t>(result.disposition() == v1::DISPOSITION_REPEATED);
    if (result.has_timing()) {
      piece.arrived_at = lane_->stream().ReadTime();
      piece.timing = result.timing();
      NoteTiming(*piece.timing, piece.sent_at, piece.arrived_at, &lane_->clock_offset());
    }
  }
  piece.answered = true;
  ++answered_;
  --outstanding_;
  outstanding_bytes_ -= piece.range.payload_bytes;
  lane_->NoteAnswered(result.sequence());
  lane_->NoteProgress();
  return absl::OkStatus();
}

absl::Status BatchRun::CheckResult(const v1::ChunkResult& result, const DecodedResponse& response,
                                   const Piece& piece) const {
  if (result.disposition() == v1::DISPOSITION_REJECTED) return absl::OkStatus();
  const int64_t tokens = piece.range.tokens;
  const int64_t dx_bytes =
      batch_.mode == ComputeMode::kLossOnly ? 0 : tokens * head_.hidden_size * SizeOf(DxTypeOnWire(outputs_));
  const auto losses_bytes = tokens * static_cast<int64_t>(sizeof(float));
  if (response.losses_bytes() != losses_bytes || response.dx_bytes() != dx_bytes) {
    return absl::InternalError(absl::StrCat(
        "the server answered sequence ", result.sequence(), " with ", response.losses_bytes(),
        " bytes of losses and ", response.dx_bytes(), " of dx; expected ", losses_bytes, " and ", dx_bytes));
  }
  return absl::OkStatus();
}

void BatchRun::CopyOutputs(const DecodedResponse& response, const Piece& piece) {
  if (!outputs_.losses.empty()) {
    response.CopyLosses(std::as_writable_bytes(outputs_.losses.subspan(
        static_cast<size_t>(piece.range.first), static_cast<size_t>(piece.range.tokens))));
  }
  if (outputs_.dx != nullptr) {
    const int64_t row_bytes = head_.hidden_size * SizeOf(outputs_.dx_type);
    response.CopyDx({static_cast<std::byte*>(outputs_.dx) + piece.range.first * row_bytes,
                     static_cast<size_t>(piece.range.tokens * row_bytes)});
  }
}

void BatchRun::NoteRejected(const v1::ChunkResult& result, const Piece& piece) {
  if (batch_.mode == ComputeMode::kLossAndGradients) lane_->NoteWithdrawal(generation_);
  if (rejected_++ > 0) return;
  const auto& error = result.error();
  const auto code =
      error.code() == 0 ? absl::StatusCode::kInternal : static_cast<absl::StatusCode>(error.code());
  rejection_ = absl::Status(
      code, absl::StrCat("the server rejected the chunk of tokens [", piece.range.first, ", ",
                         piece.range.first + piece.range.tokens, ") (sequence ", result.sequence(),
                         "): ", error.message(),
                         error.field().empty() ? "" : absl::StrCat(" [field ", error.field(), "]")));
}

absl::Status BatchRun::Resume(const absl::Status& cause) {
  const auto recovery = lane_->Recover(cause);
  if (!recovery.ok()) return recovery.status();
  if (*recovery == Lane::Recovery::kNewSession) {
    const bool started =
        std::any_of(pieces_.begin(), pieces_.end(), [](const Piece& piece) { return piece.sent; });
    if (started) {
      session_usable_ = true;  // at the new server, where nothing of this batch counts
      return absl::AbortedError(
          "the server's session was replaced by a new one in the middle of this batch, of which "
          "nothing is in any window: compute the batch again");
    }
    first_sequence_ = lane_->next_sequence();
    generation_ = lane_->generation();
    return absl::OkStatus();
  }
  RewindTo(lane_->accepted());
  return FollowGeneration(cause);
}

// Everything unanswered is to be sent again: what was accepted for the sake of its answer, the rest because
// the server will never see it otherwise.
void BatchRun::RewindTo(uint64_t accepted) {
  next_ = pieces_.size();
  outstanding_ = 0;
  outstanding_bytes_ = 0;
  for (size_t i = pieces_.size(); i-- > 0;) {
    Piece& piece = pieces_[i];
    if (piece.answered) continue;
    next_ = i;
    if (first_sequence_ + i <= accepted) {
      piece.repeat_expected = true;
    } else if (piece.sent) {
      piece.sent = false;
      if (batch_.mode == ComputeMode::kLossAndGradients) lane_->NoteWithdrawal(generation_);
    }
  }
}

absl::Status BatchRun::FollowGeneration(const absl::Status& cause) {
  const uint64_t generation = lane_->generation();
  if (generation == generation_) return absl::OkStatus();
  const uint64_t accepted = lane_->accepted();
  if (batch_.mode == ComputeMode::kLossOnly || accepted <= std::max(accepted_before_, first_sequence_ - 1)) {
    // Nothing of this batch is in the old window: all of it goes into the new one.
    generation_ = generation;
    return absl::OkStatus();
  }
  const uint64_t last = first_sequence_ + pieces_.size() - 1;
  // Lost answers of chunks that the old window has are computed again and change nothing.
  if (accepted >= last && !absl::IsAborted(cause)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("the window of generation ", generation_,
                                                    " is flushed in the middle of this batch: its first ",
                                                    accepted - first_sequence_ + 1, " of ", pieces_.size(),
                                                    " chunks are in that window, the others in none"));
}

// Only now: every chunk has made the offset of the clocks better known.
std::vector<ChunkTiming> BatchRun::Timings() const {
  std::vector<ChunkTiming> timings;
  for (const Piece& piece : pieces_) {
    if (!piece.timing.has_value()) continue;
    timings.push_back(ToChunkTiming(*piece.timing, piece.sent_at, piece.arrived_at, lane_->clock_offset()));
    timings.back().first_token = piece.range.first;
    timings.back().tokens = piece.range.tokens;
  }
  return timings;
}

absl::StatusOr<BatchResult> BatchRun::Result() const {
  if (!rejection_.ok()) {
    return absl::Status(rejection_.code(),
                        absl::StrCat(rejection_.message(), "; ", rejected_, " of the batch's ",
                                     pieces_.size(), " chunks were rejected, the others are in the window"));
  }
  BatchResult result{.weight_version = weight_version_,
                     .chunks = static_cast<int64_t>(pieces_.size()),
                     .repeated_chunks = repeated_,
                     .first_sequence = first_sequence_,
                     .timings = Timings()};
  for (const Piece& piece : pieces_) {
    result.loss_sum += piece.loss_sum;
    result.valid_tokens += piece.valid_tokens;
  }
  return result;
}

}  // namespace lossd::internal
