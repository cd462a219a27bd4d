// What is needed to call one server: its channel, the stubs over it, and what looks after waits for it.
#ifndef LOSSD_CLIENT_SRC_CONNECTION_SERVER_CHANNEL_H_
#define LOSSD_CLIENT_SRC_CONNECTION_SERVER_CHANNEL_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/connection/breaker.h"
#include "client/src/connection/call_metadata.h"
#include "client/src/connection/compute_stream.h"
#include "client/src/connection/traffic_counter.h"
#include "client/src/connection/watch.h"
#include "grpcpp/channel.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/channel_arguments.h"
#include "lossd/client.h"
#include "lossd/v1/gradient.grpc.pb.h"
#include "lossd/v1/head.grpc.pb.h"
#include "lossd/v1/loss.grpc.pb.h"
#include "lossd/v1/region.grpc.pb.h"
#include "lossd/v1/status.grpc.pb.h"

namespace lossd::internal {

// What all channels of a connection have in common. Outlives them.
struct ChannelSettings {
  ClientOptions options;
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  std::shared_ptr<TrafficCounter> traffic;
};

// Thread-safe.
class ServerChannel : public std::enable_shared_from_this<ServerChannel> {
 public:
  // Does not connect. `host`: what the certificate there is for, where TlsOptions does not say it; empty: the
  // host of the target. INVALID_ARGUMENT if the token cannot be read, or must not travel to `target`.
  static absl::StatusOr<std::shared_ptr<ServerChannel>> Create(const std::string& target,
                                                               const ChannelSettings& settings,
                                                               WatchedServer::Others others,
                                                               const std::string& host = {});
  ServerChannel(const ServerChannel&) = delete;
  ServerChannel& operator=(const ServerChannel&) = delete;

  const std::string& target() const { return target_; }
  const WatchedServer& watched() const { return watched_; }
  CallMetadata& metadata() const { return *metadata_; }
  grpc::Channel& channel() const { return *channel_; }
  template <class Stub>
  Stub& StubOf() const {
    return *std::get<std::unique_ptr<Stub>>(stubs_);
  }

  // A new channel to this server, with its own connection. It keeps peer() and incarnation().
  absl::StatusOr<std::shared_ptr<ServerChannel>> Again() const;
  // Whether Again made this channel less than 30 s ago, so that its connection may still come.
  bool is_new() const { return std::chrono::steady_clock::now() < new_until_; }
  bool is_connected() const { return channel_->GetState(false) == GRPC_CHANNEL_READY; }

  // By which certificates name it.
  std::string host() const;
  // The address of who has answered last, as gRPC writes it ("ipv4:10.0.0.7:50051"). Where the target is a
  // name of several, another connection may come to another one.
  std::string peer() const {
    const std::lock_guard lock(mutex_);
    return peer_;
  }
  void NotePeer(const std::string& peer) {
    const std::lock_guard lock(mutex_);
    peer_ = peer;
  }
  // As the server there has told it last; empty: it has not.
  std::string incarnation() const {
    const std::lock_guard lock(mutex_);
    return incarnation_;
  }
  void NoteIncarnation(const std::string& incarnation) {
    const std::lock_guard lock(mutex_);
    incarnation_ = incarnation;
  }

  // A Compute call on a network connection of its own, whose answers are as large as `limits` let them be.
  std::unique_ptr<ComputeStream> Compute(const v1::SessionLimits& limits) const;
  // The same, once that connection is there, for which it has `patience`: UNAVAILABLE if that does not do, or
  // what the caller says who is asked meanwhile (ClientOptions::interrupted).
  absl::StatusOr<std::unique_ptr<ComputeStream>> Compute(const v1::SessionLimits& limits,
                                                         std::chrono::milliseconds patience) const;

 private:
  ServerChannel(std::string target, const ChannelSettings& settings, std::shared_ptr<CallMetadata> metadata,
                WatchedServer::Others others, std::string host);
  grpc::ChannelArguments Arguments(int64_t receive_bytes, const Breaker* breaker) const;
  std::shared_ptr<grpc::Channel> StreamChannel(const v1::SessionLimits& limits, const Breaker& breaker) const;
  std::unique_ptr<ComputeStream> StreamOver(std::shared_ptr<grpc::Channel> channel,
                                            std::unique_ptr<Breaker> breaker) const;

  const std::string target_;
  const ChannelSettings& settings_;
  const std::string host_;
  const std::shared_ptr<CallMetadata> metadata_;
  const Breaker breaker_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::tuple<std::unique_ptr<v1::HeadService::Stub>, std::unique_ptr<v1::LossService::Stub>,
                   std::unique_ptr<v1::GradientService::Stub>, std::unique_ptr<v1::RegionService::Stub>,
                   std::unique_ptr<v1::StatusService::Stub>>
      stubs_;
  const WatchedServer watched_;
  std::chrono::steady_clock::time_point new_until_;
  mutable std::mutex mutex_;
  std::string peer_;
  std::string incarnation_;
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_CONNECTION_SERVER_CHANNEL_H_
