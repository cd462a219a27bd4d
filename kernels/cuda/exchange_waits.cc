#include "kernels/cuda/exchange_waits.h"

#include <utility>

namespace lossd::kernels::cuda {

Result ExchangeWaits::Await(cudaStream_t stream, const Event& event, Exchange exchange) {
  Wait wait;
  if (spare_.empty()) {
    for (Event* one : {&wait.began, &wait.over}) {
      LOSSD_CUDA_PASS_ON(Event::Create(one, Event::Timing::kYes));
    }
  } else {
    wait = std::move(spare_.back());
    spare_.pop_back();
  }
  wait.exchange = exchange;
  LOSSD_CUDA_TRY(cudaEventRecord(wait.began.get(), stream));
  LOSSD_CUDA_TRY(cudaStreamWaitEvent(stream, event.get(), 0));
  LOSSD_CUDA_TRY(cudaEventRecord(wait.over.get(), stream));
  under_way_.push_back(std::move(wait));
  return {};
}

Result ExchangeWaits::Tell(ExchangeObserver* observer) {
  for (; !under_way_.empty(); under_way_.pop_front()) {
    Wait& wait = under_way_.front();
    const cudaError_t is_over = cudaEventQuery(wait.over.get());
    if (is_over == cudaErrorNotReady) return {};
    if (is_over != cudaSuccess) return {is_over, "waiting for other ranks"};
    float milliseconds = 0;
    LOSSD_CUDA_TRY(cudaEventElapsedTime(&milliseconds, wait.began.get(), wait.over.get()));
    if (observer != nullptr) observer->OnWaited(wait.exchange, static_cast<double>(milliseconds) * 1e-3);
    spare_.push_back(std::move(wait));
  }
  return {};
}

}  // namespace lossd::kernels::cuda
