// Logits of a few rows, for generation and evaluation: what lossd::Head::Logits takes and gives. Part of
// lossd/client.h.
//
//   std::vector<float> logits(rows * V);
//   auto version = head.Logits({.rows = rows, .hidden_states = x}, {.logits = logits.data()});
#ifndef LOSSD_LOGITS_H_
#define LOSSD_LOGITS_H_

#include <cstdint>
#include <optional>
#include <span>

#include "lossd/loss.h"

namespace lossd {

// Logits are logit_scale·(x·Wᵀ + b), capped: the ones that losses are of.
struct LogitsBatch {
  int64_t rows = 0;  // N, at least 0
  DataType hidden_type = DataType::kFloat32;
  const void* hidden_states = nullptr;  // [N, H] of hidden_type, all finite
  // In place of the head's: finite and above 0; finite and above 0, or 0 for none.
  std::optional<float> logit_scale = {};
  std::optional<float> softcap = {};
  Bias bias = Bias::kOfHead;
  // What the weights must be of; FAILED_PRECONDITION if they are of another version. 0: whatever they are of.
  uint64_t weight_version = 0;
};

// Either all logits of each row, or with top_k above 0 only so many of the largest, which is little to send.
// Rows whose logits overflow have -1 and NaN there. Of equal logits the lower token comes first.
struct LogitsOutputs {
  DataType type = DataType::kFloat32;  // the server rounds to it; what does not fit is infinite
  void* logits = nullptr;              // [N, V] of `type`
  int32_t top_k = 0;                   // at most 64 and V
  std::span<int32_t> top_tokens = {};  // [N, top_k], best first; this and the next two may be empty
  std::span<float> top_logits = {};    // [N, top_k]
  std::span<float> log_sum_exp = {};   // [N], of all of the row's logits
};

}  // namespace lossd

#endif  // LOSSD_LOGITS_H_
