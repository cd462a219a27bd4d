// lossd_batch and lossd_outputs as what lossd::Session::Compute takes, and its result back.
#ifndef LOSSD_CLIENT_SRC_C_API_BATCHES_H_
#define LOSSD_CLIENT_SRC_C_API_BATCHES_H_

#include "absl/status/statusor.h"
#include "lossd/c_api.h"
#include "lossd/client.h"

namespace lossd::c_api {

absl::StatusOr<Batch> BatchOf(const lossd_batch* given);
// The outputs that are wanted of a batch of so many tokens; none if `given` is NULL.
absl::StatusOr<BatchOutputs> OutputsOf(const lossd_outputs* given, int64_t tokens);
lossd_result ToC(const BatchResult& result);

}  // namespace lossd::c_api

#endif  // LOSSD_CLIENT_SRC_C_API_BATCHES_H_
