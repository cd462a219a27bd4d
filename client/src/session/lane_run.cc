#include "client/src/session/lane_run.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/batch/token_lists.h"
#include "client/src/batch/token_returns.h"
#include "client/src/common/convert.h"

namespace lossd::internal {
namespace {

// Chunks under way on the stream. Each is answered by up to two messages, a result and a mark: all of them
// fit what the stream takes off the wire unread (GrpcComputeStream), so that a write which the server does
// not read yet never stands in the way of the answers that the server waits to get rid of.
constexpr int64_t kMostOutstanding = 80;

using Runs = std::span<const SentTokens::Run>;

// The rows of these runs, of a tensor whose rows have so many bytes.
template <typename Byte>
std::vector<std::span<Byte>> Rows(Byte* tensor, int64_t row_bytes, Runs runs) {
  std::vector<std::span<Byte>> rows;
  for (const SentTokens::Run& run : runs) {
    rows.emplace_back(tensor + run.first * row_bytes, static_cast<size_t>(run.tokens * row_bytes));
  }
  return rows;
}

void Assign(std::span<const float> values, Runs runs, std::string* bytes) {
  const std::vector<float> gathered = Gather(values, runs);
  bytes->assign(reinterpret_cast<const char*>(gathered.data()), gathered.size() * sizeof(float));
}

void SetTokenInputs(const Batch& batch, Runs runs, v1::Chunk* chunk) {
  if (!batch.token_weights.empty()) {
    Assign(batch.token_weights, runs, chunk->mutable_token_inputs()->mutable_weights());
  }
  if (!batch.lse_gradients.empty()) {
    Assign(batch.lse_gradients, runs, chunk->mutable_token_inputs()->mutable_lse_gradients());
  }
  if (!batch.entropy_gradients.empty()) {
    Assign(batch.entropy_gradients, runs, chunk->mutable_token_inputs()->mutable_entropy_gradients());
  }
  if (batch.kept_tokens.given()) {
    SetLists(batch.kept_tokens, runs, chunk->mutable_token_inputs()->mutable_kept_tokens());
  }
  if (batch.target_lists.given()) {
    SetTargetLists(batch.target_lists, runs, chunk->mutable_token_inputs()->mutable_target_lists());
  }
}

void SetRef(const RegionPlace& place, int64_t offset, v1::TensorRef* ref) {
  ref->set_handle(place.handle);
  ref->set_offset(place.offset + offset);
}

v1::ComputeMode ModeOf(const Batch& batch, const BatchOutputs& outputs) {
  if (batch.mode == ComputeMode::kLossOnly) return v1::COMPUTE_MODE_LOSS_ONLY;
  return outputs.dx == nullptr ? v1::COMPUTE_MODE_LOSS_AND_WEIGHT_GRADIENT
                               : v1::COMPUTE_MODE_LOSS_AND_GRADIENTS;
}

}  // namespace

LaneRun::LaneRun(Lane* lane, const BatchJob* job, std::vector<ChunkRange> ranges, uint64_t expected_repeats)
    : lane_(lane),
      job_(job),
      first_sequence_(lane->next_sequence()),
      accepted_before_(lane->accepted()),
      hidden_states_(job->hidden_states) {
  pieces_.reserve(ranges.size());
  for (size_t i = 0; i < ranges.size(); ++i) {
    pieces_.push_back({.range = ranges[i], .repeat_expected = SequenceOf(i) <= expected_repeats});
  }
}

LaneRun::End LaneRun::Run() {
  End end;
  credit_ = lane_->link().limits().byte_credit();
  if (lane_->stream() == nullptr && answered_ < pieces_.size()) {
    if (absl::Status status = lane_->Attach(); !status.ok()) Resume(std::move(status), &end);
  }
  // The server may be another one than when the batch was begun.
  if (absl::Status supported = CheckSupported(); !supported.ok()) {
    return {EndKind::kFailed, std::move(supported)};
  }
  while (end.kind == EndKind::kDone && answered_ < pieces_.size()) {
    if (absl::Status status = Step(&end); !status.ok()) return {EndKind::kFailed, std::move(status)};
  }
  return end;
}

absl::Status LaneRun::Step(End* end) {
  // Look without waiting as long as there is something to send; what cannot be sent leaves its reason to be
  // read.
  const bool sent = next_ < pieces_.size() && CreditAllows(pieces_[next_]) && SendNext();
  const auto timeout = sent ? std::make_optional(std::chrono::milliseconds(0)) : std::nullopt;
  grpc::ByteBuffer message;
  switch (lane_->stream()->Read(&message, timeout)) {
    case ComputeStream::ReadResult::kMessage:
      return Handle(&message);
    case ComputeStream::ReadResult::kTimeout:
      break;
    case ComputeStream::ReadResult::kEnded:
      Resume(lane_->stream()->EndStatus(), end);
      break;
  }
  return absl::OkStatus();
}

bool LaneRun::CreditAllows(const Piece& piece) const {
  return outstanding_ == 0 ||
         (outstanding_ < kMostOutstanding && piece.range.payload_bytes <= credit_ - outstanding_bytes_);
}

bool LaneRun::SendNext() {
  Piece& piece = pieces_[next_];
  const uint64_t sequence = SequenceOf(next_);
  if (!piece.sent && job_->Accumulates()) {
    lane_->link().NoteContribution(job_->generation);
  }
  piece.sent = true;
  lane_->NoteSent(sequence);
  ++outstanding_;
  outstanding_bytes_ += piece.range.payload_bytes;
  const bool written = lane_->stream()->Write(Encode(piece, sequence));
  piece.sent_at = lane_->stream()->WriteTime();
  do {
    ++next_;
  } while (next_ < pieces_.size() && pieces_[next_].answered);
  return written;
}

v1::Chunk LaneRun::Header(const ChunkRange& range, uint64_t sequence, Runs runs) const {
  const Batch& batch = job_->batch;
  const int64_t first = range.first;
  v1::Chunk chunk;
  chunk.set_sequence(sequence);
  chunk.set_generation(job_->generation);
  chunk.set_first_token(batch.first_token + runs.front().first);
  chunk.set_tokens(range.tokens);
  if (batch.hold != 0) {
    chunk.mutable_hold()->set_number(batch.hold);
    // Whether ignored tokens travel may change from one phase to the other.
    const auto before = batch.labels.first(static_cast<size_t>(runs.front().first));
    chunk.mutable_hold()->set_first_token(CountValid(before, batch.ignore_index));
    chunk.mutable_hold()->set_hidden_states(hidden_states_ != HiddenStates::kSent);
  }
  if (job_->window_token) chunk.set_window_token(*job_->window_token + first);
  chunk.set_hidden_dtype(ToProto(batch.hidden_type));
  if (job_->outputs.dx != nullptr) chunk.set_dx_dtype(ToProto(job_->outputs.dx_type));
  chunk.set_mode(ModeOf(batch, job_->outputs));
  chunk.set_ignore_index(batch.ignore_index);
  chunk.set_gradient_scale(job_->scales.all);
  SetLossOptions(batch, job_->scales, job_->outputs.returns, &chunk);
  SetTokenInputs(batch, runs, &chunk);
  const BatchPlaces& places = job_->places;
  if (places.dx) {
    SetRef(*places.dx, first * job_->head.hidden_size * SizeOf(job_->outputs.dx_type),
           chunk.mutable_dx_region());
  }
  if (places.hidden_states) {
    SetRef(*places.hidden_states, first * job_->head.hidden_size * SizeOf(batch.hidden_type),
           chunk.mutable_hidden_states_region());
  }
  if (batch.distillation && places.teacher_hidden) {
    SetRef(*places.teacher_hidden, first * TeacherRowBytes(batch),
           chunk.mutable_options()->mutable_distillation()->mutable_hidden_states_region());
  }
  return chunk;
}

grpc::ByteBuffer LaneRun::Encode(const Piece& piece, uint64_t sequence) const {
  const Batch& batch = job_->batch;
  const std::vector<SentTokens::Run> runs = job_->sent.Runs(piece.range.first, piece.range.tokens);
  // What no region has.
  std::vector<std::span<const std::byte>> hidden;
  std::vector<std::span<const std::byte>> teacher_hidden;
  if (!job_->places.hidden_states && hidden_states_ != HiddenStates::kHeld) {
    hidden = Rows(static_cast<const std::byte*>(batch.hidden_states),
                  job_->head.hidden_size * SizeOf(batch.hidden_type), runs);
  }
  if (batch.distillation && !job_->places.teacher_hidden) {
    teacher_hidden =
        Rows(static_cast<const std::byte*>(batch.distillation->hidden_states), TeacherRowBytes(batch), runs);
  }
  const std::vector<int64_t> labels = Gather(batch.labels, std::span(runs));
  return EncodeChunk(Header(piece.range, sequence, runs), std::as_bytes(std::span(labels)), hidden,
                     job_->lent, teacher_hidden);
}

absl::Status LaneRun::CheckSupported() const {
  // Its chunks differ in numbers only: one token of the first has every field.
  const ChunkRange range{.first = pieces_.front().range.first, .tokens = 1};
  const v1::Chunk chunk = Header(range, first_sequence_, job_->sent.Runs(range.first, range.tokens));
  return lane_->link().head().connection().CheckSupported(chunk);
}

absl::Status LaneRun::Handle(grpc::ByteBuffer* message) {
  const auto response = DecodedResponse::Decode(message);
  if (!response.ok()) return response.status();
  if (response->header().has_applied()) {
    lane_->NoteApplied(response->header().applied().applied());
  } else if (response->header().has_result()) {
    return TakeResult(*response);
  }
  return absl::OkStatus();
}

absl::Status LaneRun::TakeResult(const DecodedResponse& response) {
  const v1::ChunkResult& result = response.header().result();
  // Unsigned: a sequence before the first one becomes a very large index.
  const uint64_t index = result.sequence() - first_sequence_;
  if (index >= pieces_.size() || !pieces_[index].sent || pieces_[index].answered) {
    return absl::InternalError(absl::StrCat("the server answered sequence ", result.sequence(), " of lane ",
                                            lane_->number(), " of session ", lane_->link().session_id(),
                                            ", which waits for no answer"));
  }
  Piece& piece = pieces_[index];
  if (result.disposition() == v1::DISPOSITION_REPEATED && !piece.repeat_expected) {
    return lane_->link().TakenByAnother(lane_->number(), result.sequence());
  }
  if (absl::Status status = CheckResult(result, response, piece); !status.ok()) return status;

  if (result.disposition() == v1::DISPOSITION_REJECTED) {
    NoteRejected(result, &piece);
  } else {
    CopyOutputs(response, piece);
    piece.loss_sum = result.loss_sum();
    piece.sums = result.sums();
    piece.hidden_states_held = result.hidden_states_held();
    piece.repeated = result.disposition() == v1::DISPOSITION_REPEATED;
    piece.weight_version = result.weight_version();
    piece.teacher_weight_version = result.teacher_weight_version();
    if (result.has_timing()) NoteTiming(result.timing(), &piece);
  }
  piece.answered = true;
  ++answered_;
  --outstanding_;
  outstanding_bytes_ -= piece.range.payload_bytes;
  lane_->NoteAnswered(result.sequence());
  lane_->NoteProgress();
  return absl::OkStatus();
}

absl::Status LaneRun::CheckResult(const v1::ChunkResult& result, const DecodedResponse& response,
                                  const Piece& piece) const {
  if (result.disposition() == v1::DISPOSITION_REJECTED) return absl::OkStatus();
  const int64_t tokens = piece.range.tokens;
  const BatchOutputs& outputs = job_->outputs;
  const int64_t dx_bytes =
      job_->places.DxIsSent(outputs) ? tokens * job_->head.hidden_size * SizeOf(outputs.dx_type) : 0;
  const auto losses_bytes = tokens * static_cast<int64_t>(sizeof(float));
  if (response.losses_bytes() != losses_bytes || response.dx_bytes() != dx_bytes) {
    return absl::InternalError(absl::StrCat(
        "the server answered sequence ", result.sequence(), " with ", response.losses_bytes(),
        " bytes of losses and ", response.dx_bytes(), " of dx; expected ", losses_bytes, " and ", dx_bytes));
  }
  return CheckReturns(outputs.returns, tokens, result.returns());
}

void LaneRun::CopyOutputs(const DecodedResponse& response, const Piece& piece) const {
  const BatchOutputs& outputs = job_->outputs;
  const std::vector<SentTokens::Run> runs = job_->sent.Runs(piece.range.first, piece.range.tokens);
  if (!outputs.losses.empty()) {
    response.CopyLosses(Rows(std::as_writable_bytes(outputs.losses).data(), sizeof(float), runs));
  }
  CopyReturns(outputs.returns, runs, response.header().result().returns());
  if (job_->places.DxIsSent(outputs)) {
    const int64_t row_bytes = job_->head.hidden_size * SizeOf(outputs.dx_type);
    response.CopyDx(Rows(static_cast<std::byte*>(outputs.dx), row_bytes, runs));
  }
}

void LaneRun::NoteRejected(const v1::ChunkResult& result, Piece* piece) {
  if (job_->Accumulates()) lane_->link().NoteWithdrawal(job_->generation);
  const auto& error = result.error();
  piece->rejection = absl::Status(
      error.code() == 0 ? absl::StatusCode::kInternal : static_cast<absl::StatusCode>(error.code()),
      error.field().empty() ? error.message()
                            : absl::StrCat(error.message(), " [field ", error.field(), "]"));
}

void LaneRun::NoteTiming(const v1::ChunkTiming& timing, Piece* piece) {
  piece->arrived_at = lane_->stream()->ReadTime();
  piece->timing = timing;
  lane_->link().NoteTiming(timing, piece->sent_at, piece->arrived_at);
}

void LaneRun::Resume(absl::Status cause, End* end) {
  const auto recovery = lane_->Recover(cause);
  if (!recovery.ok()) {
    *end = {EndKind::kFailed, recovery.status()};
    return;
  }
  if (*recovery == Lane::Recovery::kResumed) {
    absl::Status status = Rewind();
    status.Update(CheckSupported());  // of a server that has been set back
    if (!status.ok()) {
      *end = {EndKind::kFailed, std::move(status)};
      return;
    }
    if (lane_->link().generation() == job_->generation) return;
  }
  *end = {EndKind::kUnsettled, std::move(cause)};
}

// Everything unanswered is to be sent again: what was accepted for the sake of its answer, the rest because
// the server will never see it otherwise.
absl::Status LaneRun::Rewind() {
  SendAll();
  next_ = pieces_.size();
  outstanding_ = 0;
  outstanding_bytes_ = 0;
  for (size_t i = pieces_.size(); i-- > 0;) {
    Piece& piece = pieces_[i];
    if (piece.answered) continue;
    next_ = i;
    if (SequenceOf(i) <= lane_->accepted()) {
      if (!piece.sent && !piece.repeat_expected) {
        return lane_->link().TakenByAnother(lane_->number(), SequenceOf(i));
      }
      piece.repeat_expected = true;
      continue;
    }
    piece.repeat_expected = false;
    if (piece.sent && job_->Accumulates()) {
      lane_->link().NoteWithdrawal(job_->generation);
    }
    piece.sent = false;
  }
  return absl::OkStatus();
}

void LaneRun::SendAll() {
  const bool held = lane_->link().held_hidden_bytes() > 0;  // of the server that there is now
  if (hidden_states_ == HiddenStates::kHeld || !held) hidden_states_ = HiddenStates::kSent;
}

void LaneRun::Restart() {
  SendAll();
  first_sequence_ = lane_->next_sequence();
  accepted_before_ = lane_->accepted();
  next_ = 0;
  outstanding_ = outstanding_bytes_ = 0;
  for (Piece& piece : pieces_) piece.sent = piece.repeat_expected = false;
}

bool LaneRun::AnySent() const {
  return std::any_of(pieces_.begin(), pieces_.end(), [](const Piece& piece) { return piece.sent; });
}

int64_t LaneRun::Accepted() const {
  const auto all = static_cast<int64_t>(pieces_.size());
  return std::clamp<int64_t>(static_cast<int64_t>(lane_->accepted() - first_sequence_ + 1), 0, all);
}

int64_t LaneRun::NewlyAccepted() const {
  const uint64_t before = std::max(accepted_before_, first_sequence_ - 1);
  return static_cast<int64_t>(std::max(lane_->accepted(), before) - before);
}

}  // namespace lossd::internal
