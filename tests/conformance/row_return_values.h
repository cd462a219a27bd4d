// What a batch tells of its rows beyond their losses, in guarded arrays.
#ifndef LOSSD_TESTS_CONFORMANCE_ROW_RETURN_VALUES_H_
#define LOSSD_TESTS_CONFORMANCE_ROW_RETURN_VALUES_H_

#include <cstdint>
#include <vector>

#include "kernels/linear_cross_entropy.h"
#include "server/engine/chunk/chunk.h"
#include "tests/unit/kernels/problem.h"

namespace lossd::engine::testing {

inline constexpr WantedReturns kAllReturns = {.log_sum_exp = true,
                                              .z_loss = true,
                                              .log_probability = true,
                                              .entropy = true,
                                              .prediction = true,
                                              .target_rank = true,
                                              .top_k = 3};

// Empty where it was not wanted.
struct RowReturnValues {
  std::vector<float> log_sum_exp;
  std::vector<float> z_loss;
  std::vector<float> log_probability;
  std::vector<float> entropy;
  std::vector<int32_t> prediction;
  std::vector<int32_t> target_rank;
  std::vector<float> divergence;
  std::vector<int32_t> top_tokens;           // [tokens, top_k]
  std::vector<float> top_log_probabilities;  // [tokens, top_k]
};

// Bit for bit.
bool SameBits(const RowReturnValues& a, const RowReturnValues& b);

class GuardedReturns {
 public:
  GuardedReturns(const WantedReturns& wanted, int64_t tokens);

  kernels::RowReturns Pointers();
  RowReturnValues Values() const;
  bool Intact() const;

 private:
  using Bytes = kernels::testing::GuardedBytes;

  const int32_t top_k_;
  Bytes log_sum_exp_;
  Bytes z_loss_;
  Bytes log_probability_;
  Bytes entropy_;
  Bytes prediction_;
  Bytes target_rank_;
  Bytes divergence_;
  Bytes top_tokens_;
  Bytes top_log_probabilities_;
};

}  // namespace lossd::engine::testing

#endif  // LOSSD_TESTS_CONFORMANCE_ROW_RETURN_VALUES_H_
