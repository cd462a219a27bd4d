// The two-phase flush of a head's gradient window.
#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/errors.h"
#include "server/engine/head.h"
#include "server/engine/random_id.h"
#include "server/engine/staging.h"

namespace lossd::engine {
namespace {

constexpr char kScale[] = "gradient_scale";
constexpr int64_t kPieceBytes = int64_t{4} << 20;

// One form for equal arguments: sorted, and only what a flush looks at.
std::vector<SessionMarks> Canonical(std::vector<SessionMarks> marks) {
  std::sort(marks.begin(), marks.end(),
            [](const SessionMarks& a, const SessionMarks& b) { return a.session_id < b.session_id; });
  for (SessionMarks& session : marks) {
    std::sort(session.lanes.begin(), session.lanes.end(),
              [](const LaneMarks& a, const LaneMarks& b) { return a.lane < b.lane; });
    for (LaneMarks& lane : session.lanes) lane.applied = 0;
  }
  return marks;
}

bool Same(const std::vector<SessionMarks>& a, const std::vector<SessionMarks>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const SessionMarks& x, const SessionMarks& y) {
    return x.session_id == y.session_id &&
           std::equal(x.lanes.begin(), x.lanes.end(), y.lanes.begin(), y.lanes.end(),
                      [](const LaneMarks& l, const LaneMarks& m) {
                        return l.lane == m.lane && l.accepted == m.accepted;
                      });
  });
}

// The first few of them: a message is no place for thousands.
std::string ToText(const std::vector<SessionMarks>& marks) {
  constexpr size_t kMostText = 1024;
  std::string text;
  for (const SessionMarks& session : marks) {
    for (const LaneMarks& lane : session.lanes) {
      if (text.size() > kMostText) return absl::StrCat(text, ", ...");
      absl::StrAppend(&text, text.empty() ? "" : ", ", session.session_id, "/", lane.lane, "=",
                      lane.accepted);
    }
  }
  return text.empty() ? "none" : text;
}

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
    } else if (absl::Status arguments = CheckFlushArguments(config_, gradient_scale); !arguments.ok()) {
      answer = arguments;
    } else if (generation != window_.generation) {
      answer = PositionErrorLocked(
          absl::StatusCode::kAborted, RejectReason::kGeneration, "generation",
          absl::StrCat("generation is ", generation, "; the server is at ", window_.generation), "");
    } else if (window_.state != WindowState::kOpen) {
      if (!Same(marks, window_.flush_marks)) {
        answer = MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kFlushArguments, "marks",
                           absl::StrCat("a flush of generation ", generation, " is under way with marks ",
                                        ToText(window_.flush_marks), "; this call names ", ToText(marks)));
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
    } else if (absl::Status match = ledger_.Match(marks); !match.ok()) {
      answer = match;
    } else {
      window_.state = WindowState::kFreezing;
      window_.flush_marks = std::move(marks);
      window_.flush_scale = gradient_scale;
      window_.flush_waiters.push_back(std::move(done));
      window_.flush_begun = absl::Now();
      environment_.scheduler->PostLast(shared_from_this(), [self = shared_from_this()] { self->Freeze(); });
      return;
    }
  }
  done(std::move(answer));
}

void Head::Freeze() {
  // Everything accepted before the flush has been processed by now. Marks may have gone back since, if a
  // stream was cut.
  absl::StatusOr<FlushInfo> answer = FlushInfo{};
  float scale = 1.0f;
  {
    const std::lock_guard lock(mutex_);
    scale = window_.flush_scale;
    absl::Status match = ended_.ok() ? ledger_.Match(window_.flush_marks) : ended_;
    if (!match.ok()) answer = match;
  }
  if (answer.ok()) {
    answer->flush_id = RandomId();
    answer->rows = config_.vocab_size;
    answer->columns = config_.hidden_size;
    if (absl::Status summarized = Summarize(scale, &*answer); !summarized.ok()) {
      EndByFailure(summarized);
      answer = summarized;
    }
  }
  std::vector<FlushCallback> flush_waiters;
  std::vector<std::function<void()>> window_waiters;
  {
    const std::lock_guard lock(mutex_);
    window_.state = answer.ok() ? WindowState::kFrozen : WindowState::kOpen;
    if (answer.ok()) {
      answer->window_tokens = window_.tokens;
      window_.flush = *answer;
      ++environment_.counters->flushes_begun;
      environment_.counters->flush_seconds.Observe(absl::ToDoubleSeconds(absl::Now() - window_.flush_begun));
    }
    flush_waiters = std::exchange(window_.flush_waiters, {});
    window_waiters = TakeWaitersLocked();
  }
  for (const FlushCallback& waiter : flush_waiters) waiter(answer);
  for (const auto& waiter : window_waiters) waiter();
}

absl::Status Head::ReadScaledRows(int64_t first_row, int64_t rows, float scale, float* out) {
  absl::Status status = ReadGradientSum(first_row, rows, out);
  if (!status.ok() || scale == 1.0f) return status;
  for (float& value : std::span(out, static_cast<size_t>(rows * config_.hidden_size))) value *= scale;
  return absl::OkStatus();
}

absl::Status Head::ReadScaledBias(int64_t first_row, int64_t rows, float scale, float* out) {
  absl::Status status = ReadBiasGradientSum(first_row, rows, out);
  if (!status.ok() || scale == 1.0f) return status;
  for (float& value : std::span(out, static_cast<size_t>(rows))) value *= scale;
  return absl::OkStatus();
}

absl::Status Head::Summarize(float scale, FlushInfo* flush) {
  GradientSummarizer summarizer;
  const int64_t rows_per_piece = std::max<int64_t>(1, kPieceBytes / 4 / config_.hidden_size);
  // Where the device writes by itself, if it can.
  ResultBytes memory = StagedResult(std::min(rows_per_piece, config_.vocab_size) * config_.hidden_size * 4,
                                    environment_.device);
  auto* piece = reinterpret_cast<float*>(memory.data());
  for (int64_t row = 0; row < config_.vocab_size; row += rows_per_piece) {
    const int64_t rows = std::min(rows_per_piece, config_.vocab_size - row);
    if (absl::Status status = ReadScaledRows(row, rows, scale, piece); !status.ok()) return status;
    summarizer.Add({piece, static_cast<size_t>(rows * config_.hidden_size)});
  }
  flush->summary = summarizer.Finish();
  if (!config_.bias) return absl::OkStatus();
  std::vector<float> bias(static_cast<size_t>(config_.vocab_size));
  if (absl::Status status = ReadScaledBias(0, config_.vocab_size, scale, bias.data()); !status.ok()) {
    return status;
  }
  GradientSummarizer of_bias;
  of_bias.Add(bias);
  flush->bias_summary = of_bias.Finish();
  return absl::OkStatus();
}

absl::Status Head::CheckFlush(const std::string& flush_id) const { return ScaleOf(flush_id).status(); }

absl::StatusOr<float> Head::ScaleOf(const std::string& flush_id) const {
  const std::lock_guard lock(mutex_);
  if (!ended_.ok()) return ended_;
  if (window_.state == WindowState::kFrozen && window_.flush.flush_id == flush_id) return window_.flush_scale;
  return UnknownFlush(flush_id, window_.generation);
}

void Head::ReadGradient(const std::string& flush_id, int64_t first_row, int64_t rows, kernels::DataType type,
                        RowsOut out, std::function<void(absl::Status)> done) {
  environment_.scheduler->Post(
      this, [self = shared_from_this(), flush_id, first_row, rows, type, out, done = std::move(done)] {
        const absl::StatusOr<float> scale = self->ScaleOf(flush_id);
        if (!scale.ok()) return done(scale.status());
        const bool wanted_wide = type == kernels::DataType::kFloat32;
        const int64_t count = rows * self->config_.hidden_size;
        ResultBytes memory = wanted_wide ? ResultBytes() : StagedResult(count * 4, self->environment_.device);
        auto* wide = static_cast<float*>(wanted_wide ? out.matrix : memory.data());
        absl::Status status = self->ReadScaledRows(first_row, rows, *scale, wide);
        if (status.ok() && out.bias != nullptr && self->config_.bias) {
          status = self->ReadScaledBias(first_row, rows, *scale, out.bias);
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
  std::vector<std::function<void()>> waiters;
  uint64_t generation = 0;
  {
    const std::lock_guard lock(mutex_);
    if (!ended_.ok()) return ended_;
    if (!flush_id.empty() && flush_id == window_.last_committed_flush) {
      return window_.last_committed_generation;
    }
    if (window_.state != WindowState::kFrozen || window_.flush.flush_id != flush_id) {
      return UnknownFlush(flush_id, window_.generation);
    }
    // Posted under the lock, so before any chunk of the next generation.
    environment_.scheduler->Post(this, [self = shared_from_this()] {
      self->backend_->ResetGradient();
      for (const auto& session : self->DeterministicInOrder()) {
        self->backend_->Reset(session->memory.gradient.get());
      }
    });
    generation = ++window_.generation;
    window_.state = WindowState::kOpen;
    window_.tokens = 0;
    window_.last_committed_flush = flush_id;
    window_.last_committed_generation = generation;
    ledger_.BeginWindow();
    DropGradientsLocked();
    for (const auto& [id, session] : deterministic_) session->tiles.BeginWindow();
    ++environment_.counters->flushes_committed;
    waiters = TakeWaitersLocked();
  }
  for (const auto& waiter : waiters) waiter();
  return generation;
}

absl::StatusOr<uint64_t> Head::AbortFlush(const std::string& flush_id) {
  std::vector<std::function<void()>> waiters;
  uint64_t generation = 0;
  {
    const std::lock_guard lock(mutex_);
    if (!ended_.ok()) return ended_;
    if (!flush_id.empty() && flush_id == window_.last_aborted_flush) return window_.last_aborted_generation;
    if (window_.state != WindowState::kFrozen || window_.flush.flush_id != flush_id) {
      return UnknownFlush(flush_id, window_.generation);
    }
    window_.state = WindowState::kOpen;
    window_.last_aborted_flush = flush_id;
    window_.last_aborted_generation = window_.generation;
    generation = window_.generation;
    ++environment_.counters->flushes_aborted;
    waiters = TakeWaitersLocked();
  }
  for (const auto& waiter : waiters) waiter();
  return generation;
}

}  // namespace lossd::engine
