// Replicas of one process that meet over their control, by way of a proxy that cuts their connections.
#ifndef LOSSD_TESTS_UNIT_RPC_REPLICAS_SET_UNDER_TEST_H_
#define LOSSD_TESTS_UNIT_RPC_REPLICAS_SET_UNDER_TEST_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "server/rpc/replicas/replica_set.h"
#include "tests/proxy/fault_proxy.h"
#include "tests/unit/engine/replicas/replica_servers.h"
#include "tests/unit/rpc/held_port.h"

namespace lossd::rpc::replica_set_test {

using engine::EndingPhase;
using engine::HeadConfig;
using engine::testing::ReplicaServers;
using engine::testing::SetSize;
using lossd::testing::FaultProxy;

// Engines, each with a place in the set. All but the coordinator reach it by way of a proxy.
class SetUnderTest {
 public:
  explicit SetUnderTest(int32_t replicas) : SetUnderTest(SetSize{replicas}) {}
  explicit SetUnderTest(const SetSize& size, const HeadConfig& config = ReplicaServers::AdamWHead(),
                        FaultProxy::Plan plan = {}, std::optional<EndingPhase> cut_in = {},
                        const ReplicaServers::Customize& customize = nullptr,
                        ReplicaServers::Wrap wrap = nullptr)
      : replicas_(size.replicas),
        // Those that are cut while they connect wait for several times as long.
        replica_timeout_(absl::Seconds(plan == nullptr ? 5 : 1)),
        servers_(
            size, config,
            [this](std::shared_ptr<engine::Head> head, engine::WindowEnd end) {
              sets_.at(0)->EndTogether(std::move(head), std::move(end));
            },
            [this](const engine::Head& head, int32_t replica) {
              return sets_.at(0)->FindPart(head, replica);
            },
            [this, customize](int32_t replica, engine::EngineOptions& options) {
              if (replica == 0) CustomizeCoordinator(options);
              if (customize != nullptr) customize(replica, options);
            },
            std::move(wrap)),
        proxy_(
            port_.address(), std::move(plan),
            {.would_hit = [this, cut_in] { return !cut_in.has_value() || AnyIn(*cut_in); }, .happens = {}}) {
    for (int32_t replica = 0; replica < replicas_; ++replica) Create(replica);
    started_ = true;
  }
  // Sets leave before their engines end.
  ~SetUnderTest() {
    started_ = false;
    sets_.clear();
  }

  static constexpr const char* kToken = "a secret of the replicas";
  GroupIdentity Identity() const {
    return {.epoch = 0, .ranks = replicas_, .version = "1", .device_kind = "cpu", .member = "replica"};
  }

  ReplicaServers& servers() { return servers_; }
  ReplicaSet& set(int32_t replica) { return *sets_.at(replica); }
  FaultProxy& proxy() { return proxy_; }

  void Meet(int32_t replica) { sets_.at(replica)->Meet(&servers_.at(replica).engine()); }
  // The map stays as it is: servers look up the coordinator in it.
  void Leave(int32_t replica) { sets_.at(replica).reset(); }
  // The process of this replica is killed, and another one started.
  void Replace(int32_t replica) {
    Leave(replica);
    servers_.Replace(replica);
    Create(replica);
    Meet(replica);
  }
  void MeetAll() {
    for (int32_t replica = 0; replica < replicas_; ++replica) Meet(replica);
    AwaitWhole();
  }
  // In one epoch: a replica that has yet to notice that another one was replaced says that all are there.
  // When the new one says so as well, the others have noticed, so that they are asked once more.
  void AwaitWhole() {
    for (int asked = 0; asked < 2; ++asked) {
      for (auto& [replica, set] : sets_) {
        if (set == nullptr) continue;
        while (!set->Whole().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    }
  }
  // All connections are cut, and all meet again, each with what it has.
  void MeetAgain() {
    std::map<int32_t, uint64_t> before;
    for (auto& [replica, set] : sets_) before[replica] = EpochsOf(replica);
    proxy_.CutAll();
    for (auto& [replica, set] : sets_) {
      while (EpochsOf(replica) == before[replica]) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    AwaitWhole();
  }
  // As a trainer asks, until it has an answer: ask() begins to.
  template <class Ask>
  static auto UntilAnswered(Ask ask) {
    for (;;) {
      auto answer = ReplicaServers::Answer(ask());
      if (!absl::IsUnavailable(answer.status())) return answer;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }
  // Whether the end of some replica's window has come that far.
  bool AnyIn(EndingPhase phase) {
    if (!started_) return false;
    for (int32_t replica = 0; replica < replicas_; ++replica) {
      const auto head = servers_.at(replica).engine().FindHead("h");
      if (head.ok() && (*head)->phase() == phase) return true;
    }
    return false;
  }

 private:
  uint64_t EpochsOf(int32_t replica) { return servers_.at(replica).engine().replicas().Read().epochs; }
  void CustomizeCoordinator(engine::EngineOptions& options) {
    options.find_replicas = [this](const engine::Head& head) { return sets_.at(0)->FindReplicas(head); };
    options.create_together = [this](const HeadConfig& head) {
      return started_ ? sets_.at(0)->CreateTogether(head) : absl::OkStatus();
    };
    options.copy_together = [this](const engine::HeadCopy& copy,
                                   absl::FunctionRef<absl::Status()> copy_here) {
      return sets_.at(0)->CopyTogether(copy, copy_here);
    };
    options.delete_together = [this](const std::string& name, engine::Engine::DiscardGradient discard,
                                     absl::FunctionRef<absl::Status()> delete_here) {
      return sets_.at(0)->DeleteTogether(name, discard, delete_here);
    };
    options.publish_together = [this](std::shared_ptr<engine::Head> head,
                                      std::shared_ptr<engine::StagedWrite> write) {
      if (started_) return sets_.at(0)->PublishTogether(std::move(head), std::move(write));
      head->PublishPrepared([](const absl::StatusOr<uint64_t>&) {});  // each has its own before they meet
    };
  }
  void Create(int32_t replica) {
    ReplicaSetOptions options;
    options.place = {replica, replicas_};
    options.address = "127.0.0.1:" + std::to_string(replica == 0 ? port_.number() : proxy_.port());
    options.credentials.token = kToken;
    options.identity = Identity();
    options.replica_timeout = replica_timeout_;
    sets_[replica] = ReplicaSet::Create(std::move(options));
  }

  const int32_t replicas_;
  const lossd::testing::HeldPort port_;
  const absl::Duration replica_timeout_;
  std::atomic<bool> started_ = false;                    // all servers are there
  std::map<int32_t, std::unique_ptr<ReplicaSet>> sets_;  // of all; null: left
  ReplicaServers servers_;
  FaultProxy proxy_;  // its threads look at the servers
};

}  // namespace lossd::rpc::replica_set_test

#endif  // LOSSD_TESTS_UNIT_RPC_REPLICAS_SET_UNDER_TEST_H_
