// How a batch is cut into chunks, and whether it can be sent at all. Pure functions.
#ifndef LOSSD_CLIENT_SRC_BATCH_PLAN_H_
#define LOSSD_CLIENT_SRC_BATCH_PLAN_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/batch_places.h"
#include "lossd/client.h"
#include "lossd/v1/loss.pb.h"

namespace lossd::internal {

// Sizes, pointers, labels and the scale; INVALID_ARGUMENT names the field and both values.
absl::Status ValidateBatch(const HeadConfig& head, const Batch& batch, const BatchOutputs& outputs);

// The type in which dX is asked for: the narrowest if nobody wants it.
DataType DxTypeOnWire(const BatchOutputs& outputs);

struct ChunkRange {
  int64_t first = 0;  // token of the batch
  int64_t tokens = 0;
  int64_t payload_bytes = 0;  // in and out, as the server's byte credit counts them
};

// As few chunks as SessionOptions::chunk_bytes and the limits allow, of nearly equal size (the server pays
// one pass over dW per chunk, so a small rest would cost as much as a whole chunk), and at least two within
// the byte credit if it has room for two tokens, so that sending and computing overlap. What is in a region
// costs no credit, and its chunks begin where offsets are aligned. The same for the same arguments.
// RESOURCE_EXHAUSTED if one token is above the server's chunk limit.
absl::StatusOr<std::vector<ChunkRange>> CutBatch(const HeadConfig& head, const Batch& batch,
                                                 const BatchOutputs& outputs, const BatchPlaces& places,
                                                 int64_t chunk_bytes, const v1::SessionLimits& limits);

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_BATCH_PLAN_H_
