#include "server/rpc/lanes/lane_relay.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/chunk/chunk.h"
#include "server/engine/common/errors.h"
#include "server/rpc/convert/convert.h"
#include "server/rpc/convert/grpc_status.h"
#include "server/rpc/convert/slices.h"
#include "server/rpc/convert/wire.h"

namespace lossd::rpc {
namespace {

// As ComputeReactor's.
constexpr size_t kMostChunks = 1024;
// Answers that wait here for a client that reads slowly; further ones wait at the leader.
constexpr size_t kMostAnswers = 16;
// Calls of CancelIfStuck in which nothing goes out to a client whose stream is over at once.
constexpr int kLastMessage = 2;

// What the leader says in its log of the stream.
std::multimap<std::string, std::string> TraceOf(const grpc::CallbackServerContext& context) {
  std::multimap<std::string, std::string> trace;
  for (const char* name : {"traceparent", "tracestate"}) {
    const auto [begin, end] = context.client_metadata().equal_range(name);
    for (auto one = begin; one != end; ++one) {
      trace.emplace(name, std::string(one->second.data(), one->second.size()));
    }
  }
  return trace;
}

absl::Status Malformed(const char* message) {
  return engine::MakeError(absl::StatusCode::kInvalidArgument, engine::RejectReason::kMalformed, "message",
                           message);
}

// The field of a chunk that names a region; null: none does.
const char* RegionIn(const v1::Chunk& chunk) {
  if (chunk.has_hidden_states_region()) return "hidden_states_region";
  if (chunk.has_dx_region()) return "dx_region";
  if (chunk.options().distillation().has_hidden_states_region()) {
    return "options.distillation.hidden_states_region";
  }
  return nullptr;
}

// By what the tensor itself says: the head is the leader's to look at.
int64_t HiddenSizeOf(const engine::Chunk& chunk) {
  return chunk.hidden_states.size() / chunk.tokens / kernels::SizeOf(chunk.hidden_type);
}

int64_t CostOf(const engine::Chunk& chunk, const engine::ChunkLimits& limits) {
  const bool sane = chunk.decode_status.ok() && chunk.tokens > 0 && chunk.tokens <= limits.max_chunk_tokens;
  return chunk.kept_bytes() + (sane ? engine::AnswerBytes(chunk, HiddenSizeOf(chunk)) : 0);
}

engine::HeldTensors TensorsOf(const engine::Chunk& chunk) {
  engine::HeldTensors held{.hidden_bytes = chunk.hidden_states.size(),
                           .teacher_bytes = chunk.teacher_hidden.size()};
  if (!chunk.decode_status.ok()) return held;
  held.non_finite = engine::CountNonFinite(chunk.hidden_states, chunk.hidden_type, chunk.tokens, chunk.labels,
                                           chunk.ignore_index);
  if (chunk.options.distillation.has_value()) {
    held.teacher_non_finite =
        engine::CountNonFinite(chunk.teacher_hidden, chunk.options.distillation->hidden_type, chunk.tokens,
                               chunk.labels, chunk.ignore_index);
  }
  return held;
}

}  // namespace

LaneRelay::LaneRelay(const Rank* rank, uint64_t id, grpc::CallbackServerContext* context,
                     std::unique_ptr<CallRecord> record, DoneCallback on_done)
    : rank_(rank), id_(id), context_(context), on_done_(std::move(on_done)), record_(std::move(record)) {}

void LaneRelay::Start() {
  self_ = shared_from_this();
  const engine::MutexLock lock(mutex_);
  reading_ = true;
  StartRead(&request_bytes_);
}

// From the client to the leader

void LaneRelay::OnReadDone(bool ok) {
  {
    const engine::MutexLock lock(mutex_);
    reading_ = false;
    if (!ok) half_closed_ = true;
    if (!ok || ending_.has_value() || at_once_) {
      PumpLocked();
      return;
    }
    handling_ = true;  // no further read, and no end in order, until this message is dealt with
  }
  const absl::Status taken = Take(&request_bytes_);
  const engine::MutexLock lock(mutex_);
  handling_ = false;
  if (!taken.ok() && !ending_.has_value()) ending_ = ToGrpc(taken, *rank_->counters);
  PumpLocked();
}

absl::Status LaneRelay::Take(grpc::ByteBuffer* bytes) {
  wire::ReceivedRequest request;
  if (absl::Status parsed = Parse(bytes, &request); !parsed.ok()) return parsed;
  if (upstream_ == nullptr) {
    if (request.message.has_chunk()) return Malformed("the first message must be start, not chunk");
    if (!request.message.has_start()) return Malformed("the message holds neither start nor chunk");
  }
  if (!request.message.has_chunk()) {
    PassOn(request.message, {}, {});
    return absl::OkStatus();
  }
  if (const char* field = RegionIn(request.message.chunk()); field != nullptr) {
    return engine::MakeError(
        absl::StatusCode::kFailedPrecondition, engine::RejectReason::kRegion, field,
        absl::StrCat(field, " is set, and regions are shared with the leader alone: open this lane at ",
                     rank_->leader_place));
  }
  PassOnChunk(std::move(request));
  return absl::OkStatus();
}

void LaneRelay::PassOnChunk(wire::ReceivedRequest request) {
  v1::ComputeRequest header = request.message;
  engine::Chunk chunk = ToEngine(std::move(request));
  header.mutable_chunk()->set_labels(chunk.labels);
  engine::HeldTensors held = TensorsOf(chunk);
  Sent sent{.sequence = header.chunk().sequence(),
            .cost = CostOf(chunk, rank_->limits),
            .payload = std::make_shared<engine::RankPayload>(rank_->stage(std::move(chunk.hidden_states)),
                                                             rank_->stage(std::move(chunk.teacher_hidden)))};
  sent.number = rank_->payloads->Add(sent.payload);
  held.number = sent.number;
  PassOn(header, held, std::move(sent));
}

void LaneRelay::PassOn(const v1::ComputeRequest& request, const engine::HeldTensors& held, Sent sent) {
  const bool first = upstream_ == nullptr;
  std::optional<RelayId> hello;
  if (first) {
    hello = {
        .epoch = rank_->leader.epoch, .rank = rank_->leader.rank, .relay = id_, .peer = context_->peer()};
  }
  grpc::ByteBuffer message = WriteRelayed(hello, request, held);
  const engine::MutexLock lock(mutex_);
  if (first && !at_once_) {
    upstream_ = std::make_unique<Upstream>(this, rank_->leader, TraceOf(*context_));
    leader_ = Leader::kCalled;
    ++calls_;
  }
  if (at_once_ || leader_ != Leader::kCalled) {
    if (sent.number > 0) rank_->payloads->Release(sent.number);  // nobody will hear of it
    return;
  }
  if (sent.number > 0) {
    has_sent_ = true;
    AddUnderWayLocked(sent.cost);
    sent_.push_back(std::move(sent));
  }
  leader_writing_ = true;
  upstream_->Write(&message);
  if (first) upstream_->Start();
}

void LaneRelay::OnLeaderWritten(bool ok) {
  const engine::MutexLock lock(mutex_);
  leader_writing_ = false;
  if (!ok) leader_closed_ = true;  // its read says why
  PumpLocked();
}

// From the leader to the client

void LaneRelay::OnLeaderRead(bool ok) {
  if (!ok) {
    {
      const engine::MutexLock lock(mutex_);
      leader_reading_ = false;
      leader_ = Leader::kReadToTheEnd;
    }
    upstream_->LetGo();
    return;
  }
  grpc::ByteBuffer incoming;
  incoming.Swap(&upstream_->incoming());
  Answer answer = Complete(incoming);
  const engine::MutexLock lock(mutex_);
  leader_reading_ = false;
  ready_ = true;
  if (!at_once_) answers_.push_back(std::move(answer));
  PumpLocked();
}

LaneRelay::Answer LaneRelay::Complete(const grpc::ByteBuffer& bytes) {
  grpc::ByteBuffer looked_at = bytes;
  wire::ReceivedResponse response;
  if (!wire::Decode(&looked_at, &response) || !response.message.has_result()) return {bytes, 0};
  const v1::ChunkResult& result = response.message.result();
  Sent sent;
  {
    const engine::MutexLock lock(mutex_);
    // The first one: answers come in the order of their chunks.
    const auto its = std::find_if(sent_.begin(), sent_.end(),
                                  [&result](const Sent& each) { return each.sequence == result.sequence(); });
    if (its == sent_.end()) return {bytes, 0};
    sent = std::move(*its);
    sent_.erase(its);
  }
  if (sent.payload == nullptr || result.disposition() == v1::DISPOSITION_REJECTED) {
    return {bytes, sent.cost};
  }
  engine::ResultBytes dx = sent.payload->dx();
  if (dx.size() == 0) return {bytes, sent.cost};
  std::string losses(static_cast<size_t>(response.small.bytes), '\0');
  response.small.CopyTo(std::as_writable_bytes(std::span(losses)));
  rank_->counters->payload_bytes_out += static_cast<uint64_t>(dx.size());
  return {wire::Encode(result, std::as_bytes(std::span(losses)), SliceOf(std::move(dx))), sent.cost};
}

void LaneRelay::OnWriteDone(bool ok) {
  const engine::MutexLock lock(mutex_);
  writing_ = false;
  stuck_ = 0;
  response_.bytes.Clear();
  AddUnderWayLocked(-response_.cost);
  if (!ok) EndAtOnceLocked();  // the client's call is broken; OnCancel follows or has been
  PumpLocked();
}

// Both

void LaneRelay::PumpLocked() {
  PumpLeaderLocked();
  PumpClientLocked();
}

void LaneRelay::PumpLeaderLocked() {
  if (leader_ != Leader::kCalled) return;
  if (!leader_reading_ && (at_once_ || answers_.size() < kMostAnswers)) {
    leader_reading_ = true;
    upstream_->Read();
  }
  const bool no_more = half_closed_ || ending_.has_value();
  if (no_more && !handling_ && !leader_writing_ && !leader_closed_) {
    leader_closed_ = true;
    upstream_->CloseWriting();
  }
}

void LaneRelay::PumpClientLocked() {
  if (finished_) return;
  if (!writing_ && !answers_.empty()) {
    response_ = std::move(answers_.front());
    answers_.pop_front();
    writing_ = true;
    StartWrite(&response_.bytes);
  }
  const bool leader_is_over = leader_ == Leader::kDone;
  const bool never_began =
      leader_ == Leader::kNotCalled && !handling_ && (half_closed_ || at_once_ || ending_.has_value());
  if (!writing_ && answers_.empty() && (leader_is_over || never_began)) {
    finished_ = true;
    const grpc::Status status = StatusLocked();
    if (record_ != nullptr) record_->NoteStatus(status);
    Finish(status);
    return;
  }
  if (!reading_ && !handling_ && MayReadLocked()) {
    reading_ = true;
    StartRead(&request_bytes_);
  }
}

bool LaneRelay::MayReadLocked() const {
  if (half_closed_ || at_once_ || ending_.has_value()) return false;
  // Before the leader has answered nothing is known of it, and what came now might be lost on the way.
  if (leader_ != Leader::kCalled || !ready_ || leader_writing_ || leader_closed_) return false;
  if (sent_.empty() && under_way_bytes_ == 0) return true;
  // Its own answers have it look again.
  if (*rank_->under_way >= rank_->staging_bytes) return false;
  return under_way_bytes_ < rank_->lane_credit_bytes && sent_.size() < kMostChunks;
}

void LaneRelay::AddUnderWayLocked(int64_t bytes) {
  under_way_bytes_ += bytes;
  *rank_->under_way += bytes;
}

// The end

grpc::Status LaneRelay::StatusLocked() const {
  const bool leader_agrees = leader_ == Leader::kNotCalled || leader_status_.ok();
  if (ending_.has_value() && (at_once_ || leader_agrees)) return *ending_;
  if (leader_ == Leader::kNotCalled) return at_once_ ? grpc::Status::CANCELLED : grpc::Status::OK;
  if (leader_status_.error_code() == grpc::StatusCode::CANCELLED && !at_once_) {
    return {grpc::StatusCode::UNAVAILABLE, "the leader of the group ended the stream; open it again"};
  }
  return leader_status_;
}

void LaneRelay::EndAtOnceLocked() {
  if (at_once_) return;
  at_once_ = true;
  for (const Answer& answer : answers_) AddUnderWayLocked(-answer.cost);
  answers_.clear();
  for (Sent& sent : sent_) sent.payload.reset();
  if (leader_ == Leader::kCalled || leader_ == Leader::kReadToTheEnd) upstream_->Cancel();
}

void LaneRelay::Revoke(const grpc::Status& status) {
  const engine::MutexLock lock(mutex_);
  if (finished_) return;
  ending_ = status;
  EndAtOnceLocked();
  PumpLocked();
}

void LaneRelay::CancelIfStuck() {
  const engine::MutexLock lock(mutex_);
  if (finished_ || !writing_ || (!at_once_ && leader_ != Leader::kDone)) {
    stuck_ = 0;
    return;
  }
  if (++stuck_ < (at_once_ ? kLastMessage : kFarewell)) return;
  if (record_ != nullptr) record_->NoteCancelledHere();
  context_->TryCancel();
}

void LaneRelay::Cancel() {
  const engine::MutexLock lock(mutex_);
  EndAtOnceLocked();
  if (!client_done_) context_->TryCancel();
  settle_context_.TryCancel();
  PumpLocked();
}

void LaneRelay::OnCancel() {
  if (record_ != nullptr) record_->NoteCancelled();
  const engine::MutexLock lock(mutex_);
  EndAtOnceLocked();
  PumpLocked();
}

void LaneRelay::OnDone() {
  {
    const engine::MutexLock lock(mutex_);
    client_done_ = true;
    record_.reset();
  }
  EndHalf();
}

void LaneRelay::OnLeaderDone(const grpc::Status& status) {
  bool settles = false;
  {
    const engine::MutexLock lock(mutex_);
    leader_ = Leader::kDone;
    leader_status_ = status;
    settles = has_sent_;
    PumpLocked();
  }
  if (settles) {
    Settle();
  } else {
    EndHalf();
  }
}

void LaneRelay::Settle() {
  using Stub = grpc::TemplatedGenericStub<group::v1::SettleRequest, group::v1::SettleResponse>;
  stub_ = std::make_unique<Stub>(rank_->leader.channel);
  rank_->leader.identify(&settle_context_);
  settle_context_.set_wait_for_ready(true);  // for as long as there is a group
  settle_request_.mutable_relay()->set_epoch(rank_->leader.epoch);
  settle_request_.mutable_relay()->set_rank(rank_->leader.rank);
  settle_request_.mutable_relay()->set_relay(id_);
  // One message each way, which on the wire is no different from streams of one.
  stub_->UnaryCall(&settle_context_, "/lossd.group.v1.RelayService/Settle", {}, &settle_request_,
                   &settle_response_, [this](const grpc::Status& status) {
                     if (status.ok()) Release(settle_response_.last_payload());
                     EndHalf();
                   });
}

void LaneRelay::Release(uint64_t last_known) {
  const engine::MutexLock lock(mutex_);
  for (const Sent& sent : sent_) {
    if (sent.number > last_known) rank_->payloads->Release(sent.number);
  }
}

void LaneRelay::EndHalf() {
  std::shared_ptr<LaneRelay> self;
  {
    const engine::MutexLock lock(mutex_);
    if (--calls_ > 0) return;
    sent_.clear();  // what it has of the device's memory
    AddUnderWayLocked(-under_way_bytes_);
    self = std::move(self_);
  }
  on_done_(this);
}

}  // namespace lossd::rpc
