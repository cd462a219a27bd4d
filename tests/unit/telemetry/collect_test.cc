// What the metrics say of an engine on a fake device; tests/integration/metrics has a real one.
#include "server/telemetry/metrics/collect.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <future>
#include <map>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "tests/support/wait.h"
#include "tests/unit/engine/end_flush.h"
#include "tests/unit/engine/engine_fixture.h"

namespace lossd::telemetry::collect_test {
namespace {

using testing::Await;

using engine::EngineFixture;

engine::HeadConfig WithOptimizer() {
  engine::HeadConfig config;
  config.optimizer.kind = engine::OptimizerKind::kSgd;
  return config;
}

class CollectTest : public ::testing::Test, protected EngineFixture {
 protected:
  explicit CollectTest(engine::FakeOptions device = {})
      : EngineFixture({}, std::move(device), WithOptimizer()) {}

  std::map<std::string, double> Read() const {
    std::map<std::string, double> values;
    const std::string text = MetricsText(*engine, counters_);
    for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
      if (absl::StartsWith(line, "#")) continue;
      const std::pair<std::string, std::string> parts = absl::StrSplit(line, absl::MaxSplits(' ', 1));
      double value = 0;
      EXPECT_TRUE(absl::SimpleAtod(parts.second, &value)) << line;
      EXPECT_TRUE(values.emplace(parts.first, value).second) << "twice: " << line;
    }
    return values;
  }
  // Zero or not there are told apart.
  double Value(const std::string& series) const {
    const std::map<std::string, double> values = Read();
    const auto found = values.find(series);
    return found == values.end() ? -1 : found->second;
  }
  std::string Phase() const {
    std::string phase;
    for (const char* name : {"open", "freezing", "frozen"}) {
      const double value = Value("lossd_head_flush_phase{head=\"h\",phase=\"" + std::string(name) + "\"}");
      EXPECT_TRUE(value == 0 || value == 1) << name;
      if (value == 1) phase += name;
    }
    return phase;
  }

  ServiceCounters counters_{{"HeadService/CreateHead", "LossService/Compute"}};
  std::shared_ptr<engine::RecordingListener> listener_ = std::make_shared<engine::RecordingListener>();
};

TEST_F(CollectTest, SeriesOfAHeadAreThereAsLongAsTheHeadIs) {
  EXPECT_EQ(Value("lossd_head_window_tokens{head=\"h\"}"), 0);
  EXPECT_EQ(Value("lossd_head_weight_version{head=\"h\"}"), 1);
  EXPECT_EQ(Value("lossd_head_loss{head=\"h\"}"), 0);
  std::promise<void> released;
  head.reset();
  ASSERT_TRUE(
      engine->DeleteHead("h", engine::Head::DiscardGradient::kYes, [&] { released.set_value(); }).ok());
  Await("the head to be released", released);
  for (const auto& [series, value] : Read()) EXPECT_FALSE(absl::StrContains(series, "head=\"h\"")) << series;
}

TEST_F(CollectTest, WindowsHaveAnAgeAndFlushesPhases) {
  const engine::LaneAttachment lane = Attach(Open("c"), listener_);
  EXPECT_EQ(Value("lossd_head_window_age_seconds{head=\"h\"}"), 0);
  EXPECT_EQ(Value("lossd_head_sessions{head=\"h\"}"), 1);
  EXPECT_EQ(Phase(), "open");
  Submit(lane, MakeChunk(1, 2));
  const auto flush = BeginFlush(1, Marks());
  ASSERT_TRUE(flush.ok()) << flush.status();
  EXPECT_EQ(Phase(), "frozen");
  EXPECT_EQ(Value("lossd_head_window_tokens{head=\"h\"}"), 1);
  EXPECT_GT(Value("lossd_head_window_age_seconds{head=\"h\"}"), 0);
  EXPECT_GT(Value("lossd_head_flush_age_seconds{head=\"h\"}"), 0);
  EXPECT_GE(Value("lossd_head_window_age_seconds{head=\"h\"}"),
            Value("lossd_head_flush_age_seconds{head=\"h\"}"));
  EXPECT_EQ(Value("lossd_flush_seconds_count{phase=\"freeze\"}"), 1);
  EXPECT_EQ(Value("lossd_flush_seconds_count{phase=\"read\"}"), 0);
  ASSERT_TRUE(CommitFlush(*head, flush->flush_id).ok());
  EXPECT_EQ(Phase(), "open");
  EXPECT_EQ(Value("lossd_head_window_tokens{head=\"h\"}"), 0);
  EXPECT_EQ(Value("lossd_head_window_age_seconds{head=\"h\"}"), 0);
  EXPECT_EQ(Value("lossd_head_flush_age_seconds{head=\"h\"}"), 0);
  EXPECT_EQ(Value("lossd_head_generation{head=\"h\"}"), 2);
  EXPECT_EQ(Value("lossd_flush_seconds_count{phase=\"read\"}"), 1);
  EXPECT_EQ(Value("lossd_flush_seconds_count{phase=\"commit\"}"), 1);
  ASSERT_TRUE(CommitFlush(*head, flush->flush_id).ok()) << "again";
  EXPECT_EQ(Value("lossd_flush_seconds_count{phase=\"commit\"}"), 1) << "a repeat is no commit";
}

TEST_F(CollectTest, AnAbortedFlushLeavesTheWindowAsOldAsItWas) {
  const engine::LaneAttachment lane = Attach(Open("c"), listener_);
  Submit(lane, MakeChunk(1, 2));
  const auto flush = BeginFlush(1, Marks());
  ASSERT_TRUE(flush.ok()) << flush.status();
  const double age = Value("lossd_head_window_age_seconds{head=\"h\"}");
  ASSERT_TRUE(AbortFlush(*head, flush->flush_id).ok());
  EXPECT_EQ(Phase(), "open");
  EXPECT_GE(Value("lossd_head_window_age_seconds{head=\"h\"}"), age);
  EXPECT_EQ(Value("lossd_flush_seconds_count{phase=\"read\"}"), 1);
  EXPECT_EQ(Value("lossd_flush_seconds_count{phase=\"commit\"}"), 0);
}

TEST_F(CollectTest, AStepFreezesAndIsNoFlush) {
  const engine::LaneAttachment lane = Attach(Open("c"), listener_);
  gate.Hold();
  Submit(lane, MakeChunk(1, 2));
  gate.AwaitArrival();
  std::promise<void> stepped;
  head->ApplyStep(1, Marks(), {.learning_rate = 0.5}, [&](const absl::StatusOr<engine::StepResult>& step) {
    EXPECT_TRUE(step.ok()) << step.status();
    stepped.set_value();
  });
  EXPECT_EQ(Phase(), "freezing");
  EXPECT_EQ(Value("lossd_head_flush_age_seconds{head=\"h\"}"), 0);
  gate.LetThrough();
  Await("the step", stepped);
  EXPECT_EQ(Phase(), "open");
  EXPECT_EQ(Value("lossd_step_seconds_count"), 1);
  EXPECT_EQ(Value("lossd_head_window_age_seconds{head=\"h\"}"), 0);
}

TEST_F(CollectTest, QueuedChunksAreThoseOfTheirHead) {
  const engine::LaneAttachment lane = Attach(Open("c"), listener_);
  gate.Hold();
  Submit(lane, MakeChunk(1, 1));
  gate.AwaitArrival();
  constexpr uint64_t kWaiting = 40;
  for (uint64_t i = 0; i < kWaiting; ++i) Submit(lane, MakeChunk(2 + i, 1));
  EXPECT_EQ(Value("lossd_head_queued_chunks{head=\"h\"}"), kWaiting);
  EXPECT_EQ(Value("lossd_queued_chunks"), kWaiting) << "there is one head";
  head->DetachLane(lane);
  EXPECT_EQ(Value("lossd_head_queued_chunks{head=\"h\"}"), 0) << "what was withdrawn waits no more";
  EXPECT_EQ(Value("lossd_queued_chunks"), 0);
  gate.LetThrough();
}

TEST_F(CollectTest, ThePeakOfReservedMemoryStays) {
  const double reserved = Value("lossd_memory_reserved_peak_bytes");
  EXPECT_GT(reserved, 0);
  EXPECT_EQ(Value("lossd_memory_limit_bytes") - Value("lossd_memory_free_bytes"), reserved);
  std::promise<void> released;
  head.reset();
  ASSERT_TRUE(
      engine->DeleteHead("h", engine::Head::DiscardGradient::kYes, [&] { released.set_value(); }).ok());
  Await("the head to be released", released);
  EXPECT_EQ(Value("lossd_memory_reserved_peak_bytes"), reserved);
  EXPECT_EQ(Value("lossd_memory_free_bytes"), Value("lossd_memory_limit_bytes"));
}

engine::FakeOptions GroupOfTwo() {
  engine::FakeOptions device;
  device.group.epoch = 4;
  device.group.ranks.resize(2);
  engine::RankReport& rank = device.group.ranks[1];
  rank.memory_limit = 1000;
  rank.memory_peak = 700;
  rank.memory = {.reserved = 60, .heads = {{"h", {{"weights", 50}}}}, .shared = {{"workspace", 10}}};
  rank.totals = {2000, 1500};
  rank.process.peak_bytes = 77;
  rank.activity.command = "ReadRows";
  rank.activity.command_seconds = 2.5;
  engine::DurationHistogram waits;
  waits.Observe(0.5);
  rank.activity.waits[static_cast<size_t>(kernels::Exchange::kRows)] = waits.Read();
  return device;
}

class GroupCollectTest : public CollectTest {
 protected:
  GroupCollectTest() : CollectTest(GroupOfTwo()) {}
};

TEST_F(GroupCollectTest, MemoryAndDevicesAreOfEachRank) {
  EXPECT_EQ(Value("lossd_memory_limit_bytes{rank=\"1\"}"), 1000);
  EXPECT_EQ(Value("lossd_memory_limit_bytes{rank=\"0\"}"), engine->budget().limit());
  EXPECT_EQ(Value("lossd_memory_free_bytes{rank=\"1\"}"), 940);
  EXPECT_EQ(Value("lossd_memory_reserved_peak_bytes{rank=\"1\"}"), 700);
  EXPECT_EQ(Value("lossd_memory_reserved_bytes{purpose=\"weights\",place=\"host\",rank=\"1\"}"), 50);
  EXPECT_EQ(Value("lossd_memory_reserved_bytes{purpose=\"gradient\",place=\"host\",rank=\"1\"}"), 0);
  EXPECT_EQ(
      Value("lossd_head_memory_reserved_bytes{head=\"h\",purpose=\"weights\",place=\"host\",rank=\"1\"}"),
      50);
  EXPECT_GT(
      Value("lossd_head_memory_reserved_bytes{head=\"h\",purpose=\"weights\",place=\"host\",rank=\"0\"}"), 0);
  EXPECT_EQ(Value("lossd_device_memory_bytes{kind=\"free\",rank=\"1\"}"), 1500);
  EXPECT_EQ(Value("lossd_process_peak_memory_bytes{rank=\"1\"}"), 77);
  EXPECT_EQ(Value("lossd_memory_limit_bytes"), -1) << "of nobody";
}

TEST_F(GroupCollectTest, TellsWhatRanksWaitForAndAreAt) {
  EXPECT_EQ(Value("lossd_group_ranks"), 2);
  EXPECT_EQ(Value("lossd_group_epoch"), 4);
  EXPECT_EQ(Value("lossd_rank_command_age_seconds{rank=\"0\"}"), 0);
  EXPECT_EQ(Value("lossd_rank_command_age_seconds{rank=\"1\"}"), 2.5);
  EXPECT_EQ(Value("lossd_exchange_wait_seconds_sum{exchange=\"rows\",rank=\"1\"}"), 0.5);
  EXPECT_EQ(Value("lossd_exchange_wait_seconds_count{exchange=\"rows\",rank=\"1\"}"), 1);
  EXPECT_EQ(Value("lossd_exchange_wait_seconds_bucket{exchange=\"rows\",rank=\"1\",le=\"0.25\"}"), 0);
  EXPECT_EQ(Value("lossd_exchange_wait_seconds_bucket{exchange=\"rows\",rank=\"1\",le=\"0.5\"}"), 1);
  EXPECT_EQ(Value("lossd_exchange_wait_seconds_count{exchange=\"hidden_states\",rank=\"0\"}"), 0);
}

TEST_F(CollectTest, WithoutAGroupNothingHasARank) {
  for (const auto& [series, value] : Read()) {
    EXPECT_FALSE(absl::StrContains(series, "rank")) << series;
    EXPECT_FALSE(absl::StrContains(series, "group")) << series;
    EXPECT_FALSE(absl::StrContains(series, "exchange")) << series;
  }
}

TEST_F(CollectTest, EveryMethodHasEveryCode) {
  telemetry::RpcMethod* method = counters_.rpcs.Find("HeadService/CreateHead");
  ASSERT_NE(method, nullptr);
  ++method->ended[5];
  ++method->in_flight;
  method->seconds.Observe(0.002);
  int series = 0;
  for (const auto& [name, value] : Read()) series += absl::StartsWith(name, "lossd_rpcs_total{") ? 1 : 0;
  EXPECT_EQ(series, 2 * kStatusCodeCount);
  EXPECT_EQ(Value("lossd_rpcs_total{method=\"HeadService/CreateHead\",code=\"NOT_FOUND\"}"), 1);
  EXPECT_EQ(Value("lossd_rpcs_total{method=\"LossService/Compute\",code=\"UNAUTHENTICATED\"}"), 0);
  EXPECT_EQ(Value("lossd_rpcs_in_flight{method=\"HeadService/CreateHead\"}"), 1);
  EXPECT_EQ(Value("lossd_rpc_seconds_count{method=\"HeadService/CreateHead\"}"), 1);
  EXPECT_EQ(Value("lossd_rpc_seconds_count{method=\"LossService/Compute\"}"), 0);
}

TEST_F(CollectTest, TellsWhoWasNotLetInAndOfTheCertificate) {
  AccessCounters& access = counters_.access;
  access.no_token = 1;
  access.unknown_token = 2;
  access.role = 3;
  access.token_reloads = 4;
  access.token_reloads_failed = 5;
  access.tls_reloads = 6;
  access.tls_reloads_failed = 7;
  access.tls_not_after_seconds = 1'900'000'000;
  EXPECT_EQ(Value("lossd_access_denied_total{reason=\"no_token\"}"), 1);
  EXPECT_EQ(Value("lossd_access_denied_total{reason=\"unknown_token\"}"), 2);
  EXPECT_EQ(Value("lossd_access_denied_total{reason=\"role\"}"), 3);
  EXPECT_EQ(Value("lossd_token_reloads_total{outcome=\"ok\"}"), 4);
  EXPECT_EQ(Value("lossd_token_reloads_total{outcome=\"failed\"}"), 5);
  EXPECT_EQ(Value("lossd_tls_reloads_total{outcome=\"ok\"}"), 6);
  EXPECT_EQ(Value("lossd_tls_reloads_total{outcome=\"failed\"}"), 7);
  EXPECT_EQ(Value("lossd_tls_certificate_expiry_timestamp_seconds"), 1'900'000'000);
}

TEST_F(CollectTest, TheProcessIsSeen) {
  EXPECT_GT(Value("process_open_fds"), 2);
  EXPECT_GE(Value("process_max_fds"), Value("process_open_fds"));
  EXPECT_GE(Value("process_threads"), 2);
  EXPECT_GT(Value("process_virtual_memory_bytes"), Value("process_resident_memory_bytes"));
  EXPECT_GT(Value("process_resident_memory_bytes"), 0);
}

// It is no process without threads.
TEST_F(CollectTest, WhatCannotBeReadOfTheProcessIsLeftOut) {
  const std::vector<std::string> read = {"process_open_fds", "process_threads",
                                         "process_resident_memory_bytes", "process_virtual_memory_bytes",
                                         "lossd_process_peak_memory_bytes"};
  for (const std::string& series : read) EXPECT_GT(Value(series), 0) << series;
  rlimit files{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
  const rlimit none{0, files.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const std::map<std::string, double> values = Read();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &files), 0);
  for (const std::string& series : read) EXPECT_FALSE(values.contains(series)) << series;
  EXPECT_TRUE(values.contains("process_cpu_seconds_total"));
}

}  // namespace
}  // namespace lossd::telemetry::collect_test
