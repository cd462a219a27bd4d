#include "server/telemetry/status_page/html.h"

#include <gtest/gtest.h>

#include <limits>

namespace lossd::telemetry::html_test {
namespace {

TEST(Html, EscapesAllThatCouldBecomeMarkup) {
  EXPECT_EQ(Escape("<a href='x' b=\"y\">&</a>"), "&lt;a href=&#39;x&#39; b=&quot;y&quot;&gt;&amp;&lt;/a&gt;");
  EXPECT_EQ(Escape("‖dW‖ 1.5"), "‖dW‖ 1.5");
}

TEST(Html, BytesAreInTheUnitThatFits) {
  EXPECT_EQ(BytesText(0), "0 B");
  EXPECT_EQ(BytesText(1023), "1023 B");
  EXPECT_EQ(BytesText(1536), "1.5 KiB");
  EXPECT_EQ(BytesText(80.0 * (1 << 30)), "80.0 GiB");
}

TEST(Html, CountsAreShort) {
  EXPECT_EQ(CountText(0), "0");
  EXPECT_EQ(CountText(12.34), "12.3");
  EXPECT_EQ(CountText(999), "999");
  EXPECT_EQ(CountText(1234), "1,234");
  EXPECT_EQ(CountText(1005), "1,005");
  EXPECT_EQ(CountText(45'678), "45.7 k");
  EXPECT_EQ(CountText(8'900'000), "8.9 M");
}

TEST(Html, ValuesThatAreNotFiniteHaveNames) {
  EXPECT_EQ(ValueText(2.302585), "2.3026");
  EXPECT_EQ(ValueText(std::numeric_limits<double>::quiet_NaN()), "NaN");
  EXPECT_EQ(ValueText(-std::numeric_limits<double>::infinity()), "-inf");
}

TEST(Html, DurationsAreInTheUnitThatFits) {
  EXPECT_EQ(DurationText(0), "0.0 s");
  EXPECT_EQ(DurationText(59.94), "59.9 s");
  EXPECT_EQ(DurationText(245), "4 min 5 s");
  EXPECT_EQ(DurationText(6 * 3600 + 7 * 60), "6 h 7 min");
  EXPECT_EQ(DurationText(8 * 86400 + 9 * 3600), "8 d 9 h");
}

}  // namespace
}  // namespace lossd::telemetry::html_test
