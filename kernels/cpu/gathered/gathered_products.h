// Products with some rows of the weights, which a list names. Sums are in fp64, in the order of the list.
#ifndef LOSSD_KERNELS_CPU_GATHERED_GATHERED_PRODUCTS_H_
#define LOSSD_KERNELS_CPU_GATHERED_GATHERED_PRODUCTS_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/data_type.h"

namespace lossd::kernels::cpu {

struct GatheredWeights {
  DataType type = DataType::kFloat32;
  const void* weight = nullptr;  // [V, hidden]
  int64_t hidden = 0;
};

// `count` hidden states of `type`, rounded to the weights' type and widened.
void RoundStates(DataType type, const void* states, DataType weight_type, float* x, int64_t count);

// products[i] = x . W[tokens[i]].
void GatherProducts(const GatheredWeights& weights, const float* x, std::span<const int32_t> tokens,
                    float* products);
// The same of at most kMostAtOnce tokens, from hidden states of `type` as they came: these are rounded to the
// weights' type on the way.
inline constexpr size_t kMostAtOnce = 64;
void GatherProducts(const GatheredWeights& weights, DataType type, const void* states,
                    std::span<const int32_t> tokens, float* products);

// out = Σ factors[i] W[tokens[i]], [hidden] of `type`.
void SumGathered(const GatheredWeights& weights, std::span<const int32_t> tokens, const float* factors,
                 DataType type, void* out);

// One entry of a list in order of tokens.
struct TokenEntry {
  int32_t token = 0;
  int32_t row = 0;      // of x
  float factor = 0.0f;  // of what it adds

  bool operator<(const TokenEntry& other) const {
    return token != other.token ? token < other.token : row < other.row;
  }
};

// dw[token] += Σ factor x[row] over the entries, and db[token] += Σ factor unless db is null; each token's in
// order. `entries` are sorted, x is [*, hidden].
void AddGathered(std::span<const TokenEntry> entries, const float* x, int64_t hidden, float* dw, float* db);

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_GATHERED_GATHERED_PRODUCTS_H_
