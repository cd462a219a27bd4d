// A name that comes to another address while a client uses it.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "lossd/client.h"
#include "lossd/v1/status.grpc.pb.h"

namespace lossd::moved_name_test {
namespace {

constexpr char kOldAddress[] = "127.0.0.2";
constexpr char kNewAddress[] = "127.0.0.3";

// Answers every question for an IPv4 address with one address, and others with none.
class NameServer {
 public:
  explicit NameServer(const char* address) {
    SetAddress(address);
    sockaddr_in own{};
    own.sin_family = AF_INET;
    own.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(own);
    auto* const any = reinterpret_cast<sockaddr*>(&own);
    EXPECT_EQ(bind(socket_, any, size), 0);
    EXPECT_EQ(getsockname(socket_, any, &size), 0);
    target_ = "127.0.0.1:" + std::to_string(ntohs(own.sin_port));
    thread_ = std::thread([this] { Serve(); });
  }
  ~NameServer() {
    shutdown(socket_, SHUT_RDWR);
    thread_.join();
    close(socket_);
  }

  const std::string& target() const { return target_; }
  void SetAddress(const char* address) { address_ = inet_addr(address); }

 private:
  void Serve() {
    std::array<char, 512> buffer{};
    sockaddr_in peer{};
    for (;;) {
      socklen_t size = sizeof(peer);
      auto* const any = reinterpret_cast<sockaddr*>(&peer);
      const ssize_t received = recvfrom(socket_, buffer.data(), buffer.size(), 0, any, &size);
      if (received <= 0) return;
      const std::string answer = AnswerTo({buffer.data(), static_cast<size_t>(received)});
      sendto(socket_, answer.data(), answer.size(), 0, any, size);
    }
  }

  // The question follows 12 bytes of a header: the labels of the name, a type and a class of two bytes each.
  std::string AnswerTo(const std::string& query) const {
    const size_t type = query.find('\0', 12) + 1;
    const bool is_ipv4 = query.substr(type, 2) == std::string("\0\1", 2);
    const std::string counts =
        is_ipv4 ? std::string("\0\1\0\1\0\0\0\0", 8) : std::string("\0\1\0\0\0\0\0\0", 8);
    std::string answer = query.substr(0, 2) + "\x81\x80" + counts + query.substr(12, type + 4 - 12);
    if (!is_ipv4) return answer;
    const uint32_t address = address_;
    return answer + std::string("\xc0\x0c\0\1\0\1\0\0\0\0\0\4", 12) +
           std::string(reinterpret_cast<const char*>(&address), sizeof(address));
  }

  const int socket_ = socket(AF_INET, SOCK_DGRAM, 0);
  std::atomic<uint32_t> address_ = 0;
  std::string target_;
  std::thread thread_;
};

class StatusServer final : public v1::StatusService::Service {
 public:
  StatusServer(const std::string& host, int port) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort(host + ":" + std::to_string(port), grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  int port() const { return port_; }

 private:
  grpc::Status GetStatus(grpc::ServerContext* /*context*/, const v1::GetStatusRequest* /*request*/,
                         v1::GetStatusResponse* /*response*/) override {
    return grpc::Status::OK;
  }

  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

// By itself gRPC looks a name up every 30 s.
TEST(MovedNameTest, TheNewAddressIsFoundWithinThePatienceOfACall) {
  NameServer names(kOldAddress);
  auto before = std::make_unique<StatusServer>(kOldAddress, 0);
  const std::string target = "dns://" + names.target() + "/lossd.test:" + std::to_string(before->port());
  const auto client = Client::Connect(target, {.reconnect_timeout = std::chrono::seconds(20)});
  ASSERT_TRUE(client.ok()) << client.status();
  const StatusServer after(kNewAddress, before->port());
  ASSERT_EQ(after.port(), before->port());
  names.SetAddress(kNewAddress);
  before.reset();
  const auto status = (*client)->Status();
  EXPECT_TRUE(status.ok()) << status.status();
}

}  // namespace
}  // namespace lossd::moved_name_test
