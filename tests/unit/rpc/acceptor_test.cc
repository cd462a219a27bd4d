// Connections that gRPC does not end by itself.
#include "server/rpc/connections/acceptor.h"

#include <arpa/inet.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>

#include "server/rpc/transport/file_descriptor.h"
#include "tests/support/wait.h"

namespace lossd::rpc::acceptor_test {
namespace {

class AcceptorTest : public ::testing::Test {
 protected:
  AcceptorTest() {
    grpc::ServerBuilder builder;
    EXPECT_TRUE(acceptor_.Listen("127.0.0.1:0", grpc::InsecureServerCredentials(), builder).ok());
    builder.RegisterCallbackGenericService(&service_);
    server_ = builder.BuildAndStart();
    EXPECT_TRUE(acceptor_.Prepare().ok());
    acceptor_.Start();
  }
  ~AcceptorTest() override {
    acceptor_.Stop();
    server_->Shutdown();
  }

  // A client that gRPC has answered with its settings.
  FileDescriptor Connect() {
    FileDescriptor client(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(acceptor_.port()));
    EXPECT_EQ(connect(client.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    using std::string_view_literals::operator""sv;
    constexpr std::string_view kHello = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"sv;
    EXPECT_EQ(send(client.get(), kHello.data(), kHello.size(), 0), static_cast<ssize_t>(kHello.size()));
    std::array<char, 256> answer{};
    EXPECT_GT(recv(client.get(), answer.data(), answer.size(), 0), 0);
    return client;
  }
  static uint16_t PortOf(const FileDescriptor& client) {
    sockaddr_in address{};
    socklen_t bytes = sizeof(address);
    EXPECT_EQ(getsockname(client.get(), reinterpret_cast<sockaddr*>(&address), &bytes), 0);
    return address.sin_port;
  }
  // This process's socket that is connected to that port, as /proc names it: gRPC's.
  static std::filesystem::path SocketTo(uint16_t port) {
    for (const auto& file : std::filesystem::directory_iterator("/proc/self/fd")) {
      sockaddr_in address{};
      socklen_t bytes = sizeof(address);
      const int number = std::stoi(file.path().filename());
      if (getpeername(number, reinterpret_cast<sockaddr*>(&address), &bytes) == 0 &&
          address.sin_port == port) {
        return std::filesystem::read_symlink(file.path());
      }
    }
    return {};
  }
  static bool IsOpen(const std::filesystem::path& socket) {
    for (const auto& file : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code error;  // it may be closed meanwhile
      if (std::filesystem::read_symlink(file.path(), error) == socket) return true;
    }
    return false;
  }
  static bool ReadsToItsEnd(const FileDescriptor& client) {
    std::array<char, 256> rest{};
    ssize_t bytes = 0;
    while ((bytes = recv(client.get(), rest.data(), rest.size(), 0)) > 0) {
    }
    return bytes == 0 || errno == ECONNRESET;
  }

  Acceptor acceptor_{Acceptor::For::kClients, {}};
  grpc::CallbackGenericService service_;
  std::unique_ptr<grpc::Server> server_;
};

TEST_F(AcceptorTest, WhatGrpcStillHasIsCutOff) {
  const FileDescriptor one = Connect();
  const FileDescriptor other = Connect();
  acceptor_.Stop();
  EXPECT_EQ(acceptor_.CutOffAll(), 2);
  EXPECT_TRUE(ReadsToItsEnd(one));
  EXPECT_TRUE(ReadsToItsEnd(other));
  EXPECT_EQ(acceptor_.CutOffAll(), 0);
}

TEST_F(AcceptorTest, WhatIsClosedIsLeftAlone) {
  std::filesystem::path socket_of_grpc;
  {
    const FileDescriptor client = Connect();
    socket_of_grpc = SocketTo(PortOf(client));
  }
  ASSERT_FALSE(socket_of_grpc.empty());
  // It does so in a thread, and its socket is connected no more before that.
  lossd::testing::Await("gRPC to close its socket", [&] { return !IsOpen(socket_of_grpc); });
  acceptor_.Stop();
  server_->Shutdown();
  // The number may be another socket's by now.
  const FileDescriptor another = FileDescriptor(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(acceptor_.CutOffAll(), 0);
}

}  // namespace
}  // namespace lossd::rpc::acceptor_test
