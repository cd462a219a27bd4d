#include "server/rpc/connections/handovers.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <thread>

#include "absl/synchronization/notification.h"

namespace lossd::rpc::handovers_test {
namespace {

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
  handovers.Begin(server_.get(), [&](size_t) { over.WaitForNotification(); });
  handovers.Begin(server_.get(), [&](size_t) { done.Notify(); });
  done.WaitForNotification();
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
      over.WaitForNotification();
    });
  }
  EXPECT_FALSE(handovers.HasRoom());
  over.Notify();
  while (handovers.AnyLasts()) std::this_thread::yield();
  EXPECT_TRUE(handovers.HasRoom());
  for (const std::atomic<int>& times : taken) EXPECT_EQ(times, 1);
}

TEST_F(HandoversTest, WhatTakesTheProcessorForLongIsEndedOnceOthersWantItsPlace) {
  absl::Notification over;
  Handovers handovers;
  handovers.Begin(server_.get(), [&](size_t) { ReadUntilItIsCutOff(); });
  for (size_t i = 2; i < Handovers::kMost; ++i) {
    handovers.Begin(client_.get(), [&](size_t) { over.WaitForNotification(); });
  }
  std::this_thread::sleep_for(2 * Handovers::kMostTime);
  EXPECT_TRUE(handovers.EndOverdue().empty());
  handovers.Begin(client_.get(), [&](size_t) { over.WaitForNotification(); });
  size_t ended = 0;
  while (ended == 0) ended = handovers.EndOverdue().size();
  EXPECT_EQ(ended, 1u);
  while (!handovers.EndOverdue().empty()) ADD_FAILURE() << "it counts once";
  over.Notify();
  while (handovers.AnyLasts()) std::this_thread::yield();
}

TEST_F(HandoversTest, TheEndWaitsForNoneThatLasts) {
  Handovers handovers;
  handovers.Begin(server_.get(), [&](size_t) { ReadUntilItIsCutOff(); });
  handovers.Stop();
  EXPECT_FALSE(handovers.AnyLasts());
}

}  // namespace
}  // namespace lossd::rpc::handovers_test
