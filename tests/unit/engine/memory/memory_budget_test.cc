// Who has reserved what: what is told adds up, quotas hold, and it is what the process has taken.
#include "server/engine/memory/memory_budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/device/cpu/cpu_backend.h"
#include "server/engine/engine.h"

namespace lossd::engine {

bool operator==(const MemoryItem& a, const MemoryItem& b) {
  return a.purpose == b.purpose && a.bytes == b.bytes;
}

}  // namespace lossd::engine

namespace lossd::engine::memory_budget_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// Sanitizers map memory of their own, so what is taken has no upper bound under them.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define LOSSD_SANITIZED 1
#else
#define LOSSD_SANITIZED 0
#endif

TEST(MemoryBudget, RefusesWithATableAndGivesBackWhatIsReleased) {
  auto budget = std::make_shared<MemoryBudget>(100);
  auto first = budget->Reserve("a", "first", {{"weights", 60}});
  ASSERT_TRUE(first.ok());
  const auto second = budget->Reserve("b", "second", {{"weights", 30}, {"gradient", 11}});
  EXPECT_EQ(second.status().code(), absl::StatusCode::kResourceExhausted);
  for (const char* part :
       {"second", "weights", "30", "gradient", "11", "asked for", "41", "free", "40", "limit", "100"}) {
    EXPECT_THAT(std::string(second.status().message()), HasSubstr(part));
  }
  EXPECT_THAT(std::string(second.status().message()), Not(HasSubstr("quota")));
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("--memory_limit_bytes"));
  EXPECT_EQ(budget->reserved(), 60);
  first->reset();
  EXPECT_EQ(budget->reserved(), 0);
}

TEST(MemoryBudget, ARefusalNamesTheControlGroupThatSetsTheLimit) {
  auto budget =
      std::make_shared<MemoryBudget>(100, 0, HeadMemoryAdvice("control group /a (memory.max is 9 bytes)"));
  EXPECT_THAT(std::string(budget->Reserve("a", "a head", {{"weights", 101}}).status().message()),
              HasSubstr("raise the limit of the control group /a (memory.max is 9 bytes)"));
}

TEST(MemoryBudget, AHeadHasItsQuotaWithAllItsReservationsAndOthersHaveTheirs) {
  auto budget = std::make_shared<MemoryBudget>(1000, /*head_quota_bytes=*/100);
  auto head = budget->Reserve("a", "head a", {{"weights", 60}});
  ASSERT_TRUE(head.ok());
  const auto session = budget->Reserve("a", "a session of head a", {{"gradient", 30}, {"tiles", 11}});
  EXPECT_EQ(session.status().code(), absl::StatusCode::kResourceExhausted);
  for (const char* part : {"a session of head a", "gradient (host)", "30", "asked for", "41", "free of quota",
                           "40", "used by head", "60", "quota of a head", "100", "free", "940", "limit",
                           "1000", "--head_quota_bytes"}) {
    EXPECT_THAT(std::string(session.status().message()), HasSubstr(part));
  }
  EXPECT_EQ(budget->reserved(), 60);
  auto rest = budget->Reserve("a", "head a", {{"gradient", 40}});
  EXPECT_TRUE(rest.ok()) << rest.status();
  auto other = budget->Reserve("b", "head b", {{"weights", 100}});
  EXPECT_TRUE(other.ok()) << other.status();
  auto shared = budget->Reserve("", "the device", {{"workspace", 500}});
  EXPECT_TRUE(shared.ok()) << "the quota is of heads: " << shared.status();
  head->reset();
  EXPECT_TRUE(budget->Reserve("a", "head a", {{"weights", 60}}).ok());
}

TEST(MemoryBudget, UsageIsByHeadAndPurposeAndAddsUp) {
  auto budget = std::make_shared<MemoryBudget>(1000);
  auto head = budget->Reserve("a", "head a", {{"weights", 10}, {"gradient", 20}});
  auto session = budget->Reserve("a", "a session", {{"gradient", 30}, {"tiles", 5}});
  auto device = budget->Reserve("", "the device", {{"workspace", 7}});
  auto region = budget->Reserve("", "a region", {{"regions", 8}});
  MemoryUsage usage = budget->Usage();
  EXPECT_EQ(usage.reserved, 80);
  ASSERT_EQ(usage.heads.size(), 1U);
  EXPECT_THAT(usage.heads["a"],
              ElementsAre(MemoryItem{"weights", 10}, MemoryItem{"gradient", 50}, MemoryItem{"tiles", 5}));
  EXPECT_THAT(usage.shared, ElementsAre(MemoryItem{"workspace", 7}, MemoryItem{"regions", 8}));
  head->reset();
  usage = budget->Usage();
  EXPECT_EQ(usage.reserved, 50);
  EXPECT_THAT(usage.heads["a"], ElementsAre(MemoryItem{"gradient", 30}, MemoryItem{"tiles", 5}));
  session->reset();
  EXPECT_THAT(budget->Usage().heads, IsEmpty());
}

TEST(MemoryBudget, PlacesOfOnePurposeAreApart) {
  auto budget = std::make_shared<MemoryBudget>(1000);
  constexpr MemoryPlace kDevice = MemoryPlace::kDevice;
  auto regions = budget->Reserve("", "regions", {{"regions", 10, kDevice}, {"regions", 5}});
  auto more = budget->Reserve("", "a region", {{"regions", 20, kDevice}});
  const auto bytes_in = [&budget](MemoryPlace place) {
    int64_t bytes = 0;
    for (const MemoryItem& item : budget->Usage().shared) bytes += item.place == place ? item.bytes : 0;
    return bytes;
  };
  EXPECT_EQ(bytes_in(kDevice), 30);
  EXPECT_EQ(bytes_in(MemoryPlace::kHost), 5);
  more->reset();
  EXPECT_EQ(bytes_in(kDevice), 10);
  EXPECT_EQ(bytes_in(MemoryPlace::kHost), 5);
}

TEST(MemoryBudget, ThePeakIsOfWhatWasReservedAtOnce) {
  auto budget = std::make_shared<MemoryBudget>(1000);
  EXPECT_EQ(budget->peak(), 0);
  auto first = budget->Reserve("a", "head a", {{"weights", 600}});
  EXPECT_FALSE(budget->Reserve("b", "head b", {{"weights", 500}}).ok());
  EXPECT_EQ(budget->peak(), 600) << "what was refused was never there";
  first->reset();
  auto second = budget->Reserve("b", "head b", {{"weights", 500}});
  EXPECT_EQ(budget->peak(), 600);
  auto third = budget->Reserve("c", "head c", {{"weights", 200}});
  EXPECT_EQ(budget->peak(), 700);
}

TEST(MemoryBudget, MergedKeepsTheOrder) {
  EXPECT_THAT(Merged({{"weights", 1}, {"gradient", 2}, {"weights", 4}, {"gradient", 8}}),
              ElementsAre(MemoryItem{"weights", 5}, MemoryItem{"gradient", 10}));
}

// The engine's accounts

constexpr int64_t kVocab = 4096;
constexpr int64_t kHidden = 256;
constexpr int64_t kRegion = 8 << 20;

HeadConfig FullHead(const std::string& name) {
  HeadConfig config{name, kVocab, kHidden, kernels::DataType::kFloat32};
  config.bias = true;
  config.class_weights = std::make_shared<std::vector<float>>(kVocab, 1.0F);
  return config;
}

EngineOptions Options() {
  EngineOptions options;
  options.memory_limit_bytes = int64_t{1} << 30;
  options.chunk_limits = {.max_chunk_bytes = 64 << 10, .max_chunk_tokens = 64};
  options.regions = {.total_bytes = 4 * kRegion, .client_bytes = 4 * kRegion};
  return options;
}

int64_t BytesOf(const MemoryPlan& plan, const std::string& purpose) {
  int64_t bytes = 0;
  for (const MemoryItem& item : plan) bytes += item.purpose == purpose ? item.bytes : 0;
  return bytes;
}

int64_t Sum(const MemoryUsage& usage) {
  int64_t sum = TotalBytes(usage.shared);
  for (const auto& [head, items] : usage.heads) sum += TotalBytes(items);
  return sum;
}

// Virtual memory of this process.
int64_t MappedBytes() {
  std::ifstream file("/proc/self/statm");
  int64_t pages = 0;
  file >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

// The first allocation of a thread maps an arena of malloc's, which is much and stays: here, before anything
// is measured.
void WarmUp(Engine& engine) {
  const auto head = engine.CreateHead(HeadConfig{"warm", 1, 8, kernels::DataType::kFloat32});
  ASSERT_TRUE(head.ok()) << head.status();
  const auto id = (*head)->BeginWrite("warm", Head::Replace::kNo, "id of warm");
  ASSERT_TRUE(id.ok()) << id.status();
  const std::string row(8 * 4, '\0');
  ASSERT_TRUE((*(*head)->FindWrite(*id))->Write(0, 1, kernels::DataType::kFloat32, row, {}).ok());
  (*head)->CommitWrite(*id, [](const absl::StatusOr<uint64_t>&) {});
  engine.WaitIdle();
}

// Stages all rows, which are `zeros`, under this key.
std::string Stage(Head& head, const std::string& key, const std::string& zeros) {
  const auto id = head.BeginWrite(key, Head::Replace::kNo, "id of " + key);
  EXPECT_TRUE(id.ok()) << id.status();
  const auto bias = absl::string_view(zeros).substr(0, kVocab * 4);
  EXPECT_TRUE((*head.FindWrite(*id))->Write(0, kVocab, kernels::DataType::kFloat32, zeros, bias).ok());
  return *id;
}

TEST(EngineMemory, EveryPurposeIsThereAndThePartsAddUp) {
  auto engine = *Engine::Create(Options(), *CreateCpuDevice(8 << 20));
  ASSERT_TRUE(engine->CreateHead(FullHead("a")).ok());
  ASSERT_TRUE(engine->CreateHead({"b", 100, 16, kernels::DataType::kBFloat16}).ok());
  for (const int32_t rank : {0, 1}) {
    const auto session =
        engine->OpenSession("a", {"client " + std::to_string(rank), rank, 1, Deterministic::kYes});
    ASSERT_TRUE(session.ok()) << session.status();
  }
  const auto region = engine->regions().Create(RegionKind::kSystem, kRegion);
  ASSERT_TRUE(region.ok()) << region.status();

  MemoryUsage usage = engine->budget().Usage();
  EXPECT_EQ(Sum(usage), usage.reserved);
  EXPECT_EQ(TotalBytes(engine->ReservedMemory()), usage.reserved);
  const MemoryPlan& a = usage.heads["a"];
  const int64_t weights = kVocab * (kHidden + 1) * 4;
  EXPECT_EQ(BytesOf(a, "weights"), weights);
  EXPECT_EQ(BytesOf(a, "weight_staging"), weights);
  EXPECT_EQ(BytesOf(a, "gradient"), 3 * weights) << "the head's and two sessions'";
  EXPECT_GT(BytesOf(a, "tiles"), 0);
  EXPECT_EQ(BytesOf(a, "class_weights"), kVocab * 4);
  EXPECT_EQ(TotalBytes(usage.heads["b"]), 100 * 16 * (2 + 4 + 2));
  EXPECT_EQ(BytesOf(usage.shared, "workspace"), 8 << 20);
  EXPECT_EQ(BytesOf(usage.shared, "regions"), kRegion);

  // What a head tells of itself is the same, each purpose once.
  const MemoryPlan info = (*engine->FindHead("a"))->Info().memory;
  EXPECT_EQ(TotalBytes(info), TotalBytes(a));
  EXPECT_EQ(info.size(), a.size());

  ASSERT_TRUE(engine->DeleteHead("a", Engine::DiscardGradient::kNo).ok());
  engine->WaitIdle();
  usage = engine->budget().Usage();
  EXPECT_EQ(usage.heads.count("a"), 0U);
  EXPECT_EQ(Sum(usage), usage.reserved);
}

#if !LOSSD_SANITIZED
TEST(EngineMemory, WhatIsReservedIsWhatTheProcessTakes) {
  auto engine = *Engine::Create(Options(), *CreateCpuDevice(8 << 20));
  const std::string zeros(static_cast<size_t>(kVocab * kHidden * 4), '\0');
  WarmUp(*engine);
  const int64_t mapped = MappedBytes();
  const int64_t reserved = engine->budget().reserved();

  const auto head = engine->CreateHead(FullHead("a"));
  ASSERT_TRUE(head.ok()) << head.status();
  ASSERT_TRUE(engine->OpenSession("a", {"client", 0, 1, Deterministic::kYes}).ok());
  const auto region = engine->regions().Create(RegionKind::kSystem, kRegion);
  ASSERT_TRUE(region.ok()) << region.status();
  // The weights take their memory with the first version, the staged ones with the next.
  (*head)->CommitWrite(Stage(**head, "first", zeros), [](const absl::StatusOr<uint64_t>&) {});
  engine->WaitIdle();
  Stage(**head, "second", zeros);

  // Tiles take theirs when chunks wait in them.
  const int64_t tiles = BytesOf(engine->budget().Usage().heads["a"], "tiles");
  const int64_t expected = engine->budget().reserved() - reserved - tiles;
  ASSERT_GT(expected, 24 << 20);
  EXPECT_NEAR(static_cast<double>(MappedBytes() - mapped), static_cast<double>(expected), 1 << 20);
}
#endif

// An fp32 master, two moments and a second gradient.
TEST(EngineMemory, AHeadThatStepsTakesWhatItReserves) {
  auto engine = *Engine::Create(Options(), *CreateCpuDevice(8 << 20));
  HeadConfig config{"a", kVocab, kHidden, kernels::DataType::kBFloat16};
  config.bias = true;
  config.master_weights = true;
  config.double_buffer = true;
  config.optimizer.kind = OptimizerKind::kAdamW;
  const std::string zeros(static_cast<size_t>(kVocab * kHidden * 4), '\0');
  WarmUp(*engine);
  const int64_t mapped = MappedBytes();
  const int64_t reserved = engine->budget().reserved();
  const auto head = engine->CreateHead(config);
  ASSERT_TRUE(head.ok()) << head.status();
  (*head)->CommitWrite(Stage(**head, "first", zeros), [](const absl::StatusOr<uint64_t>&) {});
  engine->WaitIdle();
  Stage(**head, "second", zeros);

  const MemoryUsage usage = engine->budget().Usage();
  EXPECT_EQ(Sum(usage), usage.reserved);
  const MemoryPlan& plan = usage.heads.at("a");
  const int64_t elements = kVocab * kHidden;
  EXPECT_GE(BytesOf(plan, "master_weights"), 4 * elements);
  EXPECT_GE(BytesOf(plan, "weights"), 2 * elements);
  EXPECT_GE(BytesOf(plan, "weight_staging"), 4 * elements);
  EXPECT_GE(BytesOf(plan, "gradient"), 2 * 4 * elements);
  EXPECT_GE(BytesOf(plan, "optimizer"), 2 * 4 * elements);
  const int64_t taken = MappedBytes() - mapped;
  EXPECT_GE(taken, engine->budget().reserved() - reserved - (1 << 20));
#if !LOSSD_SANITIZED
  EXPECT_LE(taken, engine->budget().reserved() - reserved + (1 << 20));
#endif
}

TEST(EngineMemory, TheQuotaRefusesHeadsAndSessionsAndLeavesNothingBehind) {
  EngineOptions options = Options();
  const HeadConfig config{"a", kVocab, kHidden, kernels::DataType::kFloat32};
  const int64_t head_bytes = 3 * kVocab * kHidden * 4;
  options.head_quota_bytes = head_bytes;
  auto engine = *Engine::Create(options, *CreateCpuDevice(8 << 20));
  HeadConfig large = config;
  large.vocab_size += 1;
  const absl::Status refused = engine->CreateHead(large).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("--head_quota_bytes"));
  EXPECT_EQ(engine->budget().reserved(), 8 << 20);

  ASSERT_TRUE(engine->CreateHead(config).ok()) << "its quota is exactly what it needs";
  const absl::Status session = engine->OpenSession("a", {"client", 0, 1, Deterministic::kYes}).status();
  EXPECT_EQ(session.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(session.message()), HasSubstr("a deterministic session of head a"));
  EXPECT_TRUE(engine->OpenSession("a", {"client", 0, 1}).ok());
  EXPECT_EQ(engine->budget().reserved(), head_bytes + (8 << 20));
  HeadConfig other = config;
  other.name = "b";
  EXPECT_TRUE(engine->CreateHead(other).ok()) << "another head has a quota of its own";
}

TEST(EngineMemory, AHeadsShareOfStagingLeavesRoomForOthers) {
  EngineOptions options = Options();
  options.lane_credit_bytes = 1 << 20;
  options.staging_bytes = 4 << 20;
  options.head_staging_bytes = 2 << 20;
  auto engine = *Engine::Create(options, *CreateCpuDevice(8 << 20));
  for (const char* name : {"a", "b"}) {
    ASSERT_TRUE(engine->CreateHead({name, 100, 16, kernels::DataType::kFloat32}).ok());
  }
  const auto first = engine->OpenSession("a", {"first", 0, 1});
  ASSERT_TRUE(first.ok()) << first.status();
  ASSERT_TRUE(engine->OpenSession("a", {"second", 1, 1}).ok());
  const absl::Status refused = engine->OpenSession("a", {"third", 2, 1}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("--head_staging_bytes"));
  EXPECT_TRUE(engine->OpenSession("a", {"second", 1, 1}).ok()) << "it is open";
  EXPECT_TRUE(engine->OpenSession("b", {"first", 0, 2}).ok());
  EXPECT_EQ(engine->StagingByHead(), (std::map<std::string, int64_t>{{"a", 2 << 20}, {"b", 2 << 20}}));
  EXPECT_EQ(engine->staging_reserved(), 4 << 20);
  ASSERT_TRUE(engine->CloseSession(first->info.session_id).ok());
  EXPECT_TRUE(engine->OpenSession("a", {"third", 2, 1}).ok());
}

}  // namespace
}  // namespace lossd::engine::memory_budget_test
