// A thread of a simulated server, with a queue of its own. It runs only while whoever resumes it waits, and
// stops where it would wait for another thread of the simulation.
#ifndef LOSSD_TESTS_SIMULATION_SIM_WORKER_H_
#define LOSSD_TESTS_SIMULATION_SIM_WORKER_H_

#include <deque>
#include <functional>

#include "absl/functional/function_ref.h"
#include "tests/simulation/coroutine.h"

namespace lossd::simulation {

class SimWorker {
 public:
  SimWorker();
  // It is idle.
  ~SimWorker();
  SimWorker(const SimWorker&) = delete;
  SimWorker& operator=(const SimWorker&) = delete;

  // Behind what was given before. Never begins it.
  void Run(std::function<void()> task) { tasks_.push_back(std::move(task)); }
  // Goes on until it waits, or has nothing left. Not by a worker.
  void Resume();
  // Whether it is in the middle of a task.
  bool busy() const { return busy_; }
  // Whether it has nothing to do.
  bool idle() const { return tasks_.empty(); }

  // For who has to wait: the worker whose thread this is stops until `is_there` says so. Another thread goes
  // on at once.
  static void Await(absl::FunctionRef<bool()> is_there);

 private:
  void Body();

  std::deque<std::function<void()>> tasks_;  // the first one stays while it runs
  bool busy_ = false;
  bool ending_ = false;
  Coroutine thread_;  // last: it uses the rest
};

}  // namespace lossd::simulation

#endif  // LOSSD_TESTS_SIMULATION_SIM_WORKER_H_
