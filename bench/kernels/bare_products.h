// The limit: the three matrix products of a training step on the whole batch and nothing else, by oneDNN's
// own calls.
#ifndef LOSSD_BENCH_KERNELS_BARE_PRODUCTS_H_
#define LOSSD_BENCH_KERNELS_BARE_PRODUCTS_H_

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels/data_type.h"

namespace lossd::bench {

// Operands of one batch. Z [tokens, vocab] stands for the logits and for their gradient.
struct BareOperands {
  int64_t tokens = 0;
  int64_t vocab = 0;
  int64_t hidden = 0;
  std::vector<float> weight;
  std::vector<float> hidden_states;
  std::vector<float> logits;
  std::vector<float> logit_gradients;
  std::vector<float> dx;
  std::vector<float> dw;
  // bf16 copies, where that arithmetic is measured.
  std::vector<uint16_t> narrow_weight;
  std::vector<uint16_t> narrow_hidden_states;
  std::vector<uint16_t> narrow_logit_gradients;
};

// One way to make Z = X Wᵀ, dX = Z W, dW += Zᵀ X, in this order. Each returns false if this processor cannot.
struct BareProducts {
  std::string kind;
  std::array<std::function<bool()>, 3> products;
};

// Every way that counts for a head of this type: fp32 through sgemm and through the matmul primitive, and for
// a bf16 head bf16 operands too. `operands` outlives the result.
std::vector<BareProducts> AllBareProducts(kernels::DataType head_type, BareOperands& operands);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_BARE_PRODUCTS_H_
