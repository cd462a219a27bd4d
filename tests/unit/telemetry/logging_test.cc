#include "server/telemetry/common/logging.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace lossd::telemetry::logging_test {
namespace {

TEST(LogValueTest, IsWhatJsonHas) {
  const struct {
    LogValue value;
    std::string json;
  } rows[] = {
      {true, "true"},
      {int8_t{-7}, "-7"},
      {uint8_t{65}, "65"},
      {std::numeric_limits<int64_t>::min(), "-9223372036854775808"},
      {std::numeric_limits<uint64_t>::max(), "18446744073709551615"},
      {0.25f, "0.25"},
      {1.0, "1.0"},
      {std::numeric_limits<double>::infinity(), "null"},
      {std::numeric_limits<double>::quiet_NaN(), "null"},
      {"a \"line\"\n", R"("a \"line\"\n")"},
      {std::string("\0", 1), R"("\u0000")"},
      {std::string_view("short of this", 5), R"("short")"},
      {static_cast<const char*>(nullptr), "null"},
      {"\xff is no UTF-8", "\"\xEF\xBF\xBD is no UTF-8\""},
      {std::vector<int>{}, "[]"},
      {std::vector<int>{4}, "[4]"},
      {std::vector<std::string>{"a", "b", ""}, R"(["a","b",""])"},
      {LogValue::Of({{{"rank", 1}}}), R"([{"rank":1}])"},
  };
  for (const auto& row : rows) EXPECT_EQ(row.value.json(), row.json);
}

}  // namespace
}  // namespace lossd::telemetry::logging_test
