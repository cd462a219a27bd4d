#include "server/engine/device/head_backend.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "kernels/collectives/communicator.h"
#include "server/engine/common/errors.h"

namespace lossd::engine {

HiddenRows RowsIn(const Payload& payload) {
  const std::span<const ByteSpan> parts = payload.parts();
  HiddenRows rows{.place = payload.place()};
  if (payload.place() == MemoryPlace::kRank) {
    rows.number = payload.at_rank().number;
  } else if (parts.size() == 1) {
    rows.data = parts.front().data();
  } else {
    rows.parts = parts;
  }
  return rows;
}

absl::StatusOr<std::shared_ptr<RegionMemory>> Device::CreateRegionMemory(RegionKind kind, int64_t bytes) {
  if (kind == RegionKind::kSystem) return CreateSystemMemory(bytes);
  return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kOption, "kind",
                   absl::StrCat("the server's device is ", name(),
                                ", which has no memory of its own to share; "
                                "create a region of system memory"));
}

namespace {

void AddTo(GradientTallies::PerSegment* sum, const GradientTallies::PerSegment& other) {
  for (size_t i = 0; i < other.size(); ++i) {
    kernels::GradientTally& tally = (*sum)[i];
    tally.squares += other[i].squares;
    tally.largest = std::max(tally.largest, other[i].largest);
    tally.non_finite += other[i].non_finite;
  }
}

double NormOf(const GradientTallies::PerSegment& tallies) {
  kernels::PerSegment<double> squares;
  std::transform(tallies.begin(), tallies.end(), squares.begin(),
                 [](const kernels::GradientTally& tally) { return tally.squares; });
  return std::sqrt(kernels::SumOverSegments(kernels::kFixedSegments, squares));
}

}  // namespace

void GradientTallies::Add(const GradientTallies& other) {
  AddTo(&dw, other.dw);
  AddTo(&db, other.db);
}

GradientStats StatsOf(const GradientTallies& tallies) {
  GradientStats stats{.norm = NormOf(tallies.dw), .bias_norm = NormOf(tallies.db)};
  for (const GradientTallies::PerSegment* of : {&tallies.dw, &tallies.db}) {
    for (const kernels::GradientTally& tally : *of) {
      stats.largest = std::max(stats.largest, tally.largest);
      stats.non_finite += tally.non_finite;
    }
  }
  return stats;
}

namespace {

absl::Status NotThere(const char* what) {
  return absl::UnimplementedError(absl::StrCat("this device has no ", what));
}

}  // namespace

absl::Status HeadBackend::BlendWeights(const HeadBackend& /*source*/, double /*decay*/) {
  return NotThere("BlendWeights");
}

absl::Status HeadBackend::CopyOptimizer(const HeadBackend& /*source*/) { return NotThere("CopyOptimizer"); }

absl::Status HeadBackend::Logits(const LogitRows& /*rows*/) { return NotThere("Logits"); }

absl::Status HeadBackend::Fold(Gradient* /*from*/, Gradient* /*to*/) { return NotThere("Fold"); }

absl::StatusOr<GradientTallies> HeadBackend::Summarize(const Gradient* /*gradient*/, double /*scale*/) {
  return NotThere("Summarize");
}

absl::StatusOr<GradientTallies> HeadBackend::ApplyStep(const Gradient* /*gradient*/,
                                                       const StepArguments& /*arguments*/) {
  return NotThere("optimizer");
}

std::vector<kernels::RowSpan> HeadBackend::SliceRows(const kernels::SliceLayout& slices,
                                                     int32_t slice) const {
  const kernels::RowSpan rows = slices.Slice(slice);
  if (rows.count == 0) return {};
  return {rows};
}

absl::Status HeadBackend::SumSlices(Gradient* /*gradient*/, const ReplicaCommunicators& /*replicas*/) {
  return NotThere("slices");
}

absl::Status HeadBackend::AddToSum(Gradient* /*gradient*/, int32_t /*replica*/,
                                   const ReplicaCommunicators& /*replicas*/) {
  return NotThere("slices");
}

absl::StatusOr<GradientTallies> HeadBackend::TallySum(double /*scale*/,
                                                      const ReplicaCommunicators& /*replicas*/) {
  return NotThere("slices");
}

absl::Status HeadBackend::StepSlices(const StepArguments& /*arguments*/) { return NotThere("slices"); }

absl::Status HeadBackend::GatherSlices(const ReplicaCommunicators& /*replicas*/) {
  return NotThere("slices");
}

absl::Status HeadBackend::ReadSum(int64_t /*first_row*/, int64_t /*rows*/, float* /*out*/) {
  return NotThere("slices");
}

absl::Status HeadBackend::ReadBiasSum(int64_t /*first_row*/, int64_t /*rows*/, float* /*out*/) {
  return NotThere("slices");
}

absl::Status HeadBackend::ReadState(const std::string& /*tensor*/, int64_t /*first_row*/, int64_t /*rows*/,
                                    void* /*out*/) {
  return NotThere("ReadState");
}

absl::Status HeadBackend::WriteState(const std::string& /*tensor*/, int64_t /*first_row*/, int64_t /*rows*/,
                                     const void* /*in*/) {
  return NotThere("WriteState");
}

absl::StatusOr<HeadBackend::CopyDone> HeadBackend::CopyState(std::span<const StateCopy> copies) {
  for (const auto& [tensor, out] : copies) {
    if (absl::Status read = ReadState(tensor.name, 0, tensor.rows, out); !read.ok()) return read;
  }
  return CopyDone([] { return absl::OkStatus(); });
}

absl::Status HeadBackend::WriteGradient(Gradient* /*gradient*/, int64_t /*first_row*/, int64_t /*rows*/,
                                        const float* /*dw*/, const float* /*bias*/) {
  return NotThere("WriteGradient");
}

absl::Status Device::NoShards() const {
  return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kOption, "devices",
                   absl::StrCat("heads cannot be spread over several devices such as ", name(),
                                " yet: give one of them, --device=", name()));
}

absl::StatusOr<MemoryPlan> Device::PlanShard(const HeadConfig& /*config*/, const HeadShard& /*shard*/) const {
  return NoShards();
}

absl::StatusOr<std::unique_ptr<HeadBackend>> Device::CreateShard(const HeadConfig& /*config*/,
                                                                 const HeadShard& /*shard*/) {
  return NoShards();
}

absl::StatusOr<std::shared_ptr<ReplicaConnection>> Device::ConnectReplicas(
    const ReplicaNetwork& network, kernels::collectives::Rendezvous& rendezvous) {
  absl::StatusOr<std::unique_ptr<kernels::collectives::Communicator>> host =
      ConnectReplicaHosts(network, rendezvous);
  if (!host.ok()) return host.status();
  return OwningConnection(*std::move(host), nullptr);
}

absl::StatusOr<std::unique_ptr<Gradient>> Device::CreateGradient(const HeadConfig& /*config*/) {
  return absl::UnimplementedError(absl::StrCat("the device ", name(), " keeps one gradient for a head"));
}

}  // namespace lossd::engine
