#include "client/src/connection/connection.h"

#include <algorithm>
#include <cstddef>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/connection/backoff.h"
#include "client/src/connection/diagnosis.h"
#include "client/src/connection/grpc_status.h"
#include "client/src/connection/message_stream.h"
#include "client/src/connection/waiting.h"
#include "proto/wire/row_wire.h"

namespace lossd::internal {
namespace {

constexpr std::chrono::milliseconds kWorkTimeout = std::chrono::minutes(10);
constexpr std::chrono::milliseconds kLastWordTimeout(500);
constexpr std::chrono::milliseconds kGlance(5);

// A server that closes the first connections may be one that is about to serve: so long it is given.
constexpr std::chrono::milliseconds kProbableFailurePatience(3000);

// What a call without a deadline makes of silence: one that waits for its connection fails by itself.
Watch::Silence SilenceOfStream(const ServerChannel& server) {
  return server.is_connected() ? Watch::Silence::kIsAsked : Watch::Silence::kIsEnough;
}

absl::Status CheckSum(const RowPiece& piece, uint64_t sent) {
  const uint64_t arrived = wire::ChecksumOf(piece.bias, piece.bytes.parts);
  if (arrived == sent) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("rows [", piece.first_row, ", ", piece.first_row + piece.rows,
                                          ") of the gradient are damaged: their checksum is ",
                                          absl::Hex(arrived), " after the transfer; the server's is ",
                                          absl::Hex(sent)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Connection>> Connection::Create(const std::string& targets,
                                                               const ClientOptions& options) {
  if (const auto split = SplitTargets(targets); !split.ok()) return split.status();
  if (options.call_timeout.count() <= 0 || options.reconnect_timeout.count() < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("call_timeout is ", options.call_timeout.count(), " ms and reconnect_timeout ",
                     options.reconnect_timeout.count(), " ms; they must be above 0 and at least 0"));
  }
  if (options.transfer_bytes <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("transfer_bytes is ", options.transfer_bytes, "; it must be above 0"));
  }
  TlsDigests files = DigestsOf(options);
  auto credentials = MakeChannelCredentials(options);
  if (!credentials.ok()) return credentials.status();
  std::unique_ptr<Connection> connection(
      new Connection(targets, options, *std::move(credentials), std::move(files)));
  auto servers = ReplicaChannels::Create(targets, connection->settings_);
  if (!servers.ok()) return servers.status();
  connection->servers_ = *std::move(servers);
  return connection;
}

Connection::Connection(const std::string& targets, const ClientOptions& options,
                       std::shared_ptr<grpc::ChannelCredentials> credentials, TlsDigests first_files)
    : targets_(targets),
      settings_{.options = options,
                .credentials = std::move(credentials),
                .traffic = std::make_shared<TrafficCounter>()},
      first_files_(std::move(first_files)),
      features_(targets) {}

absl::StatusOr<std::shared_ptr<ServerChannel>> Connection::Run(const google::protobuf::Message& request,
                                                               google::protobuf::Message* response,
                                                               const CallOptions& call, Attempt attempt) {
  if (absl::Status supported = features_.Check(request); !supported.ok()) return supported;
  Backoff backoff(options().reconnect_timeout);
  const auto begin = std::chrono::steady_clock::now();
  size_t distrusted = 0;  // attempts that found something which waiting cannot mend
  for (bool maybe_done = false;;) {
    const std::shared_ptr<ServerChannel> server = servers_->current();
    settings_.traffic->NoteSent(request.ByteSizeLong());
    End end = Try(*server, response, call.patience, attempt);
    NoteEnd(*server, end.status);
    if (end.is_cut) return end.status;
    absl::Status& status = end.status;
    settings_.traffic->NoteReceived(response->ByteSizeLong());
    if (!absl::IsUnavailable(status)) connected_ = true;
    if (status.ok()) return server;
    if (maybe_done && absl::IsNotFound(status) && call.repeated_not_found == RepeatedNotFound::kIsDone) {
      return server;
    }
    if (call.repeat == Repeat::kNo || !IsTransient(status)) return status;
    if (call.when_full == WhenFull::kReturn && absl::IsResourceExhausted(status)) return status;
    // A server that refuses, a token too, has done nothing.
    maybe_done |= IsTransient(end.said) && !absl::IsResourceExhausted(end.said);
    Diagnosis diagnosis = Diagnose(status, server->target(), options());
    if (!diagnosis.advice.empty()) status = Annotate(status, diagnosis.advice);
    if (diagnosis.failure == ConnectFailure::kCertain && ++distrusted < servers_->size()) {
      diagnosis.failure = ConnectFailure::kPassing;  // another one may do
    }
    if (GivesUp(diagnosis.failure, std::chrono::steady_clock::now() - begin)) return status;
    const auto delay = backoff.NextDelay(RetryDelayOf(status).value_or(std::chrono::milliseconds(0)));
    if (!delay.has_value()) {
      return Annotate(status, absl::StrCat("gave up on ", targets_, " after ",
                                           options().reconnect_timeout.count(), " ms"));
    }
    if (absl::Status paused = Pause(*delay); !paused.ok()) return paused;
  }
}

Connection::End Connection::Try(ServerChannel& server, google::protobuf::Message* response, Patience patience,
                                Attempt attempt) {
  const std::optional<std::chrono::milliseconds> timeout = TimeoutOf(patience);
  const bool is_long = patience == Patience::kWork || patience == Patience::kEndless;
  absl::Status waited = is_long ? AwaitChannel(server) : absl::OkStatus();
  if (!waited.ok()) return {.said = waited, .status = waited, .is_cut = !WasSilent(waited)};
  // What cannot be reached is given reconnect_timeout; a server that took the call has to answer.
  const bool connected = server.is_connected();
  Watch watch(server.watched(), is_long ? SilenceOfStream(server) : Watch::Silence::kIsEnough, timeout);
  grpc::ClientContext context;
  if (timeout.has_value()) context.set_deadline(std::chrono::system_clock::now() + *timeout);
  const uint64_t added = server.metadata().AddTo(&context);
  response->Clear();
  grpc::Status answer;
  End end;
  end.said = attempt(server, &context, &watch, &answer);
  if (!end.said.ok()) {
    end.is_cut = !WasSilent(end.said);
  } else if (answer.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED && timeout.has_value()) {
    end.said = NoAnswer(server.watched(), *timeout);
  } else {
    end.said = FromGrpcStatus(answer);
    if (connected) end.said = watch.Judge(end.said);
    end.is_cut = WasInterrupted(end.said);
  }
  end.status = server.metadata().Judge(end.said, added);
  if (end.status.ok()) server.NotePeer(context.peer());
  return end;
}

std::optional<std::chrono::milliseconds> Connection::TimeoutOf(Patience patience) const {
  switch (patience) {
    case Patience::kCallTimeout:
      return options().call_timeout;
    case Patience::kWork:
      return std::max(options().call_timeout, kWorkTimeout);
    case Patience::kLastWord:
      return kLastWordTimeout;
    case Patience::kEndless:
      break;
  }
  return std::nullopt;
}

absl::Status Connection::AwaitChannel(const ServerChannel& server) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + options().call_timeout;
  while (!AwaitConnected(server.channel(), Clock::now() + kGlance)) {
    if (server.channel().GetState(false) == GRPC_CHANNEL_TRANSIENT_FAILURE) break;
    if (absl::Status asked = Asked(options()); !asked.ok()) return asked;
    if (Clock::now() >= end) return NoAnswer(server.watched(), options().call_timeout);
  }
  return absl::OkStatus();
}

absl::Status Connection::Pause(std::chrono::milliseconds delay) {
  using Clock = std::chrono::steady_clock;
  const std::shared_ptr<ServerChannel> server = servers_->current();
  grpc::Channel& channel = server->channel();
  const auto end = Clock::now() + delay;
  // How long to wait is decided by callers: a pause of gRPC's own may be longer than they go on trying.
  if (channel.GetState(false) == GRPC_CHANNEL_TRANSIENT_FAILURE) {
    grpc::experimental::ChannelResetConnectionBackoff(&channel);
  }
  while (Clock::now() < end) {
    const auto until = std::min(end, Clock::now() + kWaitSlice);
    AwaitConnected(channel, until);
    // Whoever takes connections and drops them is not asked in a circle.
    std::this_thread::sleep_until(until);
    if (absl::Status asked = Asked(options()); !asked.ok()) return asked;
  }
  return absl::OkStatus();
}

bool Connection::GivesUp(ConnectFailure failure, std::chrono::steady_clock::duration tried) const {
  // A server that has been reached before may be in the middle of a change of certificates.
  if (connected_) return false;
  const bool hopeless = failure == ConnectFailure::kCertain ||
                        (failure == ConnectFailure::kProbable && tried >= kProbableFailurePatience);
  // Whoever has replaced this client's files makes such a change as well, and the credentials look at them
  // every second: the next attempt, or one behind it, shows what they hold now.
  return hopeless && DigestsOf(options()) == first_files_;
}

void Connection::NoteEnd(const ServerChannel& server, const absl::Status& ended) {
  if (WasInterrupted(ended)) return;
  if (absl::IsUnavailable(ended)) servers_->Leave(server);
  if (absl::IsDeadlineExceeded(ended) || WasSilent(ended)) servers_->Renew(server);
}

absl::Status Connection::LeaveIfGone(const ServerChannel& server, const absl::Status& ended) {
  NoteEnd(server, ended);
  return Explain(ended, server.target(), options());
}

template <class Response, class Request, class Complete>
absl::Status Connection::ReadRows(const char* method, const Request& request, const RowSink& sink,
                                  Complete complete) {
  if (absl::Status supported = features_.Check(request); !supported.ok()) return supported;
  const grpc::Slice slice(request.SerializeAsString());
  settings_.traffic->NoteSent(slice.size());
  const std::shared_ptr<ServerChannel> server = servers_->current();
  if (absl::Status waited = AwaitChannel(*server); !waited.ok()) return LeaveIfGone(*server, waited);
  MessageStream stream(server->watched(), SilenceOfStream(*server), method, grpc::ByteBuffer(&slice, 1));
  grpc::ByteBuffer bytes;
  while (stream.Read(&bytes)) {
    settings_.traffic->NoteReceived(bytes.Length());
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
    if (absl::Status whole = complete(received.message, &piece); !whole.ok()) return whole;
    if (absl::Status sunk = sink(piece); !sunk.ok()) return sunk;
  }
  return LeaveIfGone(*server, stream.EndStatus());
}

absl::Status Connection::ReadGradient(const v1::ReadGradientRequest& request, const RowSink& sink) {
  return ReadRows<v1::ReadGradientResponse>("/lossd.v1.GradientService/ReadGradient", request, sink,
                                            [](v1::ReadGradientResponse& response, RowPiece* piece) {
                                              piece->bias = std::move(*response.mutable_bias_gradient());
                                              return CheckSum(*piece, response.checksum());
                                            });
}

absl::Status Connection::ReadWeights(const v1::ReadWeightsRequest& request, const RowSink& sink) {
  return ReadRows<v1::ReadWeightsResponse>("/lossd.v1.HeadService/ReadWeights", request, sink,
                                           [](v1::ReadWeightsResponse& response, RowPiece* piece) {
                                             piece->weight_version = response.weight_version();
                                             piece->bias = std::move(*response.mutable_bias());
                                             return absl::OkStatus();
                                           });
}

absl::StatusOr<int64_t> Connection::WriteWeights(const WeightSource& source) {
  const std::shared_ptr<ServerChannel> server = servers_->current();
  if (absl::Status waited = AwaitChannel(*server); !waited.ok()) return LeaveIfGone(*server, waited);
  v1::WriteWeightsResponse response;
  absl::Status written = LeaveIfGone(*server, WriteRows(*server, source, &response));
  if (!written.ok()) return written;
  return response.rows_received();
}

absl::Status Connection::WriteRows(const ServerChannel& server, const WeightSource& source,
                                   v1::WriteWeightsResponse* response) {
  grpc::ClientContext context;
  const uint64_t added = server.metadata().AddTo(&context);
  grpc::CompletionQueue queue;
  Watch::Silence silence = SilenceOfStream(server);
  std::optional<Watch> watch;
  bool ok = false;
  // Every operation is waited for before the next one.
  const auto wait = [&] {
    watch.emplace(server.watched(), silence);
    silence = Watch::Silence::kIsAsked;
    return Await(&queue, &context, &*watch, &ok);
  };
  const auto writer =
      server.StubOf<v1::HeadService::Stub>().AsyncWriteWeights(&context, response, &queue, &ok);
  absl::Status cut = wait();
  v1::WriteWeightsRequest request;
  while (cut.ok() && ok) {
    cut = AskedNow(options());  // messages may leave one after the other, without a wait
    if (!cut.ok() || !source(&request)) break;
    cut = features_.Check(request);
    if (!cut.ok()) break;
    writer->Write(request, &ok);
    cut = wait();
    if (ok) settings_.traffic->NoteSent(request.ByteSizeLong());
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
  settings_.traffic->NoteReceived(response->ByteSizeLong());
  const absl::Status ended = watch->Judge(FromGrpcStatus(status));
  return ended.ok() ? ended : server.metadata().Judge(ended, added);
}

absl::StatusOr<std::unique_ptr<ComputeStream>> Connection::ComputeAt(const std::string& target,
                                                                     const v1::SessionLimits& limits) {
  const auto server = servers_->At(target);
  if (!server.ok()) return server.status();
  return (*server)->Compute(limits, kConnectPatience);
}

bool IsTransient(const absl::Status& status) {
  return absl::IsUnavailable(status) ||
         (absl::IsResourceExhausted(status) && RetryDelayOf(status).has_value());
}

}  // namespace lossd::internal
