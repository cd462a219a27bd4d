#include "server/engine/head/parts/gradient_window.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/common/errors.h"

namespace lossd::engine {
namespace {

constexpr char kScale[] = "gradient_scale";

absl::Status OtherArguments(absl::string_view field, uint64_t generation, const std::string& first,
                            const std::string& now) {
  return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kFlushArguments, field,
                   absl::StrCat("a flush of generation ", generation, " is under way with ", field, " ",
                                first, "; this call names ", now));
}

}  // namespace

const char* Name(WindowState state) {
  switch (state) {
    case WindowState::kOpen:
      return "open";
    case WindowState::kSealing:
      return "freezing";
    case WindowState::kSealed:
      return "frozen";
  }
  return "open";
}

std::optional<absl::Time> GradientWindow::flush_since() const {
  if (window_.state == WindowState::kOpen || stepping() || opens_again()) return std::nullopt;
  return begun_;
}

std::string GradientWindow::flush_id() const {
  return window_.state == WindowState::kSealed ? window_.flush.flush_id : "";
}

bool GradientWindow::IsSealedBy(const std::string& flush_id) const {
  return window_.state == WindowState::kSealed && window_.flush.flush_id == flush_id;
}

GradientWindow::Turn GradientWindow::TurnOf(uint64_t generation) const {
  if (window_.state == WindowState::kOpen) {
    return generation == window_.generation ? Turn::kNow : Turn::kNever;
  }
  if (generation == window_.generation + 1) {
    return IsNext(generation) && gradients_ == Gradients::kTwo ? Turn::kNext : Turn::kWait;
  }
  // While it is being sealed, it is not yet known whether the window stays open.
  const bool may_open = generation == window_.generation && window_.state == WindowState::kSealing;
  return may_open ? Turn::kWait : Turn::kNever;
}

void GradientWindow::Count(uint64_t generation, uint64_t valid_tokens, absl::Time accepted) {
  const bool next = IsNext(generation);
  (next ? window_.next_tokens : window_.tokens) += valid_tokens;
  std::optional<absl::Time>& since = next ? next_since_ : since_;
  if (!since.has_value()) since = accepted;
}

absl::Status GradientWindow::CheckOpen() const {
  if (window_.state == WindowState::kOpen) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kConflict, "generation",
                   absl::StrCat("generation ", window_.generation,
                                stepping() ? " is being consumed by a step"
                                : window_.state == WindowState::kSealed
                                    ? " is sealed by a flush (commit or abort it first)"
                                    : " is about to be sealed by a flush"));
}

absl::Status GradientWindow::CheckNotBehindFlush(uint64_t generation) const {
  if (gradients_ == Gradients::kOne || !IsNext(generation)) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kFailedPrecondition, RejectReason::kGeneration, "generation",
      absl::StrCat("generation is ", generation, "; generation ", window_.generation, " is sealed by flush ",
                   window_.flush.flush_id, " (commit or abort that first)"));
}

std::optional<absl::StatusOr<FlushInfo>> GradientWindow::JoinFlush(const std::vector<SessionMarks>& marks,
                                                                   float scale, FlushCallback& done) {
  if (stepping()) return CheckOpen();
  if (!Same(marks, window_.marks)) {
    return OtherArguments("marks", window_.generation, ToText(window_.marks), ToText(marks));
  }
  if (scale != window_.flush_scale) {
    return OtherArguments(kScale, window_.generation, absl::StrCat(window_.flush_scale), absl::StrCat(scale));
  }
  if (window_.state == WindowState::kSealed) return window_.flush;
  flush_waiters_.push_back(std::move(done));
  return std::nullopt;
}

std::optional<absl::StatusOr<StepResult>> GradientWindow::JoinStep(const std::vector<SessionMarks>& marks,
                                                                   const StepRequest& request,
                                                                   StepCallback& done) {
  if (!stepping()) return CheckOpen();
  const StepRecord first{window_.generation, window_.marks, step(), {}};
  if (absl::Status same = CheckSameStep(first, marks, request, "is under way"); !same.ok()) return same;
  step_waiters_.push_back(std::move(done));
  return std::nullopt;
}

std::optional<absl::StatusOr<StepResult>> GradientWindow::RepeatedStep(uint64_t generation,
                                                                       const std::vector<SessionMarks>& marks,
                                                                       const StepRequest& request) const {
  const StepRecord& last = window_.last_step;
  if (generation == 0 || generation != last.generation) return std::nullopt;
  // A caller that no longer knows the marks may ask without them.
  absl::Status same = CheckSameStep(last, marks.empty() ? last.marks : marks, request, "was applied");
  if (!same.ok()) return same;
  return last.result;
}

void GradientWindow::Begin(std::vector<SessionMarks> marks, EndsBy by) {
  window_.state = WindowState::kSealing;
  if (const auto* const flush = std::get_if<FlushEnd>(&by); flush != nullptr) {
    window_.flush_scale = flush->gradient_scale;
  }
  by_ = std::move(by);
  ++ending_;
  window_.marks = std::move(marks);
  begun_ = absl::Now();
}

void GradientWindow::BeginFlush(std::vector<SessionMarks> marks, FlushEnd flush, FlushCallback done) {
  Begin(std::move(marks), std::move(flush));
  flush_waiters_.push_back(std::move(done));
}

void GradientWindow::BeginStep(std::vector<SessionMarks> marks, const StepRequest& request,
                               StepCallback done) {
  Begin(std::move(marks), request);
  step_waiters_.push_back(std::move(done));
}

void GradientWindow::BeginLook(std::vector<SessionMarks> marks, LookEnd look, StatsCallback done) {
  Begin(std::move(marks), look);
  stats_waiters_.push_back(std::move(done));
}

void GradientWindow::BeginBlend(BlendEnd blend, CommitCallback done) {
  Begin({}, std::move(blend));
  blend_waiters_.push_back(std::move(done));
}

std::vector<std::function<void()>> GradientWindow::TakeBehind() {
  std::vector<std::function<void()>> calls;
  for (Behind& one : std::exchange(behind_, {})) calls.push_back(std::move(one.again));
  return calls;
}

bool GradientWindow::awaited() const {
  return !flush_waiters_.empty() || !step_waiters_.empty() || !stats_waiters_.empty() ||
         !blend_waiters_.empty() || !fate_waiters_.empty();
}

std::vector<GradientWindow::Tell> GradientWindow::TakeCallers() {
  std::vector<Tell> callers;
  const auto take = [&callers](auto waiters) {
    for (auto& waiter : waiters) {
      callers.emplace_back([waiter = std::move(waiter)](const absl::Status& why) { waiter(why); });
    }
  };
  take(std::exchange(flush_waiters_, {}));
  take(std::exchange(step_waiters_, {}));
  take(std::exchange(stats_waiters_, {}));
  take(std::exchange(blend_waiters_, {}));
  take(TakeFateWaiters());
  return callers;
}

std::vector<GradientWindow::Tell> GradientWindow::TakeAll() {
  std::vector<Tell> all = TakeCallers();
  for (Behind& one : std::exchange(behind_, {})) all.push_back(std::move(one.tell));
  return all;
}

std::vector<FlushCallback> GradientWindow::Seal(absl::StatusOr<FlushInfo>* answer) {
  if (!answer->ok()) {
    Open();
  } else {
    window_.state = WindowState::kSealed;
    window_.flush = **answer;
    sealed_at_ = absl::Now();
  }
  return std::exchange(flush_waiters_, {});
}

std::vector<StepCallback> GradientWindow::EndStep(absl::StatusOr<StepResult>* answer) {
  const StepRequest request = step();
  if (answer->ok()) {
    (*answer)->generation = window_.generation + 1;
    window_.last_step = {window_.generation, std::exchange(window_.marks, {}), request, **answer};
    BeginNext();
  } else {
    Open();
  }
  return std::exchange(step_waiters_, {});
}

std::vector<StatsCallback> GradientWindow::EndLook() {
  Open();
  return std::exchange(stats_waiters_, {});
}

std::vector<CommitCallback> GradientWindow::EndBlend() {
  Open();
  return std::exchange(blend_waiters_, {});
}

std::vector<GradientWindow::Tell> GradientWindow::Reopen() {
  Open();
  return TakeCallers();
}

absl::StatusOr<GradientWindow::Asked> GradientWindow::AskFor(FlushFate fate, FateCallback done) {
  if (asked_fate_.has_value() && *asked_fate_ != fate) {
    return absl::UnavailableError(absl::StrCat("flush ", window_.flush.flush_id, " is being ",
                                               fate == FlushFate::kCommit ? "aborted" : "committed",
                                               "; ask what became of it"));
  }
  const Asked asked = asked_fate_.has_value() ? Asked::kAgain : Asked::kFirst;
  asked_fate_ = fate;
  fate_waiters_.push_back(std::move(done));
  return asked;
}

std::vector<FateCallback> GradientWindow::TakeFateWaiters() {
  asked_fate_.reset();
  return std::exchange(fate_waiters_, {});
}

absl::StatusOr<std::optional<uint64_t>> GradientWindow::CheckCommit(const std::string& flush_id) const {
  if (!flush_id.empty() && flush_id == window_.committed.flush_id) return window_.committed.generation;
  if (!IsSealedBy(flush_id)) return UnknownFlush(flush_id);
  return std::nullopt;
}

absl::StatusOr<std::optional<uint64_t>> GradientWindow::CheckAbort(const std::string& flush_id) const {
  if (!flush_id.empty() && flush_id == window_.aborted.flush_id) return window_.aborted.generation;
  if (!IsSealedBy(flush_id)) return UnknownFlush(flush_id);
  return std::nullopt;
}

void GradientWindow::Commit() {
  window_.committed.flush_id = window_.flush.flush_id;
  if (gradients_ == Gradients::kTwo) in_second_ = !in_second_;
  BeginNext();
  window_.committed.generation = window_.generation;
}

void GradientWindow::Abort() {
  Open();
  TakeBackNext();
  window_.aborted = {window_.flush.flush_id, window_.generation};
}

void GradientWindow::Open() {
  window_.state = WindowState::kOpen;
  phase_ = EndingPhase::kOpen;
  by_.reset();
}

void GradientWindow::BeginNext() {
  ++window_.generation;
  Open();
  window_.tokens = std::exchange(window_.next_tokens, 0);
  since_ = std::exchange(next_since_, std::nullopt);
}

// The window is open again: what is in the next one is in this one.
void GradientWindow::TakeBackNext() {
  window_.tokens += std::exchange(window_.next_tokens, 0);
  const std::optional<absl::Time> next = std::exchange(next_since_, std::nullopt);
  if (!since_.has_value()) since_ = next;
}

absl::Status GradientWindow::UnknownFlush(const std::string& flush_id) const {
  return MakeError(absl::StatusCode::kAborted, RejectReason::kUnknownFlush, "flush_id",
                   absl::StrCat("flush_id is '", flush_id, "'; no such flush is under way at generation ",
                                window_.generation));
}

Window GradientWindow::Capture() const {
  Window captured = window_;
  if (captured.state != WindowState::kSealed) captured.state = WindowState::kOpen;
  return captured;
}

void GradientWindow::Install(Window window, absl::Time now) {
  window_ = std::move(window);
  in_second_ = false;
  phase_ = EndingPhase::kOpen;
  by_.reset();
  if (window_.state == WindowState::kSealed) by_ = FlushEnd{window_.flush.flush_id, window_.flush_scale};
  begun_ = sealed_at_ = now;
  since_ = window_.tokens > 0 ? std::optional(now) : std::nullopt;
  next_since_ = window_.next_tokens > 0 ? std::optional(now) : std::nullopt;
}

}  // namespace lossd::engine
