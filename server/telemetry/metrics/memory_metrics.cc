// The queue, credits, sessions and memory.
#include "server/telemetry/metrics/collect.h"

namespace lossd::telemetry {
namespace {

constexpr Metric kAllQueuedChunks{"lossd_queued_chunks", "Chunks accepted and not yet started.", kGauge};
constexpr Metric kCreditBytes{
    "lossd_credit_bytes", "Payloads and answers under way: read, and not yet answered on the wire.", kGauge};
constexpr Metric kAllStaging{"lossd_staging_reserved_bytes",
                             "Credits of all open sessions, and memory for what they hold.", kGauge};
constexpr Metric kStagingLimit{"lossd_staging_limit_bytes", "What the credits of all sessions may come to.",
                               kGauge};
constexpr Metric kStreams{"lossd_live_streams", "Compute streams.", kGauge};
constexpr Metric kRowStreams{"lossd_row_streams", "Calls of ReadWeights and ReadGradient.", kGauge};
constexpr Metric kRowStreamBytes{"lossd_row_stream_bytes",
                                 "What these may hold until their clients have read it.", kGauge};
constexpr Metric kAllSessions{"lossd_sessions", "Open sessions.", kGauge};
constexpr Metric kHeads{"lossd_heads", "Heads.", kGauge};
constexpr Metric kDraining{"lossd_draining", "1 while the server is shutting down.", kGauge};
constexpr Metric kReserved{"lossd_memory_reserved_bytes", "Memory reserved.", kGauge, {"purpose", "place"}};
constexpr Metric kReservedPeak{"lossd_memory_reserved_peak_bytes",
                               "Most memory that was reserved at once since the start.", kGauge};
constexpr Metric kLimit{"lossd_memory_limit_bytes", "What heads and the device may reserve in all.", kGauge};
constexpr Metric kFree{"lossd_memory_free_bytes", "What is left of that.", kGauge};
constexpr Metric kQuota{"lossd_head_quota_bytes", "What one head may reserve with its sessions; 0: no quota.",
                        kGauge};
constexpr Metric kParkedHeads{"lossd_parked_heads", "Heads that wait in the host's memory.", kGauge};
constexpr Metric kParkedBytes{"lossd_parked_bytes", "What they take of it.", kGauge};
constexpr Metric kParkingLimit{"lossd_parking_limit_bytes", "What they may take (--parking_bytes).", kGauge};
constexpr Metric kParkings{
    "lossd_head_parkings_total", "Heads that were parked, and came back.", kCounter, {"direction"}};
constexpr Metric kDevice{
    "lossd_device_memory_bytes",
    "Memory of the device, whoever uses it: all of it, and what is free. 0: it does not tell.",
    kGauge,
    {"kind"}};
constexpr Metric kPinnedPool{"lossd_pinned_pool_bytes",
                             "Page-locked memory that payloads and results come from; 0 on the CPU.",
                             kGauge,
                             {"kind"}};
constexpr Metric kRegions{
    "lossd_regions", "Regions of memory shared with clients on this host.", kGauge, {"kind"}};
constexpr Metric kRegionBytes{"lossd_region_bytes", "Their memory.", kGauge, {"kind"}};
constexpr Metric kProcessPeak{"lossd_process_peak_memory_bytes",
                              "Largest resident memory of the process since its start.", kGauge};

void CollectRegions(const engine::RegionTable& regions, Exposition& out) {
  constexpr std::array kKinds = {engine::RegionKind::kSystem, engine::RegionKind::kDevice};
  out.Begin(kRegions);
  for (const engine::RegionKind kind : kKinds) out.Add({engine::Name(kind)}, regions.usage(kind).regions);
  out.Begin(kRegionBytes);
  for (const engine::RegionKind kind : kKinds) out.Add({engine::Name(kind)}, regions.usage(kind).bytes);
}

void CollectReserved(const engine::GroupReport& group, Exposition& out) {
  using engine::RankReport;
  out.OfEachRank(kReserved, group, [&out](const RankReport& rank) {
    for (const engine::MemoryItem& item : engine::ByPurpose(rank.memory)) {
      out.Add({item.purpose, engine::Name(item.place)}, item.bytes);
    }
  });
  out.OfEachRank(kReservedPeak, group, [&out](const RankReport& rank) { out.Add({}, rank.memory_peak); });
  out.OfEachRank(kLimit, group, [&out](const RankReport& rank) { out.Add({}, rank.memory_limit); });
  out.OfEachRank(kFree, group,
                 [&out](const RankReport& rank) { out.Add({}, rank.memory_limit - rank.memory.reserved); });
}

}  // namespace

void CollectMemory(const engine::Engine& engine, const engine::GroupReport& group, Exposition& out) {
  const engine::Counters& counters = engine.counters();
  out.Only(kAllQueuedChunks, counters.queued_chunks);
  out.Only(kCreditBytes, counters.credit_bytes);
  out.Only(kAllStaging, engine.staging_reserved());
  out.Only(kStagingLimit, engine.options().staging_bytes);
  out.Only(kStreams, counters.live_streams);
  const engine::RowStreamUsage rows = engine.row_streams().Total();
  out.Only(kRowStreams, rows.streams);
  out.Only(kRowStreamBytes, rows.bytes);
  out.Only(kAllSessions, engine.sessions());
  out.Only(kHeads, engine.Heads().size());
  out.Only(kDraining, engine.draining() ? 1 : 0);
  CollectReserved(group, out);
  out.Only(kQuota, engine.budget().head_quota());
  out.Only(kParkedHeads, engine.ParkedHeads().size());
  out.Only(kParkedBytes, engine.parking().reserved());
  out.Only(kParkingLimit, engine.parking().limit());
  out.Begin(kParkings);
  out.Add({"parked"}, counters.heads_parked);
  out.Add({"back"}, counters.heads_brought_back);
  out.OfEachRank(kDevice, group, [&out](const engine::RankReport& rank) {
    out.Add({"total"}, rank.totals.total_bytes);
    out.Add({"free"}, rank.totals.free_bytes);
  });
  const engine::PoolUsage pinned = engine.device().RegisteredUsage();
  out.Begin(kPinnedPool);
  out.Add({"capacity"}, pinned.capacity);
  out.Add({"used"}, pinned.used);
  out.Add({"peak"}, pinned.peak);
  CollectRegions(engine.regions(), out);
  if (group.ranks.front().process.peak_bytes == 0) return;  // it cannot be read
  out.OfEachRank(kProcessPeak, group,
                 [&out](const engine::RankReport& rank) { out.Add({}, rank.process.peak_bytes); });
}

}  // namespace lossd::telemetry
