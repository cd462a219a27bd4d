// Ends of windows that a client asked for and got no answer to.
#ifndef LOSSD_CLIENT_SRC_COMMON_UNANSWERED_ENDS_H_
#define LOSSD_CLIENT_SRC_COMMON_UNANSWERED_ENDS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client/src/common/server_life.h"
#include "lossd/client.h"

namespace lossd::internal {

// The commit of a flush that may have been done although no answer came: gradient/open_commit.h.
struct OpenCommit {
  FlushResult flush;
  ServerLife life;    // in which there is, or was, the flush
  std::string marks;  // KeyOf those that it named
};

// A step that may have been taken although no answer came.
struct OpenStep {
  uint64_t generation = 0;
  ServerLife life;  // of the server that was asked
};

// A flush that may have frozen the window although no answer came, so that nobody knows its id:
// gradient/open_freeze.h. With what it had named.
struct OpenFreeze {
  uint64_t generation = 0;
  double gradient_scale = 1;
  std::vector<SessionMarks> marks;
  ServerLife life;  // of the server that was asked
};

// Those of one head. All handles of the head that a client gives out share it: a commit that one of them left
// open must not be forgotten by a call through another. Thread-safe.
class UnansweredEnds {
 public:
  // The generation of a step whose answer never came, if one was asked for in this life.
  std::optional<uint64_t> StepAt(const ServerLife& life) const {
    std::lock_guard lock(mutex_);
    if (!step_ || step_->life != life) return std::nullopt;
    return step_->generation;
  }
  void SetStep(std::optional<OpenStep> step) {
    std::lock_guard lock(mutex_);
    step_ = std::move(step);
  }

  // The flush whose commit has no answer yet, if there is one.
  std::optional<OpenCommit> commit() const {
    std::lock_guard lock(mutex_);
    return commit_;
  }
  void SetCommit(OpenCommit commit) {
    std::lock_guard lock(mutex_);
    commit_ = std::move(commit);
  }
  void ForgetCommit(const std::string& flush_id) {
    std::lock_guard lock(mutex_);
    if (commit_ && commit_->flush.flush_id == flush_id) commit_ = std::nullopt;
  }

  // The flush that may have frozen the window, if there is one.
  std::optional<OpenFreeze> freeze() const {
    std::lock_guard lock(mutex_);
    return freeze_;
  }
  void SetFreeze(std::optional<OpenFreeze> freeze) {
    std::lock_guard lock(mutex_);
    freeze_ = std::move(freeze);
  }

  void Clear() {
    std::lock_guard lock(mutex_);
    freeze_ = std::nullopt;
    step_ = std::nullopt;
    commit_ = std::nullopt;
  }
  // Forgets what was asked for in lives before this one.
  void KeepOnly(const ServerLife& life) {
    std::lock_guard lock(mutex_);
    if (freeze_ && freeze_->life != life) freeze_ = std::nullopt;
    if (step_ && step_->life != life) step_ = std::nullopt;
    if (commit_ && commit_->life != life) commit_ = std::nullopt;
  }

 private:
  mutable std::mutex mutex_;
  std::optional<OpenFreeze> freeze_;
  std::optional<OpenStep> step_;
  std::optional<OpenCommit> commit_;
};

// Those of all heads of a client, by name. Thread-safe.
class UnansweredEndsMap {
 public:
  std::shared_ptr<UnansweredEnds> Of(const std::string& head) {
    std::lock_guard lock(mutex_);
    std::shared_ptr<UnansweredEnds>& ends = ends_[head];
    if (ends == nullptr) ends = std::make_shared<UnansweredEnds>();
    return ends;
  }
  // The head is gone, or another: its handles have none.
  void Clear(const std::string& head) { Of(head)->Clear(); }

 private:
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<UnansweredEnds>> ends_;
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_COMMON_UNANSWERED_ENDS_H_
