#include "client/src/session/batch_run.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/batch/batch_loss.h"
#include "client/src/connection/waiting.h"
#include "client/src/session/chunk_times.h"

namespace lossd::internal {
namespace {

using EndKind = LaneRun::EndKind;

std::vector<uint64_t> NextSequences(const LaneSet& lanes) {
  std::vector<uint64_t> next;
  next.reserve(lanes.size());
  for (size_t i = 0; i < lanes.size(); ++i) next.push_back(lanes[i].next_sequence());
  return next;
}

}  // namespace

BatchRun::BatchRun(LaneSet* lanes, const HeadConfig& head, const Batch& batch, const BatchOutputs& outputs,
                   const BatchPlaces& places, const SentTokens& sent, const BatchPlan& plan,
                   const std::vector<uint64_t>& expected_repeats, HiddenStates hidden_states)
    : lanes_(lanes),
      chunks_(plan.chunks.size()),
      first_sequences_(NextSequences(*lanes)),
      marks_told_(lanes->link().marks_told()),
      job_{.head = head,
           .batch = batch,
           .outputs = outputs,
           .places = places,
           .sent = sent,
           .lent = lent_,
           .scales = ScalesOf(batch),
           .hidden_states = hidden_states,
           .generation = 0} {
  GoTo(lanes->link().generation());
  const auto used = static_cast<size_t>(plan.lanes);
  std::vector<std::vector<ChunkRange>> shares(used);
  for (size_t i = 0; i < chunks_; ++i) shares[i % used].push_back(plan.chunks[i]);
  runs_.reserve(used);
  for (size_t i = 0; i < used; ++i) {
    const uint64_t repeats = i < expected_repeats.size() ? expected_repeats[i] : 0;
    runs_.emplace_back(&(*lanes)[i], &job_, std::move(shares[i]), repeats);
  }
}

void BatchRun::GoTo(uint64_t generation) {
  SessionLink& link = lanes_->link();
  link.NoteNamed(generation);
  // Its places in the window that it leaves are free again.
  if (job_.window_token) link.PlaceBatch(job_.generation, job_.window_token, 0);
  job_.generation = generation;
  if (link.options().deterministic == Deterministic::kNo || !job_.Accumulates()) return;
  job_.window_token =
      link.PlaceBatch(generation, job_.batch.window_token, static_cast<int64_t>(job_.batch.labels.size()));
}

absl::StatusOr<BatchResult> BatchRun::Run() {
  if (absl::Status supported = runs_.front().CheckSupported(); !supported.ok()) {
    session_usable_ = true;  // nothing was sent, and its places are free
    if (job_.window_token) lanes_->link().PlaceBatch(job_.generation, job_.window_token, 0);
    return supported;
  }
  Backoff backoff(lanes_->link().head().options().reconnect_timeout);
  size_t answered = 0;
  for (;;) {
    const LaneRun::End end = RunLanes();
    if (end.kind == EndKind::kFailed) return end.status;
    if (end.kind == EndKind::kDone) break;
    size_t now_answered = 0;
    for (const LaneRun& run : runs_) now_answered += run.answered();
    if (now_answered > answered) backoff.Reset();
    answered = now_answered;
    if (absl::Status status = Settle(end.status, &backoff); !status.ok()) return status;
  }
  for (size_t i = 0; i < runs_.size(); ++i) {
    (*lanes_)[i].set_next_sequence(runs_[i].SequenceOf(runs_[i].pieces().size()));
  }
  session_usable_ = true;
  return Result();
}

LaneRun::End BatchRun::RunLanes() {
  std::mutex mutex;
  std::condition_variable changed;
  int running = 0;  // threads; one may end before it is counted
  LaneRun::End first_end;
  const auto note = [&](LaneRun::End end) {
    if (end.kind == EndKind::kDone) return;
    {
      const std::lock_guard lock(mutex);
      // A failure for good comes before one that all lanes have to settle. Otherwise the first end counts: it
      // is why the others were interrupted.
      if (first_end.kind == EndKind::kDone ||
          (first_end.kind == EndKind::kUnsettled && end.kind == EndKind::kFailed)) {
        first_end = std::move(end);
      }
    }
    lanes_->Interrupt(runs_.size());
  };
  // The caller is asked in its own thread only.
  const Question question = [this] {
    return lanes_->is_interrupted() ? absl::UnavailableError("another lane has come to an end")
                                    : absl::OkStatus();
  };
  const auto run_in_thread = [&](LaneRun* run) {
    const AskInstead asks(&question);
    note(run->Run());
    const std::lock_guard lock(mutex);
    --running;
    changed.notify_all();
  };

  std::vector<std::thread> threads;
  size_t threaded = 1;
  try {
    for (; threaded < runs_.size(); ++threaded) {
      threads.emplace_back(run_in_thread, &runs_[threaded]);
      const std::lock_guard lock(mutex);
      ++running;
    }
  } catch (const std::system_error&) {
    // No more threads to be had: lanes do not wait for each other, so the rest can go one after the other.
  }
  note(runs_[0].Run());
  for (size_t i = threaded; i < runs_.size(); ++i) note(runs_[i].Run());
  for (std::unique_lock lock(mutex); !changed.wait_for(lock, kWaitSlice, [&] { return running == 0; });) {
    lock.unlock();
    if (absl::Status asked = Asked(lanes_->link().head().options()); !asked.ok()) {
      note({EndKind::kFailed, std::move(asked)});
    }
    lock.lock();
  }
  for (std::thread& thread : threads) thread.join();
  lanes_->Resume();
  return first_end;
}

absl::Status BatchRun::Settle(const absl::Status& cause, Backoff* backoff) {
  const auto recovery = lanes_->Reattach(cause, runs_.size(), backoff);
  if (!recovery.ok()) return recovery.status();
  if (*recovery == LaneSet::Recovery::kNewSession) return BeginAnew();
  for (LaneRun& run : runs_) {
    if (absl::Status status = run.Rewind(); !status.ok()) return status;
  }
  return FollowGeneration(cause);
}

absl::Status BatchRun::BeginAnew() {
  const bool sent = std::any_of(runs_.begin(), runs_.end(), [](const LaneRun& run) { return run.AnySent(); });
  const bool answered =
      std::any_of(runs_.begin(), runs_.end(), [](const LaneRun& run) { return run.answered() > 0; });
  const bool ended = job_.Accumulates() && lanes_->link().generation() > job_.generation;
  // Marks that were told before name nothing of this batch, and a window ends with what they name.
  if (sent && ended && (answered || !marks_told_)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the window of generation ", job_.generation,
        " ended in the middle of this batch, and the replica that had the session was lost: what it had "
        "accepted of the batch is in that window, the rest in none"));
  }
  if (sent && !ended) {
    session_usable_ = true;  // at the new server, where nothing of this batch counts
    return absl::AbortedError(
        "the server's session was replaced by a new one in the middle of this batch, of which "
        "nothing is in any window: compute the batch again");
  }
  for (LaneRun& run : runs_) run.Restart();
  first_sequences_ = NextSequences(*lanes_);
  job_.window_token.reset();  // it was another session's
  GoTo(lanes_->link().generation());
  return absl::OkStatus();
}

absl::Status BatchRun::FollowGeneration(const absl::Status& cause) {
  const uint64_t generation = lanes_->link().generation();
  if (generation == job_.generation) return absl::OkStatus();
  int64_t accepted = 0;
  int64_t newly_accepted = 0;
  for (const LaneRun& run : runs_) {
    accepted += run.Accepted();
    newly_accepted += run.NewlyAccepted();
  }
  // Back again: a flush was aborted, and what the next window had taken is in the reopened one.
  const bool reopened = generation + 1 == job_.generation && job_.head.double_buffer;
  if (!job_.Accumulates() || newly_accepted == 0 || reopened) {
    // Nothing of this batch is in another window: all of it goes into this one.
    GoTo(generation);
    return absl::OkStatus();
  }
  const auto chunks = static_cast<int64_t>(chunks_);
  // Lost answers of chunks that the old window has are computed again and change nothing.
  if (accepted == chunks && !absl::IsAborted(cause)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the window of generation ", job_.generation, " is flushed in the middle of this batch: ", accepted,
      " of its ", chunks, " chunks are in that window, the others in none"));
}

// Called when all chunks are answered: each of them has made the offset of the clocks more exact.
std::vector<ChunkTiming> BatchRun::Timings() const {
  const ClockOffset offset = lanes_->link().clock_offset();
  std::vector<ChunkTiming> timings;
  for (size_t i = 0; i < chunks_; ++i) {
    const Piece& piece = PieceOf(i);
    if (!piece.timing.has_value()) continue;
    timings.push_back(ToChunkTiming(*piece.timing, piece.sent_at, piece.arrived_at, offset));
    timings.back().first_token = job_.sent.PlaceOf(piece.range.first);
    timings.back().tokens = piece.range.tokens;
  }
  return timings;
}

std::vector<ChunkRange> BatchRun::HeldRanges() const {
  std::vector<ChunkRange> held;
  for (size_t i = 0; i < chunks_; ++i) {
    if (PieceOf(i).hidden_states_held) held.push_back(PieceOf(i).range);
  }
  return held;
}

const Piece& BatchRun::PieceOf(size_t chunk) const {
  return runs_[chunk % runs_.size()].pieces()[chunk / runs_.size()];
}

absl::StatusOr<BatchResult> BatchRun::Result() const {
  // Valid tokens that were not sent count as well.
  BatchResult result{.valid_tokens = CountValid(job_.batch.labels, job_.batch.ignore_index),
                     .chunks = static_cast<int64_t>(chunks_),
                     .first_sequences = first_sequences_,
                     .timings = Timings()};
  std::set<uint64_t> versions;  // of the weights that chunks met
  std::set<uint64_t> teacher_versions;
  absl::Status rejection;  // of the first chunk that was rejected
  int64_t rejected = 0;
  for (size_t i = 0; i < chunks_; ++i) {
    const LaneRun& run = runs_[i % runs_.size()];
    const Piece& piece = PieceOf(i);
    result.loss_sum += piece.loss_sum;
    result.z_loss_sum += piece.sums.z_loss();
    result.correct_tokens += piece.sums.correct_tokens();
    result.class_weight_sum += piece.sums.class_weights();
    result.divergence_sum += piece.sums.divergence();
    result.repeated_chunks += static_cast<int64_t>(piece.repeated);
    if (piece.weight_version > 0) versions.insert(piece.weight_version);
    if (piece.teacher_weight_version > 0) teacher_versions.insert(piece.teacher_weight_version);
    if (piece.rejection.ok() || rejected++ > 0) continue;
    const int64_t last = piece.range.first + piece.range.tokens - 1;
    rejection = absl::Status(
        piece.rejection.code(),
        absl::StrCat("the server rejected the chunk of tokens [", job_.sent.PlaceOf(piece.range.first), ", ",
                     job_.sent.PlaceOf(last) + 1, ") (lane ", i % runs_.size(), ", sequence ",
                     run.SequenceOf(i / runs_.size()), "): ", piece.rejection.message()));
  }
  if (versions.size() == 1) result.weight_version = *versions.begin();
  if (teacher_versions.size() == 1) result.teacher_weight_version = *teacher_versions.begin();
  result.loss = ReducedLoss(job_.batch, result);
  if (rejected == 0) return result;
  const bool all = rejected == static_cast<int64_t>(chunks_);
  const std::string count =
      all ? "nothing of the batch is in the window"
          : absl::StrCat(rejected, " of the batch's ", chunks_, " chunks ", rejected == 1 ? "was" : "were",
                         " rejected, the others are in the window");
  std::string places;
  if (job_.window_token) {
    // No chunk took these places. They are used again: otherwise the tile would never be complete.
    if (all) {
      lanes_->link().PlaceBatch(job_.generation, job_.window_token, 0);
    } else {
      places = absl::StrCat("; the batch begins at window_token ", *job_.window_token,
                            ": send what was rejected again at its places");
    }
  }
  return absl::Status(rejection.code(), absl::StrCat(rejection.message(), "; ", count, places));
}

}  // namespace lossd::internal
