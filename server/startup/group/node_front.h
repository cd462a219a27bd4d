// What the first rank of a node does for the node, if the leader is at another one.
#ifndef LOSSD_SERVER_STARTUP_GROUP_NODE_FRONT_H_
#define LOSSD_SERVER_STARTUP_GROUP_NODE_FRONT_H_

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/engine/common/mutex.h"
#include "server/engine/device/device_report.h"
#include "server/rpc/group/group_member.h"
#include "server/rpc/health_server.h"
#include "server/startup/group/parent_link.h"

namespace lossd {

struct NodeFrontOptions {
  std::string health_listen;  // empty: no health
  std::string port_file;      // empty: none
};

// Serves the node's health, tells the parent when the group serves and when it drains, and the leader when
// the parent is told to end (SIGRTMIN, which is blocked in every thread). Has a thread of its own.
class NodeFront {
 public:
  // `parent` outlives it. UNAVAILABLE if the port or the file of ports cannot be had.
  static absl::StatusOr<std::unique_ptr<NodeFront>> Start(const NodeFrontOptions& options,
                                                          ParentLink* parent);
  // Health ends with it.
  ~NodeFront();
  NodeFront(const NodeFront&) = delete;
  NodeFront& operator=(const NodeFront&) = delete;

  // The rank has joined. Without that, the process ends in order some seconds after it was told to. `member`
  // outlives this.
  void Joined(rpc::GroupMember* member) ABSL_LOCKS_EXCLUDED(mutex_);
  // The rank executes commands. Health is ready while the leader serves and is ready, and the last command
  // that the rank is done with is younger than `patience`. `activity` does not wait for a device.
  void Follow(std::function<engine::RankActivity()> activity, absl::Duration patience)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  using Clock = std::chrono::steady_clock;

  NodeFront(std::unique_ptr<rpc::HealthServer> health, std::string port_file, ParentLink* parent);
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  void Look() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void HandleEnd() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TellParent() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TellServing() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsReady() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::unique_ptr<rpc::HealthServer> health_;  // may be null
  const std::string port_file_;
  ParentLink* const parent_;

  engine::Mutex mutex_;
  bool over_ ABSL_GUARDED_BY(mutex_) = false;
  rpc::GroupMember* member_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::function<engine::RankActivity()> activity_ ABSL_GUARDED_BY(mutex_);
  absl::Duration patience_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteDuration();
  std::optional<Clock::time_point> told_to_end_ ABSL_GUARDED_BY(mutex_);
  bool drain_requested_ ABSL_GUARDED_BY(mutex_) = false;
  bool told_serving_ ABSL_GUARDED_BY(mutex_) = false;
  bool told_draining_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_GROUP_NODE_FRONT_H_
