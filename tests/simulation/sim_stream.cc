#include "tests/simulation/sim_stream.h"

#include <algorithm>
#include <utility>

namespace lossd::simulation {

absl::Status SimStream::Attach(const std::string& session_id, int32_t lane) {
  auto attachment = head_->AttachLane(session_id, lane, shared_from_this());
  if (!attachment.ok()) return attachment.status();
  attachment_ = *std::move(attachment);
  applied_ = std::max(applied_, attachment_.marks.applied);
  return absl::OkStatus();
}

std::optional<SimStream::Message> SimStream::Receive() {
  if (to_client_.empty()) return std::nullopt;
  Message message = std::move(to_client_.front());
  to_client_.pop_front();
  return message;
}

std::optional<absl::Status> SimStream::end() const {
  if (ended_.has_value()) return ended_;
  const bool settled = unanswered_ == 0 && to_client_.empty() && applied_ >= last_taken_;
  return settled ? refused_ : std::nullopt;
}

void SimStream::Deliver() {
  held_ = std::move(to_server_.front());
  to_server_.pop_front();
  SubmitHeld();
}

void SimStream::DeliverTwice() {
  to_server_.push_front(to_server_.front());
  Deliver();
}

void SimStream::Swap() { std::swap(to_server_[0], to_server_[1]); }

void SimStream::SubmitHeld() {
  if (over() || !held_.has_value()) return;
  const uint64_t sequence = held_->sequence;
  // A deterministic session's rows may wait in a tile.
  const bool adds = held_->mode != engine::ComputeMode::kLossOnly && !held_->window_token.has_value();
  const auto item = static_cast<uint64_t>(held_->first_token);
  const auto submission =
      head_->Submit(attachment_, *held_, [self = shared_from_this()] { self->SubmitHeld(); });
  if (submission.ok() && *submission == engine::Head::Submission::kWait) return;
  held_.reset();
  if (!submission.ok()) {
    refused_ = submission.status();
    return;
  }
  if (adds) taken_[sequence] = item;
  ++unanswered_;
  last_taken_ = std::max(last_taken_, sequence);
}

void SimStream::Die() {
  OnEnd(absl::UnavailableError("the server is gone"));
  head_ = nullptr;
}

void SimStream::OnAnswer(engine::ChunkAnswer answer) {
  --unanswered_;
  const auto taken = taken_.extract(answer.sequence);
  if (!taken.empty() && answer.disposition == engine::Disposition::kAccumulated) {
    answered_[taken.key()] = taken.mapped();
  }
  if (!ended_.has_value()) to_client_.emplace_back(std::move(answer));
}

void SimStream::OnApplied(uint64_t applied) {
  applied_ = std::max(applied_, applied);
  if (ended_.has_value()) return;
  while (!answered_.empty() && answered_.begin()->first <= applied) {
    on_item_applied_(answered_.begin()->second);
    answered_.erase(answered_.begin());
  }
  to_client_.emplace_back(applied);
}

void SimStream::OnEnd(absl::Status status) {
  if (ended_.has_value()) return;
  ended_ = std::move(status);
  to_client_.clear();
  to_server_.clear();
  held_.reset();
}

}  // namespace lossd::simulation
