#include "server/startup/group/connecting_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace lossd::connecting_watch_test {
namespace {

using ::testing::ExitedWithCode;
using ::testing::HasSubstr;

// Logs go where the test looks.
void LogToStandardError() { dup2(STDERR_FILENO, STDOUT_FILENO); }

void WaitForEver() {
  for (;;) pause();
}

TEST(ConnectingWatch, ARankThatDoesNotGetThroughEndsAndSaysWhichFlagTellsHowLongItTries) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        LogToStandardError();
        const ConnectingWatch watch(absl::Milliseconds(50), nullptr);
        WaitForEver();
      },
      ExitedWithCode(1), HasSubstr("within 50ms (--group_start_timeout)"));
}

TEST(ConnectingWatch, ALeaderThatIsToldToEndMeanwhileDoes) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        LogToStandardError();
        const ConnectingWatch watch(absl::Hours(1), [] { return true; });
        WaitForEver();
      },
      ExitedWithCode(1), HasSubstr("told to end, and the ranks do not get through"));
}

TEST(ConnectingWatch, NothingHappensOnceRanksAreConnected) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        {
          const ConnectingWatch watch(absl::Milliseconds(200), [] { return false; });
        }
        absl::SleepFor(absl::Milliseconds(400));
        _exit(0);
      },
      ExitedWithCode(0), "");
}

}  // namespace
}  // namespace lossd::connecting_watch_test
