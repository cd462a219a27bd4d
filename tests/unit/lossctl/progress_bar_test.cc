// Progress of transfers: bars that redraw and erase themselves, sparse lines in a log, sizes and times people
// can read.
#include "client/tools/progress_bar.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace lossd::tools::progress_bar_test {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr int64_t kMiB = 1 << 20;

class ProgressBarTest : public ::testing::Test {
 protected:
  ProgressBar Make(ProgressBar::Style style) {
    return ProgressBar(
        "moving", style, [this] { return now_; }, [this](const std::string& text) { drawn_.push_back(text); },
        /*unicode=*/false);
  }

  std::chrono::steady_clock::time_point now_{};
  std::vector<std::string> drawn_;
};

TEST_F(ProgressBarTest, ABarShowsShareRateAndTimeLeftAndErasesItself) {
  {
    ProgressBar bar = Make(ProgressBar::Style::kBar);
    bar.Update(0, 100 * kMiB);
    now_ += std::chrono::seconds(2);
    bar.Update(25 * kMiB, 100 * kMiB);
    now_ += milliseconds(10);
    bar.Update(26 * kMiB, 100 * kMiB);  // too soon to be drawn
    bar.Update(100 * kMiB, 100 * kMiB);
  }
  EXPECT_THAT(
      drawn_,
      ElementsAre(
          "\r\033[Kmoving  ........................   0 %  0 B of 100.0 MiB",
          "\r\033[Kmoving  ######..................  25 %  25.0 MiB of 100.0 MiB  12.5 MiB/s  6 s left",
          "\r\033[Kmoving  ######################## 100 %  100.0 MiB of 100.0 MiB  49.8 MiB/s", "\r\033[K"));
}

TEST_F(ProgressBarTest, ALogGetsALineNowAndThenAndNothingForAShortTransfer) {
  {
    ProgressBar bar = Make(ProgressBar::Style::kLines);
    bar.Update(0, 10 * kMiB);
    now_ += milliseconds(4900);
    bar.Update(10 * kMiB, 10 * kMiB);
  }
  EXPECT_THAT(drawn_, IsEmpty());
  {
    ProgressBar bar = Make(ProgressBar::Style::kLines);
    now_ += milliseconds(5000);
    bar.Update(5 * kMiB, 10 * kMiB);
    now_ += milliseconds(4000);
    bar.Update(8 * kMiB, 10 * kMiB);
    now_ += milliseconds(1000);
    bar.Update(10 * kMiB, 10 * kMiB);
  }
  EXPECT_THAT(drawn_, ElementsAre("moving   50 %  5.0 MiB of 10.0 MiB  1.0 MiB/s  5 s left\n",
                                  "moving  100 %  10.0 MiB of 10.0 MiB  1.0 MiB/s\n"));
}

TEST_F(ProgressBarTest, SilentIsSilent) {
  {
    ProgressBar bar = Make(ProgressBar::Style::kSilent);
    now_ += std::chrono::hours(1);
    bar.Update(1, 1);
  }
  EXPECT_THAT(drawn_, IsEmpty());
}

TEST_F(ProgressBarTest, AnEmptyTransferIsComplete) {
  ProgressBar bar = Make(ProgressBar::Style::kBar);
  bar.Update(0, 0);
  EXPECT_THAT(drawn_, ElementsAre("\r\033[Kmoving  ######################## 100 %  0 B of 0 B"));
}

TEST(DrawBarTest, CutsWhatIsOutOfRange) {
  EXPECT_EQ(DrawBar(0.5, 4, false), "##..");
  EXPECT_EQ(DrawBar(0.5, 4, true), "██░░");
  EXPECT_EQ(DrawBar(-1, 4, false), "....");
  EXPECT_EQ(DrawBar(7, 4, false), "####");
  EXPECT_EQ(DrawBar(std::numeric_limits<double>::quiet_NaN(), 4, false), "....");
}

TEST(FormatTest, BytesNeverShow1024OfAUnit) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1024), "1.0 KiB");
  EXPECT_EQ(FormatBytes(kMiB - 1), "1.0 MiB");
  EXPECT_EQ(FormatBytes(1536 * kMiB), "1.5 GiB");
  EXPECT_EQ(FormatBytes(std::numeric_limits<int64_t>::max()), "8192.0 PiB");
}

TEST(FormatTest, SecondsGrowIntoMinutesHoursAndDays) {
  EXPECT_EQ(FormatSeconds(-3), "0 s");
  EXPECT_EQ(FormatSeconds(59.4), "59 s");
  EXPECT_EQ(FormatSeconds(59.6), "1 min 0 s");
  EXPECT_EQ(FormatSeconds(3725), "1 h 2 min");
  EXPECT_EQ(FormatSeconds(90000), "1 d 1 h");
}

}  // namespace
}  // namespace lossd::tools::progress_bar_test
