#include "tests/integration/client_resume/cutting_proxy.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <utility>

namespace lossd::testing {
namespace {

constexpr int kPollMilliseconds = 20;  // how soon CutAll and the destructor are noticed

sockaddr_in Loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

// Closes with a reset, as a peer that vanished does.
void Reset(int fd) {
  const linger now{.l_onoff = 1, .l_linger = 0};
  setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
  close(fd);
}

// Passes on at once what comes in small pieces: each would otherwise wait 40 ms for the last one's
// acknowledgement.
void SendWithoutDelay(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

bool SendAll(int fd, const char* data, ssize_t size) {
  while (size > 0) {
    const ssize_t sent = send(fd, data, static_cast<size_t>(size), MSG_NOSIGNAL);
    if (sent <= 0) return false;
    data += sent;
    size -= sent;
  }
  return true;
}

}  // namespace

CuttingProxy::CuttingProxy(int backend_port, Budget budget)
    : budget_(std::move(budget)), backend_port_(backend_port) {
  listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof address;
  if (bind(listener_, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      listen(listener_, 64) != 0 ||
      getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    std::abort();
  }
  port_ = ntohs(address.sin_port);
  acceptor_ = std::thread([this] { Accept(); });
}

CuttingProxy::~CuttingProxy() {
  stopping_ = true;
  acceptor_.join();
  CutAll();
  for (Connection& connection : connections_) connection.thread.join();
  close(listener_);
}

void CuttingProxy::CutAll() {
  const std::lock_guard lock(mutex_);
  for (Connection& connection : connections_) connection.cut = true;
}

void CuttingProxy::Accept() {
  for (int number = 0; !stopping_;) {
    pollfd waiting{.fd = listener_, .events = POLLIN, .revents = 0};
    if (poll(&waiting, 1, kPollMilliseconds) <= 0) continue;
    const int client = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (client < 0) continue;
    const int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const sockaddr_in address = Loopback(backend_port_);
    if (connect(server, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
      Reset(client);
      close(server);
      continue;
    }
    SendWithoutDelay(client);
    SendWithoutDelay(server);
    const int64_t budget = budget_ ? budget_(number) : -1;
    ++number;
    const std::lock_guard lock(mutex_);
    Connection& connection = connections_.emplace_back();
    connection.client = client;
    connection.server = server;
    connection.thread = std::thread([this, &connection, budget] { Serve(&connection, budget); });
  }
}

void CuttingProxy::Serve(Connection* connection, int64_t budget) {
  std::array<char, 4096> buffer;
  bool open = true;
  while (open && !connection->cut) {
    std::array<pollfd, 2> ends{pollfd{.fd = connection->client, .events = POLLIN, .revents = 0},
                               pollfd{.fd = connection->server, .events = POLLIN, .revents = 0}};
    if (poll(ends.data(), ends.size(), kPollMilliseconds) <= 0) continue;
    for (size_t i = 0; open && i < ends.size(); ++i) {
      if (ends[i].revents == 0) continue;
      ssize_t size = recv(ends[i].fd, buffer.data(), buffer.size(), 0);
      open = size > 0;
      if (open && budget >= 0) {
        size = std::min<ssize_t>(size, budget);
        budget -= size;
      }
      open = open && SendAll(ends[1 - i].fd, buffer.data(), size);
      if (budget == 0) {
        ++cuts_;
        open = false;
      }
    }
  }
  Reset(connection->client);
  Reset(connection->server);
}

}  // namespace lossd::testing
