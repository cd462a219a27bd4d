#include "server/startup/group/node_front.h"

#include <signal.h>
#include <unistd.h>

#include <ctime>
#include <utility>

#include "server/startup/port_file.h"
#include "server/telemetry/common/logging.h"

namespace lossd {
namespace {

using telemetry::Log;
using telemetry::LogLevel;

constexpr timespec kTick{.tv_sec = 0, .tv_nsec = 100'000'000};
// A rank that is told to end while it joins tells the leader, if it gets as far within this.
constexpr std::chrono::seconds kPatienceWithJoining{3};

}  // namespace

absl::StatusOr<std::unique_ptr<NodeFront>> NodeFront::Start(const NodeFrontOptions& options,
                                                            ParentLink* parent) {
  if (absl::Status can = CheckPortFile(options.port_file); !can.ok()) return can;
  std::unique_ptr<rpc::HealthServer> health;
  if (!options.health_listen.empty()) {
    absl::StatusOr<std::unique_ptr<rpc::HealthServer>> started =
        rpc::HealthServer::Start(options.health_listen);
    if (!started.ok()) return started.status();
    health = *std::move(started);
  }
  return std::unique_ptr<NodeFront>(new NodeFront(std::move(health), options.port_file, parent));
}

NodeFront::NodeFront(std::unique_ptr<rpc::HealthServer> health, std::string port_file, ParentLink* parent)
    : health_(std::move(health)),
      port_file_(std::move(port_file)),
      parent_(parent),
      thread_([this] { Run(); }) {}

NodeFront::~NodeFront() {
  {
    const engine::MutexLock lock(mutex_);
    over_ = true;
  }
  thread_.join();
  const engine::MutexLock lock(mutex_);
  if (member_ != nullptr) TellParent();  // it may have served for less than a tick
}

void NodeFront::Joined(rpc::GroupMember* member) {
  const engine::MutexLock lock(mutex_);
  member_ = member;
}

void NodeFront::Follow(std::function<engine::RankActivity()> activity, absl::Duration patience) {
  const engine::MutexLock lock(mutex_);
  activity_ = std::move(activity);
  patience_ = patience;
}

void NodeFront::Run() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGRTMIN);
  for (;;) {
    const bool told = sigtimedwait(&signals, nullptr, &kTick) > 0;
    const engine::MutexLock lock(mutex_);
    if (over_) return;
    if (told && !told_to_end_.has_value()) told_to_end_ = Clock::now();
    Look();
  }
}

void NodeFront::Look() {
  if (told_to_end_.has_value()) HandleEnd();
  if (member_ == nullptr) return;
  TellParent();
  if (health_ != nullptr) {
    health_->Set(IsReady() ? rpc::HealthServer::Ready::kYes : rpc::HealthServer::Ready::kNo);
  }
}

void NodeFront::HandleEnd() {
  if (member_ == nullptr) {
    if (Clock::now() - *told_to_end_ < kPatienceWithJoining) return;
    Log(LogLevel::kInfo, "stopped before it joined the group");
    telemetry::FlushLog();
    _exit(0);  // what tries to join waits for a leader, and nothing is to be saved
  }
  if (drain_requested_) return;
  drain_requested_ = true;
  Log(LogLevel::kInfo, "asks the leader to drain the group");
  member_->RequestDrain();
}

void NodeFront::TellParent() {
  const rpc::Serving serving = member_->serving();
  if (serving != rpc::Serving::kNotYet && !told_serving_) TellServing();
  if (serving == rpc::Serving::kDraining && !std::exchange(told_draining_, true)) {
    Log(LogLevel::kInfo, "the leader drains the group");
    parent_->TellDraining();
  }
}

void NodeFront::TellServing() {
  told_serving_ = true;
  const Ports ports{.health = health_ == nullptr ? 0 : health_->port()};
  parent_->TellServing();
  absl::StatusOr<PortFile> file = PortFile::Write(port_file_, ports);
  const absl::Status published = file.ok() ? file->Publish() : file.status();
  if (!published.ok()) {
    Log(LogLevel::kError, "the ports could not be told", {{"reason", std::string(published.message())}});
  }
}

bool NodeFront::IsReady() const {
  return member_->serving() == rpc::Serving::kReady && activity_ != nullptr &&
         absl::Seconds(activity_().last_done_seconds) < patience_;
}

}  // namespace lossd
