// Division that rounds up.
#ifndef LOSSD_KERNELS_ROUNDING_H_
#define LOSSD_KERNELS_ROUNDING_H_

#include <cstdint>

namespace lossd::kernels {

constexpr int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t RoundUp(int64_t a, int64_t b) { return CeilDivide(a, b) * b; }

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_ROUNDING_H_
