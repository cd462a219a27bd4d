// The servers that a connection may call: one, or the replicas of a set, each of which serves all calls.
#ifndef LOSSD_CLIENT_SRC_CONNECTION_REPLICA_CHANNELS_H_
#define LOSSD_CLIENT_SRC_CONNECTION_REPLICA_CHANNELS_H_

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/connection/server_channel.h"

namespace lossd::internal {

// "host-a:50051,host-b:50051" by its addresses, each a gRPC target; one that begins with ipv4: or ipv6: is a
// list of gRPC's own, and stays whole. INVALID_ARGUMENT, saying what to write, for what is none.
absl::StatusOr<std::vector<std::string>> SplitTargets(const std::string& targets);

// Calls go to one of them, as long as that answers. Thread-safe.
class ReplicaChannels {
 public:
  // `settings` outlives this. INVALID_ARGUMENT as SplitTargets and ServerChannel::Create have it.
  static absl::StatusOr<std::unique_ptr<ReplicaChannels>> Create(const std::string& targets,
                                                                 const ChannelSettings& settings);

  size_t size() const { return count_; }
  // Which calls go to now.
  std::shared_ptr<ServerChannel> current() const;
  // It cannot be reached: calls go to the one behind it in the list from now on, or to the first behind the
  // last. Nothing happens if they do not go to `server` any more.
  void Leave(const ServerChannel& server);

  // Replaces the channel of a listed server if that has no connection: gRPC may stop connecting a channel for
  // ever, without an error. Does nothing in the first 30 s of a channel that Renew made.
  void Renew(const ServerChannel& server);

  // The place for At of the one that has answered at `server`, so that other connections come to it as well;
  // empty if they do so by the target of `server`, as far as can be told.
  static std::string PlaceOf(const ServerChannel& server);
  // Another one, of which a server has said that it belongs to it, or a PlaceOf; always the same for a
  // target. With a token one of the list, or one that CheckTokenMayGo lets have it: FAILED_PRECONDITION if
  // not.
  absl::StatusOr<std::shared_ptr<ServerChannel>> At(const std::string& target);

 private:
  ReplicaChannels(std::vector<std::shared_ptr<ServerChannel>> servers, const ChannelSettings& settings)
      : count_(servers.size()), settings_(settings), servers_(std::move(servers)) {}

  const size_t count_;
  const ChannelSettings& settings_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<ServerChannel>> servers_;
  size_t current_ = 0;
  std::map<std::string, std::shared_ptr<ServerChannel>> elsewhere_;  // by target
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_CONNECTION_REPLICA_CHANNELS_H_
