// Matrix products on all threads of a pool. fp32, row-major, dense; each thread computes whole rows of the
// result.
#ifndef LOSSD_CLIENT_EXAMPLES_TRAIN_LM_PARALLEL_PRODUCT_H_
#define LOSSD_CLIENT_EXAMPLES_TRAIN_LM_PARALLEL_PRODUCT_H_

#include <cstdint>

#include "client/examples/train_lm/thread_pool.h"

namespace lossd::train_lm {

struct ProductSize {
  int64_t m = 0;  // rows of the result
  int64_t n = 0;  // columns of the result
  int64_t k = 0;  // terms of each sum
};

// out [m, n] = a [m, k] · b [k, n]
void Product(const float* a, const float* b, float* out, const ProductSize& size, ThreadPool* pool);
// out [m, n] = a [m, k] · b [n, k]ᵀ
void ProductBt(const float* a, const float* b, float* out, const ProductSize& size, ThreadPool* pool);
// out [m, n] += a [k, m]ᵀ · b [k, n]
void AccumulateAt(const float* a, const float* b, float* out, const ProductSize& size, ThreadPool* pool);

}  // namespace lossd::train_lm

#endif  // LOSSD_CLIENT_EXAMPLES_TRAIN_LM_PARALLEL_PRODUCT_H_
