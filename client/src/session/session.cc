#include "client/src/session/session.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/batch/batch_loss.h"
#include "client/src/batch/batch_plan.h"
#include "client/src/batch/sent_tokens.h"
#include "client/src/connection/grpc_status.h"
#include "client/src/gradient/open_freeze.h"
#include "client/src/session/batch_run.h"

namespace lossd {
namespace {

// What lies in a region costs nothing to send, and a chunk of it is in one piece; the places of a
// deterministic session's tokens are those of all.
internal::SentTokens SentTokensOf(const internal::NeededTokens& needed, const internal::BatchPlaces& places,
                                  Deterministic deterministic) {
  if (deterministic == Deterministic::kYes || places.hidden_states || places.teacher_hidden || places.dx) {
    return internal::SentTokens::All(static_cast<int64_t>(needed.size()));
  }
  return internal::SentTokens::Of(needed);
}

}  // namespace

Session::Impl::Impl(std::shared_ptr<internal::HeadContext> head, const SessionOptions& options)
    : head_(std::move(head)), lanes_(head_, options) {}

Session::Impl::~Impl() {
  if (!closed_ && failure_.ok()) lanes_.Close();
}

absl::StatusOr<std::unique_ptr<Session::Impl>> Session::Impl::Open(
    std::shared_ptr<internal::HeadContext> head, const SessionOptions& options) {
  std::unique_ptr<Impl> impl(new Impl(std::move(head), options));
  if (absl::Status status = impl->lanes_.Open(); !status.ok()) {
    impl->failure_ = status;
    return status;
  }
  return impl;
}

absl::Status Session::Impl::CheckAlive() const {
  if (closed_) {
    return absl::FailedPreconditionError(absl::StrCat("session ", lanes_.link().session_id(), " is closed"));
  }
  if (failure_.ok()) return absl::OkStatus();
  return internal::Annotate(
      failure_, absl::StrCat("this session ended with an earlier error: open another with client_key '",
                             client_key(), "'"));
}

absl::Status Session::Impl::Interrupted(const absl::Status& cause) const {
  return internal::Annotate(
      cause, absl::StrCat("a batch was cut short, and a part of it may be in the window: open a session with "
                          "client_key '",
                          client_key(), "', and discard the window or resume at the batch"));
}

absl::StatusOr<BatchResult> Session::Impl::Compute(const Batch& given, const BatchOutputs& outputs) {
  std::lock_guard lock(mutex_);
  if (absl::Status status = CheckAlive(); !status.ok()) return status;
  const HeadConfig& config = head_->config();
  if (absl::Status status = internal::ValidateBatch(config, given, outputs); !status.ok()) return status;
  if (given.labels.empty()) return internal::ResultOfNothing(given);
  auto places = internal::FindPlaces(head_->regions(), config, given, outputs);
  if (!places.ok()) return places.status();
  Batch batch = given;
  // Where nothing is kept by its number, tokens without a factor need not travel.
  if (config.held_bytes == 0 && HiddenStatesOf(batch, *places) == internal::HiddenStates::kSent) {
    batch.hold = 0;
  }
  const internal::NeededTokens needed(config, batch, outputs);
  const internal::SentTokens sent = SentTokensOf(needed, *places, lanes_.link().options().deterministic);
  if (sent.count() == 0) {
    internal::FillUnneeded(needed, config, outputs);
    return internal::ResultOfNothing(batch);
  }
  // Otherwise the chunks would wait until somebody ended that flush.
  if (absl::Status status = internal::SettleFreeze(*head_); !status.ok()) return status;
  // Regions are of the process that calls go to.
  if (places->hidden_states || places->teacher_hidden || places->dx) {
    if (absl::Status here = lanes_.ComeHere(); !here.ok()) return here;
  }
  if (absl::Status status = lanes_.EnsureReady(); !status.ok()) return status;
  auto result = Send(batch, outputs, *places, sent);
  if (result.ok() && sent.count() < static_cast<int64_t>(batch.labels.size())) {
    internal::FillUnneeded(needed, config, outputs);
  }
  return result;
}

absl::StatusOr<BatchResult> Session::Impl::Send(const Batch& batch, const BatchOutputs& outputs,
                                                const internal::BatchPlaces& places,
                                                const internal::SentTokens& sent) {
  const internal::SessionLink& link = lanes_.link();
  const auto plan = internal::PlanBatch(head_->config(), batch, outputs, places, sent,
                                        link.options().chunk_bytes, link.limits(), link.lanes());
  if (!plan.ok()) return plan.status();
  if (link.session_id() != resumed_session_) expected_repeats_.clear();
  const internal::HiddenStates hidden_states = HiddenStatesOf(batch, places);
  held_.Forget(batch.hold);  // whatever comes of it
  internal::BatchRun run(&lanes_, head_->config(), batch, outputs, places, sent, *plan, expected_repeats_,
                         hidden_states);
  auto result = run.Run();
  if (result.ok() && hidden_states == internal::HiddenStates::kSentToStay) NoteHeld(batch, sent, run);
  if (!run.session_usable()) {
    failure_ = absl::IsCancelled(result.status()) ? Interrupted(result.status()) : result.status();
    lanes_.Abandon();
  }
  return result;
}

// A batch with a number has two phases, of which the first brings its hidden states.
internal::HiddenStates Session::Impl::HiddenStatesOf(const Batch& batch,
                                                     const internal::BatchPlaces& places) const {
  using internal::HiddenStates;
  const internal::SessionLink& link = lanes_.link();
  if (batch.hold == 0 || places.hidden_states) return HiddenStates::kSent;
  if (batch.mode == ComputeMode::kLossAndGradients) {
    return held_.HasAll(link.session_id(), batch) ? HiddenStates::kHeld : HiddenStates::kSent;
  }
  // Other ranks of a group hold nothing, and a part would be of no use.
  const bool fits = internal::HeldBatches::BytesOf(head_->config(), batch) <= link.held_hidden_bytes();
  return fits && link.all_lanes_home() ? HiddenStates::kSentToStay : HiddenStates::kSent;
}

// When a run is done: what the server holds of it.
void Session::Impl::NoteHeld(const Batch& batch, const internal::SentTokens& sent,
                             const internal::BatchRun& run) {
  int64_t tokens = 0;
  for (const internal::ChunkRange& range : run.HeldRanges()) {
    for (const internal::SentTokens::Run& part : sent.Runs(range.first, range.tokens)) {
      const auto labels =
          batch.labels.subspan(static_cast<size_t>(part.first), static_cast<size_t>(part.tokens));
      tokens += CountValid(labels, batch.ignore_index);
    }
  }
  const internal::SessionLink& link = lanes_.link();
  held_.Note(link.session_id(), head_->config(), batch, tokens, link.held_hidden_bytes());
}

absl::Status Session::Impl::ResumeAt(const std::vector<uint64_t>& sequences) {
  std::lock_guard lock(mutex_);
  if (absl::Status status = CheckAlive(); !status.ok()) return status;
  if (sequences.size() != lanes_.size()) {
    return absl::InvalidArgumentError(absl::StrCat("sequences has ", sequences.size(),
                                                   " entries; the session has ", lanes_.size(), " lanes"));
  }
  std::vector<uint64_t> accepted;
  for (size_t i = 0; i < lanes_.size(); ++i) {
    accepted.push_back(lanes_[i].accepted());
    if (sequences[i] < 1 || sequences[i] > accepted[i] + 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("sequences[", i, "] is ", sequences[i], "; it must be in [1, ", accepted[i] + 1,
                       "], since the server has accepted ", accepted[i], " on that lane"));
    }
  }
  for (size_t i = 0; i < lanes_.size(); ++i) lanes_[i].set_next_sequence(sequences[i]);
  expected_repeats_ = std::move(accepted);
  resumed_session_ = lanes_.link().session_id();
  return absl::OkStatus();
}

SessionMarks Session::Impl::marks() const {
  std::lock_guard lock(mutex_);
  const internal::SessionLink& link = lanes_.link();
  link.NoteMarksTold();
  SessionMarks marks{.session_id = link.session_id(),
                     .lanes = {},
                     .incarnation = link.incarnation(),
                     .restores = link.restores_of_marks(),
                     .generation = link.generation_of_marks()};
  for (size_t i = 0; i < lanes_.size(); ++i) {
    marks.lanes.push_back(
        {.lane = lanes_[i].number(), .accepted = lanes_[i].accepted(), .applied = lanes_[i].applied()});
  }
  return marks;
}

int64_t Session::Impl::reconnects() const {
  std::lock_guard lock(mutex_);
  return lanes_.reconnects();
}

std::vector<LanePlace> Session::Impl::lane_places() const {
  std::lock_guard lock(mutex_);
  std::vector<LanePlace> places;
  for (size_t i = 0; i < lanes_.size(); ++i) {
    const std::string place = lanes_[i].place();
    const bool at_home = place == lanes_.link().places().home();
    places.push_back({.target = place.empty() ? head_->connection().target() : place,
                      .why_not_elsewhere = at_home ? lanes_[i].displaced() : absl::OkStatus()});
  }
  return places;
}

absl::Status Session::Impl::Close() {
  std::lock_guard lock(mutex_);
  if (closed_) return absl::OkStatus();
  closed_ = true;
  lanes_.Close();
  v1::CloseSessionRequest request;
  request.set_session_id(lanes_.link().session_id());
  internal::Connection& connection = head_->connection();
  return connection.Call(&v1::LossService::Stub::AsyncCloseSession, request, internal::kDeletion).status();
}

Session::Session(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Session::~Session() = default;
Session::Session(Session&&) noexcept = default;
Session& Session::operator=(Session&&) noexcept = default;

absl::StatusOr<BatchResult> Session::Compute(const Batch& batch, const BatchOutputs& outputs) {
  return impl_->Compute(batch, outputs);
}
absl::Status Session::ResumeAt(const std::vector<uint64_t>& sequences) { return impl_->ResumeAt(sequences); }
SessionMarks Session::marks() const { return impl_->marks(); }
bool Session::opened_in_window() const { return impl_->opened_in_window(); }
const std::string& Session::id() const { return impl_->id(); }
const std::string& Session::client_key() const { return impl_->client_key(); }
int64_t Session::reconnects() const { return impl_->reconnects(); }
int64_t Session::held_hidden_bytes() const { return impl_->held_hidden_bytes(); }
std::vector<LanePlace> Session::lane_places() const { return impl_->lane_places(); }
absl::Status Session::Close() { return impl_->Close(); }

}  // namespace lossd
