#include "kernels/threads.h"

#include <sched.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace lossd::kernels {

#ifdef _OPENMP

void UnbindInitialThread() {
  if (omp_get_proc_bind() == omp_proc_bind_false) return;
  cpu_set_t processors;
  CPU_ZERO(&processors);
  for (int place = 0; place < omp_get_num_places(); ++place) {
    std::vector<int> numbers(static_cast<size_t>(omp_get_place_num_procs(place)));
    omp_get_place_proc_ids(place, numbers.data());
    for (const int number : numbers) CPU_SET(static_cast<size_t>(number), &processors);
  }
  if (CPU_COUNT(&processors) > 0) sched_setaffinity(0, sizeof(processors), &processors);
}

int64_t LoopThreads() { return std::min(omp_get_max_threads(), omp_get_thread_limit()); }

void StartLoopThreads() {
  [[maybe_unused]] int threads = 0;
#pragma omp parallel reduction(+ : threads)
  threads += 1;
}

#else

void UnbindInitialThread() {}

int64_t LoopThreads() { return 1; }

void StartLoopThreads() {}

#endif

}  // namespace lossd::kernels
