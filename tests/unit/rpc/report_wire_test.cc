#include "server/rpc/group/report_wire.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <tuple>
#include <vector>

namespace lossd::rpc::report_wire_test {
namespace {

using engine::MemoryPlace;
using kernels::Exchange;

engine::RankReport Example() {
  engine::RankReport report;
  report.device = "cuda:1";
  report.description = "a GPU";
  report.pci_bus_id = "00000000:1b:00.0";
  report.host = "node-1";
  report.memory_limit = 1000;
  report.memory_peak = 900;
  report.memory = {.reserved = 70,
                   .heads = {{"a", {{"weights", 20, MemoryPlace::kDevice}, {"gradient", 40}}}},
                   .shared = {{"workspace", 10, MemoryPlace::kRegisteredHost}}};
  report.totals = {2000, 1500};
  report.process.resident_bytes = 30;
  report.process.peak_bytes = 31;
  report.activity.uptime_seconds = 12;
  report.activity.command = "ReadRows";
  report.activity.command_seconds = 3;
  report.activity.last_done_seconds = 4;
  report.activity.waits_at = Exchange::kRows;
  engine::DurationHistogram waits;
  waits.Observe(0.5);
  waits.Observe(100);
  report.activity.waits[static_cast<size_t>(Exchange::kInputGradients)] = waits.Read();
  return report;
}

void ExpectSame(const engine::RankReport& one, const engine::RankReport& other) {
  EXPECT_EQ(one.device, other.device);
  EXPECT_EQ(one.description, other.description);
  EXPECT_EQ(one.pci_bus_id, other.pci_bus_id);
  EXPECT_EQ(one.host, other.host);
  EXPECT_EQ(one.memory_limit, other.memory_limit);
  EXPECT_EQ(one.memory_peak, other.memory_peak);
  EXPECT_EQ(one.memory.reserved, other.memory.reserved);
  const auto items = [](const engine::RankReport& report) {
    std::vector<std::tuple<std::string, std::string, MemoryPlace, int64_t>> all;
    const auto add = [&all](const std::string& head, const engine::MemoryPlan& plan) {
      for (const auto& item : plan) all.emplace_back(head, item.purpose, item.place, item.bytes);
    };
    for (const auto& [head, plan] : report.memory.heads) add(head, plan);
    add("", report.memory.shared);
    return all;
  };
  EXPECT_EQ(items(one), items(other));
  EXPECT_EQ(one.totals.total_bytes, other.totals.total_bytes);
  EXPECT_EQ(one.totals.free_bytes, other.totals.free_bytes);
  EXPECT_EQ(one.process.resident_bytes, other.process.resident_bytes);
  EXPECT_EQ(one.process.peak_bytes, other.process.peak_bytes);
  EXPECT_EQ(one.activity.uptime_seconds, other.activity.uptime_seconds);
  EXPECT_EQ(one.activity.command, other.activity.command);
  EXPECT_EQ(one.activity.command_seconds, other.activity.command_seconds);
  EXPECT_EQ(one.activity.last_done_seconds, other.activity.last_done_seconds);
  EXPECT_EQ(one.activity.waits_at, other.activity.waits_at);
  for (size_t i = 0; i < one.activity.waits.size(); ++i) {
    EXPECT_EQ(one.activity.waits[i].sum(), other.activity.waits[i].sum());
    for (size_t bucket = 0; bucket <= engine::kDurationBounds.size(); ++bucket) {
      EXPECT_EQ(one.activity.waits[i].bucket(bucket), other.activity.waits[i].bucket(bucket));
    }
  }
}

TEST(ReportWire, ArrivesAsItIs) {
  ReportWriter writer;
  engine::RankReport taken;
  ASSERT_TRUE(TakeReport(writer.Changed(Example()), &taken).ok());
  ExpectSame(taken, Example());
}

TEST(ReportWire, WhatHasNotChangedIsNotSentAgain) {
  ReportWriter writer;
  engine::RankReport report = Example();
  engine::RankReport taken;
  ASSERT_TRUE(TakeReport(writer.Changed(report), &taken).ok());
  group::v1::Report message = writer.Changed(report);
  EXPECT_FALSE(message.has_device());
  EXPECT_FALSE(message.has_memory());
  EXPECT_FALSE(message.has_waits());
  ASSERT_TRUE(TakeReport(message, &taken).ok());
  ExpectSame(taken, report);

  report.memory.heads["b"] = {{"weights", 5}};
  report.activity.command = "";
  report.activity.waits_at.reset();
  message = writer.Changed(report);
  EXPECT_FALSE(message.has_device());
  EXPECT_TRUE(message.has_memory());
  ASSERT_TRUE(TakeReport(message, &taken).ok());
  ExpectSame(taken, report);

  report.memory.heads.erase("a");
  ASSERT_TRUE(TakeReport(writer.Changed(report), &taken).ok());
  ExpectSame(taken, report);
}

TEST(ReportWire, WhatMakesNoSenseIsRefused) {
  const auto refused = [](const std::function<void(group::v1::Report*)>& change) {
    ReportWriter writer;
    group::v1::Report message = writer.Changed(Example());
    change(&message);
    engine::RankReport taken;
    return TakeReport(message, &taken).code() == absl::StatusCode::kInternal;
  };
  EXPECT_TRUE(refused([](auto* message) { message->mutable_memory()->mutable_items(0)->set_place(3); }));
  EXPECT_TRUE(refused([](auto* message) { message->mutable_memory()->mutable_items(0)->set_place(-1); }));
  EXPECT_TRUE(refused([](auto* message) { message->mutable_waits()->mutable_exchanges()->RemoveLast(); }));
  EXPECT_TRUE(refused([](auto* message) { message->mutable_waits()->mutable_exchanges(0)->add_buckets(1); }));
  EXPECT_TRUE(refused([](auto* message) { message->mutable_activity()->set_waits_at(4); }));
  EXPECT_TRUE(refused([](auto* message) { message->mutable_activity()->set_waits_at(-1); }));
}

}  // namespace
}  // namespace lossd::rpc::report_wire_test
