#include "client/src/connection/replica_channels.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/src/connection/channel_arguments.h"

namespace lossd::internal {
namespace {

// What gRPC would take for a name to be looked up, and would wait for. The schemes that it knows are its own
// matter.
bool HasPort(const std::string& target) {
  const size_t colon = target.rfind(':');
  const bool is_url = absl::StartsWith(target, "http://") || absl::StartsWith(target, "https://");
  return colon != std::string::npos && colon + 1 < target.size() && colon > 0 && !is_url;
}

// gRPC takes several addresses of these schemes itself.
bool IsOneOfGrpc(const std::string& targets) {
  return absl::StartsWith(targets, "ipv4:") || absl::StartsWith(targets, "ipv6:");
}

// A list that is written as other programs take them. Files may be called so.
bool HasOtherSeparator(const std::string& address) {
  return !absl::StartsWith(address, "unix:") && address.find_first_of("; \t\n") != std::string::npos;
}

absl::Status CheckAddress(const std::string& address, const std::string& targets) {
  if (HasPort(address) && !HasOtherSeparator(address)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "target is \"", targets, "\"", address == targets ? "" : absl::StrCat(", with \"", address, "\" in it"),
      "; want host:port, such as 127.0.0.1:50051, dns:///name:port or unix:/path, or several of "
      "these, as replicas have, with commas and nothing else between them: host-a:50051,host-b:50051"));
}

}  // namespace

absl::StatusOr<std::vector<std::string>> SplitTargets(const std::string& targets) {
  std::vector<std::string> split = {targets};
  if (!IsOneOfGrpc(targets)) split = absl::StrSplit(targets, ',');
  for (size_t i = 0; i < split.size(); ++i) {
    if (absl::Status is = CheckAddress(split[i], targets); !is.ok()) return is;
    if (i > 0 && IsOneOfGrpc(split[i])) {
      return absl::InvalidArgumentError(
          absl::StrCat("target is \"", targets, "\", with \"", split[i],
                       "\" behind a comma; leave the scheme out: 10.0.0.1:50051,10.0.0.2:50051"));
    }
    if (std::find(split.begin(), split.begin() + static_cast<std::ptrdiff_t>(i), split[i]) !=
        split.begin() + static_cast<std::ptrdiff_t>(i)) {
      return absl::InvalidArgumentError(
          absl::StrCat("target is \"", targets, "\", with ", split[i], " twice; name each replica once"));
    }
  }
  return split;
}

absl::StatusOr<std::unique_ptr<ReplicaChannels>> ReplicaChannels::Create(const std::string& targets,
                                                                         const ChannelSettings& settings) {
  const auto split = SplitTargets(targets);
  if (!split.ok()) return split.status();
  const auto others = split->size() > 1 ? WatchedServer::Others::kAre : WatchedServer::Others::kNone;
  std::vector<std::shared_ptr<ServerChannel>> servers;
  servers.reserve(split->size());
  for (const std::string& target : *split) {
    auto server = ServerChannel::Create(target, settings, others);
    if (!server.ok()) return server.status();
    servers.push_back(*std::move(server));
  }
  return std::unique_ptr<ReplicaChannels>(new ReplicaChannels(std::move(servers), settings));
}

std::shared_ptr<ServerChannel> ReplicaChannels::current() const {
  const std::lock_guard lock(mutex_);
  return servers_[current_];
}

void ReplicaChannels::Leave(const ServerChannel& server) {
  const std::lock_guard lock(mutex_);
  if (servers_[current_].get() == &server) current_ = (current_ + 1) % servers_.size();
}

void ReplicaChannels::Renew(const ServerChannel& server) {
  if (server.is_connected() || server.is_new()) return;
  const std::lock_guard lock(mutex_);
  for (std::shared_ptr<ServerChannel>& place : servers_) {
    if (place.get() != &server) continue;
    if (auto again = server.Again(); again.ok()) place = *std::move(again);
    return;
  }
}

std::string ReplicaChannels::PlaceOf(const ServerChannel& server) {
  std::string peer = server.peer();
  const std::string& target = server.target();
  const bool is_address = IsOneOfGrpc(peer);
  // Behind a proxy gRPC tells the proxy's address instead of the server's.
  const bool is_servers = is_address && !ProxyTo(target, server.watched().options).is_used;
  if (!is_servers || peer == target || peer.substr(peer.find(':') + 1) == target) return "";
  return peer;
}

absl::StatusOr<std::shared_ptr<ServerChannel>> ReplicaChannels::At(const std::string& target) {
  {
    const std::lock_guard lock(mutex_);
    for (const std::shared_ptr<ServerChannel>& server : servers_) {
      if (server->target() == target) return server;
    }
  }
  const std::shared_ptr<ServerChannel> called = current();
  // There it has been already.
  const bool is_called = called->peer() == target;
  if (!is_called) {
    absl::Status may = CheckTokenMayGo(target, called->target(), settings_.options);
    if (!may.ok()) return may;
  }
  const std::lock_guard lock(mutex_);
  std::shared_ptr<ServerChannel>& server = elsewhere_[target];
  if (server == nullptr) {
    auto made = ServerChannel::Create(target, settings_, WatchedServer::Others::kAre,
                                      is_called ? called->host() : "");
    if (!made.ok()) {
      elsewhere_.erase(target);
      return made.status();
    }
    server = *std::move(made);
  }
  return server;
}

}  // namespace lossd::internal
