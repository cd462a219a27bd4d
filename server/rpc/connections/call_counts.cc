#include "server/rpc/connections/call_counts.h"

#include <grpc/grpc.h>
#include <grpc/support/alloc.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "server/engine/common/mutex.h"

namespace lossd::rpc {
namespace {

using nlohmann::json;

// channelz has 64-bit numbers as strings, and leaves out those that are zero.
int64_t Number(const json& object, const char* name) {
  int64_t number = 0;
  const auto found = object.find(name);
  if (found != object.end() && found->is_string()) (void)absl::SimpleAtoi(found->get<std::string>(), &number);
  return number;
}

const json& Part(const json& object, const char* name) {
  static const json kNothing = json::object();
  const auto found = object.find(name);
  return found == object.end() ? kNothing : *found;
}

// What one of gRPC's functions says; empty if what was asked for is gone.
json Parse(char* text) {
  const std::unique_ptr<char, decltype(&gpr_free)> owned(text, gpr_free);
  if (text == nullptr) return json::object();
  json parsed = json::parse(text, nullptr, /*allow_exceptions=*/false);
  return parsed.is_object() ? std::move(parsed) : json::object();
}

engine::Mutex& ListMutex() {
  static engine::Mutex mutex;
  return mutex;
}

// There are two at most: --listen's and --health_listen's.
json Servers() {
  const engine::MutexLock lock(ListMutex());
  return Part(Parse(grpc_channelz_get_servers(0)), "server");
}

// None of a socket file.
std::optional<TcpAddress> ReadAddress(const json& end) {
  const json& address = Part(end, "tcpip_address");
  std::string bytes;
  if (!address.contains("ip_address") || !address.contains("port") ||
      !absl::Base64Unescape(address["ip_address"].get<std::string>(), &bytes)) {
    return std::nullopt;
  }
  const std::optional<std::string> host = PlainHost(bytes);
  if (!host.has_value()) return std::nullopt;
  return TcpAddress{*host, address["port"].get<int>()};
}

std::optional<ConnectionCalls> ReadSocket(int64_t id) {
  const json answer = Parse(grpc_channelz_get_socket(id));
  const json& socket = Part(answer, "socket");
  const std::optional<TcpAddress> peer = ReadAddress(Part(socket, "remote"));
  const std::optional<TcpAddress> local = ReadAddress(Part(socket, "local"));
  if (!peer.has_value() || !local.has_value()) return std::nullopt;
  const json& data = Part(socket, "data");
  const int64_t reset = Number(data, "streamsFailed");
  return ConnectionCalls{
      .id = id,
      .connection = {.peer = *peer, .local = *local},
      .unfinished = Number(data, "streamsStarted") - Number(data, "streamsSucceeded") - reset,
      .reset = reset};
}

}  // namespace

std::unique_ptr<grpc::Server> BuildAndStart(grpc::ServerBuilder& builder) {
  const engine::MutexLock lock(ListMutex());
  return builder.BuildAndStart();
}

int64_t ChannelzCounts::Begun() {
  int64_t begun = 0;
  for (const json& server : Servers()) begun += Number(Part(server, "data"), "callsStarted");
  return begun;
}

std::vector<ConnectionCalls> ChannelzCounts::ByConnection() {
  std::vector<ConnectionCalls> connections;
  for (const json& server : Servers()) {
    const int64_t id = Number(Part(server, "ref"), "serverId");
    int64_t first = 0;
    for (bool more = true; more;) {
      const json page = Parse(grpc_channelz_get_server_sockets(id, first, /*max_results=*/0));
      more = page.contains("socketRef") && !page.contains("end");
      for (const json& socket : Part(page, "socketRef")) {
        const int64_t number = Number(socket, "socketId");
        first = number + 1;
        if (auto calls = ReadSocket(number); calls.has_value()) connections.push_back(*std::move(calls));
      }
    }
  }
  return connections;
}

}  // namespace lossd::rpc
