// Numbers that several of the CPU's loops need.
#ifndef LOSSD_KERNELS_CPU_CONSTANTS_H_
#define LOSSD_KERNELS_CPU_CONSTANTS_H_

#include <limits>

namespace lossd::kernels::cpu {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
inline constexpr double kLn2 = 0.693147180559945309417;

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_CONSTANTS_H_
