// Problems with soft targets, for every device.
#ifndef LOSSD_TESTS_UNIT_KERNELS_SOFT_PROBLEMS_H_
#define LOSSD_TESTS_UNIT_KERNELS_SOFT_PROBLEMS_H_

#include <cstdint>
#include <vector>

#include "tests/unit/kernels/problem.h"

namespace lossd::kernels::testing {

inline constexpr Divergence kDivergences[] = {Divergence::kForwardKl, Divergence::kReverseKl,
                                              Divergence::kJensenShannon};

// A problem whose teacher has 11 hidden elements, the other 16-bit type or fp32, and temperature 1.
Problem SoftProblem(const Shape& shape, DataType type, Divergence divergence);

// Turns on other options, one by one, by the bits of a number.
inline constexpr int kAllSoftOptions = 127;
void UseWithSoftTargets(Problem& problem, int options);
// The numbers of none of them, of each, of every two and of all.
std::vector<int> SoftOptionPairs();

// One whose teacher is the head itself, but for weights that are off by about `change`, relatively.
Problem Nearly(const Shape& shape, DataType type, Divergence divergence, float change);

// SetLogit of the teacher.
void SetTeacherLogit(Problem& problem, int64_t row, int64_t entry, float value);

// Rows [first, first + count) of a problem.
Problem PartOf(const Problem& whole, int64_t first, int64_t count);

}  // namespace lossd::kernels::testing

#endif  // LOSSD_TESTS_UNIT_KERNELS_SOFT_PROBLEMS_H_
