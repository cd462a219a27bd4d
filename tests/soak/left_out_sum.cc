// Linked into a lossd for the soak of replicas, which has to notice: every so often its gradient is left out
// of the sum of all.
#include <atomic>
#include <cstdint>
#include <vector>

#include "kernels/collectives/slice_exchange.h"

using lossd::kernels::collectives::Result;
using lossd::kernels::collectives::SliceExchange;

namespace {

constexpr int64_t kSumsUntilOneIsLeftOut = 10;
constexpr size_t kMostFloats = size_t{1} << 22;  // far more than any head of the soak has

}  // namespace

// What --wrap makes of SliceExchange::Sum, and of calls to it.
#define LOSSD_SUM(prefix) prefix##_ZN5lossd7kernels11collectives13SliceExchange3SumEPKfiiPfPvS6_
#ifdef __clang__
#pragma clang diagnostic ignored "-Wreturn-type-c-linkage"  // only the names are to be plain
#endif
extern "C" {
// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming): the linker's
Result LOSSD_SUM(__real_)(SliceExchange* exchange, const float* gradient, int32_t piece, int32_t pieces,
                          float* sum, void* scratch, void* stream);
Result LOSSD_SUM(__wrap_)(SliceExchange* exchange, const float* gradient, int32_t piece, int32_t pieces,
                          float* sum, void* scratch, void* stream) {
  static const auto& nothing = *new std::vector<float>(kMostFloats);
  static std::atomic<int64_t> sums_so_far = 0;
  if (++sums_so_far % kSumsUntilOneIsLeftOut == 0) gradient = nothing.data();
  return LOSSD_SUM(__real_)(exchange, gradient, piece, pieces, sum, scratch, stream);
}
// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)
}
