// The two-phase flush of a head's gradient window.
#include <algorithm>
#include <array>
#include <cmath>
#include <future>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/chunk/session_marks.h"
#include "server/engine/common/errors.h"
#include "server/engine/common/random_id.h"
#include "server/engine/device/staging.h"
#include "server/engine/head/head.h"

namespace lossd::engine {
namespace {

constexpr char kScale[] = "gradient_scale";
constexpr int64_t kSummedBytes = int64_t{4} << 20;

absl::Status UnknownFlush(const std::string& flush_id, uint64_t generation) {
  return MakeError(
      absl::StatusCode::kAborted, RejectReason::kUnknownFlush, "flush_id",
      absl::StrCat("flush_id is '", flush_id, "'; no such flush is under way at generation ", generation));
}

absl::Status CheckFlushArguments(const HeadConfig& head, float gradient_scale) {
  if (head.weight_gradients == WeightGradients::kFrozen) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, RejectReason::kConflict, "head",
        absl::StrCat("head ", head.name, " is frozen: it has no gradient, and no window to flush"));
  }
  if (std::isfinite(gradient_scale)) return absl::OkStatus();
  return MakeError(absl::StatusCode::kInvalidArgument, RejectReason::kOption, kScale,
                   absl::StrCat(kScale, " is ", gradient_scale, "; it must be finite"));
}

}  // namespace

void Head::BeginFlush(uint64_t generation, std::vector<SessionMarks> marks, float gradient_scale,
                      FlushCallback done) {
  marks = Canonical(std::move(marks));
  absl::StatusOr<FlushInfo> answer = FlushInfo{};
  {
    const std::lock_guard lock(mutex_);
    if (!ended_.ok()) {
      answer = ended_;
    } else if (!restoring_.ok()) {
      answer = restoring_;
    } else if (absl::Status arguments = CheckFlushArguments(config_, gradient_scale); !arguments.ok()) {
      answer = arguments;
    } else if (absl::Status place = CheckGenerationLocked(generation); !place.ok()) {
      answer = place;
    } else if (window_.step.has_value()) {
      answer = CheckOpenLocked();
    } else if (window_.state != WindowState::kOpen) {
      if (!Same(marks, window_.marks)) {
        answer = MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kFlushArguments, "marks",
                           absl::StrCat("a flush of generation ", generation, " is under way with marks ",
                                        ToText(window_.marks), "; this call names ", ToText(marks)));
      } else if (gradient_scale != window_.flush_scale) {
        answer = MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kFlushArguments, kScale,
                           absl::StrCat("a flush of generation ", generation, " is under way with ", kScale,
                                        " ", window_.flush_scale, "; this call names ", gradient_scale));
      } else if (window_.state == WindowState::kFrozen) {
        answer = window_.flush;
      } else {
        window_.flush_waiters.push_back(std::move(done));
        return;
      }
    } else if (!draining_.ok()) {
      answer = draining_;
    } else if (absl::Status match = ledger_.Match(marks); !match.ok()) {
      answer = match;
    } else {
      window_.state = WindowState::kFreezing;
      window_.marks = std::move(marks);
      window_.flush_scale = gradient_scale;
      window_.flush_waiters.push_back(std::move(done));
      window_.flush_begun = absl::Now();
      PostLastLocked(window_.marks, [self = shared_from_this()] { self->Freeze(); });
      return;
    }
  }
  done(std::move(answer));
}

// ABORTED with the server's position; FAILED_PRECONDITION for the window behind one that a flush still holds.
absl::Status Head::CheckGenerationLocked(uint64_t generation) const {
  if (generation == window_.generation) return absl::OkStatus();
  if (second_gradient_ != nullptr && InNextWindowLocked(generation)) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, RejectReason::kGeneration, "generation",
        absl::StrCat("generation is ", generation, "; generation ", window_.generation,
                     " is frozen by flush ", window_.flush.flush_id, " (commit or abort that first)"));
  }
  return PositionErrorLocked(
      absl::StatusCode::kAborted, RejectReason::kGeneration, "generation",
      absl::StrCat("generation is ", generation, "; the server is at ", window_.generation), "");
}

absl::Status Head::CheckOpenLocked() const {
  if (window_.state == WindowState::kOpen) return absl::OkStatus();
  const bool step = window_.step.has_value();
  return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kConflict, "generation",
                   absl::StrCat("generation ", window_.generation,
                                step ? " is being consumed by a step"
                                : window_.state == WindowState::kFrozen
                                    ? " is frozen by a flush (commit or abort it first)"
                                    : " is about to be frozen by a flush"));
}

void Head::PostLastLocked(std::optional<std::vector<SessionMarks>> marks, std::function<void()> task) {
  last_tasks_.push_back(std::move(marks));
  environment_.scheduler->PostLast(shared_from_this(), [self = shared_from_this(), task = std::move(task)] {
    {
      const std::lock_guard lock(self->mutex_);
      self->last_tasks_.pop_front();
    }
    task();
  });
}

// What a call did to the window that the device has yet to do to its gradients.
void Head::PostWindowWorkLocked(std::function<void()> task) {
  ++window_work_;
  environment_.scheduler->Post(this, [self = shared_from_this(), task = std::move(task)] {
    task();
    ++self->gradient_changes_;
    const std::lock_guard lock(self->mutex_);
    --self->window_work_;
  });
}

Gradient* Head::GradientOfLocked(uint64_t generation) const {
  return InNextWindowLocked(generation) ? OtherGradientLocked() : window_gradient_;
}

void Head::Freeze() {
  // Everything accepted before the flush has been processed by now. Marks may have gone back since, if a
  // stream was cut.
  absl::StatusOr<FlushInfo> answer = FlushInfo{};
  ScaledGradient gradient;
  {
    const std::lock_guard lock(mutex_);
    gradient = {window_gradient_, window_.flush_scale};
    absl::Status match = ended_.ok() ? ledger_.Match(window_.marks) : ended_;
    if (!match.ok()) answer = match;
  }
  if (answer.ok()) {
    answer->flush_id = RandomId();
    answer->rows = config_.vocab_size;
    answer->columns = config_.hidden_size;
    if (absl::Status summarized = Summarize(gradient, &*answer); !summarized.ok()) {
      EndByFailure(summarized);
      answer = summarized;
    }
  }
  if (answer.ok()) {
    CountGradient(answer->summary.norm,
                  answer->summary.non_finite + (answer->bias_summary ? answer->bias_summary->non_finite : 0));
  }
  std::vector<FlushCallback> flush_waiters;
  std::vector<std::function<void()>> window_waiters;
  {
    const std::lock_guard lock(mutex_);
    window_.state = answer.ok() ? WindowState::kFrozen : WindowState::kOpen;
    if (answer.ok()) {
      answer->window_tokens = window_.tokens;
      window_.flush = *answer;
      ledger_.Freeze();
      window_.flush_frozen = absl::Now();
      ++environment_.counters->flushes_begun;
      environment_.counters->flush_freeze_seconds.Observe(
          absl::ToDoubleSeconds(window_.flush_frozen - window_.flush_begun));
    }
    flush_waiters = std::exchange(window_.flush_waiters, {});
    window_waiters = TakeWaitersLocked();
  }
  for (const FlushCallback& waiter : flush_waiters) waiter(answer);
  for (const auto& waiter : window_waiters) waiter();
}

absl::Status Head::ReadScaledRows(const ScaledGradient& gradient, int64_t first_row, int64_t rows,
                                  float* out) {
  absl::Status status = ReadGradientSum(gradient.of, first_row, rows, out);
  if (!status.ok() || gradient.scale == 1.0f) return status;
  for (float& value : std::span(out, static_cast<size_t>(rows * config_.hidden_size))) {
    value *= gradient.scale;
  }
  return absl::OkStatus();
}

absl::Status Head::ReadScaledBias(const ScaledGradient& gradient, int64_t first_row, int64_t rows,
                                  float* out) {
  absl::Status status = ReadBiasGradientSum(gradient.of, first_row, rows, out);
  if (!status.ok() || gradient.scale == 1.0f) return status;
  for (float& value : std::span(out, static_cast<size_t>(rows))) value *= gradient.scale;
  return absl::OkStatus();
}

absl::Status Head::ForEachPiece(const ScaledGradient& gradient,
                                absl::FunctionRef<void(std::span<const float> rows)> add) {
  const int64_t rows_per_piece = std::max<int64_t>(1, kSummedBytes / 4 / config_.hidden_size);
  const int64_t piece_bytes = std::min(rows_per_piece, config_.vocab_size) * config_.hidden_size * 4;
  // Where the device writes by itself, if it can. Two, since one piece is read while the one before is added.
  std::array<ResultBytes, 2> memory;
  std::future<void> adding;
  absl::Status status;
  for (int64_t row = 0, turn = 0; row < config_.vocab_size && status.ok(); row += rows_per_piece, turn ^= 1) {
    ResultBytes& bytes = memory[static_cast<size_t>(turn)];
    if (bytes.size() == 0) bytes = StagedResult(piece_bytes, environment_.device);
    auto* piece = reinterpret_cast<float*>(bytes.data());
    const int64_t rows = std::min(rows_per_piece, config_.vocab_size - row);
    status = ReadScaledRows(gradient, row, rows, piece);
    if (adding.valid()) adding.get();
    if (!status.ok()) break;
    const std::span<const float> values(piece, static_cast<size_t>(rows * config_.hidden_size));
    if (row + rows == config_.vocab_size) {
      add(values);
    } else {
      // Where no thread can be had, get() does it.
      adding = std::async(std::launch::async | std::launch::deferred, [add, values] { add(values); });
    }
  }
  return status;
}

absl::Status Head::Summarize(const ScaledGradient& gradient, FlushInfo* flush) {
  // What is summed of several gradients is nowhere on the device.
  const bool summed_here = !DeterministicInOrder().empty();
  absl::Status status =
      summed_here ? SummarizeHere(gradient, &flush->summary) : SummarizeOnDevice(gradient, &flush->summary);
  if (!status.ok() || !config_.bias) return status;
  std::vector<float> bias(static_cast<size_t>(config_.vocab_size));
  status = ReadScaledBias(gradient, 0, config_.vocab_size, bias.data());
  if (!status.ok()) return status;
  GradientSummarizer of_bias;
  of_bias.Add(bias);
  flush->bias_summary = of_bias.Finish();
  if (!summed_here) flush->summary.non_finite -= flush->bias_summary->non_finite;
  return absl::OkStatus();
}

absl::Status Head::SummarizeHere(const ScaledGradient& gradient, GradientSummary* summary) {
  GradientSummarizer summarizer;
  const auto add = [&summarizer](std::span<const float> rows) { summarizer.Add(rows); };
  if (absl::Status status = ForEachPiece(gradient, add); !status.ok()) return status;
  *summary = summarizer.Finish();
  return absl::OkStatus();
}

// Only the checksum needs every byte in the host's memory. Counts what of the bias is not finite as well.
absl::Status Head::SummarizeOnDevice(const ScaledGradient& gradient, GradientSummary* summary) {
  const absl::StatusOr<GradientStats> stats = backend_->Summarize(gradient.of, gradient.scale);
  if (!stats.ok()) return stats.status();
  GradientChecksum checksum;
  const auto add = [&checksum](std::span<const float> rows) { checksum.Add(rows); };
  if (absl::Status status = ForEachPiece(gradient, add); !status.ok()) return status;
  *summary = {stats->norm, checksum.Value(), stats->non_finite};
  return absl::OkStatus();
}

absl::Status Head::CheckFlush(const std::string& flush_id) const { return GradientOf(flush_id).status(); }

absl::StatusOr<Head::ScaledGradient> Head::GradientOf(const std::string& flush_id) const {
  const std::lock_guard lock(mutex_);
  if (!ended_.ok()) return ended_;
  if (window_.state == WindowState::kFrozen && window_.flush.flush_id == flush_id) {
    return ScaledGradient{window_gradient_, window_.flush_scale};
  }
  return UnknownFlush(flush_id, window_.generation);
}

void Head::ReadGradient(const std::string& flush_id, int64_t first_row, int64_t rows, kernels::DataType type,
                        RowsOut out, std::function<void(absl::Status)> done) {
  environment_.scheduler->Post(
      this, [self = shared_from_this(), flush_id, first_row, rows, type, out, done = std::move(done)] {
        const absl::StatusOr<ScaledGradient> gradient = self->GradientOf(flush_id);
        if (!gradient.ok()) return done(gradient.status());
        const bool wanted_wide = type == kernels::DataType::kFloat32;
        const int64_t count = rows * self->config_.hidden_size;
        ResultBytes memory = wanted_wide ? ResultBytes() : StagedResult(count * 4, self->environment_.device);
        auto* wide = static_cast<float*>(wanted_wide ? out.matrix : memory.data());
        absl::Status status = self->ReadScaledRows(*gradient, first_row, rows, wide);
        if (status.ok() && out.bias != nullptr && self->config_.bias) {
          status = self->ReadScaledBias(*gradient, first_row, rows, out.bias);
        }
        if (!status.ok()) {
          self->EndByFailure(status);
        } else if (!wanted_wide) {
          kernels::Convert(kernels::DataType::kFloat32, wide, type, out.matrix, count);
        }
        done(status);
      });
}

absl::StatusOr<uint64_t> Head::CommitFlush(const std::string& flush_id) {
  const absl::Time begun = absl::Now();
  std::vector<std::function<void()>> waiters;
  uint64_t generation = 0;
  {
    const std::lock_guard lock(mutex_);
    if (!ended_.ok()) return ended_;
    if (!restoring_.ok()) return restoring_;
    if (!flush_id.empty() && flush_id == window_.last_committed_flush) {
      return window_.last_committed_generation;
    }
    if (window_.state != WindowState::kFrozen || window_.flush.flush_id != flush_id) {
      return UnknownFlush(flush_id, window_.generation);
    }
    // Posted under the lock, so before any chunk that is to be added to this gradient again.
    PostWindowWorkLocked([self = shared_from_this(), flushed = window_gradient_] {
      self->backend_->Reset(flushed);
      for (const auto& session : self->DeterministicInOrder()) {
        self->backend_->Reset(session->memory.gradient.get());
      }
    });
    if (second_gradient_ != nullptr) window_gradient_ = OtherGradientLocked();
    waiters = BeginWindowLocked();
    generation = window_.generation;
    window_.last_committed_flush = flush_id;
    window_.last_committed_generation = generation;
    ++environment_.counters->flushes_committed;
    environment_.counters->flush_read_seconds.Observe(absl::ToDoubleSeconds(begun - window_.flush_frozen));
  }
  for (const auto& waiter : waiters) waiter();
  environment_.counters->flush_commit_seconds.Observe(absl::ToDoubleSeconds(absl::Now() - begun));
  return generation;
}

// The one behind a window that was flushed or stepped; returns who waits for it.
std::vector<std::function<void()>> Head::BeginWindowLocked() {
  ++window_.generation;
  window_.state = WindowState::kOpen;
  window_.tokens = std::exchange(window_.next_tokens, 0);
  window_.since = std::exchange(window_.next_since, std::nullopt);
  ledger_.BeginWindow();
  DropGradientsLocked();
  for (const auto& [id, session] : deterministic_) session->tiles.BeginWindow();
  return TakeWaitersLocked();
}

absl::StatusOr<uint64_t> Head::AbortFlush(const std::string& flush_id) {
  std::vector<std::function<void()>> waiters;
  uint64_t generation = 0;
  {
    const std::lock_guard lock(mutex_);
    if (!ended_.ok()) return ended_;
    if (!restoring_.ok()) return restoring_;
    if (!flush_id.empty() && flush_id == window_.last_aborted_flush) return window_.last_aborted_generation;
    if (window_.state != WindowState::kFrozen || window_.flush.flush_id != flush_id) {
      return UnknownFlush(flush_id, window_.generation);
    }
    window_.state = WindowState::kOpen;
    window_.TakeBackNext();
    ledger_.Reopen();
    if (second_gradient_ != nullptr) {
      // Behind every chunk that was taken for the next window, and before any that comes now.
      PostWindowWorkLocked([self = shared_from_this(), from = OtherGradientLocked(), to = window_gradient_] {
        if (absl::Status folded = self->backend_->Fold(from, to); !folded.ok()) self->EndByFailure(folded);
      });
    }
    window_.last_aborted_flush = flush_id;
    window_.last_aborted_generation = window_.generation;
    generation = window_.generation;
    ++environment_.counters->flushes_aborted;
    environment_.counters->flush_read_seconds.Observe(
        absl::ToDoubleSeconds(absl::Now() - window_.flush_frozen));
    waiters = TakeWaitersLocked();
  }
  for (const auto& waiter : waiters) waiter();
  return generation;
}

}  // namespace lossd::engine
