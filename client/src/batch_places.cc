#include "client/src/batch_places.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"

namespace lossd::internal {
namespace {

constexpr int64_t kAlignment = 16;  // of offsets, the server's rule

absl::StatusOr<std::optional<RegionPlace>> FindPlace(const RegionMap& regions, const void* data,
                                                     int64_t bytes, const char* name) {
  auto place = regions.Find(data, bytes, name);
  if (!place.ok() || !place->has_value() || (*place)->offset % kAlignment == 0) return place;
  if ((*place)->kind == RegionKind::kSystem) return std::nullopt;
  return absl::InvalidArgumentError(absl::StrCat(name, " is at offset ", (*place)->offset,
                                                 " of a region of device memory; it must be a multiple of ",
                                                 kAlignment));
}

int64_t StepOf(int64_t row_bytes) { return kAlignment / std::gcd(kAlignment, row_bytes); }

}  // namespace

int64_t BatchPlaces::TokenStep(const HeadConfig& head, const Batch& batch,
                               const BatchOutputs& outputs) const {
  int64_t step = 1;  // powers of two
  if (hidden_states) step = std::max(step, StepOf(head.hidden_size * SizeOf(batch.hidden_type)));
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
  if (outputs.dx != nullptr) {
    auto dx = FindPlace(regions, outputs.dx, dx_bytes, "dx");
    if (!dx.ok()) return dx.status();
    places.dx = *std::move(dx);
  }
  if (places.hidden_states && places.dx && places.hidden_states->handle == places.dx->handle &&
      places.hidden_states->offset < places.dx->offset + dx_bytes &&
      places.dx->offset < places.hidden_states->offset + hidden_bytes) {
    return absl::InvalidArgumentError(
        "dx overlaps hidden_states in their region; a chunk that has to be sent again needs them unchanged");
  }
  return places;
}

}  // namespace lossd::internal
