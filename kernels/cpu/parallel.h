// Tasks on the cores of this machine through OpenMP.
#ifndef LOSSD_KERNELS_CPU_PARALLEL_H_
#define LOSSD_KERNELS_CPU_PARALLEL_H_

#include <cstdint>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace lossd::kernels::cpu {

// Threads the calling thread may use. 1 in a build without OpenMP.
inline int64_t AvailableThreads() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

// Runs function(task, thread) for every task in [0, tasks), on up to `threads` threads, 0 <= thread <
// threads. Which thread runs which task is not fixed: tasks must not depend on it. Returns when all are done.
template <typename Function>
void ParallelFor(int64_t threads, int64_t tasks, const Function& function) {
#ifdef _OPENMP
  // clang-format would split the directive.
  // clang-format off
#pragma omp parallel for num_threads(static_cast<int>(threads)) schedule(dynamic, 1) if (threads > 1)
  // clang-format on
  for (int64_t task = 0; task < tasks; ++task) function(task, static_cast<int64_t>(omp_get_thread_num()));
#else
  static_cast<void>(threads);
  for (int64_t task = 0; task < tasks; ++task) function(task, int64_t{0});
#endif
}

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_PARALLEL_H_
