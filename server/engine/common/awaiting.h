// How a thread waits for what another one is to bring.
#ifndef LOSSD_SERVER_ENGINE_COMMON_AWAITING_H_
#define LOSSD_SERVER_ENGINE_COMMON_AWAITING_H_

#include <chrono>
#include <future>

#include "absl/functional/function_ref.h"

namespace lossd::engine {

// Comes before each of these waits, and does nothing. The simulation puts its own in its place, which returns
// when it is there: all threads but one stand still then, and take turns where they wait.
void BeginWait(absl::FunctionRef<bool()> is_there);

// What `future` comes to, of threads that wait for other replicas.
template <class Value>
Value Await(std::future<Value>& future) {
  BeginWait([&future] { return future.wait_for(std::chrono::seconds(0)) == std::future_status::ready; });
  return future.get();
}

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_COMMON_AWAITING_H_
