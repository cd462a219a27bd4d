#include "server/rpc/compute/compute_reactor.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "server/engine/common/errors.h"
#include "server/rpc/convert/convert.h"
#include "server/rpc/convert/grpc_status.h"
#include "server/rpc/convert/wire.h"

namespace lossd::rpc {
namespace {

// Most chunks a stream may have under way: what a chunk costs beside its payload is not in the byte credit.
constexpr size_t kMostChunks = 1024;

absl::Status Malformed(const std::string& message) {
  return engine::MakeError(absl::StatusCode::kInvalidArgument, engine::RejectReason::kMalformed, "message",
                           message);
}

}  // namespace

ComputeReactor::ComputeReactor(engine::Engine* engine, engine::WorkerPool* writers, CallReports* reports,
                               grpc::CallbackServerContext* context, std::unique_ptr<CallRecord> record,
                               std::unique_ptr<ComputeRequests> requests, DoneCallback on_done)
    : engine_(engine),
      writers_(writers),
      reports_(reports),
      context_(context),
      peer_(context->peer()),
      record_(std::move(record)),
      trace_id_(TraceIdOf(context->client_metadata())),
      on_done_(std::move(on_done)),
      requests_(std::move(requests)) {
  ++engine_->counters().live_streams;
}

ComputeReactor::~ComputeReactor() { --engine_->counters().live_streams; }

ComputeReactor::Guard::~Guard() {
  const std::vector<engine::SessionCredit::Waiter> woken = std::exchange(reactor_->to_be_woken_, {});
  reactor_->mutex_.Unlock();
  for (const auto& wake : woken) wake();
}

void ComputeReactor::Start() {
  self_ = shared_from_this();
  const Guard guard(this);
  reading_ = true;
  StartRead(&request_bytes_);
}

// Reading

void ComputeReactor::OnReadDone(bool ok) {
  const absl::Status parsed = ok ? requests_->Parse(&request_bytes_, &request_) : absl::OkStatus();
  bool attached = false;
  {
    const Guard guard(this);
    reading_ = false;
    if (!ok) half_closed_ = true;
    if (!ok || ending_.has_value()) {
      if (ok && parsed.ok() && request_.message.has_chunk()) ++engine_->counters().chunks_refused;
      PumpLocked();
      return;
    }
    submitting_ = true;  // no further read, and no end, until this message is dealt with
    attached = attached_;
  }
  if (!parsed.ok()) {
    HandleMalformed(parsed);
  } else if (request_.message.has_chunk()) {
    HandleChunk(attached);
  } else {
    HandleStart(attached);
  }
}

void ComputeReactor::HandleMalformed(const absl::Status& status) {
  request_.Clear();  // the stream may live on for a while, until its answers are written
  const Guard guard(this);
  submitting_ = false;
  EndLocked(status, Ending::kAfterAnswers);
}

void ComputeReactor::HandleStart(bool attached) {
  absl::Status status;
  std::shared_ptr<engine::SessionCredit> credit;
  if (attached) {
    status = Malformed("the stream has started; after start only chunk is expected");
  } else if (!request_.message.has_start()) {
    status = Malformed("the message holds neither start nor chunk");
  } else {
    status = engine_->CheckServing();
  }
  if (status.ok()) {
    const v1::ComputeStart& start = request_.message.start();
    if (start.report_timing()) timing_ = engine::Timing::kReport;
    absl::StatusOr<engine::FoundSession> session =
        engine_->FindSession(start.session_id(), start.incarnation());
    status = session.status();
    if (status.ok()) status = requests_->CheckSession(session->head->IsDeterministic(start.session_id()));
    if (status.ok()) {
      head_ = std::move(session->head);
      credit = std::move(session->credit);
      absl::StatusOr<engine::LaneAttachment> attachment =
          head_->AttachLane(start.session_id(), start.lane(), shared_from_this());
      status = attachment.status();
      if (status.ok()) {
        attachment_ = *std::move(attachment);
        attachment_.held = std::move(session->held);
      }
    }
  }
  if (status.ok()) {
    LogEvent("a stream was attached", trace_id_,
             {{"head", head_->config().name}, {"lane", request_.message.start().lane()}});
  }
  bool cancelled = false;
  {
    const Guard guard(this);
    submitting_ = false;
    if (!status.ok()) {
      EndLocked(status, Ending::kAfterAnswers);
    } else {
      attached_ = true;
      credit_ = std::move(credit);
      cancelled = finished_;
      v1::ComputeResponse response;
      ToProto(attachment_.marks, response.mutable_ready()->mutable_marks());
      response.mutable_ready()->set_generation(attachment_.generation);
      if (timing_ == engine::Timing::kReport) {
        response.mutable_ready()->set_server_time(absl::ToUnixMicros(absl::Now()));
      }
      applied_ = std::max(applied_, attachment_.marks.applied);
      applied_written_ = attachment_.marks.applied;
      if (!at_once_) answers_.push_front({Serialize(response), false});
    }
    PumpLocked();
  }
  if (cancelled) Detach();
}

void ComputeReactor::HandleChunk(bool attached) {
  held_ = ToEngine(std::exchange(request_, {}));
  held_.timing = timing_;
  requests_->Place(&held_);
  engine_->counters().payload_bytes_in += static_cast<uint64_t>(held_.payload_bytes());
  if (!attached) {
    const Guard guard(this);
    submitting_ = false;
    ++engine_->counters().chunks_refused;
    EndLocked(Malformed("the first message must be start, not chunk"), Ending::kAfterAnswers);
    return;
  }
  held_.hidden_states = engine_->Staged(std::move(held_.hidden_states));
  held_.teacher_hidden = engine_->Staged(std::move(held_.teacher_hidden));
  {
    const Guard guard(this);
    const Cost cost = CostOf(held_);
    if (!at_once_) {
      costs_.push_back(cost);
      outstanding_bytes_ += cost.bytes;
      credit_->Take(cost.bytes);
    }
  }
  SubmitHeld();
}

ComputeReactor::Cost ComputeReactor::CostOf(const engine::Chunk& chunk) const {
  Cost cost{.bytes = chunk.kept_bytes()};
  const bool at_rank = chunk.dx.place == engine::MemoryPlace::kRank;
  if (at_rank) cost.bytes += chunk.hidden_states.size() + chunk.teacher_hidden.size();
  // A token count that will be rejected has no answer to reserve for (and might overflow).
  if (chunk.tokens < 1 || chunk.tokens > engine_->options().chunk_limits.max_chunk_tokens) return cost;
  const int64_t hidden_size = head_->config().hidden_size;
  if (engine::TakesHeld(chunk)) cost.bytes += chunk.tokens * hidden_size * kernels::SizeOf(chunk.hidden_type);
  if (at_rank && engine::HasInputGradient(chunk.mode)) {
    cost.dx_elsewhere = chunk.tokens * hidden_size * kernels::SizeOf(chunk.dx_type);
  }
  cost.bytes += engine::AnswerBytes(chunk, hidden_size) + cost.dx_elsewhere;
  return cost;
}

void ComputeReactor::SubmitHeld() {
  const uint64_t sequence = held_.sequence;
  absl::Status status = engine_->CheckServing();
  if (status.ok()) {
    const absl::StatusOr<engine::Head::Submission> submission =
        head_->Submit(attachment_, held_, [self = shared_from_this()] { self->SubmitHeld(); });
    status = submission.status();
    // Held until the window changes: SubmitHeld comes again, perhaps already has.
    if (status.ok() && *submission == engine::Head::Submission::kWait) return;
  }
  const Guard guard(this);
  submitting_ = false;
  if (status.ok()) {
    last_taken_ = std::max(last_taken_, sequence);
  } else {
    ++engine_->counters().chunks_refused;
    if (!costs_.empty()) {
      ReturnCreditLocked(costs_.back().bytes);
      costs_.pop_back();
    }
    EndLocked(status, Ending::kAfterAnswers);
  }
  PumpLocked();
}

// Writing

void ComputeReactor::OnAnswer(engine::ChunkAnswer answer) { Post(std::move(answer)); }

void ComputeReactor::OnApplied(uint64_t applied) { Post(applied); }

void ComputeReactor::Post(News news) {
  {
    const engine::MutexLock lock(news_mutex_);
    news_.push_back(std::move(news));
    if (std::exchange(taking_news_, true)) return;
  }
  writers_->Run([self = shared_from_this()] { self->TakeNews(); });
}

// One thread at a time, so that they stay in order.
void ComputeReactor::TakeNews() {
  while (std::optional<News> news = NextNews()) {
    std::visit([this](auto& content) { Take(std::move(content)); }, *news);
  }
}

std::optional<ComputeReactor::News> ComputeReactor::NextNews() {
  const engine::MutexLock lock(news_mutex_);
  if (news_.empty()) {
    taking_news_ = false;
    return std::nullopt;
  }
  News news = std::move(news_.front());
  news_.pop_front();
  return news;
}

void ComputeReactor::Take(engine::ChunkAnswer answer) {
  {
    const Guard guard(this);
    if (at_once_) return;
  }
  engine_->counters().payload_bytes_out +=
      answer.losses.size() + static_cast<uint64_t>(answer.returns.bytes() + answer.dx.size());
  Response response{.bytes = {}, .is_result = true, .is_rejection = !answer.error.ok()};
  if (answer.error.ok()) {
    response.ready = answer.ready;
  } else {
    ReportRejected(answer);
  }
  response.bytes = ToWire(std::move(answer));
  const Guard guard(this);
  if (at_once_) return;
  answers_.push_back(std::move(response));
  PumpLocked();
}

void ComputeReactor::ReportRejected(const engine::ChunkAnswer& answer) const {
  if (reports_ == nullptr) return;
  const std::string peer = requests_->Peer();
  reports_->Reject({.head = head_->config().name,
                    .session = attachment_.session_number,
                    .rank = attachment_.rank,
                    .lane = attachment_.lane,
                    .sequence = answer.sequence,
                    .field = engine::FieldOf(answer.error),
                    .code = static_cast<int>(answer.error.code()),
                    .message = std::string(answer.error.message()),
                    .peer = peer.empty() ? peer_ : peer,
                    .trace_id = trace_id_});
}

void ComputeReactor::Take(uint64_t applied) {
  const Guard guard(this);
  if (at_once_) return;
  applied_ = std::max(applied_, applied);
  PumpLocked();
}

void ComputeReactor::OnWriteDone(bool ok) {
  const Guard guard(this);
  writing_ = false;
  if (ok && response_is_result_ && !costs_.empty()) {
    const Cost cost = costs_.front();
    ReturnCreditLocked(cost.bytes);
    costs_.pop_front();
    if (!response_is_rejection_) {
      engine_->counters().payload_bytes_out += static_cast<uint64_t>(cost.dx_elsewhere);
    }
  }
  if (ok && response_ready_.has_value()) {
    engine_->counters().answer_seconds.Observe(absl::ToDoubleSeconds(absl::Now() - *response_ready_));
  }
  response_bytes_.Clear();
  if (!ok) {  // the stream is broken; OnCancel follows or has been
    if (!ending_.has_value()) ending_ = grpc::Status(grpc::StatusCode::CANCELLED, "the stream broke");
    ForgetAnswersLocked();
  }
  PumpLocked();
}

void ComputeReactor::WriteLocked(Response response) {
  writing_ = true;
  response_is_result_ = response.is_result;
  response_is_rejection_ = response.is_rejection;
  response_ready_ = response.ready;
  response_bytes_.Swap(&response.bytes);
  StartWrite(&response_bytes_);
}

bool ComputeReactor::SettledLocked() const {
  return !submitting_ && !writing_ && answers_.empty() && costs_.empty() && applied_ >= last_taken_ &&
         applied_written_ == applied_;
}

void ComputeReactor::PumpLocked() {
  if (finished_) return;
  if (!writing_ && attached_) {
    if (!answers_.empty()) {
      WriteLocked(std::move(answers_.front()));
      answers_.pop_front();
    } else if (applied_ > applied_written_) {
      applied_written_ = applied_;
      v1::ComputeResponse mark;
      mark.mutable_applied()->set_applied(applied_);
      WriteLocked({Serialize(mark), false});
    }
  }
  if (half_closed_ && !ending_.has_value()) ending_ = grpc::Status::OK;
  if (ending_.has_value()) {
    if (at_once_ ? !writing_ : SettledLocked()) FinishLocked(*ending_);
    return;
  }
  if (!reading_ && !submitting_ && MayReadLocked()) {
    reading_ = true;
    StartRead(&request_bytes_);
  }
}

bool ComputeReactor::MayReadLocked() {
  if (costs_.empty()) return true;
  if (awaiting_credit_) return false;
  if (outstanding_bytes_ >= engine_->options().lane_credit_bytes || costs_.size() >= kMostChunks) {
    return false;
  }
  awaiting_credit_ = !credit_->MayTake(this, [waiting = weak_from_this()] {
    if (const auto self = waiting.lock()) self->Resume();
  });
  return !awaiting_credit_;
}

void ComputeReactor::ReturnCreditLocked(int64_t bytes) {
  outstanding_bytes_ -= bytes;
  for (auto& waiter : credit_->Return(bytes)) to_be_woken_.push_back(std::move(waiter));
}

void ComputeReactor::Resume() {
  const Guard guard(this);
  awaiting_credit_ = false;
  PumpLocked();
}

// The end

void ComputeReactor::EndLocked(const absl::Status& status, Ending ending) {
  if (finished_) return;
  if (ending == Ending::kAtOnce) ForgetAnswersLocked();
  if (!ending_.has_value()) ending_ = ToGrpc(status, engine_->counters());
  PumpLocked();
}

void ComputeReactor::ForgetAnswersLocked() {
  at_once_ = true;
  answers_.clear();
  costs_.clear();
  if (outstanding_bytes_ > 0) ReturnCreditLocked(outstanding_bytes_);
  applied_written_ = applied_;
}

void ComputeReactor::FinishLocked(const grpc::Status& status) {
  if (finished_) return;
  finished_ = true;
  if (record_ != nullptr) record_->NoteStatus(status);
  Finish(status);
}

void ComputeReactor::Drain() {
  const Guard guard(this);
  EndLocked(engine_->CheckServing(), Ending::kAfterAnswers);
}

void ComputeReactor::Revoke(const grpc::Status& status) {
  const Guard guard(this);
  if (finished_) return;
  ForgetAnswersLocked();
  ending_ = status;
  PumpLocked();
}

void ComputeReactor::CancelIfStuck() {
  const Guard guard(this);
  if (finished_ || !at_once_ || !writing_) return;
  if (stuck_) {
    if (record_ != nullptr) record_->NoteCancelledHere();
    context_->TryCancel();
  }
  stuck_ = true;
}

void ComputeReactor::Cancel() {
  const Guard guard(this);
  if (!done_) context_->TryCancel();
}

void ComputeReactor::OnEnd(absl::Status status) {
  const Guard guard(this);
  EndLocked(status, Ending::kAtOnce);
}

void ComputeReactor::OnCancel() {
  if (record_ != nullptr) record_->NoteCancelled();
  Detach();
  const Guard guard(this);
  if (!ending_.has_value()) ending_ = grpc::Status(grpc::StatusCode::CANCELLED, "cancelled");
  // A write under way completes first, at once and unsuccessfully.
  ForgetAnswersLocked();
  PumpLocked();
}

void ComputeReactor::Detach() {
  {
    const Guard guard(this);
    if (!attached_ || detached_) return;
    detached_ = true;
  }
  head_->DetachLane(attachment_);
}

void ComputeReactor::OnDone() {
  Detach();
  {
    const engine::MutexLock lock(mutex_);
    done_ = true;
    if (credit_ != nullptr) credit_->Forget(this);
  }
  const std::shared_ptr<const void> held = on_done_(this);
  record_.reset();
  self_.reset();  // may destroy this
}

}  // namespace lossd::rpc
