// Rows of hidden states on their way into a tile.
#ifndef LOSSD_KERNELS_CPU_PACK_ROWS_H_
#define LOSSD_KERNELS_CPU_PACK_ROWS_H_

#include <cstdint>

#include "kernels/cpu/products.h"
#include "kernels/cpu/workspace.h"
#include "kernels/data_type.h"

namespace lossd::kernels::cpu {

struct HiddenStates {
  DataType type = DataType::kFloat32;
  const void* data = nullptr;  // [N, hidden]
  int64_t hidden = 0;
};

// Rounds the rows that the tile's states name to the weight's type, stores them for the logits product and
// notes their largest magnitudes, on so many threads.
void PackRows(const HiddenStates& x, DataType weight_type, const Workspace& tile, Products& products,
              int64_t threads);

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_PACK_ROWS_H_
