// What is made of a run's numbers, and the check of answers.
#include "client/tools/perf/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/tools/perf/problem.h"
#include "client/tools/perf/settings.h"
#include "client/tools/perf/sweep.h"

namespace lossd::perf::report_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::ordered_json;

Settings SmallSettings() {
  Settings settings;
  settings.tokens = 10;
  settings.vocab = 50;
  settings.hidden = 16;
  settings.hidden_type = DataType::kFloat32;
  settings.dx_type = DataType::kBFloat16;
  return settings;
}

Findings FindingsOf(const LoadResult& load) {
  Findings findings{.target = "host:1", .server_version = "1.2.3", .device = "a device"};
  findings.load = load;
  findings.client_cpu = {.before = 1, .after = 3};
  return findings;
}

TEST(ReportTest, RatesArePerSecondAndCpuPerGigabyteOfPayload) {
  const Settings settings = SmallSettings();
  const Json report = Report(
      settings,
      FindingsOf({.seconds = 2, .batches = 4, .tokens = 40, .chunks = 8, .latencies = {0.1, 0.2, 0.3, 0.4}}));
  EXPECT_EQ(report["tokens_per_second"], 20);
  const double in = 40 * (8 + 16 * 4);
  const double out = 40 * (4 + 16 * 2);
  EXPECT_DOUBLE_EQ(report["payload_gb_per_second"]["in"], in / 2e9);
  EXPECT_DOUBLE_EQ(report["payload_gb_per_second"]["out"], out / 2e9);
  EXPECT_DOUBLE_EQ(report["cpu"]["client"]["seconds_per_gb"], 2 / ((in + out) / 1e9));
  EXPECT_TRUE(report["cpu"]["server"].is_null());
  EXPECT_TRUE(report["server_stages_ms"].is_null());
  EXPECT_DOUBLE_EQ(report["latency_ms"]["p50"], 200);
  EXPECT_DOUBLE_EQ(report["latency_ms"]["max"], 400);
  EXPECT_EQ(BytesOut([&settings] {
              Settings loss_only = settings;
              loss_only.mode = ComputeMode::kLossOnly;
              return loss_only;
            }()),
            4);
}

TEST(ReportTest, ArrivalsNeverSentCountInTheLatency) {
  const Json report = Report(
      SmallSettings(),
      FindingsOf(
          {.seconds = 1, .batches = 1, .tokens = 10, .latencies = {0.1}, .waited_in_vain = {5, 6, 7}}));
  EXPECT_EQ(report["never_sent"], 3);
  EXPECT_DOUBLE_EQ(report["latency_ms"]["p50"], 5000);
  EXPECT_THAT(ReportText(report), HasSubstr("did not keep up: 3 arrivals"));
}

TEST(ReportTest, ErrorsAreCountedByCode) {
  LoadResult load{.seconds = 1, .batches = 1, .latencies = {0.1}};
  EXPECT_FALSE(Failed(load));
  load.errors = {{absl::StatusCode::kResourceExhausted, 2}, {absl::StatusCode::kUnavailable, 3}};
  load.first_error = "what it was";
  const Json report = Report(SmallSettings(), FindingsOf(load));
  EXPECT_EQ(report["errors"]["total"], 5);
  EXPECT_EQ(report["errors"]["resource_exhausted"], 2);
  EXPECT_EQ(report["errors"]["by_code"]["UNAVAILABLE"], 3);
  EXPECT_THAT(ReportText(report), HasSubstr("5 calls failed, RESOURCE_EXHAUSTED 2, UNAVAILABLE 3"));
  EXPECT_TRUE(Failed(load));
  EXPECT_TRUE(Failed({.batches = 1, .wrong_results = 1}));
  EXPECT_TRUE(Failed({}));  // nothing was measured
}

TEST(ReportTest, ARunWithoutAnAnswerIsStillJsonAndText) {
  const Json report = Report(SmallSettings(), FindingsOf({}));
  const Json parsed = Json::parse(report.dump());
  EXPECT_TRUE(parsed["latency_ms"]["p50"].is_null());
  EXPECT_TRUE(parsed["tokens_per_second"].is_null());
  EXPECT_THAT(ReportText(parsed), HasSubstr("p50 -"));
}

TEST(SweepTest, TablesHaveARowForEachCaseAndSayWhatWentWrong) {
  const Json good =
      Report(SmallSettings(),
             FindingsOf({.seconds = 2, .batches = 4, .tokens = 40, .latencies = {0.1}, .lanes = 3}));
  const Json bad = {{"settings", ToJson(SmallSettings())}, {"error", "UNAVAILABLE: \"no\", said\n|it|"}};
  const Json sweep = {{"command", "c"}, {"time", "t"}, {"cases", {good, bad}}};
  const std::string csv = SweepCsv(sweep);
  EXPECT_THAT(csv, HasSubstr("\ntcp,1,10,0,0,3,50,16,4,20.0,"));
  EXPECT_THAT(csv, HasSubstr(",\"UNAVAILABLE: \"\"no\"\", said\n|it|\"\n"));
  EXPECT_THAT(SweepMarkdown(sweep), HasSubstr("| UNAVAILABLE: \"no\", said /it/ |\n"));
  EXPECT_THAT(ReportText(good), HasSubstr("clients: 1, lanes: 3, closed loop"));
  EXPECT_THAT(CaseLine(good), HasSubstr("20 tokens/s"));
  EXPECT_THAT(CaseLine(bad), Not(HasSubstr("tokens/s")));
}

TEST(TensorTest, ValuesAreTheSameInEveryType) {
  for (const int exponent : {0, 5, 11}) {
    Tensor fp32(DataType::kFloat32, 1001);
    fp32.FillRandom(exponent, 7);
    double largest = 0;
    for (const DataType type : {DataType::kBFloat16, DataType::kFloat16}) {
      Tensor narrow(type, 1001);
      narrow.FillRandom(exponent, 7);
      for (int64_t i = 0; i < 1001; ++i) {
        ASSERT_EQ(narrow.At(i), fp32.At(i)) << i;
        largest = std::max(largest, std::abs(fp32.At(i)));
      }
    }
    EXPECT_LT(largest, std::ldexp(1, -exponent));
    EXPECT_GT(largest, std::ldexp(0.9, -exponent));
  }
}

// What a correct server would answer, from the definition.
Outputs Answer(const Settings& settings, const Tensor& weights, const Inputs& inputs) {
  Outputs outputs(settings);
  for (int64_t n = 0; n < settings.tokens; ++n) {
    const int64_t label = inputs.labels[static_cast<size_t>(n)];
    std::vector<double> p(static_cast<size_t>(settings.vocab));
    double sum = 0;
    for (int64_t v = 0; v < settings.vocab; ++v) {
      double logit = 0;
      for (int64_t h = 0; h < settings.hidden; ++h) {
        logit += weights.At(v * settings.hidden + h) * inputs.hidden_states.At(n * settings.hidden + h);
      }
      sum += p[static_cast<size_t>(v)] = std::exp(logit);
    }
    if (label != kIgnored) {
      outputs.losses[static_cast<size_t>(n)] =
          static_cast<float>(-std::log(p[static_cast<size_t>(label)] / sum));
    }
    auto* const dx = static_cast<float*>(outputs.dx.data()) + n * settings.hidden;
    for (int64_t h = 0; h < settings.hidden; ++h) {
      double value = 0;
      for (int64_t v = 0; v < settings.vocab; ++v) {
        value +=
            (p[static_cast<size_t>(v)] / sum - (v == label ? 1 : 0)) * weights.At(v * settings.hidden + h);
      }
      dx[h] = label == kIgnored ? 0.0F : static_cast<float>(value);
    }
  }
  return outputs;
}

TEST(CheckAnswerTest, TakesTheRightAnswerAndNoOther) {
  Settings settings = SmallSettings();
  settings.dx_type = DataType::kFloat32;
  settings.ignored = 0.5;
  const Tensor weights = RandomWeights(settings);
  const Inputs inputs(settings, 1);
  ASSERT_GT(inputs.valid_tokens, 0);
  ASSERT_LT(inputs.valid_tokens, settings.tokens);
  const auto answer = [&] { return Answer(settings, weights, inputs); };
  const Outputs good = answer();
  const auto check = [&](const Outputs& outputs) { return CheckAnswer(settings, weights, inputs, outputs); };
  ASSERT_TRUE(check(good).ok()) << check(good).status();
  EXPECT_LT(check(good)->loss_error, 1e-5);
  EXPECT_LT(check(good)->dx_error, 1e-5);

  Outputs off = answer();
  off.losses[3] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THAT(check(off).status().message(), HasSubstr("the loss of token 3"));
  off = answer();
  for (float& loss : off.losses) loss *= 2.0F;
  EXPECT_THAT(check(off).status().message(), HasSubstr("mean loss"));
  off = answer();
  static_cast<float*>(off.dx.data())[5] = std::numeric_limits<float>::infinity();
  EXPECT_THAT(check(off).status().message(), HasSubstr("not finite"));
  off.dx = Tensor(DataType::kFloat32, good.dx.size());
  EXPECT_THAT(check(off).status().message(), HasSubstr("dX of zeros"));
  off = answer();
  for (int64_t i = 0; i < off.dx.size(); ++i) static_cast<float*>(off.dx.data())[i] *= 1.1F;
  EXPECT_THAT(check(off).status().message(), HasSubstr("dX is off by"));
}

}  // namespace
}  // namespace lossd::perf::report_test
