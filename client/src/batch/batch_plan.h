// How a batch is cut into chunks, and whether it can be sent at all. Pure functions.
#ifndef LOSSD_CLIENT_SRC_BATCH_BATCH_PLAN_H_
#define LOSSD_CLIENT_SRC_BATCH_BATCH_PLAN_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/batch/batch_places.h"
#include "client/src/batch/sent_tokens.h"
#include "lossd/client.h"
#include "lossd/v1/loss.pb.h"

namespace lossd::internal {

// Sizes, pointers, labels, scales and options; INVALID_ARGUMENT names the field and both values.
absl::Status ValidateBatch(const HeadConfig& head, const Batch& batch, const BatchOutputs& outputs);

struct ChunkRange {
  int64_t first = 0;  // of the tokens that are sent
  int64_t tokens = 0;
  int64_t payload_bytes = 0;  // in and out, as the server's byte credit counts them
};

struct BatchPlan {
  std::vector<ChunkRange> chunks;
  int32_t lanes = 1;  // chunk i goes to lane i % lanes
};

// The largest chunk is what `chunk_bytes` (SessionOptions; 0: what the server prefers) and the limits allow,
// and at least two are within the byte credit if it has room for two tokens.
//
// Where that is 1 MiB or more, a batch of more than half of it begins and ends with chunks of a quarter, the
// larger ones with one of a half next to it: the server starts early, and only little is on its way back when
// the last of it is computed. Between them, and otherwise, there are as few chunks as can be, of nearly equal
// size: the server may pay one pass over dW for each, so a small rest would cost as much as a whole one.
//
// A batch uses as many lanes as it would fill with largest chunks, at least one and at most `lanes`: a small
// one keeps to the first, and the others need no connection.
//
// A tensor in a region costs no credit, and its chunks begin where offsets are aligned. If all of them are,
// there is nothing to wait for on the way: chunks are as large as the limits allow, of nearly equal size, on
// one lane.
//
// Lists count with their mean length. A chunk whose own are so long that it would exceed the limits of lists
// or half of the credit is cut further.
//
// At least one token is sent.
//
// The same for the same arguments. RESOURCE_EXHAUSTED if one token is above the server's chunk limit.
absl::StatusOr<BatchPlan> PlanBatch(const HeadConfig& head, const Batch& batch, const BatchOutputs& outputs,
                                    const BatchPlaces& places, const SentTokens& sent, int64_t chunk_bytes,
                                    const v1::SessionLimits& limits, int32_t lanes);

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_BATCH_BATCH_PLAN_H_
