// One Compute stream between a simulated client and the real engine: what ComputeReactor does, with a network
// in between that delivers what it is told to.
#ifndef LOSSD_TESTS_SIMULATION_SIM_STREAM_H_
#define LOSSD_TESTS_SIMULATION_SIM_STREAM_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "server/engine/head/head.h"

namespace lossd::simulation {

// One thread's.
class SimStream : public engine::LaneListener, public std::enable_shared_from_this<SimStream> {
 public:
  // Told of every item that a mark covers, of those that this stream alone had added to dW at once.
  using OnItemApplied = std::function<void(uint64_t item)>;

  SimStream(std::shared_ptr<engine::Head> head, int32_t replica, OnItemApplied on_item_applied)
      : head_(std::move(head)), replica_(replica), on_item_applied_(std::move(on_item_applied)) {}

  absl::Status Attach(const std::string& session_id, int32_t lane);
  const engine::LaneAttachment& attachment() const { return attachment_; }
  int32_t replica() const { return replica_; }  // that has the head

  // The client's end
  void Send(engine::Chunk chunk) { to_server_.push_back(std::move(chunk)); }
  size_t under_way() const { return to_server_.size(); }
  using Message = std::variant<engine::ChunkAnswer, uint64_t>;  // or an applied mark
  // What has arrived, in order; nothing: see end().
  std::optional<Message> Receive();
  // How the stream ended, once everything before that was received.
  std::optional<absl::Status> end() const;

  // The network
  bool CanDeliver() const { return !over() && !held_.has_value() && !to_server_.empty(); }
  void Deliver();
  // The sequence of the message that comes next.
  uint64_t NextSequence() const { return to_server_.front().sequence; }
  // The first message is delivered and stays.
  void DeliverTwice();
  // The first two change places.
  void Swap();

  // The server's end
  // The connection is gone, as the server sees at last.
  void Detach() { head_->DetachLane(attachment_); }
  // With the server's process.
  void Die();

  void OnAnswer(engine::ChunkAnswer answer) override;
  void OnApplied(uint64_t applied) override;
  void OnEnd(absl::Status status) override;

 private:
  bool over() const { return refused_.has_value() || ended_.has_value(); }
  void SubmitHeld();

  std::shared_ptr<engine::Head> head_;
  const int32_t replica_;
  const OnItemApplied on_item_applied_;
  engine::LaneAttachment attachment_;
  std::deque<engine::Chunk> to_server_;
  std::optional<engine::Chunk> held_;  // read, and not yet taken
  std::deque<Message> to_client_;
  int64_t unanswered_ = 0;
  uint64_t last_taken_ = 0;
  uint64_t applied_ = 0;
  // Items by sequence: those that are taken, and those of them that were answered and not applied.
  std::map<uint64_t, uint64_t> taken_;
  std::map<uint64_t, uint64_t> answered_;
  std::optional<absl::Status> refused_;  // the end, once what was taken is answered and applied
  std::optional<absl::Status> ended_;    // the end, at once
};

}  // namespace lossd::simulation

#endif  // LOSSD_TESTS_SIMULATION_SIM_STREAM_H_
