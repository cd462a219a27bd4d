#include "server/rpc/services/loss_service.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proto/wire/row_wire.h"
#include "server/engine/common/errors.h"
#include "server/engine/common/replica_place.h"
#include "server/rpc/calls/call_observer.h"
#include "server/rpc/calls/call_record.h"
#include "server/rpc/calls/methods.h"
#include "server/rpc/convert/convert.h"
#include "server/rpc/convert/grpc_status.h"
#include "server/rpc/convert/slices.h"
#include "server/rpc/convert/wire.h"

namespace lossd::rpc {
namespace {

// A stream that is not taken: it ends at once.
class RefusedStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  RefusedStream(std::unique_ptr<CallRecord> record, const grpc::Status& status) : record_(std::move(record)) {
    if (record_ != nullptr) record_->NoteStatus(status);
    Finish(status);
  }

  void OnCancel() override {
    if (record_ != nullptr) record_->NoteCancelled();
  }
  void OnDone() override { delete this; }  // NOLINT(cppcoreguidelines-owning-memory): gRPC is done with it

 private:
  const std::unique_ptr<CallRecord> record_;
};

// Hears of a client that no longer waits, and holds what the answer refers to until it has been sent.
class LogitsReactor final : public grpc::ServerUnaryReactor {
 public:
  void Hold(std::shared_ptr<const void> room) { room_ = std::move(room); }
  const std::shared_ptr<std::atomic<bool>>& cancelled() const { return cancelled_; }

  void OnCancel() override { *cancelled_ = true; }
  void OnDone() override { delete this; }  // NOLINT(cppcoreguidelines-owning-memory): gRPC is done with it

 private:
  const std::shared_ptr<std::atomic<bool>> cancelled_ = std::make_shared<std::atomic<bool>>(false);
  std::shared_ptr<const void> room_;
};

grpc::ByteBuffer Encode(const v1::LogitsRequest& request, const std::string& incarnation,
                        engine::LogitsAnswer answer) {
  v1::LogitsResponse response;
  response.set_weight_version(answer.weight_version);
  response.set_incarnation(incarnation);
  response.set_restores(answer.restores);
  response.set_rows(request.rows());
  response.set_logits_dtype(request.logits_dtype() == v1::DATA_TYPE_UNSPECIFIED ? v1::DATA_TYPE_FLOAT32
                                                                                : request.logits_dtype());
  response.set_log_sum_exp(std::move(answer.log_sum_exp));
  response.set_top_tokens(std::move(answer.top_tokens));
  response.set_top_logits(std::move(answer.top_logits));
  return wire::Encode(response, SliceOf(std::move(answer.logits)));
}

// Whether a stream that was begun with this token may go on.
grpc::Status CheckToken(const AccessControl* access, const std::optional<TokenHash>& token) {
  if (access == nullptr || !token.has_value()) return grpc::Status::OK;
  return access->Check(*token, MethodOfPath(kComputePath));
}

}  // namespace

LossService::LossService(engine::Engine* engine, std::shared_ptr<const AccessControl> access,
                         CallReports* reports)
    : engine_(engine),
      access_(std::move(access)),
      reports_(reports),
      writers_(std::clamp(static_cast<int>(std::thread::hardware_concurrency()) / 2, 1, 8)) {
  TakeKnownRequestsOnly(&engine->counters(), &LossService::OpenSession, &LossService::CloseSession);
}

grpc::ServerUnaryReactor* LossService::OpenSession(grpc::CallbackServerContext* context,
                                                   const v1::OpenSessionRequest* request,
                                                   v1::OpenSessionResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  if (placer_ != nullptr && !request->at_this_replica()) {
    // A client of this server's own reaches what is here as it has reached this.
    const bool own_client = PeerOf(*context) == context->peer();
    placer_->OpenSession(*context, *request,
                         [this, reactor, response, own_client, peer = context->peer()](
                             const grpc::Status& status, v1::OpenSessionResponse opened) {
                           *response = std::move(opened);
                           const bool here = response->replica() == placer_->replica();
                           if (own_client && here) SetAddresses(LaneAddresses(lanes_, peer), response);
                           reactor->Finish(status);
                         });
    return reactor;
  }
  const std::string trace_id = TraceIdOf(context->client_metadata());
  const auto open = [this, reactor, request, response, trace_id, peer = context->peer()] {
    const absl::Status opened = Open(*request, trace_id, response);
    SetAddresses(LaneAddresses(lanes_, peer), response);
    reactor->Finish(ToGrpc(opened, engine_->counters()));
  };
  if (request->deterministic()) {
    memory_.Run(open);
  } else {
    open();
  }
  return reactor;
}

absl::Status LossService::OpenFor(const std::string& address, const v1::OpenSessionRequest& request,
                                  v1::OpenSessionResponse* response) {
  absl::Status opened = Open(request, "", response);
  SetAddresses(LaneAddressesFromElsewhere(lanes_, address), response);
  return opened;
}

void LossService::SetAddresses(const std::vector<std::string>& addresses,
                               v1::OpenSessionResponse* response) const {
  response->mutable_lane_addresses()->Assign(addresses.begin(), addresses.end());
}

absl::Status LossService::Open(const v1::OpenSessionRequest& request, const std::string& trace_id,
                               v1::OpenSessionResponse* response) {
  const auto deterministic =
      request.deterministic() ? engine::Deterministic::kYes : engine::Deterministic::kNo;
  const absl::StatusOr<engine::OpenedSession> opened =
      engine_->OpenSession(request.head(), {.client_key = request.client_key(),
                                            .rank = request.rank(),
                                            .lanes = request.lanes() == 0 ? 1 : request.lanes(),
                                            .deterministic = deterministic,
                                            .held_hidden_bytes = request.held_hidden_bytes()});
  if (!opened.ok()) return opened.status();
  const engine::EngineOptions& options = engine_->options();
  const engine::HeadConfig& config = opened->head->config();
  LogEvent("a session was opened", trace_id,
           {{"head", config.name}, {"rank", request.rank()}, {"lanes", request.lanes()}});
  response->set_session_id(opened->info.session_id);
  response->set_incarnation(engine_->incarnation());
  response->set_generation(opened->info.generation);
  v1::SessionLimits* limits = response->mutable_limits();
  limits->set_max_chunk_bytes(options.chunk_limits.max_chunk_bytes);
  limits->set_max_chunk_tokens(options.chunk_limits.max_chunk_tokens);
  limits->set_byte_credit(options.lane_credit_bytes);
  limits->set_preferred_chunk_bytes(
      std::min(engine_->device().PreferredChunkBytes(), options.chunk_limits.max_chunk_bytes));
  limits->set_lease_seconds(absl::ToDoubleSeconds(options.session_lease));
  for (const engine::LaneMarks& marks : opened->info.lanes) ToProto(marks, response->add_lanes());
  response->set_vocab_size(config.vocab_size);
  response->set_hidden_size(config.hidden_size);
  response->set_weight_dtype(ToProto(config.weight_type));
  response->set_is_new(opened->is_new);
  response->set_in_window(opened->info.in_window);
  response->set_has_class_weights(config.class_weights != nullptr);
  response->set_frozen(config.weight_gradients == engine::WeightGradients::kFrozen);
  response->set_has_bias(config.bias);
  response->set_held_hidden_bytes(opened->held_hidden_bytes);
  response->set_restores(opened->info.restores);
  if (opened->info.restored_from.has_value()) response->set_restored_from(*opened->info.restored_from);
  if (placer_ != nullptr) {
    response->set_replica(placer_->replica());
    response->set_history(placer_->history());
  }
  return absl::OkStatus();
}

absl::Status LossService::Close(const v1::CloseSessionRequest& request) {
  return engine_->CloseSession(request.session_id());
}

grpc::ServerUnaryReactor* LossService::CloseSession(grpc::CallbackServerContext* context,
                                                    const v1::CloseSessionRequest* request,
                                                    v1::CloseSessionResponse* /*response*/) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  if (placer_ != nullptr) {
    placer_->CloseSession(*context, *request,
                          [reactor](const grpc::Status& status) { reactor->Finish(status); });
    return reactor;
  }
  const absl::Status status = Close(*request);
  if (status.ok()) LogEvent("a session was closed", TraceIdOf(context->client_metadata()), {});
  reactor->Finish(ToGrpc(status, engine_->counters()));
  return reactor;
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* LossService::Compute(
    grpc::CallbackServerContext* context) {
  auto record = CallRecord::Begin(reports_, kComputePath, *context);
  if (const absl::Status status = engine_->CheckStreams("start"); !status.ok()) {
    return new RefusedStream(std::move(record), ToGrpc(status, engine_->counters()));
  }
  const std::optional<TokenHash> token =
      access_ == nullptr ? std::nullopt : AccessControl::TokenOf(context->client_metadata());
  return Begin(context, std::move(record), std::make_unique<ComputeRequests>(), {.token = token}, [] {});
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* LossService::ServeRelayed(
    grpc::CallbackServerContext* context, std::unique_ptr<ComputeRequests> requests,
    std::function<void()> on_done) {
  if (const absl::Status status = engine_->CheckStreams("start"); !status.ok()) {
    on_done();
    return new RefusedStream(nullptr, ToGrpc(status, engine_->counters()));
  }
  return Begin(context, nullptr, std::move(requests), {.relayed = true}, std::move(on_done));
}

ComputeReactor* LossService::Begin(grpc::CallbackServerContext* context, std::unique_ptr<CallRecord> record,
                                   std::unique_ptr<ComputeRequests> requests, Stream stream,
                                   std::function<void()> on_done) {
  // Held here until it is registered: a stream may be over before Start returns.
  const std::shared_ptr<ComputeReactor> reactor = std::make_shared<ComputeReactor>(
      engine_, &writers_, reports_, context, std::move(record), std::move(requests),
      [this, relayed = stream.relayed,
       on_done = std::move(on_done)](ComputeReactor* done) -> std::shared_ptr<const void> {
        on_done();
        Forget(done);
        if (!relayed) return nullptr;
        return {nullptr, [this](const void*) { NoteRelayedGone(); }};
      });
  const std::optional<TokenHash> token = stream.token;
  {
    const engine::MutexLock lock(mutex_);
    stream.reactor = reactor;
    if (stream.relayed) ++relayed_;
    streams_.emplace(reactor.get(), std::move(stream));
  }
  reactor->Start();
  // Tokens may have changed before it was among the streams.
  if (const grpc::Status status = CheckToken(access_.get(), token); !status.ok()) reactor->Revoke(status);
  return reactor.get();
}

grpc::ServerUnaryReactor* LossService::Logits(grpc::CallbackServerContext* /*context*/,
                                              const grpc::ByteBuffer* request, grpc::ByteBuffer* response) {
  auto* reactor = new LogitsReactor;  // deletes itself when gRPC is done with it
  const auto fail = [this, reactor](absl::Status status) {
    if (engine::ReasonOf(status) == engine::RejectReason::kOverload) {
      status = engine_->Overload(engine::FieldOf(status), status.message());
    }
    reactor->Finish(ToGrpc(status, engine_->counters()));
    return reactor;
  };
  const auto message = std::make_shared<v1::LogitsRequest>();
  grpc::ByteBuffer bytes = *request;
  if (absl::Status status = Parse(&bytes, message.get()); !status.ok()) return fail(std::move(status));
  const absl::StatusOr<std::shared_ptr<engine::Head>> head = engine_->FindHead(message->head());
  if (!head.ok()) return fail(head.status());
  absl::StatusOr<engine::LogitsRequest> wanted = ToEngine(message.get());
  if (!wanted.ok()) return fail(wanted.status());
  wanted->cancelled = [cancelled = reactor->cancelled()] { return cancelled->load(); };
  (*head)->Logits(*std::move(wanted),
                  [this, reactor, response, message, fail](absl::StatusOr<engine::LogitsAnswer> answer) {
                    if (!answer.ok()) {
                      fail(answer.status());
                      return;
                    }
                    reactor->Hold(answer->room);
                    *response = Encode(*message, engine_->incarnation(), *std::move(answer));
                    reactor->Finish(grpc::Status::OK);
                  });
  return reactor;
}

std::vector<std::shared_ptr<ComputeReactor>> LossService::Live() {
  std::vector<std::shared_ptr<ComputeReactor>> live;
  const engine::MutexLock lock(mutex_);
  for (const auto& [key, stream] : streams_) {
    if (std::shared_ptr<ComputeReactor> reactor = stream.reactor.lock()) live.push_back(std::move(reactor));
  }
  return live;
}

void LossService::Drain() {
  for (const std::shared_ptr<ComputeReactor>& reactor : Live()) reactor->Drain();
}

void LossService::EndRevokedStreams() {
  // Not under the lock: a stream that ends takes it.
  std::vector<std::pair<std::shared_ptr<ComputeReactor>, grpc::Status>> revoked;
  {
    const engine::MutexLock lock(mutex_);
    for (const auto& [key, stream] : streams_) {
      const grpc::Status status = CheckToken(access_.get(), stream.token);
      if (status.ok()) continue;
      if (std::shared_ptr<ComputeReactor> reactor = stream.reactor.lock()) {
        revoked.emplace_back(std::move(reactor), status);
      }
    }
  }
  for (const auto& [reactor, status] : revoked) reactor->Revoke(status);
}

void LossService::CancelStuckStreams() {
  for (const std::shared_ptr<ComputeReactor>& reactor : Live()) reactor->CancelIfStuck();
}

void LossService::Forget(ComputeReactor* reactor) {
  const engine::MutexLock lock(mutex_);
  streams_.erase(reactor);
}

void LossService::NoteRelayedGone() {
  const engine::MutexLock lock(mutex_);
  if (--relayed_ == 0) relayed_gone_.NotifyAll();
}

void LossService::AwaitRelayed(absl::Time deadline) {
  {
    const engine::MutexLock lock(mutex_);
    const auto until = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(deadline - absl::Now());
    while (relayed_ > 0 && relayed_gone_.WaitUntil(mutex_, until) == std::cv_status::no_timeout) {
    }
    if (relayed_ == 0) return;
  }
  for (const std::shared_ptr<ComputeReactor>& reactor : Live()) reactor->Cancel();
  const engine::MutexLock lock(mutex_);
  while (relayed_ > 0) relayed_gone_.Wait(mutex_);
}

}  // namespace lossd::rpc
