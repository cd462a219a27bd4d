// A thread that runs only while whoever resumed it waits: it and its callers never run at the same time.
#ifndef LOSSD_TESTS_SIMULATION_COROUTINE_H_
#define LOSSD_TESTS_SIMULATION_COROUTINE_H_

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace lossd::simulation {

class Coroutine {
 public:
  // Begins with the first Resume.
  explicit Coroutine(std::function<void()> body);
  // The body has ended.
  ~Coroutine();
  Coroutine(const Coroutine&) = delete;
  Coroutine& operator=(const Coroutine&) = delete;

  // The body goes on until it yields or ends. One caller at a time; nothing happens once it has ended.
  void Resume();
  // By the body: returns with the next Resume.
  void Yield();
  bool ended() const { return ended_; }

 private:
  enum class Turn { kCaller, kBody };

  void Await(Turn turn);
  void Give(Turn turn);

  std::mutex mutex_;
  std::condition_variable changed_;
  Turn turn_ = Turn::kCaller;
  bool ended_ = false;  // of whose turn it is
  std::thread thread_;
};

}  // namespace lossd::simulation

#endif  // LOSSD_TESTS_SIMULATION_COROUTINE_H_
