// Which tensors of a batch lie in regions, so that chunks name them instead of carrying them.
#ifndef LOSSD_CLIENT_SRC_BATCH_BATCH_PLACES_H_
#define LOSSD_CLIENT_SRC_BATCH_BATCH_PLACES_H_

#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "client/src/regions/region_map.h"
#include "lossd/client.h"

namespace lossd::internal {

struct BatchPlaces {
  std::optional<RegionPlace> hidden_states;
  std::optional<RegionPlace> teacher_hidden;  // of a distillation
  std::optional<RegionPlace> dx;

  // Whether answers carry dX: it is wanted, and not put into a region.
  bool DxIsSent(const BatchOutputs& outputs) const { return outputs.dx != nullptr && !dx; }
  // Whether chunks carry labels and losses only.
  bool All(const Batch& batch, const BatchOutputs& outputs) const {
    return hidden_states && (teacher_hidden || !batch.distillation) && !DxIsSent(outputs);
  }

  // A chunk that begins at a multiple of so many tokens has offsets that the server takes.
  int64_t TokenStep(const HeadConfig& head, const Batch& batch, const BatchOutputs& outputs) const;
};

// Bytes of a token's hidden states for a distillation's teacher; 0 without one.
int64_t TeacherRowBytes(const Batch& batch);

// The places of a batch that ValidateBatch accepts. A tensor in system memory that is not aligned to 16
// bytes is sent as if it were in no region. INVALID_ARGUMENT if one leaves its region or is not aligned in
// device memory, or if dX overlaps hidden states; FAILED_PRECONDITION if the server has lost a region.
absl::StatusOr<BatchPlaces> FindPlaces(const RegionMap& regions, const HeadConfig& head, const Batch& batch,
                                       const BatchOutputs& outputs);

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_BATCH_BATCH_PLACES_H_
