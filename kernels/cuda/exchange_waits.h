// How long a device's stream waits for other ranks, by the device's own clock: no thread waits with it.
#ifndef LOSSD_KERNELS_CUDA_EXCHANGE_WAITS_H_
#define LOSSD_KERNELS_CUDA_EXCHANGE_WAITS_H_

#include <cuda_runtime_api.h>

#include <deque>
#include <vector>

#include "kernels/cuda/memory/owners.h"
#include "kernels/cuda/memory/result.h"
#include "kernels/exchange.h"

namespace lossd::kernels::cuda {

// Belongs to one device; one thread at a time.
class ExchangeWaits {
 public:
  // What follows in `stream` waits for `event`, and with it for an exchange.
  Result Await(cudaStream_t stream, const Event& event, Exchange exchange);

  // Tells `observer`, which may be null, of the waits that are over by now, in their order. What is not told
  // is kept, so this is to be called once in a while.
  Result Tell(ExchangeObserver* observer);

 private:
  struct Wait {
    Exchange exchange{};
    Event began;
    Event over;
  };

  std::deque<Wait> under_way_;
  std::vector<Wait> spare_;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_EXCHANGE_WAITS_H_
