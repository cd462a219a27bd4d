// Buffers that are published as one version of a head's weights.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_WEIGHT_BUFFERS_H_
#define LOSSD_SERVER_ENGINE_DEVICE_WEIGHT_BUFFERS_H_

#include "server/engine/memory/host_buffer.h"

namespace lossd::engine {

struct WeightBuffers {
  HostBuffer weights;    // [V, H] of the head's master_type
  HostBuffer bias = {};  // fp32 [V]; empty if the head has none
};

// Where rows of the weights, or of their gradient, go.
struct RowsOut {
  void* matrix = nullptr;
  float* bias = nullptr;  // null: not wanted, or the head has none
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_WEIGHT_BUFFERS_H_
