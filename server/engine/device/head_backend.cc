#include "server/engine/device/head_backend.h"

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"

namespace lossd::engine {

HiddenRows RowsIn(const Payload& payload) {
  const std::span<const ByteSpan> parts = payload.parts();
  HiddenRows rows{.place = payload.place()};
  if (parts.size() == 1) {
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

absl::Status NotThere(const char* what) {
  return absl::UnimplementedError(absl::StrCat("this device has no ", what));
}

}  // namespace

absl::Status HeadBackend::Logits(const LogitRows& /*rows*/) { return NotThere("Logits"); }

absl::Status HeadBackend::Fold(Gradient* /*from*/, Gradient* /*to*/) { return NotThere("Fold"); }

absl::StatusOr<GradientStats> HeadBackend::Summarize(const Gradient* /*gradient*/, double /*scale*/) {
  return NotThere("Summarize");
}

absl::StatusOr<GradientStats> HeadBackend::ApplyStep(const Gradient* /*gradient*/,
                                                     const StepArguments& /*arguments*/) {
  return NotThere("optimizer");
}

absl::Status HeadBackend::ReadState(const std::string& /*tensor*/, int64_t /*first_row*/, int64_t /*rows*/,
                                    void* /*out*/) {
  return NotThere("ReadState");
}

absl::Status HeadBackend::WriteState(const std::string& /*tensor*/, int64_t /*first_row*/, int64_t /*rows*/,
                                     const void* /*in*/) {
  return NotThere("WriteState");
}

absl::Status HeadBackend::WriteGradient(Gradient* /*gradient*/, int64_t /*first_row*/, int64_t /*rows*/,
                                        const float* /*dw*/, const float* /*bias*/) {
  return NotThere("WriteGradient");
}

absl::StatusOr<std::unique_ptr<Gradient>> Device::CreateGradient(const HeadConfig& /*config*/) {
  return absl::UnimplementedError(absl::StrCat("the device ", name(), " keeps one gradient for a head"));
}

}  // namespace lossd::engine
