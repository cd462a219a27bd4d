// Where a row leaves the range of numbers, the same on every device. See "The exponent" and "Overflow" in
// docs/numerics.md.
#ifndef LOSSD_KERNELS_ROW_RANGE_H_
#define LOSSD_KERNELS_ROW_RANGE_H_

#include <cstdint>

namespace lossd::kernels {

// What k is above the maximum m that it was chosen from: a row's sum of E is then at least 2^-kHeadroom.
inline constexpr int32_t kHeadroom = 40;
// A row with a larger sum of E is computed again from its true maximum: that is, if its log-sum-exp lies more
// than 104 ln 2 = 72 above m. Both ends are far enough inside fp32's range for the products with W and X.
inline constexpr double kLargestSum = 0x1p64;
// Beyond these, of g max|x| and v max|x|, a row counts as overflowed: sums over 2^24 rows stay finite.
inline constexpr double kLargestContribution = 0x1p100;
inline constexpr double kLargestScaledRow = 0x1p120;

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_ROW_RANGE_H_
