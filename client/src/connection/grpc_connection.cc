#include "client/src/connection/grpc_connection.h"

#include <grpc/support/time.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/connection/backoff.h"
#include "client/src/connection/call_metadata.h"
#include "client/src/connection/grpc_compute_stream.h"
#include "client/src/connection/grpc_status.h"
#include "client/src/connection/message_stream.h"
#include "client/src/connection/server_features.h"
#include "client/src/connection/tls.h"
#include "client/src/connection/traffic_counter.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/channel_arguments.h"
#include "lossd/v1/gradient.grpc.pb.h"
#include "lossd/v1/head.grpc.pb.h"
#include "lossd/v1/loss.grpc.pb.h"
#include "lossd/v1/region.grpc.pb.h"
#include "lossd/v1/status.grpc.pb.h"
#include "proto/wire/row_wire.h"

namespace lossd::internal {
namespace {

// The server chooses the size of the pieces it streams; this is far above any sensible choice.
constexpr int64_t kReceiveBytes = int64_t{64} << 20;
constexpr int kKeepaliveMs = 30000;
constexpr int kKeepaliveTimeoutMs = 20000;
constexpr int kReconnectMs = 100;
constexpr int kLongestReconnectMs = 2000;
constexpr int kConnectTimeoutMs = 5000;
constexpr std::chrono::milliseconds kDiskTimeout = std::chrono::minutes(10);

// A server that closes the first connections may be one that is about to serve: so long it is given.
constexpr std::chrono::milliseconds kProbableFailurePatience(3000);

grpc::ChannelArguments Arguments(const ClientOptions& options, int64_t receive_bytes) {
  grpc::ChannelArguments arguments;
  AddTlsArguments(options, &arguments);
  // A proxy of the environment would be a way beyond this machine.
  if (!options.token_file.empty() && !options.tls.has_value()) {
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  }
  arguments.SetMaxReceiveMessageSize(
      static_cast<int>(std::min<int64_t>(receive_bytes, std::numeric_limits<int>::max())));
  arguments.SetMaxSendMessageSize(-1);  // the server's limits are checked against before a message is made
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kReconnectMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kLongestReconnectMs);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS,
                   kConnectTimeoutMs);  // in fact the time a connect may take
  return arguments;
}

// A repeated call that finds its work already done by an attempt whose answer was lost.
enum class RepeatedNotFound { kIsError, kIsDone };

// kNo: of a call that would do its work once more.
enum class Repeat { kYes, kNo };

class GrpcConnection final : public Connection {
 public:
  GrpcConnection(std::string target, ClientOptions options,
                 std::shared_ptr<grpc::ChannelCredentials> credentials,
                 std::shared_ptr<CallMetadata> metadata)
      : target_(std::move(target)),
        options_(std::move(options)),
        credentials_(std::move(credentials)),
        metadata_(std::move(metadata)),
        features_(target_),
        channel_(grpc::CreateCustomChannel(target_, credentials_, Arguments(options_, kReceiveBytes))),
        head_(v1::HeadService::NewStub(channel_)),
        loss_(v1::LossService::NewStub(channel_)),
        gradient_(v1::GradientService::NewStub(channel_)),
        region_(v1::RegionService::NewStub(channel_)),
        status_(v1::StatusService::NewStub(channel_)) {}

  const ClientOptions& options() const override { return options_; }
  Traffic traffic() const override { return traffic_->Total(); }
  absl::Status CheckSupported(const google::protobuf::Message& request) const override {
    return features_.Check(request);
  }

  absl::StatusOr<v1::Head> CreateHead(const v1::CreateHeadRequest& request) override {
    return Call(*head_, &v1::HeadService::Stub::CreateHead, request);
  }
  absl::StatusOr<v1::DeleteHeadResponse> DeleteHead(const v1::DeleteHeadRequest& request) override {
    return Call(*head_, &v1::HeadService::Stub::DeleteHead, request, RepeatedNotFound::kIsDone);
  }
  absl::StatusOr<v1::ListHeadsResponse> ListHeads(const v1::ListHeadsRequest& request) override {
    return Call(*head_, &v1::HeadService::Stub::ListHeads, request);
  }
  absl::StatusOr<v1::Head> GetHead(const v1::GetHeadRequest& request) override {
    return Call(*head_, &v1::HeadService::Stub::GetHead, request);
  }
  absl::StatusOr<v1::BeginWriteResponse> BeginWrite(const v1::BeginWriteRequest& request) override {
    return Call(*head_, &v1::HeadService::Stub::BeginWrite, request);
  }
  absl::StatusOr<v1::CommitWriteResponse> CommitWrite(const v1::CommitWriteRequest& request) override {
    return Call(*head_, &v1::HeadService::Stub::CommitWrite, request);
  }
  absl::StatusOr<v1::LoadWeightsResponse> LoadWeights(const v1::LoadWeightsRequest& request) override {
    return Call(*head_, &v1::HeadService::Stub::LoadWeights, request,
                CallOptions{RepeatedNotFound::kIsError, WhenFull::kReturn, std::nullopt, Repeat::kNo});
  }
  absl::StatusOr<v1::OpenSessionResponse> OpenSession(const v1::OpenSessionRequest& request,
                                                      WhenFull when_full) override {
    return Call(*loss_, &v1::LossService::Stub::OpenSession, request, RepeatedNotFound::kIsError, when_full);
  }
  absl::StatusOr<v1::CloseSessionResponse> CloseSession(const v1::CloseSessionRequest& request) override {
    return Call(*loss_, &v1::LossService::Stub::CloseSession, request, RepeatedNotFound::kIsDone);
  }
  absl::StatusOr<v1::LogitsResponse> Logits(const v1::LogitsRequest& request) override {
    return Call(*loss_, &v1::LossService::Stub::Logits, request);
  }
  absl::StatusOr<v1::BeginFlushResponse> BeginFlush(const v1::BeginFlushRequest& request) override {
    return Call(*gradient_, &v1::GradientService::Stub::BeginFlush, request);
  }
  absl::StatusOr<v1::CommitFlushResponse> CommitFlush(const v1::CommitFlushRequest& request) override {
    return Call(*gradient_, &v1::GradientService::Stub::CommitFlush, request);
  }
  absl::StatusOr<v1::AbortFlushResponse> AbortFlush(const v1::AbortFlushRequest& request) override {
    return Call(*gradient_, &v1::GradientService::Stub::AbortFlush, request);
  }
  absl::StatusOr<v1::SaveCheckpointResponse> SaveCheckpoint(
      const v1::SaveCheckpointRequest& request) override {
    return Call(*head_, &v1::HeadService::Stub::SaveCheckpoint, request, Patient());
  }
  absl::StatusOr<v1::RestoreCheckpointResponse> RestoreCheckpoint(
      const v1::RestoreCheckpointRequest& request) override {
    return Call(*head_, &v1::HeadService::Stub::RestoreCheckpoint, request, Patient());
  }
  absl::StatusOr<v1::ListCheckpointsResponse> ListCheckpoints(
      const v1::ListCheckpointsRequest& request) override {
    return Call(*head_, &v1::HeadService::Stub::ListCheckpoints, request, Patient());
  }
  absl::StatusOr<v1::DeleteCheckpointResponse> DeleteCheckpoint(
      const v1::DeleteCheckpointRequest& request) override {
    CallOptions options = Patient();
    options.repeated_not_found = RepeatedNotFound::kIsDone;
    return Call(*head_, &v1::HeadService::Stub::DeleteCheckpoint, request, options);
  }
  absl::StatusOr<v1::DrainResponse> Drain(const v1::DrainRequest& request) override {
    if (absl::Status supported = features_.Check(request); !supported.ok()) return supported;
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + options_.call_timeout);
    metadata_->AddTo(&context);
    v1::DrainResponse response;
    const grpc::Status status = status_->Drain(&context, request, &response);
    if (!status.ok()) return FromGrpcStatus(status);
    return response;
  }
  absl::StatusOr<v1::GradientStatsResponse> GradientStats(const v1::GradientStatsRequest& request) override {
    return Call(*gradient_, &v1::GradientService::Stub::GradientStats, request);
  }
  absl::StatusOr<v1::ApplyStepResponse> ApplyStep(const v1::ApplyStepRequest& request) override {
    return Call(*gradient_, &v1::GradientService::Stub::ApplyStep, request);
  }
  absl::StatusOr<v1::CreateRegionResponse> CreateRegion(const v1::CreateRegionRequest& request) override {
    return Call(*region_, &v1::RegionService::Stub::CreateRegion, request);
  }
  absl::StatusOr<v1::DeleteRegionResponse> DeleteRegion(const v1::DeleteRegionRequest& request) override {
    return Call(*region_, &v1::RegionService::Stub::DeleteRegion, request, RepeatedNotFound::kIsDone);
  }
  absl::StatusOr<v1::GetStatusResponse> GetStatus(const v1::GetStatusRequest& request) override {
    auto status = Call(*status_, &v1::StatusService::Stub::GetStatus, request);
    if (status.ok()) features_.Note(*status);
    return status;
  }
  absl::StatusOr<v1::GetMemoryResponse> GetMemory(const v1::GetMemoryRequest& request) override {
    return Call(*status_, &v1::StatusService::Stub::GetMemory, request);
  }

  absl::Status ReadGradient(const v1::ReadGradientRequest& request, const RowSink& sink) override {
    return ReadRows<v1::ReadGradientResponse>("/lossd.v1.GradientService/ReadGradient", request, sink,
                                              [](v1::ReadGradientResponse& response, RowPiece* piece) {
                                                piece->bias = std::move(*response.mutable_bias_gradient());
                                              });
  }

  absl::Status ReadWeights(const v1::ReadWeightsRequest& request, const RowSink& sink) override {
    return ReadRows<v1::ReadWeightsResponse>("/lossd.v1.HeadService/ReadWeights", request, sink,
                                             [](v1::ReadWeightsResponse& response, RowPiece* piece) {
                                               piece->weight_version = response.weight_version();
                                               piece->bias = std::move(*response.mutable_bias());
                                             });
  }

  absl::StatusOr<int64_t> WriteWeights(const WeightSource& source) override {
    grpc::ClientContext context;
    const uint64_t added = metadata_->AddTo(&context);
    v1::WriteWeightsResponse response;
    auto writer = head_->WriteWeights(&context, &response);
    v1::WriteWeightsRequest request;
    absl::Status supported;
    while (source(&request)) {
      supported = features_.Check(request);
      if (!supported.ok() || !writer->Write(request)) break;
      traffic_->NoteSent(request.ByteSizeLong());
    }
    if (!supported.ok()) context.TryCancel();
    writer->WritesDone();
    const grpc::Status status = writer->Finish();
    traffic_->NoteReceived(response.ByteSizeLong());
    if (!supported.ok()) return supported;
    if (!status.ok()) return metadata_->Judge(FromGrpcStatus(status), added);
    return response.rows_received();
  }

  std::unique_ptr<ComputeStream> Compute(const v1::SessionLimits& limits) override {
    // dX may be twice as wide as the hidden states were.
    grpc::ChannelArguments arguments =
        Arguments(options_, kReceiveBytes + 2 * std::min(limits.max_chunk_bytes(), kReceiveBytes * 16));
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL,
                     1);                           // otherwise all streams share one TCP connection
    arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);  // the session resends, with its eyes open
    return std::make_unique<GrpcComputeStream>(grpc::CreateCustomChannel(target_, credentials_, arguments),
                                               metadata_, traffic_);
  }

 private:
  template <class Stub, class Request, class Response>
  absl::StatusOr<Response> Call(Stub& stub,
                                grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                                const Request& request,
                                RepeatedNotFound repeated_not_found = RepeatedNotFound::kIsError,
                                WhenFull when_full = WhenFull::kWait) {
    return Call(stub, method, request, {repeated_not_found, when_full, options_.call_timeout});
  }

  struct CallOptions {
    RepeatedNotFound repeated_not_found = RepeatedNotFound::kIsError;
    WhenFull when_full = WhenFull::kWait;
    std::optional<std::chrono::milliseconds> timeout;  // of an attempt; none: as long as it takes
    Repeat repeat = Repeat::kYes;
  };
  // For calls that wait for a disk.
  CallOptions Patient() const { return {.timeout = std::max(options_.call_timeout, kDiskTimeout)}; }

  template <class Stub, class Request, class Response>
  absl::StatusOr<Response> Call(Stub& stub,
                                grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                                const Request& request, const CallOptions& call) {
    if (absl::Status supported = features_.Check(request); !supported.ok()) return supported;
    Backoff backoff(options_.reconnect_timeout);
    const auto begin = std::chrono::steady_clock::now();
    for (bool maybe_done = false;;) {
      grpc::ClientContext context;
      if (call.timeout.has_value()) context.set_deadline(std::chrono::system_clock::now() + *call.timeout);
      const uint64_t added = metadata_->AddTo(&context);
      Response response;
      traffic_->NoteSent(request.ByteSizeLong());
      const absl::Status ended = FromGrpcStatus((stub.*method)(&context, request, &response));
      absl::Status status = metadata_->Judge(ended, added);
      traffic_->NoteReceived(response.ByteSizeLong());
      if (!absl::IsUnavailable(status)) connected_ = true;
      if (status.ok()) return response;
      if (maybe_done && absl::IsNotFound(status) && call.repeated_not_found == RepeatedNotFound::kIsDone) {
        return response;
      }
      if (call.repeat == Repeat::kNo || !IsTransient(status)) return status;
      if (call.when_full == WhenFull::kReturn && absl::IsResourceExhausted(status)) return status;
      // A server that refuses, a token too, has done nothing.
      maybe_done |= IsTransient(ended) && !absl::IsResourceExhausted(ended);
      const HandshakeDiagnosis diagnosis = Diagnose(status, target_, options_);
      if (!diagnosis.advice.empty()) status = Annotate(status, diagnosis.advice);
      if (GivesUp(diagnosis.failure, std::chrono::steady_clock::now() - begin)) return status;
      const auto delay = backoff.NextDelay(RetryDelayOf(status).value_or(std::chrono::milliseconds(0)));
      if (!delay.has_value()) {
        return Annotate(status, absl::StrCat("gave up on ", target_, " after ",
                                             options_.reconnect_timeout.count(), " ms"));
      }
      Pause(*delay);
    }
  }

  // Waits, and connects again whenever the connection is lost meanwhile: by itself gRPC would not before the
  // next call, whose first attempts may be five seconds apart.
  void Pause(std::chrono::milliseconds delay) {
    const auto end = std::chrono::steady_clock::now() + delay;
    const gpr_timespec deadline =
        gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(delay.count(), GPR_TIMESPAN));
    while (channel_->WaitForConnected(deadline) &&
           channel_->WaitForStateChange(GRPC_CHANNEL_READY, deadline)) {
      // Whoever takes connections and drops them is not asked in a circle.
      std::this_thread::sleep_until(
          std::min(end, std::chrono::steady_clock::now() + std::chrono::milliseconds(100)));
    }
    std::this_thread::sleep_until(end);
  }

  // A server that has been reached before may be in the middle of a change of certificates.
  bool GivesUp(HandshakeFailure failure, std::chrono::steady_clock::duration tried) const {
    if (connected_) return false;
    return failure == HandshakeFailure::kCertain ||
           (failure == HandshakeFailure::kProbable && tried >= kProbableFailurePatience);
  }

  // `complete` moves into the piece what only its kind of message has.
  template <class Response, class Request, class Complete>
  absl::Status ReadRows(const char* method, const Request& request, const RowSink& sink, Complete complete) {
    if (absl::Status supported = features_.Check(request); !supported.ok()) return supported;
    const grpc::Slice slice(request.SerializeAsString());
    traffic_->NoteSent(slice.size());
    MessageStream stream(channel_, method, grpc::ByteBuffer(&slice, 1), metadata_);
    grpc::ByteBuffer bytes;
    while (stream.Read(&bytes)) {
      traffic_->NoteReceived(bytes.Length());
      wire::ReceivedRows<Response> received;
      if (!wire::Decode(&bytes, &received)) {
        return absl::InternalError(absl::StrCat("the server sent a message that is not a ",
                                                std::string(Response::descriptor()->full_name())));
      }
      RowPiece piece{.first_row = received.message.first_row(),
                     .rows = received.message.rows(),
                     .dtype = received.message.dtype(),
                     .weight_version = 0,
                     .bytes = std::move(received.rows),
                     .bias = {}};
      complete(received.message, &piece);
      if (absl::Status sunk = sink(piece); !sunk.ok()) return sunk;
    }
    return stream.EndStatus();
  }

  const std::string target_;
  const ClientOptions options_;
  const std::shared_ptr<grpc::ChannelCredentials> credentials_;
  const std::shared_ptr<CallMetadata> metadata_;
  ServerFeatures features_;
  const std::shared_ptr<TrafficCounter> traffic_ = std::make_shared<TrafficCounter>();
  std::atomic<bool> connected_ = false;  // a server has answered
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::HeadService::Stub> head_;
  const std::unique_ptr<v1::LossService::Stub> loss_;
  const std::unique_ptr<v1::GradientService::Stub> gradient_;
  const std::unique_ptr<v1::RegionService::Stub> region_;
  const std::unique_ptr<v1::StatusService::Stub> status_;
};

}  // namespace

bool IsTransient(const absl::Status& status) {
  return absl::IsUnavailable(status) ||
         absl::IsCancelled(status) ||  // by a server that goes away: nobody here cancels
         (absl::IsResourceExhausted(status) && RetryDelayOf(status).has_value());
}

absl::StatusOr<std::unique_ptr<Connection>> MakeGrpcConnection(const std::string& target,
                                                               const ClientOptions& options) {
  if (target.empty()) return absl::InvalidArgumentError("target is empty; expected e.g. \"localhost:50051\"");
  if (options.call_timeout.count() <= 0 || options.reconnect_timeout.count() < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("call_timeout is ", options.call_timeout.count(), " ms and reconnect_timeout ",
                     options.reconnect_timeout.count(), " ms; they must be above 0 and at least 0"));
  }
  if (options.transfer_bytes <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("transfer_bytes is ", options.transfer_bytes, "; it must be above 0"));
  }
  auto credentials = MakeChannelCredentials(options);
  if (!credentials.ok()) return credentials.status();
  auto metadata = CallMetadata::Create(target, options);
  if (!metadata.ok()) return metadata.status();
  return std::make_unique<GrpcConnection>(target, options, *std::move(credentials), *std::move(metadata));
}

}  // namespace lossd::internal
