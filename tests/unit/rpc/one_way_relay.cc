#include "tests/unit/rpc/one_way_relay.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cstdlib>

namespace lossd::rpc::testing {
namespace {

sockaddr_in Loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

}  // namespace

OneWayRelay::OneWayRelay(int port) : listener_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  const sockaddr_in any = Loopback(0);
  if (bind(listener_.get(), reinterpret_cast<const sockaddr*>(&any), sizeof(any)) != 0 ||
      listen(listener_.get(), 1) != 0) {
    std::abort();
  }
  thread_ = std::thread([this, port] { Run(port); });
}

OneWayRelay::~OneWayRelay() {
  for (const FileDescriptor* file : {&listener_, &client_, &server_}) {
    if (file->valid()) shutdown(file->get(), SHUT_RDWR);
  }
  thread_.join();
}

std::string OneWayRelay::address() const {
  sockaddr_in own{};
  socklen_t size = sizeof(own);
  if (getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&own), &size) != 0) std::abort();
  return "127.0.0.1:" + std::to_string(ntohs(own.sin_port));
}

void OneWayRelay::Run(int port) {
  client_ = FileDescriptor(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!client_.valid()) return;
  server_ = FileDescriptor(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_in there = Loopback(port);
  if (connect(server_.get(), reinterpret_cast<const sockaddr*>(&there), sizeof(there)) != 0) std::abort();
  std::thread back([this] { Pass(server_.get(), client_.get(), server_silent_); });
  Pass(client_.get(), server_.get(), client_silent_);
  back.join();
}

void OneWayRelay::Pass(int from, int to, const std::atomic<bool>& silent) {
  std::array<char, 65536> bytes{};
  for (;;) {
    const ssize_t size = recv(from, bytes.data(), bytes.size(), 0);
    if (size <= 0) break;
    for (ssize_t sent = 0; sent < size && !silent;) {
      const ssize_t now = send(to, bytes.data() + sent, static_cast<size_t>(size - sent), MSG_NOSIGNAL);
      if (now <= 0) break;
      sent += now;
    }
  }
  if (!silent) shutdown(to, SHUT_WR);
}

}  // namespace lossd::rpc::testing
