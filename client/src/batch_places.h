// Which tensors of a batch lie in regions, so that chunks name them instead of carrying them.
#ifndef LOSSD_CLIENT_SRC_BATCH_PLACES_H_
#define LOSSD_CLIENT_SRC_BATCH_PLACES_H_

#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "client/src/region_map.h"
#include "lossd/client.h"

namespace lossd::internal {

struct BatchPlaces {
  std::optional<RegionPlace> hidden_states;
  std::optional<RegionPlace> dx;

  // A chunk that begins at a multiple of so many tokens has offsets that the server takes.
  int64_t TokenStep(const HeadConfig& head, const Batch& batch, const BatchOutputs& outputs) const;
};

// Of a batch that ValidateBatch accepts. What is in system memory but not aligned to 16 bytes is sent as if
// it were in no region. INVALID_ARGUMENT for what leaves its region, is not aligned in device memory, or if
// dX overlaps the hidden states; FAILED_PRECONDITION if the server has lost a region.
absl::StatusOr<BatchPlaces> FindPlaces(const RegionMap& regions, const HeadConfig& head, const Batch& batch,
                                       const BatchOutputs& outputs);

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_BATCH_PLACES_H_
