#include "tests/simulation/sim_worker.h"

#include <utility>

#include "server/engine/common/awaiting.h"

namespace lossd::engine {

// Instead of the engine's own (awaiting.cc).
void BeginWait(absl::FunctionRef<bool()> is_there) { simulation::SimWorker::Await(is_there); }

}  // namespace lossd::engine

namespace lossd::simulation {
namespace {

thread_local Coroutine* own_thread = nullptr;

}  // namespace

SimWorker::SimWorker() : thread_([this] { Body(); }) {}

SimWorker::~SimWorker() {
  ending_ = true;
  thread_.Resume();
}

void SimWorker::Resume() {
  if (!idle()) thread_.Resume();
}

void SimWorker::Body() {
  own_thread = &thread_;
  while (!ending_) {
    if (tasks_.empty()) {
      thread_.Yield();
      continue;
    }
    busy_ = true;
    tasks_.front()();
    busy_ = false;
    tasks_.pop_front();
  }
}

void SimWorker::Await(absl::FunctionRef<bool()> is_there) {
  while (own_thread != nullptr && !is_there()) own_thread->Yield();
}

}  // namespace lossd::simulation
