// The loss of a batch: whether its options can be, what they are on the wire, and what the mean of it is
// over. Pure functions.
#ifndef LOSSD_CLIENT_SRC_BATCH_BATCH_LOSS_H_
#define LOSSD_CLIENT_SRC_BATCH_BATCH_LOSS_H_

#include <optional>

#include "absl/status/status.h"
#include "lossd/client.h"
#include "lossd/v1/loss.pb.h"

namespace lossd::internal {

// Options, per-token inputs and the reduction; INVALID_ARGUMENT names the field and both values.
absl::Status ValidateLoss(const HeadConfig& head, const Batch& batch);

// What multiplies the gradients, the reduction included. The same for every chunk of the batch, and for the
// same batch.
struct GradientScales {
  float all = 1.0F;
  std::optional<float> z_loss = {};  // none: `all`
};
GradientScales ScalesOf(const Batch& batch);

// Into `chunk`, which gets no options if there are none, so that plain chunks are as they always were.
void SetLossOptions(const Batch& batch, const GradientScales& scales, const TokenReturns& returns,
                    v1::Chunk* chunk);

// By the sums of `result`, which are those of all of the batch's chunks.
double ReducedLoss(const Batch& batch, const BatchResult& result);
// The result of a batch of which nothing is sent.
BatchResult ResultOfIgnored(const Batch& batch);

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_BATCH_BATCH_LOSS_H_
