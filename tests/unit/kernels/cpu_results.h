// What the CPU's step gives, in the form of the fp64 reference: the oracle of all other devices. The CPU
// device is the one that fp64 judges (tests/conformance).
#ifndef LOSSD_TESTS_UNIT_KERNELS_CPU_RESULTS_H_
#define LOSSD_TESTS_UNIT_KERNELS_CPU_RESULTS_H_

#include "kernels/cpu/arithmetic.h"
#include "tests/unit/kernels/problem.h"

namespace lossd::kernels::testing {

// As the CPU device computes them for heads of this type.
Reference CpuResults(const Problem& problem);
Reference CpuResults(const Problem& problem, cpu::Arithmetic arithmetic);

// In fp32 arithmetic whatever the head's type, so that no operand but those that are stored in 16 bits is
// rounded to them: the same on every processor, and within kFloat32Error of fp64.
inline Reference CpuResultsInFloat32(const Problem& problem) {
  return CpuResults(problem, cpu::Arithmetic::kSimd);
}
inline constexpr double kFloat32Error = 1e-5;

}  // namespace lossd::kernels::testing

#endif  // LOSSD_TESTS_UNIT_KERNELS_CPU_RESULTS_H_
