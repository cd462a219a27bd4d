// What happens to the connection while a call waits to be made again.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>

#include "lossd/client.h"
#include "tests/support/wait.h"
#include "tests/unit/client/fake_server.h"

namespace lossd::waiting_call_test {
namespace {

using testing::FakeServer;

// Whether anybody connects to this port of 127.0.0.1 within a minute.
bool SomebodyConnects(uint16_t port) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  const int on = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  // Somebody else may have been given the port meanwhile, for a moment.
  testing::Await("the port",
                 [&] { return bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0; });
  if (listen(listener, 1) != 0) return false;
  pollfd waited{.fd = listener, .events = POLLIN, .revents = 0};
  return poll(&waited, 1, 60'000) == 1;
}

// A call is sent away for an hour, then its server goes and comes back.
bool ServerIsLookedForMeanwhile() {
  auto fake = std::make_unique<FakeServer>();
  fake->busy_deletions = 1;
  fake->busy_delay = std::chrono::hours(1);
  const std::string target = fake->target();
  auto connected = Client::Connect(target, {.reconnect_timeout = std::chrono::hours(2)});
  if (!connected.ok()) return false;
  Client* const client = connected->release();  // the call that waits outlives this function
  std::thread([client] { static_cast<void>(client->DeleteHead(FakeServer::kName)); }).detach();
  testing::Await("the refusal", [&fake] { return fake->observed().refused_deletions > 0; });
  // The answer is on its way; cut off, it would be made again at once, and prove nothing.
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  fake.reset();
  return SomebodyConnects(static_cast<uint16_t>(std::stoi(target.substr(target.rfind(':') + 1))));
}

// By itself gRPC makes a lost connection again when the next call is made, and its first attempts of that may
// come seconds apart. In a process of its own, since the call that waits can only end with it.
TEST(WaitingCallDeathTest, ItsServerIsLookedForBeforeItIsMadeAgain) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_EXIT(_exit(ServerIsLookedForMeanwhile() ? 0 : 1), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace lossd::waiting_call_test
