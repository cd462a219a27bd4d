// Times on the device's own clock.
#ifndef LOSSD_BENCH_KERNELS_CUDA_CUDA_TIMING_H_
#define LOSSD_BENCH_KERNELS_CUDA_CUDA_TIMING_H_

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/memory/owners.h"
#include "kernels/cuda/memory/result.h"

namespace lossd::bench {

// Marks points on the default stream; what was enqueued between two of them is timed once all is enqueued.
class Marks {
 public:
  // `name` is of what ends here; that of the first is not used. Errors are kept for Read.
  void Add(std::string name) {
    kernels::cuda::Event event;
    if (result_.ok()) {
      result_ = kernels::cuda::Event::Create(&event, kernels::cuda::Event::Timing::kYes);
    }
    if (result_.ok()) result_ = {cudaEventRecord(event.get(), nullptr), "cudaEventRecord"};
    names_.push_back(std::move(name));
    events_.push_back(std::move(event));
  }

  // As a stage's callback of the step, with a Marks as its context.
  static void AddTo(void* marks, const char* name) { static_cast<Marks*>(marks)->Add(name); }

  // Waits for the last mark. Name and milliseconds of each interval.
  kernels::cuda::Result Read(std::vector<std::pair<std::string, double>>* intervals) const {
    intervals->clear();
    if (!result_.ok()) return result_;
    LOSSD_CUDA_TRY(cudaEventSynchronize(events_.back().get()));
    for (size_t i = 1; i < events_.size(); ++i) {
      float elapsed = 0;
      LOSSD_CUDA_TRY(cudaEventElapsedTime(&elapsed, events_[i - 1].get(), events_[i].get()));
      intervals->emplace_back(names_[i], static_cast<double>(elapsed));
    }
    return {};
  }

 private:
  kernels::cuda::Result result_;
  std::vector<std::string> names_;
  std::vector<kernels::cuda::Event> events_;
};

// Times what `work` enqueues on the default stream; waits for it.
inline kernels::cuda::Result TimeOnDevice(const std::function<kernels::cuda::Result()>& work,
                                          double* milliseconds) {
  Marks marks;
  marks.Add("begin");
  LOSSD_CUDA_PASS_ON(work());
  marks.Add("end");
  std::vector<std::pair<std::string, double>> intervals;
  LOSSD_CUDA_PASS_ON(marks.Read(&intervals));
  *milliseconds = intervals[0].second;
  return {};
}

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_CUDA_CUDA_TIMING_H_
