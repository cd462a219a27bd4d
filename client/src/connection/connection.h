// What the client needs from a server: the calls of lossd.v1, with errors as absl::Status and the unary ones
// repeated while the server cannot be reached.
#ifndef LOSSD_CLIENT_SRC_CONNECTION_CONNECTION_H_
#define LOSSD_CLIENT_SRC_CONNECTION_CONNECTION_H_

#include <google/protobuf/message.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/connection/compute_stream.h"
#include "client/src/connection/diagnosis.h"
#include "client/src/connection/replica_channels.h"
#include "client/src/connection/server_channel.h"
#include "client/src/connection/server_features.h"
#include "client/src/connection/tls.h"
#include "client/src/connection/watch.h"
#include "grpcpp/client_context.h"
#include "grpcpp/completion_queue.h"
#include "grpcpp/support/async_unary_call.h"
#include "grpcpp/support/status.h"
#include "lossd/client.h"
#include "lossd/v1/gradient.pb.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/status.pb.h"
#include "proto/wire/tensor.h"

namespace lossd::internal {

// Some rows of a matrix, as they arrived.
struct RowPiece {
  int64_t first_row = 0;
  int64_t rows = 0;
  v1::DataType dtype = v1::DATA_TYPE_UNSPECIFIED;
  uint64_t weight_version = 0;  // of weights; 0 of gradients
  wire::Tensor bytes;           // valid during the call of the sink
  std::string bias;             // fp32 [rows], or empty
};
// Takes the pieces one after the other; an error ends the call, which returns it.
using RowSink = std::function<absl::Status(const RowPiece&)>;
// Fills in the next message; false when there is none.
using WeightSource = std::function<bool(v1::WriteWeightsRequest*)>;

// What NOT_FOUND means when it answers a call that was made before.
enum class RepeatedNotFound {
  kIsError,
  kIsDone,  // an attempt before, whose answer was lost, did the work
};

// What a call does about RESOURCE_EXHAUSTED with a time to try again at.
enum class WhenFull { kWait, kReturn };

// How long one attempt may take.
enum class Patience {
  kCallTimeout,  // options().call_timeout
  kWork,      // the same, but at least ten minutes if the server lives: it waits for its disks or its device
  kEndless,   // as long as the server needs
  kLastWord,  // half a second: for what a call that is cut short has to clear away
};

// Whether a call is made again after an attempt that failed for a reason which may pass.
enum class Repeat { kYes, kNo };

// What is particular about a unary call.
struct CallOptions {
  // kIsDone for what deletes or ends something: an attempt whose answer was lost leaves nothing to be found.
  RepeatedNotFound repeated_not_found = RepeatedNotFound::kIsError;
  // kReturn for a caller that can ask for less instead.
  WhenFull when_full = WhenFull::kWait;
  // How long attempts go on is another matter: options().reconnect_timeout.
  Patience patience = Patience::kCallTimeout;
  // kNo for a call that would do its work once more.
  Repeat repeat = Repeat::kYes;
  // Filled in with the server whose answer it is, where it is not null.
  std::shared_ptr<ServerChannel>* answered_by = nullptr;
};

// What several calls share.
inline constexpr CallOptions kDeletion{.repeated_not_found = RepeatedNotFound::kIsDone};
inline constexpr CallOptions kWorkCall{.patience = Patience::kWork};

template <class Stub, class Request, class Response>
using AsyncMethod = std::unique_ptr<grpc::ClientAsyncResponseReader<Response>> (Stub::*)(
    grpc::ClientContext*, const Request&, grpc::CompletionQueue*);

// To a server, or to the replicas of a set: then calls go to one of them as long as that answers, and to the
// next where it cannot be reached. Thread-safe.
class Connection {
 public:
  // Does not wait for the server. INVALID_ARGUMENT for targets (SplitTargets) and options that cannot work.
  static absl::StatusOr<std::unique_ptr<Connection>> Create(const std::string& targets,
                                                            const ClientOptions& options);

  // Which server calls go to now.
  std::string target() const { return servers_->current()->target(); }
  const ClientOptions& options() const { return settings_.options; }
  Traffic traffic() const { return settings_.traffic->Total(); }

  // Whether the server can do all that `request` asks for: UNIMPLEMENTED names what it lacks. By what it said
  // in the last answer of GetStatus, without a call. Every call below looks by itself; Compute's messages are
  // its caller's.
  absl::Status CheckSupported(const google::protobuf::Message& request) const {
    return features_.Check(request);
  }

  // A unary call, e.g. Call(&v1::HeadService::Stub::AsyncGetHead, request). It is repeated with growing
  // pauses while the server is UNAVAILABLE or asks for patience, up to options().reconnect_timeout: so it
  // must be safe to repeat, or `options` say that it is not.
  template <class Stub, class Request, class Response>
  absl::StatusOr<Response> Call(AsyncMethod<Stub, Request, Response> method, const Request& request,
                                const CallOptions& options = {}) {
    Response response;
    const auto attempt = [&](const ServerChannel& server, grpc::ClientContext* context, Watch* watch,
                             grpc::Status* ended) {
      grpc::CompletionQueue queue;
      const auto call = (server.StubOf<Stub>().*method)(context, request, &queue);
      call->Finish(&response, ended, &response);
      bool ok = false;
      return Await(&queue, context, watch, &ok);
    };
    const auto server = Run(request, &response, options, attempt);
    if (!server.ok()) return server.status();
    if (options.answered_by != nullptr) *options.answered_by = *server;
    // Here, so that no caller can forget it: the requests that follow are checked against this answer.
    if constexpr (std::is_same_v<Response, v1::GetStatusResponse>) {
      features_.Note(response);
      (*server)->NoteIncarnation(response.incarnation());
    }
    return response;
  }

  // Streams: one attempt each, the caller resumes.
  absl::Status ReadGradient(const v1::ReadGradientRequest& request, const RowSink& sink);
  absl::Status ReadWeights(const v1::ReadWeightsRequest& request, const RowSink& sink);
  // Returns the number of rows the server confirms.
  absl::StatusOr<int64_t> WriteWeights(const WeightSource& source);

  // A Compute call on a network connection of its own, whose answers are as large as `limits` let them be.
  std::unique_ptr<ComputeStream> Compute(const v1::SessionLimits& limits) {
    return servers_->current()->Compute(limits);
  }
  // The same at another target, of which a server has said that it takes the session's lanes: once a
  // connection to it is there, for which it has kConnectPatience. UNAVAILABLE if that does not do,
  // FAILED_PRECONDITION if the token must not be sent there, or what the caller says who is asked meanwhile
  // (ClientOptions::interrupted).
  static constexpr std::chrono::milliseconds kConnectPatience{2000};
  absl::StatusOr<std::unique_ptr<ComputeStream>> ComputeAt(const std::string& target,
                                                           const v1::SessionLimits& limits);

 private:
  Connection(const std::string& targets, const ClientOptions& options,
             std::shared_ptr<grpc::ChannelCredentials> credentials, TlsDigests first_files);

  // Makes the call and fills in the response and its end; or the error with which the watch cut it short.
  using Attempt =
      absl::FunctionRef<absl::Status(const ServerChannel&, grpc::ClientContext*, Watch*, grpc::Status*)>;
  // Call without its types, so that it is compiled once. The server that has answered.
  absl::StatusOr<std::shared_ptr<ServerChannel>> Run(const google::protobuf::Message& request,
                                                     google::protobuf::Message* response,
                                                     const CallOptions& call, Attempt attempt);
  // One attempt, and what it ended with: the server's answer, or why there is none.
  struct End {
    absl::Status said;    // by the server, or by gRPC in its place
    absl::Status status;  // what that means, as the token may have been replaced since
    bool is_cut = false;  // nobody waits for it any longer
  };
  End Try(ServerChannel& server, google::protobuf::Message* response, Patience patience, Attempt attempt);
  // For calls with a deadline of minutes, or none: until there is a connection, or gRPC has found that there
  // is none, of which it tells the call. NoAnswer if neither comes within call_timeout.
  absl::Status AwaitChannel(const ServerChannel& server);
  // Nothing for kEndless.
  std::optional<std::chrono::milliseconds> TimeoutOf(Patience patience) const;
  // Waits, and connects again whenever the connection is lost meanwhile: by itself gRPC would not before the
  // next call, whose first attempts may be five seconds apart.
  absl::Status Pause(std::chrono::milliseconds delay);
  bool GivesUp(ConnectFailure failure, std::chrono::steady_clock::duration tried) const;
  // Call after each call to `server`. If the server could not be reached, the next call goes to another
  // server; if its channel had no connection, to a new channel.
  void NoteEnd(const ServerChannel& server, const absl::Status& ended);
  // NoteEnd for a stream of rows. Returns `ended` with advice added for the caller.
  absl::Status LeaveIfGone(const ServerChannel& server, const absl::Status& ended);
  // `complete` moves into the piece what only its kind of message has.
  template <class Response, class Request, class Complete>
  absl::Status ReadRows(const char* method, const Request& request, const RowSink& sink, Complete complete);
  absl::Status WriteRows(const ServerChannel& server, const WeightSource& source,
                         v1::WriteWeightsResponse* response);

  const std::string targets_;
  const ChannelSettings settings_;
  const TlsDigests first_files_;  // no younger than what the credentials began with
  ServerFeatures features_;
  std::atomic<bool> connected_ = false;  // a server has answered
  std::unique_ptr<ReplicaChannels> servers_;
};

// The server could not be reached, or wants to be asked again later: the same call may succeed.
bool IsTransient(const absl::Status& status);

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_CONNECTION_CONNECTION_H_
