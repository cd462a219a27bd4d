#include "server/rpc/group/report_wire.h"

#include <algorithm>
#include <string>
#include <utility>

#include "google/protobuf/util/message_differencer.h"

namespace lossd::rpc {
namespace {

using google::protobuf::util::MessageDifferencer;
using Waits = engine::HistogramReading<engine::kDurationBounds>;

void AddItems(const std::string& head, const engine::MemoryPlan& plan, group::v1::Memory* memory) {
  for (const engine::MemoryItem& item : plan) {
    group::v1::MemoryItem& added = *memory->add_items();
    added.set_head(head);
    added.set_purpose(item.purpose);
    added.set_place(static_cast<int32_t>(item.place));
    added.set_bytes(item.bytes);
  }
}

group::v1::Memory MemoryOf(const engine::RankReport& report) {
  group::v1::Memory memory;
  memory.set_limit_bytes(report.memory_limit);
  memory.set_peak_bytes(report.memory_peak);
  memory.set_reserved_bytes(report.memory.reserved);
  for (const auto& [head, plan] : report.memory.heads) AddItems(head, plan, &memory);
  AddItems("", report.memory.shared, &memory);
  return memory;
}

group::v1::Waits WaitsOf(const engine::RankActivity& activity) {
  group::v1::Waits waits;
  for (const Waits& one : activity.waits) {
    group::v1::Histogram& histogram = *waits.add_exchanges();
    for (size_t i = 0; i <= Waits::kBounds.size(); ++i) histogram.add_buckets(one.bucket(i));
    histogram.set_sum(one.sum());
  }
  return waits;
}

group::v1::Report MessageOf(const engine::RankReport& report) {
  group::v1::Report message;
  group::v1::Device& device = *message.mutable_device();
  device.set_name(report.device);
  device.set_description(report.description);
  device.set_pci_bus_id(report.pci_bus_id);
  device.set_host(report.host);
  *message.mutable_memory() = MemoryOf(report);
  *message.mutable_waits() = WaitsOf(report.activity);
  message.mutable_totals()->set_total_bytes(report.totals.total_bytes);
  message.mutable_totals()->set_free_bytes(report.totals.free_bytes);
  message.mutable_process()->set_resident_bytes(report.process.resident_bytes);
  message.mutable_process()->set_peak_bytes(report.process.peak_bytes);
  group::v1::Activity& activity = *message.mutable_activity();
  activity.set_uptime_seconds(report.activity.uptime_seconds);
  activity.set_command(report.activity.command);
  activity.set_command_seconds(report.activity.command_seconds);
  activity.set_last_done_seconds(report.activity.last_done_seconds);
  if (report.activity.waits_at.has_value()) {
    activity.set_waits_at(static_cast<int32_t>(*report.activity.waits_at));
  }
  return message;
}

absl::Status TakeMemory(const group::v1::Memory& message, engine::RankReport* report) {
  report->memory_limit = message.limit_bytes();
  report->memory_peak = message.peak_bytes();
  report->memory = {.reserved = message.reserved_bytes(), .heads = {}, .shared = {}};
  for (const group::v1::MemoryItem& item : message.items()) {
    if (item.place() < 0 || item.place() >= engine::kMemoryPlaceCount) {
      return absl::InternalError("a report names a place of memory that there is not");
    }
    engine::MemoryPlan& plan =
        item.head().empty() ? report->memory.shared : report->memory.heads[item.head()];
    plan.push_back({item.purpose(), item.bytes(), static_cast<engine::MemoryPlace>(item.place())});
  }
  return absl::OkStatus();
}

absl::Status TakeWaits(const group::v1::Waits& message, engine::RankActivity* activity) {
  if (static_cast<size_t>(message.exchanges_size()) != activity->waits.size()) {
    return absl::InternalError("a report has not the exchanges that there are");
  }
  for (size_t i = 0; i < activity->waits.size(); ++i) {
    const group::v1::Histogram& histogram = message.exchanges(static_cast<int>(i));
    Waits::Buckets buckets{};
    if (static_cast<size_t>(histogram.buckets_size()) != buckets.size()) {
      return absl::InternalError("a report has not the buckets that there are");
    }
    std::copy(histogram.buckets().begin(), histogram.buckets().end(), buckets.begin());
    activity->waits[i] = Waits(buckets, histogram.sum());
  }
  return absl::OkStatus();
}

absl::Status TakeActivity(const group::v1::Activity& message, engine::RankActivity* activity) {
  activity->uptime_seconds = message.uptime_seconds();
  activity->command = message.command();
  activity->command_seconds = message.command_seconds();
  activity->last_done_seconds = message.last_done_seconds();
  activity->waits_at.reset();
  if (!message.has_waits_at()) return absl::OkStatus();
  const int32_t at = message.waits_at();
  if (at < 0 || static_cast<size_t>(at) >= kernels::kExchanges.size()) {
    return absl::InternalError("a report names an exchange that there is not");
  }
  activity->waits_at = kernels::kExchanges[static_cast<size_t>(at)];
  return absl::OkStatus();
}

}  // namespace

group::v1::Report ReportWriter::Changed(const engine::RankReport& report) {
  group::v1::Report now = MessageOf(report);
  group::v1::Report changed = now;
  if (MessageDifferencer::Equals(now.device(), last_.device())) changed.clear_device();
  if (MessageDifferencer::Equals(now.memory(), last_.memory())) changed.clear_memory();
  if (MessageDifferencer::Equals(now.waits(), last_.waits())) changed.clear_waits();
  last_ = std::move(now);
  return changed;
}

absl::Status TakeReport(const group::v1::Report& message, engine::RankReport* report) {
  if (message.has_device()) {
    report->device = message.device().name();
    report->description = message.device().description();
    report->pci_bus_id = message.device().pci_bus_id();
    report->host = message.device().host();
  }
  absl::Status status;
  if (message.has_memory()) status = TakeMemory(message.memory(), report);
  if (status.ok() && message.has_waits()) status = TakeWaits(message.waits(), &report->activity);
  if (message.has_totals()) {
    report->totals = {message.totals().total_bytes(), message.totals().free_bytes()};
  }
  if (message.has_process()) {
    report->process.resident_bytes = message.process().resident_bytes();
    report->process.peak_bytes = message.process().peak_bytes();
  }
  if (status.ok() && message.has_activity()) status = TakeActivity(message.activity(), &report->activity);
  return status;
}

}  // namespace lossd::rpc
