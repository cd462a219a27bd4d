#ifndef LOSSD_KERNELS_CUDA_STEP_OBSERVER_H_
#define LOSSD_KERNELS_CUDA_STEP_OBSERVER_H_

namespace lossd::kernels::cuda {

// Hears of a step's stages, as the caller of LinearCrossEntropy::Run does.
struct StepObserver {
  void (*between)(void* context, const char* name) = nullptr;
  void* context = nullptr;

  void Report(const char* stage) const {
    if (between != nullptr) between(context, stage);
  }
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_STEP_OBSERVER_H_
