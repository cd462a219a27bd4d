#include "client/src/connection/server_channel.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/connection/channel_arguments.h"
#include "client/src/connection/grpc_compute_stream.h"
#include "client/src/connection/waiting.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/support/channel_arguments.h"

namespace lossd::internal {
namespace {

// The server chooses the size of the pieces it streams; this is far above any sensible choice.
constexpr int64_t kReceiveBytes = int64_t{64} << 20;
constexpr int kKeepaliveMs = 30000;
constexpr int kKeepaliveTimeoutMs = 20000;
constexpr int kReconnectMs = 100;
constexpr int kLongestReconnectMs = 2000;
constexpr int kConnectTimeoutMs = 5000;
constexpr std::chrono::seconds kConnectPatience(30);

}  // namespace

absl::StatusOr<std::shared_ptr<ServerChannel>> ServerChannel::Create(const std::string& target,
                                                                     const ChannelSettings& settings,
                                                                     WatchedServer::Others others,
                                                                     const std::string& host) {
  auto metadata = CallMetadata::Create(target, settings.options);
  if (!metadata.ok()) return metadata.status();
  return std::shared_ptr<ServerChannel>(
      new ServerChannel(target, settings, *std::move(metadata), others, host));
}

ServerChannel::ServerChannel(std::string target, const ChannelSettings& settings,
                             std::shared_ptr<CallMetadata> metadata, WatchedServer::Others others,
                             std::string host)
    : target_(std::move(target)),
      settings_(settings),
      host_(std::move(host)),
      metadata_(std::move(metadata)),
      channel_(
          grpc::CreateCustomChannel(target_, settings_.credentials, Arguments(kReceiveBytes, &breaker_))),
      stubs_(v1::HeadService::NewStub(channel_), v1::LossService::NewStub(channel_),
             v1::GradientService::NewStub(channel_), v1::RegionService::NewStub(channel_),
             v1::StatusService::NewStub(channel_)),
      watched_{.target = target_,
               .options = settings_.options,
               .metadata = metadata_,
               .channel = channel_,
               .breaker = breaker_,
               .connect =
                   [this] {
                     grpc::ChannelArguments arguments = Arguments(kReceiveBytes, nullptr);
                     arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
                     return grpc::CreateCustomChannel(target_, settings_.credentials, arguments);
                   },
               .others = others} {}

grpc::ChannelArguments ServerChannel::Arguments(int64_t receive_bytes, const Breaker* breaker) const {
  grpc::ChannelArguments arguments = ArgumentsFor(target_, settings_.options, host_);
  if (breaker != nullptr) breaker->AddTo(&arguments);
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

absl::StatusOr<std::shared_ptr<ServerChannel>> ServerChannel::Again() const {
  auto again = Create(target_, settings_, watched_.others, host_);
  if (!again.ok()) return again;
  (*again)->new_until_ = std::chrono::steady_clock::now() + kConnectPatience;
  (*again)->NotePeer(peer());
  (*again)->NoteIncarnation(incarnation());
  return again;
}

std::string ServerChannel::host() const {
  if (!host_.empty()) return host_;
  const size_t colon = target_.rfind(':');
  const size_t slash = target_.rfind('/', colon);
  const size_t begin = slash == std::string::npos ? 0 : slash + 1;
  return target_.substr(begin, colon == std::string::npos ? colon : colon - begin);
}

std::shared_ptr<grpc::Channel> ServerChannel::StreamChannel(const v1::SessionLimits& limits,
                                                            const Breaker& breaker) const {
  // dX may be twice as wide as the hidden states were.
  grpc::ChannelArguments arguments =
      Arguments(kReceiveBytes + 2 * std::min(limits.max_chunk_bytes(), kReceiveBytes * 16), &breaker);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL,
                   1);                           // otherwise all streams share one TCP connection
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);  // the session resends, with its eyes open
  return grpc::CreateCustomChannel(target_, settings_.credentials, arguments);
}

std::unique_ptr<ComputeStream> ServerChannel::StreamOver(std::shared_ptr<grpc::Channel> channel,
                                                         std::unique_ptr<Breaker> breaker) const {
  std::shared_ptr<const WatchedServer> watched(shared_from_this(), &watched_);
  return std::make_unique<GrpcComputeStream>(std::move(channel), metadata_, settings_.traffic,
                                             std::move(watched), std::move(breaker));
}

std::unique_ptr<ComputeStream> ServerChannel::Compute(const v1::SessionLimits& limits) const {
  auto breaker = std::make_unique<Breaker>();
  auto channel = StreamChannel(limits, *breaker);
  return StreamOver(std::move(channel), std::move(breaker));
}

absl::StatusOr<std::unique_ptr<ComputeStream>> ServerChannel::Compute(
    const v1::SessionLimits& limits, std::chrono::milliseconds patience) const {
  auto breaker = std::make_unique<Breaker>();
  auto channel = StreamChannel(limits, *breaker);
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + patience;
  while (!AwaitConnected(*channel, std::min<Clock::time_point>(end, Clock::now() + kWaitSlice))) {
    if (absl::Status asked = Asked(settings_.options); !asked.ok()) return asked;
    if (channel->GetState(false) == GRPC_CHANNEL_TRANSIENT_FAILURE) {
      return absl::UnavailableError(absl::StrCat("no connection to ", target_, " can be made"));
    }
    if (Clock::now() >= end) {
      return absl::UnavailableError(
          absl::StrCat("no connection to ", target_, " within ", patience.count(), " ms"));
    }
  }
  return StreamOver(std::move(channel), std::move(breaker));
}

}  // namespace lossd::internal
