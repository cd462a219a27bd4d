// Order between streams of a device.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_CUDA_STREAM_ORDER_H_
#define LOSSD_SERVER_ENGINE_DEVICE_CUDA_STREAM_ORDER_H_

#include <cuda_runtime_api.h>

#include "kernels/cuda/memory/owners.h"
#include "kernels/cuda/memory/result.h"

namespace lossd::engine {

// What is put on `later` from now on comes behind what is on `earlier`. `event` may be used again at once.
inline kernels::cuda::Result Order(cudaStream_t earlier, const kernels::cuda::Event& event,
                                   cudaStream_t later) {
  LOSSD_CUDA_TRY(cudaEventRecord(event.get(), earlier));
  LOSSD_CUDA_TRY(cudaStreamWaitEvent(later, event.get(), 0));
  return {};
}

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_CUDA_STREAM_ORDER_H_
