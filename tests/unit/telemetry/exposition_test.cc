#include "server/telemetry/metrics/exposition.h"

#include <gtest/gtest.h>
#include <prometheus/text_serializer.h>

#include <cmath>

namespace lossd::telemetry::exposition_test {
namespace {

constexpr Metric kCalls{"calls_total", "Calls.", kCounter, {"method", "code"}};
constexpr Metric kAge{"age_seconds", "Age.", kGauge};
constexpr Metric kTime{"time_seconds", "Time.", kHistogram, {"stage"}};

std::string Text(Exposition& exposition) { return prometheus::TextSerializer().Serialize(exposition.Take()); }

TEST(Exposition, WritesWhatAMetricIsAndItsValuesUnderItsLabels) {
  engine::Counter ok{3};
  Exposition exposition;
  exposition.Begin(kCalls);
  exposition.Add({"Get", "OK"}, ok);
  exposition.Add({"Get", "ABORTED"}, uint64_t{0});
  exposition.Only(kAge, 1.5);
  EXPECT_EQ(Text(exposition),
            "# HELP calls_total Calls.\n# TYPE calls_total counter\n"
            "calls_total{method=\"Get\",code=\"OK\"} 3\n"
            "calls_total{method=\"Get\",code=\"ABORTED\"} 0\n"
            "# HELP age_seconds Age.\n# TYPE age_seconds gauge\nage_seconds 1.5\n");
}

TEST(Exposition, LabelValuesCannotEndTheirQuotesOrTheirLine) {
  Exposition exposition;
  exposition.Begin(kCalls);
  exposition.Add({"a\"} 1\nb{\\", "OK"}, 1);
  EXPECT_NE(Text(exposition).find("{method=\"a\\\"} 1\\nb{\\\\\",code=\"OK\"} 1\n"), std::string::npos);
}

TEST(Exposition, BucketsOfHistogramsCountAllBelowThem) {
  engine::DurationHistogram times;
  times.Observe(0.0002);  // up to 0.00025
  times.Observe(0.0002);
  times.Observe(0.02);  // up to 0.025
  times.Observe(100);   // above every bound
  Exposition exposition;
  exposition.Begin(kTime);
  exposition.Add({"forward"}, times);
  const std::string text = Text(exposition);
  for (const char* line :
       {"_bucket{stage=\"forward\",le=\"0.0001\"} 0\n", "_bucket{stage=\"forward\",le=\"0.00025\"} 2\n",
        "_bucket{stage=\"forward\",le=\"0.01\"} 2\n", "_bucket{stage=\"forward\",le=\"0.025\"} 3\n",
        "_bucket{stage=\"forward\",le=\"30\"} 3\n", "_bucket{stage=\"forward\",le=\"+Inf\"} 4\n",
        "_count{stage=\"forward\"} 4\n", "_sum{stage=\"forward\"} 100.0204\n"}) {
    EXPECT_NE(text.find(std::string("time_seconds") + line), std::string::npos) << line << text;
  }
}

TEST(Exposition, SaysOfAValueThatItIsNotFinite) {
  Exposition exposition;
  exposition.Only(kAge, std::nan(""));
  EXPECT_NE(Text(exposition).find("age_seconds Nan\n"), std::string::npos);
}

}  // namespace
}  // namespace lossd::telemetry::exposition_test
