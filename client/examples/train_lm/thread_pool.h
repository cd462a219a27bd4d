// A fixed set of threads for loops over independent parts. They sleep while there is nothing to do (the
// server may be computing on the same cores), which is why this is not OpenMP: its threads spin between
// loops.
#ifndef LOSSD_CLIENT_EXAMPLES_TRAIN_LM_THREAD_POOL_H_
#define LOSSD_CLIENT_EXAMPLES_TRAIN_LM_THREAD_POOL_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace lossd::train_lm {

// Used by one thread at a time.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Calls work(begin, end) for consecutive ranges that cover [0, count), on all threads and the caller's, and
  // returns when all are done. There are at most threads() ranges and, but for the last, their sizes are
  // multiples of `granularity`; they depend on nothing but the arguments and threads(), so that sums made
  // range by range are the same in every run.
  void For(int64_t count, int64_t granularity, const std::function<void(int64_t begin, int64_t end)>& work);

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

 private:
  void Work(int64_t worker);

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  const std::function<void(int64_t, int64_t)>* work_ = nullptr;  // guarded by mutex_, as all below
  int64_t count_ = 0;
  int64_t range_ = 0;
  uint64_t round_ = 0;
  int64_t running_ = 0;
  bool stop_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace lossd::train_lm

#endif  // LOSSD_CLIENT_EXAMPLES_TRAIN_LM_THREAD_POOL_H_
