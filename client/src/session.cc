#include "client/src/session.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/batch_plan.h"
#include "client/src/batch_run.h"
#include "client/src/grpc_status.h"

namespace lossd {

Session::Impl::Impl(std::shared_ptr<internal::HeadContext> head, const SessionOptions& options)
    : head_(std::move(head)), lane_(head_, options) {}

Session::Impl::~Impl() {
  if (!closed_ && failure_.ok()) lane_.Close();
}

absl::StatusOr<std::unique_ptr<Session::Impl>> Session::Impl::Open(
    std::shared_ptr<internal::HeadContext> head, const SessionOptions& options) {
  std::unique_ptr<Impl> impl(new Impl(std::move(head), options));
  if (absl::Status status = impl->lane_.Open(); !status.ok()) {
    impl->failure_ = status;
    return status;
  }
  return impl;
}

absl::Status Session::Impl::CheckAlive() const {
  if (closed_) {
    return absl::FailedPreconditionError(absl::StrCat("session ", lane_.session_id(), " is closed"));
  }
  if (failure_.ok()) return absl::OkStatus();
  return internal::Annotate(failure_, "this session ended with an earlier error");
}

absl::StatusOr<BatchResult> Session::Impl::Compute(const Batch& batch, const BatchOutputs& outputs) {
  std::lock_guard lock(mutex_);
  if (absl::Status status = CheckAlive(); !status.ok()) return status;
  const HeadConfig& config = head_->config();
  if (absl::Status status = internal::ValidateBatch(config, batch, outputs); !status.ok()) return status;
  if (batch.labels.empty()) return BatchResult{};
  const auto places = internal::FindPlaces(head_->regions(), config, batch, outputs);
  if (!places.ok()) return places.status();
  if (absl::Status status = lane_.EnsureAttached(); !status.ok()) return status;

  auto ranges =
      internal::CutBatch(config, batch, outputs, *places, lane_.options().chunk_bytes, lane_.limits());
  if (!ranges.ok()) return ranges.status();
  internal::BatchRun run(&lane_, config, batch, outputs, *places, *std::move(ranges), expected_repeats_);
  auto result = run.Run();
  if (!run.session_usable()) {
    failure_ = result.status();
    lane_.Abandon();
  }
  return result;
}

absl::Status Session::Impl::ResumeAt(uint64_t sequence) {
  std::lock_guard lock(mutex_);
  if (absl::Status status = CheckAlive(); !status.ok()) return status;
  if (sequence < 1 || sequence > lane_.accepted() + 1) {
    return absl::InvalidArgumentError(absl::StrCat("sequence is ", sequence, "; it must be in [1, ",
                                                   lane_.accepted() + 1, "], since the server has accepted ",
                                                   lane_.accepted()));
  }
  lane_.set_next_sequence(sequence);
  expected_repeats_ = lane_.accepted();
  return absl::OkStatus();
}

SessionMarks Session::Impl::marks() const {
  std::lock_guard lock(mutex_);
  return {.session_id = lane_.session_id(),
          .lanes = {{.lane = 0, .accepted = lane_.accepted(), .applied = lane_.applied()}}};
}

int64_t Session::Impl::reconnects() const {
  std::lock_guard lock(mutex_);
  return lane_.reconnects();
}

absl::Status Session::Impl::Close() {
  std::lock_guard lock(mutex_);
  if (closed_) return absl::OkStatus();
  closed_ = true;
  lane_.Close();
  v1::CloseSessionRequest request;
  request.set_session_id(lane_.session_id());
  return head_->connection().CloseSession(request).status();
}

Session::Session(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Session::~Session() = default;
Session::Session(Session&&) noexcept = default;
Session& Session::operator=(Session&&) noexcept = default;

absl::StatusOr<BatchResult> Session::Compute(const Batch& batch, const BatchOutputs& outputs) {
  return impl_->Compute(batch, outputs);
}
absl::Status Session::ResumeAt(uint64_t sequence) { return impl_->ResumeAt(sequence); }
SessionMarks Session::marks() const { return impl_->marks(); }
const std::string& Session::id() const { return impl_->id(); }
const std::string& Session::client_key() const { return impl_->client_key(); }
int64_t Session::reconnects() const { return impl_->reconnects(); }
absl::Status Session::Close() { return impl_->Close(); }

}  // namespace lossd
