// One epoch of a set of replicas, as the threads of this server know it.
#ifndef LOSSD_SERVER_RPC_REPLICAS_MEETING_H_
#define LOSSD_SERVER_RPC_REPLICAS_MEETING_H_

#include <condition_variable>
#include <functional>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/engine/common/mutex.h"
#include "server/engine/device/replica_connection.h"
#include "server/rpc/group/group_timing.h"

namespace lossd::rpc {

// Where all replicas have met, until one is lost: whoever notices it aborts their connection. Losses come
// before there is one, or after.
class Meeting {
 public:
  void Lose(const absl::Status& why) {
    const engine::MutexLock lock(mutex_);
    if (!lost_.ok()) return;
    lost_ = why;
    if (connection_ != nullptr) connection_->Abort();
    changed_.NotifyAll();
  }
  // Not ok if it is over.
  absl::Status Take(std::shared_ptr<engine::ReplicaConnection> connection) {
    const engine::MutexLock lock(mutex_);
    connection_ = std::move(connection);
    if (!lost_.ok()) connection_->Abort();
    return lost_;
  }
  absl::Status lost() {
    const engine::MutexLock lock(mutex_);
    return lost_;
  }
  // The call that ends whatever this replica waits for; null: it waits for nothing any more.
  void SetInterrupt(std::function<void()> interrupt) {
    const engine::MutexLock lock(interrupt_mutex_);
    interrupt_ = std::move(interrupt);
  }
  void Interrupt() {
    const engine::MutexLock lock(interrupt_mutex_);
    if (interrupt_ != nullptr) interrupt_();
  }
  // Waits for it, or until then.
  void AwaitLoss(absl::Duration timeout) {
    const auto deadline = DeadlineAfter(timeout);
    const engine::MutexLock lock(mutex_);
    while (lost_.ok() && changed_.WaitUntil(mutex_, deadline) != std::cv_status::timeout) {
    }
  }

 private:
  engine::Mutex mutex_;
  engine::CondVar changed_;
  std::shared_ptr<engine::ReplicaConnection> connection_ ABSL_GUARDED_BY(mutex_);
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);

  engine::Mutex interrupt_mutex_;
  std::function<void()> interrupt_ ABSL_GUARDED_BY(interrupt_mutex_);
};

// For as long as this lives.
class Interruptible {
 public:
  Interruptible(Meeting& meeting, std::function<void()> interrupt) : meeting_(meeting) {
    meeting_.SetInterrupt(std::move(interrupt));
  }
  ~Interruptible() { meeting_.SetInterrupt(nullptr); }
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

 private:
  Meeting& meeting_;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_REPLICAS_MEETING_H_
