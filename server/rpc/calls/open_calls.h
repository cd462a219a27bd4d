// Which calls are under way, so that a drain can wait for them, and for nobody else who is connected.
#ifndef LOSSD_SERVER_RPC_CALLS_OPEN_CALLS_H_
#define LOSSD_SERVER_RPC_CALLS_OPEN_CALLS_H_

#include <chrono>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "server/engine/common/mutex.h"

namespace lossd::rpc {

// Thread-safe.
class OpenCalls {
 public:
  // One call that watches the health of the server. It is no work, so that nobody waits for its end, but it
  // is to be told that the server goes away.
  class Watch {
   public:
    // `calls` outlives it.
    explicit Watch(OpenCalls* calls);
    ~Watch();
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;

    // A message is about to be sent to the client; it has been written. The two calls alternate.
    void NoteSend();
    void NoteSent();

   private:
    enum class Told { kNothing, kSending, kYes };

    OpenCalls* const calls_;
    Told told_ ABSL_GUARDED_BY(calls_->mutex_) = Told::kNothing;  // of the drain
  };

  // A call of one of lossd's methods, from the moment gRPC takes it until gRPC is done with it.
  void Begin();
  void End();

  // To be called once, before health says NOT_SERVING: the next message of each watch announces the drain.
  void BeginDrain();
  // Waits until no call is under way, and then, for at most `patience`, until every watch has its message.
  // False: Stop() came first.
  bool AwaitEnd(std::chrono::milliseconds patience);
  // Leaves clients time to close their connections by themselves: `shortest`, and until `after_last` after
  // the end of the last call, whose answer may still be on its way. False: Stop() or another call came first.
  bool AwaitFarewell(std::chrono::milliseconds shortest, std::chrono::milliseconds after_last);
  // Ends the waiting of both.
  void Stop();

 private:
  engine::Mutex mutex_;
  engine::CondVar changed_;
  int64_t calls_ ABSL_GUARDED_BY(mutex_) = 0;
  std::chrono::steady_clock::time_point last_end_ ABSL_GUARDED_BY(mutex_){};
  int64_t watches_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t told_ ABSL_GUARDED_BY(mutex_) = 0;  // of watches_
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_CALLS_OPEN_CALLS_H_
