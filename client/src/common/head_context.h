// What all copies of a head handle, and the sessions opened from it, share.
#ifndef LOSSD_CLIENT_SRC_COMMON_HEAD_CONTEXT_H_
#define LOSSD_CLIENT_SRC_COMMON_HEAD_CONTEXT_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "client/src/common/server_life.h"
#include "client/src/common/unanswered_ends.h"
#include "client/src/connection/connection.h"
#include "client/src/regions/region_map.h"
#include "lossd/client.h"

namespace lossd::internal {

struct LogitsLimits {
  int64_t bytes = 0;
  int64_t rows = 0;
};

// Thread-safe.
class HeadContext {
 public:
  // `most_logits`: what the server takes, and answers, in one call for logits.
  HeadContext(std::shared_ptr<Connection> connection, HeadConfig config, LogitsLimits most_logits,
              std::shared_ptr<RegionMap> regions, std::shared_ptr<UnansweredEnds> unanswered)
      : connection_(std::move(connection)),
        config_(std::move(config)),
        most_logits_(most_logits),
        regions_(std::move(regions)),
        unanswered_(std::move(unanswered)) {}

  Connection& connection() const { return *connection_; }
  const ClientOptions& options() const { return connection_->options(); }
  const HeadConfig& config() const { return config_; }
  const LogitsLimits& most_logits() const { return most_logits_; }
  const RegionMap& regions() const { return *regions_; }
  UnansweredEnds& unanswered() const { return *unanswered_; }

  // The generation that a commit of this process opened, so that its sessions need not find out by being
  // refused; 0 before the first. Only of this life: a restarted server counts anew.
  uint64_t CommittedGeneration(const ServerLife& life) const {
    std::lock_guard lock(mutex_);
    return life == life_ ? generation_ : 0;
  }
  // Forgets a step that was left open: it belongs to a window that is over now, or it was what ended the
  // window.
  void NoteCommit(uint64_t generation) {
    unanswered_->SetStep(std::nullopt);
    std::lock_guard lock(mutex_);
    generation_ = generation;
    next_generation_ = 0;
  }

  // Likewise the one whose chunks the server takes while a flush of this process holds the window before; 0
  // if none does. Only of a head with two gradients: others refuse chunks until they are told that they wait.
  uint64_t NextGeneration(const ServerLife& life) const {
    std::lock_guard lock(mutex_);
    return life == life_ ? next_generation_ : 0;
  }
  void NoteFrozen(uint64_t next_generation) {
    std::lock_guard lock(mutex_);
    if (config_.double_buffer) next_generation_ = next_generation;
  }
  // The server is at this generation again.
  void NoteSetBack(uint64_t generation) {
    std::lock_guard lock(mutex_);
    generation_ = std::min(generation_, generation);
    next_generation_ = 0;
  }
  void NoteReopened() {
    std::lock_guard lock(mutex_);
    next_generation_ = 0;
  }

  // The generation that this process knows a head of that past to have come to; 0: none.
  uint64_t GenerationIn(const ServerLife& life, uint64_t restores) const {
    std::lock_guard lock(mutex_);
    if (life == life_ && restores == restores_) return generation_;
    const auto earlier = earlier_.find({life, restores});
    return earlier == earlier_.end() ? 0 : earlier->second;
  }

  uint64_t restores() const {
    std::lock_guard lock(mutex_);
    return restores_;
  }

  // That of the server which sessions of this process were opened at; not known before the first.
  ServerLife life() const {
    std::lock_guard lock(mutex_);
    return life_;
  }
  // How often the head had been restored then: like a restarted server, a restored head counts anew.
  void NoteLife(const ServerLife& life, uint64_t restores) {
    std::lock_guard lock(mutex_);
    if (life_ != life || restores_ != restores) {
      uint64_t& earlier = earlier_[{life_, restores_}];
      earlier = std::max(earlier, generation_);
      generation_ = next_generation_ = 0;
      // Another handle may have come to this server before, and have left something open there.
      if (life_ == life) {
        unanswered_->Clear();
      } else {
        unanswered_->KeepOnly(life);
      }
    }
    life_ = life;
    restores_ = restores;
  }

 private:
  const std::shared_ptr<Connection> connection_;
  const HeadConfig config_;
  const LogitsLimits most_logits_;
  const std::shared_ptr<RegionMap> regions_;
  const std::shared_ptr<UnansweredEnds> unanswered_;
  mutable std::mutex mutex_;
  ServerLife life_;
  uint64_t restores_ = 0;
  uint64_t generation_ = 0;
  uint64_t next_generation_ = 0;
  std::map<std::pair<ServerLife, uint64_t>, uint64_t> earlier_;  // generations, by life and restores
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_COMMON_HEAD_CONTEXT_H_
