// What a head may still do: it serves, drains, is being restored, or has ended.
//
// Thread-compatible: guarded by Head::mutex_.
#ifndef LOSSD_SERVER_ENGINE_HEAD_PARTS_LIFECYCLE_H_
#define LOSSD_SERVER_ENGINE_HEAD_PARTS_LIFECYCLE_H_

#include <utility>

#include "absl/status/status.h"

namespace lossd::engine {

class Lifecycle {
 public:
  // From now on there are no new streams and chunks: they get `status`. What was accepted goes on.
  void Drain(absl::Status status) { draining_ = std::move(status); }
  // No window ends, and nothing is published, until EndRestore: such calls get `status`. Chunks wait.
  void BeginRestore(absl::Status status) { restoring_ = std::move(status); }
  void EndRestore() { restoring_ = absl::OkStatus(); }
  bool restoring() const { return !restoring_.ok(); }
  // New chunks wait, until this is over: the head may be deleted. No window ends meanwhile, and nothing is
  // published: such calls get `status`.
  void BeginDeletion(absl::Status status) { deleting_ = std::move(status); }
  void CancelDeletion() { deleting_ = absl::OkStatus(); }
  bool deleting() const { return !deleting_.ok(); }
  // The head was deleted, or its device failed: from now on everything gets `status`.
  void End(absl::Status status) { ended_ = std::move(status); }

  // Not ok once it has ended.
  const absl::Status& alive() const { return ended_; }
  // Whether new streams and chunks are taken.
  const absl::Status& admits() const { return ended_.ok() ? draining_ : ended_; }
  // Whether a call may end the window, or repeat one that did. A drain does not forbid it.
  const absl::Status& may_end_window() const {
    if (!ended_.ok()) return ended_;
    if (!deleting_.ok()) return deleting_;
    return restoring_;
  }

 private:
  absl::Status draining_;
  absl::Status restoring_;
  absl::Status deleting_;
  absl::Status ended_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_PARTS_LIFECYCLE_H_
