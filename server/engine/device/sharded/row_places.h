// Where a rank that does not answer a batch says that results are wanted, which go elsewhere.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_SHARDED_ROW_PLACES_H_
#define LOSSD_SERVER_ENGINE_DEVICE_SHARDED_ROW_PLACES_H_

#include <cstdint>

#include "kernels/linear_cross_entropy.h"
#include "server/engine/chunk/chunk.h"

namespace lossd::engine {

// A place that is never written to: what the rank that answers has memory for.
template <class Value>
Value* Wanted(bool wanted) {
  static Value marker;
  return wanted ? &marker : nullptr;
}

inline kernels::RowReturns Marked(const WantedReturns& wanted) {
  const bool top = wanted.top_k > 0;
  return {.log_sum_exp = Wanted<float>(wanted.log_sum_exp),
          .z_loss = Wanted<float>(wanted.z_loss),
          .log_probability = Wanted<float>(wanted.log_probability),
          .entropy = Wanted<float>(wanted.entropy),
          .prediction = Wanted<int32_t>(wanted.prediction),
          .target_rank = Wanted<int32_t>(wanted.target_rank),
          .divergence = Wanted<float>(wanted.divergence),
          .top_k = wanted.top_k,
          .top_tokens = Wanted<int32_t>(top),
          .top_log_probabilities = Wanted<float>(top)};
}

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_SHARDED_ROW_PLACES_H_
