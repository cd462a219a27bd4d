#include "tests/simulation/coroutine.h"

#include <utility>

namespace lossd::simulation {

Coroutine::Coroutine(std::function<void()> body)
    : thread_([this, body = std::move(body)] {
        Await(Turn::kBody);
        body();
        ended_ = true;
        Give(Turn::kCaller);
      }) {}

Coroutine::~Coroutine() { thread_.join(); }

void Coroutine::Resume() {
  if (ended_) return;
  Give(Turn::kBody);
  Await(Turn::kCaller);
}

void Coroutine::Yield() {
  Give(Turn::kCaller);
  Await(Turn::kBody);
}

void Coroutine::Await(Turn turn) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this, turn] { return turn_ == turn; });
}

void Coroutine::Give(Turn turn) {
  const std::lock_guard lock(mutex_);
  turn_ = turn;
  changed_.notify_all();
}

}  // namespace lossd::simulation
