#include "server/rpc/connections/handovers.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <thread>

#include "absl/synchronization/notification.h"
#include "tests/support/wait.h"

namespace lossd::rpc::handovers_test {
namespace {

using lossd::testing::Await;

class HandoversTest : public ::testing::Test {
 protected:
  HandoversTest() {
    std::array<int, 2> files{};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, files.data()), 0);
    client_ = FileDescriptor(files[0]);
    server_ = FileDescriptor(files[1]);
  }

  // As gRPC does with a connection on which something comes all the time.
  void ReadUntilItIsCutOff() {
    char byte = 0;
    while (recv(server_.get(), &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN) {
    }
  }

  FileDescriptor client_;
  FileDescriptor server_;
};

TEST_F(HandoversTest, OneThatLastsKeepsNoOtherWaiting) {
  absl::Notification over;
  absl::Notification done;
  Handovers handovers;
  handovers.Begin(server_.get(), [&](size_t) { Await("the end", over); });
  handovers.Begin(server_.get(), [&](size_t) { done.Notify(); });
  Await("the other one", done);
  EXPECT_TRUE(handovers.AnyLasts());
  over.Notify();
}

TEST_F(HandoversTest, ThereIsRoomForSoManyEachWithAPlaceOfItsOwn) {
  absl::Notification over;
  std::array<std::atomic<int>, Handovers::kMost> taken{};
  Handovers handovers;
  for (size_t i = 0; i < Handovers::kMost; ++i) {
    ASSERT_TRUE(handovers.HasRoom());
    handovers.Begin(server_.get(), [&](size_t place) {
      ++taken.at(place);
      Await("the end", over);
    });
  }
  EXPECT_FALSE(handovers.HasRoom());
  over.Notify();
  Await("the last one", [&] { return !handovers.AnyLasts(); });
  EXPECT_TRUE(handovers.HasRoom());
  for (const std::atomic<int>& times : taken) EXPECT_EQ(times, 1);
}

TEST_F(HandoversTest, WhatTakesTheProcessorForLongIsEndedOnceOthersWantItsPlace) {
  absl::Notification over;
  Handovers handovers;
  handovers.Begin(server_.get(), [&](size_t) { ReadUntilItIsCutOff(); });
  for (size_t i = 2; i < Handovers::kMost; ++i) {
    handovers.Begin(client_.get(), [&](size_t) { Await("the end", over); });
  }
  std::this_thread::sleep_for(2 * Handovers::kMostTime);
  EXPECT_TRUE(handovers.EndOverdue().empty());
  handovers.Begin(client_.get(), [&](size_t) { Await("the end", over); });
  size_t ended = 0;
  Await("one to be ended", [&] { return (ended = handovers.EndOverdue().size()) > 0; });
  EXPECT_EQ(ended, 1u);
  while (!handovers.EndOverdue().empty()) ADD_FAILURE() << "it counts once";
  over.Notify();
  Await("the last one", [&] { return !handovers.AnyLasts(); });
}

TEST_F(HandoversTest, TheEndWaitsForNoneThatLasts) {
  Handovers handovers;
  handovers.Begin(server_.get(), [&](size_t) { ReadUntilItIsCutOff(); });
  handovers.Stop();
  EXPECT_FALSE(handovers.AnyLasts());
}

}  // namespace
}  // namespace lossd::rpc::handovers_test
