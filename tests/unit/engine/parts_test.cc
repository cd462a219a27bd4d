// The engine's small parts: budget, staged writes, summaries, errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

#include "server/engine/common/counters.h"
#include "server/engine/common/errors.h"
#include "server/engine/common/random_id.h"
#include "server/engine/common/retry_slots.h"
#include "server/engine/device/cpu/cpu_backend.h"
#include "server/engine/device/gradient_summary.h"
#include "server/engine/engine.h"
#include "server/engine/schedule/batch_scheduler.h"
#include "server/engine/schedule/session_credit.h"
#include "tests/unit/engine/fake_device.h"

namespace lossd::engine::parts_test {
namespace {

TEST(CpuDevice, PlansForWeightsThatAreWrittenBesideThoseInUse) {
  auto device = *CreateCpuDevice(8 << 20);
  const HeadConfig config{"h", 1000, 16, kernels::DataType::kBFloat16};
  EXPECT_EQ(TotalBytes(*device->PlanMemory(config)), 1000 * 16 * (2 + 4 + 2));
  HeadConfig biased = config;
  biased.bias = true;
  EXPECT_EQ(TotalBytes(*device->PlanMemory(biased)), 1000 * (16 * (2 + 4 + 2) + 4 + 4 + 4));
  biased.weight_gradients = WeightGradients::kFrozen;
  EXPECT_EQ(TotalBytes(*device->PlanMemory(biased)), 1000 * (16 * (2 + 2) + 4 + 4)) << "no db";
}

TEST(CpuDevice, PlansForMasterMomentsAndASecondGradient) {
  auto device = *CreateCpuDevice(8 << 20);
  HeadConfig config{"h", 1000, 16, kernels::DataType::kBFloat16};
  config.optimizer.kind = OptimizerKind::kAdamW;
  config.master_weights = true;
  config.double_buffer = true;
  config.bias = true;
  const absl::StatusOr<MemoryPlan> plan = device->PlanMemory(config);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const auto bytes_of = [&](const std::string& purpose) {
    int64_t bytes = 0;
    for (const MemoryItem& item : *plan) bytes += item.purpose == purpose ? item.bytes : 0;
    return bytes;
  };
  EXPECT_EQ(bytes_of("weights"), 1000 * (16 * 2 + 4));
  EXPECT_EQ(bytes_of("master_weights"), 1000 * 16 * 4);
  EXPECT_EQ(bytes_of("gradient"), 2 * 1000 * (16 * 4 + 4));
  EXPECT_EQ(bytes_of("optimizer"), 2 * 1000 * (16 * 4 + 4));
  EXPECT_EQ(bytes_of("weight_staging"), 1000 * (16 * 4 + 4)) << "writes are staged as the master is";
  EXPECT_EQ(plan->size(), 5U);
}

TEST(Engine, CreationThatDoesNotFitLeavesTheBudgetAsItWas) {
  EngineOptions options;
  options.memory_limit_bytes = 16 << 20;
  auto engine = *Engine::Create(options, *CreateCpuDevice(8 << 20));
  const int64_t before = engine->budget().reserved();
  EXPECT_EQ(engine->CreateHead({"big", 10000, 200, kernels::DataType::kFloat32}).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(engine->budget().reserved(), before);
  EXPECT_TRUE(engine->CreateHead({"small", 1000, 64, kernels::DataType::kFloat32}).ok());
}

TEST(GradientSummary, IsOfTheWholeWhateverThePieces) {
  std::vector<float> values(1003);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) * 0.25f - 100;
  GradientSummary summary;
  for (size_t i = 0; i < values.size(); i += 17) {
    summary.Add(std::span(values).subspan(i, std::min<size_t>(17, values.size() - i)));
  }
  double squares = 0;
  for (const float value : values) squares += static_cast<double>(value) * value;
  EXPECT_NEAR(summary.norm(), std::sqrt(squares), 1e-9 * summary.norm());
  EXPECT_EQ(summary.largest(), 150.5F);
  EXPECT_EQ(summary.non_finite(), 0);
}

TEST(GradientSummary, CountsNonFiniteElements) {
  const std::vector<float> values = {1, std::numeric_limits<float>::infinity(), NAN, -1};
  GradientSummary summary;
  summary.Add(values);
  EXPECT_EQ(summary.non_finite(), 2);
  EXPECT_EQ(summary.largest(), 1);
}

TEST(Errors, CarryTheirFactsThroughTheStatus) {
  absl::Status status =
      MakeError(absl::StatusCode::kAborted, RejectReason::kGeneration, "generation", "text");
  AttachPosition(&status, {"incarnation", 7, {{0, 3}, {1, 9}}});
  AttachRetryDelay(&status, absl::Milliseconds(250));
  EXPECT_EQ(ReasonOf(status), RejectReason::kGeneration);
  EXPECT_EQ(FieldOf(status), "generation");
  const std::optional<Position> position = PositionOf(status);
  ASSERT_TRUE(position.has_value());
  EXPECT_EQ(position->incarnation, "incarnation");
  EXPECT_EQ(position->generation, 7U);
  ASSERT_EQ(position->replay.size(), 2U);
  EXPECT_EQ(position->replay[1].lane, 1);
  EXPECT_EQ(position->replay[1].next_sequence, 9U);
  EXPECT_EQ(RetryDelayOf(status), absl::Milliseconds(250));
  EXPECT_FALSE(PositionOf(absl::InternalError("plain")).has_value());
  EXPECT_EQ(ReasonOf(absl::InternalError("plain")), RejectReason::kInternal);
}

TEST(Errors, EveryReasonHasANameOfItsOwn) {
  std::set<std::string> names;
  for (int i = 0; i < kRejectReasonCount; ++i) names.insert(Name(static_cast<RejectReason>(i)));
  EXPECT_EQ(names.size(), static_cast<size_t>(kRejectReasonCount));
}

TEST(DurationHistogram, PutsAValueIntoTheBucketWhoseBoundItDoesNotPass) {
  DurationHistogram histogram;
  histogram.Observe(1e-4);
  histogram.Observe(1.1e-4);
  histogram.Observe(1000);
  EXPECT_EQ(histogram.bucket(0), 1U);
  EXPECT_EQ(histogram.bucket(1), 1U);
  EXPECT_EQ(histogram.bucket(DurationHistogram::kBounds.size()), 1U);
}

TEST(DurationHistogram, ADurationThatIsNegativeCountsAsNone) {
  DurationHistogram histogram;
  histogram.Observe(2);
  histogram.Observe(-3600);
  EXPECT_EQ(histogram.bucket(0), 1U);
  EXPECT_EQ(histogram.sum(), 2) << "a sum that goes back looks like a restart";
}

TEST(RandomId, IsAVersionFourUuidAndNeverTheSame) {
  std::set<std::string> ids;
  for (int i = 0; i < 1000; ++i) {
    const std::string id = RandomId();
    EXPECT_THAT(id, ::testing::MatchesRegex("........-....-4...-[89ab]...-............"));
    ids.insert(id);
  }
  EXPECT_EQ(ids.size(), 1000U);
}

TEST(BatchScheduler, RunsInOrderAndFinishesWhatIsQueuedBeforeItEnds) {
  std::vector<int> order;
  {
    FakeGate gate;
    const std::unique_ptr<Device> device = MakeFakeDevice(&gate);
    BatchScheduler scheduler(device.get(), absl::ZeroDuration());
    for (int i = 0; i < 100; ++i) scheduler.Post(nullptr, [&order, i] { order.push_back(i); });
  }
  ASSERT_EQ(order.size(), 100U);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

// Credit and refusals

TEST(SessionCreditTest, WhoFindsNoneIsToldOnceThereIsSomeAgain) {
  Gauge total{0};
  SessionCredit credit(100, &total);
  int told = 0;
  int one = 0;
  int other = 0;
  EXPECT_TRUE(credit.MayTake(&one, [&] { ++told; }));
  credit.Take(80);
  EXPECT_TRUE(credit.MayTake(&one, [&] { ++told; })) << "how large the next one is shows when it is there";
  credit.Take(80);
  EXPECT_FALSE(credit.MayTake(&one, [&] { ++told; }));
  EXPECT_FALSE(credit.MayTake(&other, [&] { ++told; }));
  EXPECT_EQ(total, 160);
  EXPECT_TRUE(credit.Return(60).empty()) << "as much as there may be";
  for (const SessionCredit::Waiter& waiter : credit.Return(20)) waiter();
  EXPECT_EQ(told, 2);
  EXPECT_TRUE(credit.Return(80).empty());
  EXPECT_EQ(total, 0);
}

TEST(SessionCreditTest, NothingIsKeptOfStreamsThatEndedWhileTheyWaited) {
  Gauge total{0};
  SessionCredit credit(100, &total);
  credit.Take(100);
  const auto kept = std::make_shared<int>();
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(credit.MayTake(&total, [kept] {}));
  EXPECT_EQ(kept.use_count(), 2) << "one of each stream";
  credit.Forget(&total);
  EXPECT_EQ(kept.use_count(), 1);
  EXPECT_TRUE(credit.Return(100).empty());
}

TEST(RetrySlotsTest, NoTwoAreToldToComeBackAtTheSameTimeUntilTheyAreTooMany) {
  RetrySlots slots;
  const absl::Time now = absl::UnixEpoch();
  EXPECT_EQ(slots.Next(now), RetrySlots::kShortest);
  EXPECT_EQ(slots.Next(now), RetrySlots::kShortest + RetrySlots::kApart);
  EXPECT_EQ(slots.Next(now + absl::Seconds(10)), RetrySlots::kShortest) << "the others have been";
  absl::Duration last;
  for (int i = 0; i < 10'000; ++i) last = slots.Next(now + absl::Seconds(10));
  EXPECT_EQ(last, RetrySlots::kLongest);
}

}  // namespace
}  // namespace lossd::engine::parts_test
