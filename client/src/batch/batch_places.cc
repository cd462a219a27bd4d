#include "client/src/batch/batch_places.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"

namespace lossd::internal {
namespace {

constexpr int64_t kAlignment = 16;  // of offsets, the server's rule
constexpr char kTeacherHidden[] = "distillation.hidden_states";

absl::StatusOr<std::optional<RegionPlace>> FindPlace(const RegionMap& regions, const void* data,
                                                     int64_t bytes, const char* name) {
  auto place = regions.Find(data, bytes, name);
  if (!place.ok() || !place->has_value() || (*place)->offset % kAlignment == 0) return place;
  if ((*place)->kind == RegionKind::kSystem) return std::nullopt;
  return absl::InvalidArgumentError(absl::StrCat(name, " is at offset ", (*place)->offset,
                                                 " of a region of device memory; it must be a multiple of ",
                                                 kAlignment));
}

absl::Status CheckOverlap(const std::optional<RegionPlace>& input, int64_t bytes,
                          const std::optional<RegionPlace>& dx, int64_t dx_bytes, const char* name) {
  if (!input || !dx || input->handle != dx->handle || input->offset >= dx->offset + dx_bytes ||
      dx->offset >= input->offset + bytes) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "dx overlaps ", name, " in their region; a chunk that has to be sent again needs them unchanged"));
}

int64_t StepOf(int64_t row_bytes) { return kAlignment / std::gcd(kAlignment, row_bytes); }

}  // namespace

int64_t TeacherRowBytes(const Batch& batch) {
  if (!batch.distillation) return 0;
  return batch.distillation->hidden_size * SizeOf(batch.distillation->hidden_type);
}

int64_t BatchPlaces::TokenStep(const HeadConfig& head, const Batch& batch,
                               const BatchOutputs& outputs) const {
  int64_t step = 1;  // powers of two
  if (hidden_states) step = std::max(step, StepOf(head.hidden_size * SizeOf(batch.hidden_type)));
  if (teacher_hidden) step = std::max(step, StepOf(TeacherRowBytes(batch)));
  if (dx) step = std::max(step, StepOf(head.hidden_size * SizeOf(outputs.dx_type)));
  return step;
}

absl::StatusOr<BatchPlaces> FindPlaces(const RegionMap& regions, const HeadConfig& head, const Batch& batch,
                                       const BatchOutputs& outputs) {
  const int64_t elements = static_cast<int64_t>(batch.labels.size()) * head.hidden_size;
  const int64_t hidden_bytes = elements * SizeOf(batch.hidden_type);
  const int64_t dx_bytes = elements * SizeOf(outputs.dx_type);
  BatchPlaces places;
  auto hidden = FindPlace(regions, batch.hidden_states, hidden_bytes, "hidden_states");
  if (!hidden.ok()) return hidden.status();
  places.hidden_states = *std::move(hidden);
  const int64_t teacher_bytes = static_cast<int64_t>(batch.labels.size()) * TeacherRowBytes(batch);
  if (batch.distillation) {
    auto teacher = FindPlace(regions, batch.distillation->hidden_states, teacher_bytes, kTeacherHidden);
    if (!teacher.ok()) return teacher.status();
    places.teacher_hidden = *std::move(teacher);
  }
  if (outputs.dx != nullptr) {
    auto dx = FindPlace(regions, outputs.dx, dx_bytes, "dx");
    if (!dx.ok()) return dx.status();
    places.dx = *std::move(dx);
  }
  if (absl::Status status =
          CheckOverlap(places.hidden_states, hidden_bytes, places.dx, dx_bytes, "hidden_states");
      !status.ok()) {
    return status;
  }
  if (absl::Status status =
          CheckOverlap(places.teacher_hidden, teacher_bytes, places.dx, dx_bytes, kTeacherHidden);
      !status.ok()) {
    return status;
  }
  return places;
}

}  // namespace lossd::internal
