#include "server/rpc/calls/open_calls.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <thread>

namespace lossd::rpc::open_calls_test {
namespace {

constexpr std::chrono::hours kForEver(1);
constexpr std::chrono::milliseconds kNotAtAll(0);

TEST(OpenCalls, CallsAreWaitedFor) {
  OpenCalls calls;
  calls.Begin();
  calls.Begin();
  calls.BeginDrain();
  std::atomic<bool> over = false;
  std::thread waiting([&] {
    EXPECT_TRUE(calls.AwaitEnd(kForEver));
    EXPECT_TRUE(over);
  });
  calls.End();
  over = true;
  calls.End();
  waiting.join();
}

TEST(OpenCalls, WatchesAreWaitedForUntilTheyWereToldOfTheDrain) {
  OpenCalls calls;
  OpenCalls::Watch watch(&calls);
  std::optional<OpenCalls::Watch> gone(std::in_place, &calls);
  watch.NoteSend();  // that it serves
  calls.BeginDrain();
  watch.NoteSent();
  std::atomic<bool> told = false;
  std::thread waiting([&] {
    EXPECT_TRUE(calls.AwaitEnd(kForEver));
    EXPECT_TRUE(told);
  });
  gone.reset();
  watch.NoteSend();
  told = true;
  watch.NoteSent();
  waiting.join();
}

TEST(OpenCalls, AWatchThatDoesNotReadIsNotWaitedForLong) {
  OpenCalls calls;
  const OpenCalls::Watch watch(&calls);
  calls.BeginDrain();
  EXPECT_TRUE(calls.AwaitEnd(kNotAtAll));
}

TEST(OpenCalls, AFarewellEndsWithoutACutWhenSomebodyCallsAgain) {
  OpenCalls calls;
  calls.BeginDrain();
  EXPECT_TRUE(calls.AwaitFarewell(kNotAtAll, kNotAtAll));
  std::thread waiting([&] { EXPECT_FALSE(calls.AwaitFarewell(kForEver, kNotAtAll)); });
  calls.Begin();
  waiting.join();
  EXPECT_FALSE(calls.AwaitFarewell(kNotAtAll, kNotAtAll));
}

TEST(OpenCalls, AFarewellLeavesTheLastAnswerTimeToArrive) {
  OpenCalls calls;
  calls.BeginDrain();
  calls.Begin();
  calls.End();
  std::thread waiting([&] { EXPECT_FALSE(calls.AwaitFarewell(kNotAtAll, kForEver)); });
  calls.Begin();
  waiting.join();
}

TEST(OpenCalls, StopEndsEveryWaiting) {
  OpenCalls calls;
  calls.Begin();
  std::thread waiting([&] {
    EXPECT_FALSE(calls.AwaitEnd(kForEver));
    EXPECT_FALSE(calls.AwaitFarewell(kForEver, kForEver));
  });
  calls.Stop();
  waiting.join();
}

}  // namespace
}  // namespace lossd::rpc::open_calls_test
