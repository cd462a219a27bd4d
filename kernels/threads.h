// The threads that OpenMP computes with in this process.
#ifndef LOSSD_KERNELS_THREADS_H_
#define LOSSD_KERNELS_THREADS_H_

#include <cstdint>

namespace lossd::kernels {

// Where its variables bind threads, OpenMP binds the initial thread to one processor while it is loaded, and
// all threads and programs that this thread starts inherit that. Undoes it: the thread may run on every
// processor of OpenMP's places. Threads of parallel loops stay bound. From the initial thread.
void UnbindInitialThread();

// Threads of one parallel loop.
int64_t LoopThreads();

// Starts as many threads as one parallel loop has; they stay for as long as the calling thread. Where one
// cannot be started, OpenMP ends the process.
void StartLoopThreads();

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_THREADS_H_
