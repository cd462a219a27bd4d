#include "client/src/connection/connection.h"

#include <grpc/support/time.h>

#include <algorithm>
#include <limits>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/src/connection/backoff.h"
#include "client/src/connection/grpc_compute_stream.h"
#include "client/src/connection/grpc_status.h"
#include "client/src/connection/message_stream.h"
#include "client/src/connection/waiting.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/support/channel_arguments.h"
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
constexpr std::chrono::milliseconds kWorkTimeout = std::chrono::minutes(10);
constexpr std::chrono::milliseconds kLastWordTimeout(500);

// A server that closes the first connections may be one that is about to serve: so long it is given.
constexpr std::chrono::milliseconds kProbableFailurePatience(3000);

grpc::ChannelArguments Arguments(const ClientOptions& options, int64_t receive_bytes,
                                 const Breaker* breaker = nullptr) {
  grpc::ChannelArguments arguments;
  if (breaker != nullptr) breaker->AddTo(&arguments);
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

// What gRPC would take for a name to be looked up, and would wait for. The schemes that it knows are its own
// matter.
absl::Status CheckTarget(const std::string& target) {
  const size_t colon = target.rfind(':');
  const bool is_url = absl::StartsWith(target, "http://") || absl::StartsWith(target, "https://");
  const bool has_port = colon != std::string::npos && colon + 1 < target.size() && colon > 0 && !is_url;
  if (has_port) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "target is \"", target, "\"; want host:port, such as 127.0.0.1:50051, dns:///name:port or unix:/path"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Connection>> Connection::Create(const std::string& target,
                                                               const ClientOptions& options) {
  if (absl::Status named = CheckTarget(target); !named.ok()) return named;
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
  return std::unique_ptr<Connection>(
      new Connection(target, options, *std::move(credentials), *std::move(metadata)));
}

Connection::Connection(std::string target, ClientOptions options,
                       std::shared_ptr<grpc::ChannelCredentials> credentials,
                       std::shared_ptr<CallMetadata> metadata)
    : target_(std::move(target)),
      options_(std::move(options)),
      credentials_(std::move(credentials)),
      metadata_(std::move(metadata)),
      features_(target_),
      channel_(
          grpc::CreateCustomChannel(target_, credentials_, Arguments(options_, kReceiveBytes, &breaker_))),
      stubs_(v1::HeadService::NewStub(channel_), v1::LossService::NewStub(channel_),
             v1::GradientService::NewStub(channel_), v1::RegionService::NewStub(channel_),
             v1::StatusService::NewStub(channel_)),
      watched_{.target = target_,
               .options = options_,
               .metadata = metadata_,
               .channel = channel_,
               .breaker = breaker_,
               .connect = [this] {
                 grpc::ChannelArguments arguments = Arguments(options_, kReceiveBytes);
                 arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
                 return grpc::CreateCustomChannel(target_, credentials_, arguments);
               }} {}

absl::Status Connection::Run(const google::protobuf::Message& request, google::protobuf::Message* response,
                             const CallOptions& call, Attempt attempt) {
  if (absl::Status supported = features_.Check(request); !supported.ok()) return supported;
  Backoff backoff(options_.reconnect_timeout);
  const std::optional<std::chrono::milliseconds> timeout = TimeoutOf(call.patience);
  const auto begin = std::chrono::steady_clock::now();
  for (bool maybe_done = false;;) {
    // What cannot be reached is given reconnect_timeout; a server that took the call has to answer.
    const bool connected = channel_->GetState(false) == GRPC_CHANNEL_READY;
    const bool is_long = call.patience == Patience::kWork || call.patience == Patience::kEndless;
    Watch watch(watched_, is_long ? SilenceOfStream() : Watch::Silence::kIsEnough, timeout);
    grpc::ClientContext context;
    if (timeout.has_value()) context.set_deadline(std::chrono::system_clock::now() + *timeout);
    const uint64_t added = metadata_->AddTo(&context);
    response->Clear();
    traffic_->NoteSent(request.ByteSizeLong());
    grpc::Status answer;
    if (absl::Status cut = attempt(&context, &watch, &answer); !cut.ok()) return cut;
    absl::Status ended = FromGrpcStatus(answer);
    if (connected) ended = watch.Judge(ended);
    if (WasInterrupted(ended)) return ended;
    absl::Status status = metadata_->Judge(ended, added);
    traffic_->NoteReceived(response->ByteSizeLong());
    if (!absl::IsUnavailable(status)) connected_ = true;
    if (status.ok()) return absl::OkStatus();
    if (answer.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED && timeout.has_value()) {
      return NoAnswer(watched_, *timeout);
    }
    if (maybe_done && absl::IsNotFound(status) && call.repeated_not_found == RepeatedNotFound::kIsDone) {
      return absl::OkStatus();
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
      return Annotate(
          status, absl::StrCat("gave up on ", target_, " after ", options_.reconnect_timeout.count(), " ms"));
    }
    if (absl::Status paused = Pause(*delay); !paused.ok()) return paused;
  }
}

std::optional<std::chrono::milliseconds> Connection::TimeoutOf(Patience patience) const {
  switch (patience) {
    case Patience::kCallTimeout:
      return options_.call_timeout;
    case Patience::kWork:
      return std::max(options_.call_timeout, kWorkTimeout);
    case Patience::kLastWord:
      return kLastWordTimeout;
    case Patience::kEndless:
      break;
  }
  return std::nullopt;
}

Watch::Silence Connection::SilenceOfStream() const {
  return channel_->GetState(false) == GRPC_CHANNEL_READY ? Watch::Silence::kIsAsked
                                                         : Watch::Silence::kIsEnough;
}

absl::Status Connection::Pause(std::chrono::milliseconds delay) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + delay;
  while (Clock::now() < end) {
    const auto until = std::min(end, Clock::now() + kWaitSlice);
    const auto wait = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
    const gpr_timespec deadline =
        gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(wait.count() + 1, GPR_TIMESPAN));
    // Whoever takes connections and drops them is not asked in a circle.
    if (channel_->WaitForConnected(deadline)) channel_->WaitForStateChange(GRPC_CHANNEL_READY, deadline);
    std::this_thread::sleep_until(until);
    if (absl::Status asked = Asked(options_); !asked.ok()) return asked;
  }
  return absl::OkStatus();
}

bool Connection::GivesUp(HandshakeFailure failure, std::chrono::steady_clock::duration tried) const {
  // A server that has been reached before may be in the middle of a change of certificates.
  if (connected_) return false;
  return failure == HandshakeFailure::kCertain ||
         (failure == HandshakeFailure::kProbable && tried >= kProbableFailurePatience);
}

template <class Response, class Request, class Complete>
absl::Status Connection::ReadRows(const char* method, const Request& request, const RowSink& sink,
                                  Complete complete) {
  if (absl::Status supported = features_.Check(request); !supported.ok()) return supported;
  const grpc::Slice slice(request.SerializeAsString());
  traffic_->NoteSent(slice.size());
  MessageStream stream(watched_, SilenceOfStream(), method, grpc::ByteBuffer(&slice, 1));
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

absl::Status Connection::ReadGradient(const v1::ReadGradientRequest& request, const RowSink& sink) {
  return ReadRows<v1::ReadGradientResponse>("/lossd.v1.GradientService/ReadGradient", request, sink,
                                            [](v1::ReadGradientResponse& response, RowPiece* piece) {
                                              piece->bias = std::move(*response.mutable_bias_gradient());
                                            });
}

absl::Status Connection::ReadWeights(const v1::ReadWeightsRequest& request, const RowSink& sink) {
  return ReadRows<v1::ReadWeightsResponse>("/lossd.v1.HeadService/ReadWeights", request, sink,
                                           [](v1::ReadWeightsResponse& response, RowPiece* piece) {
                                             piece->weight_version = response.weight_version();
                                             piece->bias = std::move(*response.mutable_bias());
                                           });
}

absl::StatusOr<int64_t> Connection::WriteWeights(const WeightSource& source) {
  grpc::ClientContext context;
  const uint64_t added = metadata_->AddTo(&context);
  v1::WriteWeightsResponse response;
  grpc::CompletionQueue queue;
  Watch::Silence silence = SilenceOfStream();
  std::optional<Watch> watch;
  bool ok = false;
  // Every operation is waited for before the next one.
  const auto wait = [&] {
    watch.emplace(watched_, silence);
    silence = Watch::Silence::kIsAsked;
    return Await(&queue, &context, &*watch, &ok);
  };
  const auto writer = StubOf<v1::HeadService::Stub>().AsyncWriteWeights(&context, &response, &queue, &ok);
  absl::Status cut = wait();
  v1::WriteWeightsRequest request;
  while (cut.ok() && ok) {
    cut = AskedNow(options_);  // messages may leave one after the other, without a wait
    if (!cut.ok() || !source(&request)) break;
    cut = features_.Check(request);
    if (!cut.ok()) break;
    writer->Write(request, &ok);
    cut = wait();
    if (ok) traffic_->NoteSent(request.ByteSizeLong());
  }
  if (cut.ok() && ok) {
    writer->WritesDone(&ok);
    cut = wait();
  }
  if (!cut.ok()) context.TryCancel();
  grpc::Status status;
  writer->Finish(&status, &ok);
  // Where an operation failed, its wait is what Judge has to know of.
  cut.Update(ok ? wait() : Await(&queue, &context, &*watch, &ok));
  if (!cut.ok()) return cut;
  traffic_->NoteReceived(response.ByteSizeLong());
  const absl::Status ended = watch->Judge(FromGrpcStatus(status));
  if (!ended.ok()) return metadata_->Judge(ended, added);
  return response.rows_received();
}

std::shared_ptr<grpc::Channel> Connection::StreamChannel(const std::string& target,
                                                         const v1::SessionLimits& limits,
                                                         const Breaker& breaker) const {
  // dX may be twice as wide as the hidden states were.
  grpc::ChannelArguments arguments = Arguments(
      options_, kReceiveBytes + 2 * std::min(limits.max_chunk_bytes(), kReceiveBytes * 16), &breaker);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL,
                   1);                           // otherwise all streams share one TCP connection
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);  // the session resends, with its eyes open
  return grpc::CreateCustomChannel(target, credentials_, arguments);
}

std::unique_ptr<ComputeStream> Connection::Compute(const v1::SessionLimits& limits) {
  auto breaker = std::make_unique<Breaker>();
  auto channel = StreamChannel(target_, limits, *breaker);
  return std::make_unique<GrpcComputeStream>(std::move(channel), metadata_, traffic_, &watched_,
                                             std::move(breaker));
}

absl::StatusOr<std::unique_ptr<ComputeStream>> Connection::ComputeAt(const std::string& target,
                                                                     const v1::SessionLimits& limits) {
  if (absl::Status may = CheckTokenMayGo(target, target_, options_); !may.ok()) return may;
  auto metadata = CallMetadata::Create(target, options_);
  if (!metadata.ok()) return metadata.status();
  auto breaker = std::make_unique<Breaker>();
  auto channel = StreamChannel(target, limits, *breaker);
  const auto end = std::chrono::system_clock::now() + kConnectPatience;
  while (!channel->WaitForConnected(std::min(end, std::chrono::system_clock::now() + kWaitSlice))) {
    if (absl::Status asked = Asked(options_); !asked.ok()) return asked;
    if (channel->GetState(false) == GRPC_CHANNEL_TRANSIENT_FAILURE) {
      return absl::UnavailableError(absl::StrCat("no connection to ", target, " can be made"));
    }
    if (std::chrono::system_clock::now() >= end) {
      return absl::UnavailableError(
          absl::StrCat("no connection to ", target, " within ", kConnectPatience.count(), " ms"));
    }
  }
  return std::make_unique<GrpcComputeStream>(std::move(channel), *std::move(metadata), traffic_, &watched_,
                                             std::move(breaker));
}

bool IsTransient(const absl::Status& status) {
  return absl::IsUnavailable(status) ||
         (absl::IsResourceExhausted(status) && RetryDelayOf(status).has_value());
}

}  // namespace lossd::internal
