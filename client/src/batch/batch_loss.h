// The loss of a batch: checks its options, puts them on the wire, and reduces the sums of its chunks. Pure
// functions.
#ifndef LOSSD_CLIENT_SRC_BATCH_BATCH_LOSS_H_
#define LOSSD_CLIENT_SRC_BATCH_BATCH_LOSS_H_

#include <optional>

#include "absl/status/status.h"
#include "lossd/client.h"
#include "lossd/v1/loss.pb.h"

namespace lossd::internal {

// Whether the head's class weights count in the batch.
bool ClassWeightsCount(const HeadConfig& head, const Batch& batch);

// Options, per-token inputs and the reduction; INVALID_ARGUMENT names the field and both values.
absl::Status ValidateLoss(const HeadConfig& head, const Batch& batch);

// What multiplies the gradients, the reduction included. The same for every chunk of the batch, and for the
// same batch.
struct GradientScales {
  float all = 1.0F;
  std::optional<float> z_loss = {};  // none: `all`
};
GradientScales ScalesOf(const Batch& batch);

// Sets the options of `chunk`; without any it stays as it is, so that plain chunks are as they always were.
void SetLossOptions(const Batch& batch, const GradientScales& scales, const TokenReturns& returns,
                    v1::Chunk* chunk);

// The batch's loss, reduced as it asks, from the sums in `result`: they cover all of its chunks.
double ReducedLoss(const Batch& batch, const BatchResult& result);
// The result of a batch none of whose tokens is needed (NeededTokens): nothing of it is sent.
BatchResult ResultOfNothing(const Batch& batch);

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_BATCH_BATCH_LOSS_H_
