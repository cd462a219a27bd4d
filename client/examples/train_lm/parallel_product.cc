#include "client/examples/train_lm/parallel_product.h"

#include "client/examples/train_lm/arithmetic.h"

namespace lossd::train_lm {
namespace {
constexpr int64_t kProductGranularity = 32;  // a multiple of every product kernel's tile
}  // namespace

void Product(const float* a, const float* b, float* out, const ProductSize& size, ThreadPool* pool) {
  pool->For(size.m, kProductGranularity, [&](int64_t begin, int64_t end) {
    BestArithmetic().product(a + begin * size.k, b, out + begin * size.n, end - begin, size.n, size.k);
  });
}

void ProductBt(const float* a, const float* b, float* out, const ProductSize& size, ThreadPool* pool) {
  pool->For(size.m, kProductGranularity, [&](int64_t begin, int64_t end) {
    BestArithmetic().product_bt(a + begin * size.k, b, out + begin * size.n, end - begin, size.n, size.k);
  });
}

void AccumulateAt(const float* a, const float* b, float* out, const ProductSize& size, ThreadPool* pool) {
  pool->For(size.m, kProductGranularity, [&](int64_t begin, int64_t end) {
    BestArithmetic().accumulate_at(a, size.m, begin, b, out + begin * size.n, end - begin, size.n, size.k);
  });
}

}  // namespace lossd::train_lm
