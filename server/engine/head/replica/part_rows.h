// Rows of what a replica holds of a head, as they go from one replica to another.
#ifndef LOSSD_SERVER_ENGINE_HEAD_REPLICA_PART_ROWS_H_
#define LOSSD_SERVER_ENGINE_HEAD_REPLICA_PART_ROWS_H_

#include <algorithm>
#include <cstdint>
#include <string>

#include "kernels/slices.h"

namespace lossd::engine {

// As bytes: the rows as they are in memory; of the sum in fp32, and behind them those of the bias's sum, if
// the head has a bias.
struct PartRows {
  std::string tensor = {};  // a StateTensor's name; empty: the sum of the gradients
  kernels::RowSpan rows = {};
};

// What goes at once, but for a single row that is longer.
inline constexpr int64_t kMostPartBytes = int64_t{4} << 20;
inline int64_t RowsOfPiece(int64_t row_bytes) {
  return std::max<int64_t>(1, kMostPartBytes / std::max<int64_t>(1, row_bytes));
}

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_REPLICA_PART_ROWS_H_
