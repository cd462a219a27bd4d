// What ranks of these tests write: elements that anybody can compute.
#ifndef LOSSD_TESTS_INTEGRATION_CLIENT_SERVER_WEIGHT_RANKS_H_
#define LOSSD_TESTS_INTEGRATION_CLIENT_SERVER_WEIGHT_RANKS_H_

#include <cstdint>
#include <vector>

namespace lossd::testing {

// In (-1, 1), a multiple of 1/128: exact in every dtype, so that a row tells whose it is.
inline float WeightAt(int64_t row, int64_t column, int64_t seed) {
  const auto mixed = static_cast<uint64_t>(row * 1000003 + column * 7919 + seed * 104729) * 2654435761U;
  return static_cast<float>(static_cast<int64_t>(mixed >> 20 & 0xff) - 128) / 128.0F;
}

inline std::vector<float> WeightRows(int64_t first_row, int64_t rows, int64_t hidden, int64_t seed) {
  std::vector<float> values;
  values.reserve(static_cast<size_t>(rows * hidden));
  for (int64_t row = first_row; row < first_row + rows; ++row) {
    for (int64_t column = 0; column < hidden; ++column) values.push_back(WeightAt(row, column, seed));
  }
  return values;
}

}  // namespace lossd::testing

#endif  // LOSSD_TESTS_INTEGRATION_CLIENT_SERVER_WEIGHT_RANKS_H_
