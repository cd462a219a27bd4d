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
#include <tuple>
#include <type_traits>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/connection/breaker.h"
#include "client/src/connection/call_metadata.h"
#include "client/src/connection/compute_stream.h"
#include "client/src/connection/server_features.h"
#include "client/src/connection/tls.h"
#include "client/src/connection/traffic_counter.h"
#include "client/src/connection/watch.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/completion_queue.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/async_unary_call.h"
#include "grpcpp/support/status.h"
#include "lossd/client.h"
#include "lossd/v1/gradient.grpc.pb.h"
#include "lossd/v1/head.grpc.pb.h"
#include "lossd/v1/loss.grpc.pb.h"
#include "lossd/v1/region.grpc.pb.h"
#include "lossd/v1/status.grpc.pb.h"
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
};

// What several calls share.
inline constexpr CallOptions kDeletion{.repeated_not_found = RepeatedNotFound::kIsDone};
inline constexpr CallOptions kWorkCall{.patience = Patience::kWork};

template <class Stub, class Request, class Response>
using AsyncMethod = std::unique_ptr<grpc::ClientAsyncResponseReader<Response>> (Stub::*)(
    grpc::ClientContext*, const Request&, grpc::CompletionQueue*);

// Thread-safe.
class Connection {
 public:
  // Does not wait for the server. INVALID_ARGUMENT for options that cannot work.
  static absl::StatusOr<std::unique_ptr<Connection>> Create(const std::string& target,
                                                            const ClientOptions& options);

  const std::string& target() const { return target_; }
  const ClientOptions& options() const { return options_; }
  Traffic traffic() const { return traffic_->Total(); }

  // Whether the server can do all that `request` asks for: UNIMPLEMENTED names what it lacks. By what it said
  // in the last answer of GetStatus, without a call. Every call below looks by itself; Compute's messages are
  // its caller's.
  absl::Status CheckSupported(const google::protobuf::Message& request) const {
    return features_.Check(request);
  }

  // For what is done in another way at a server that lacks it.
  bool Has(const std::string& feature) const { return features_.Has(feature); }

  // A unary call, e.g. Call(&v1::HeadService::Stub::AsyncGetHead, request). It is repeated with growing
  // pauses while the server is UNAVAILABLE or asks for patience, up to options().reconnect_timeout: so it
  // must be safe to repeat, or `options` say that it is not.
  template <class Stub, class Request, class Response>
  absl::StatusOr<Response> Call(AsyncMethod<Stub, Request, Response> method, const Request& request,
                                const CallOptions& options = {}) {
    Response response;
    const auto attempt = [&](grpc::ClientContext* context, Watch* watch, grpc::Status* ended) {
      grpc::CompletionQueue queue;
      const auto call = (StubOf<Stub>().*method)(context, request, &queue);
      call->Finish(&response, ended, &response);
      bool ok = false;
      return Await(&queue, context, watch, &ok);
    };
    const absl::Status status = Run(request, &response, options, attempt);
    if (!status.ok()) return status;
    // Here, so that no caller can forget it: the requests that follow are checked against this answer.
    if constexpr (std::is_same_v<Response, v1::GetStatusResponse>) features_.Note(response);
    return response;
  }

  // Streams: one attempt each, the caller resumes.
  absl::Status ReadGradient(const v1::ReadGradientRequest& request, const RowSink& sink);
  absl::Status ReadWeights(const v1::ReadWeightsRequest& request, const RowSink& sink);
  // Returns the number of rows the server confirms.
  absl::StatusOr<int64_t> WriteWeights(const WeightSource& source);

  // A Compute call on a network connection of its own, whose answers are as large as `limits` let them be.
  std::unique_ptr<ComputeStream> Compute(const v1::SessionLimits& limits);
  // The same at another target, which belongs to the same server: once a connection to it is there, for which
  // it has kConnectPatience. UNAVAILABLE if that does not do, INVALID_ARGUMENT if the token must not be sent
  // there, or what the caller says who is asked meanwhile (ClientOptions::interrupted).
  static constexpr std::chrono::milliseconds kConnectPatience{2000};
  absl::StatusOr<std::unique_ptr<ComputeStream>> ComputeAt(const std::string& target,
                                                           const v1::SessionLimits& limits);

 private:
  Connection(std::string target, ClientOptions options, std::shared_ptr<grpc::ChannelCredentials> credentials,
             std::shared_ptr<CallMetadata> metadata);

  template <class Stub>
  Stub& StubOf() const {
    return *std::get<std::unique_ptr<Stub>>(stubs_);
  }
  // Makes the call and fills in the response and its end; or the error with which the watch cut it short.
  using Attempt = absl::FunctionRef<absl::Status(grpc::ClientContext*, Watch*, grpc::Status*)>;
  // Call without its types, so that it is compiled once.
  absl::Status Run(const google::protobuf::Message& request, google::protobuf::Message* response,
                   const CallOptions& call, Attempt attempt);
  // Nothing for kEndless.
  std::optional<std::chrono::milliseconds> TimeoutOf(Patience patience) const;
  // What a call without a deadline makes of silence: one that waits for its connection fails by itself.
  Watch::Silence SilenceOfStream() const;
  // Waits, and connects again whenever the connection is lost meanwhile: by itself gRPC would not before the
  // next call, whose first attempts may be five seconds apart.
  absl::Status Pause(std::chrono::milliseconds delay);
  bool GivesUp(HandshakeFailure failure, std::chrono::steady_clock::duration tried) const;
  std::shared_ptr<grpc::Channel> StreamChannel(const std::string& target, const v1::SessionLimits& limits,
                                               const Breaker& breaker) const;
  // `complete` moves into the piece what only its kind of message has.
  template <class Response, class Request, class Complete>
  absl::Status ReadRows(const char* method, const Request& request, const RowSink& sink, Complete complete);

  const std::string target_;
  const ClientOptions options_;
  const std::shared_ptr<grpc::ChannelCredentials> credentials_;
  const std::shared_ptr<CallMetadata> metadata_;
  ServerFeatures features_;
  const std::shared_ptr<TrafficCounter> traffic_ = std::make_shared<TrafficCounter>();
  std::atomic<bool> connected_ = false;  // a server has answered
  const Breaker breaker_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::tuple<std::unique_ptr<v1::HeadService::Stub>, std::unique_ptr<v1::LossService::Stub>,
                   std::unique_ptr<v1::GradientService::Stub>, std::unique_ptr<v1::RegionService::Stub>,
                   std::unique_ptr<v1::StatusService::Stub>>
      stubs_;
  const WatchedServer watched_;
};

// The server could not be reached, or wants to be asked again later: the same call may succeed.
bool IsTransient(const absl::Status& status);

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_CONNECTION_CONNECTION_H_
