// Lanes of clients at a rank that is not the leader: where it takes them, and for how long.
#ifndef LOSSD_SERVER_STARTUP_GROUP_RANK_LANES_H_
#define LOSSD_SERVER_STARTUP_GROUP_RANK_LANES_H_

#include <functional>
#include <memory>

#include "server/engine/group/rank_payloads.h"
#include "server/rpc/convert/lane_addresses.h"
#include "server/rpc/group/ticker.h"
#include "server/rpc/lanes/lane_server.h"
#include "server/startup/group/lane_place.h"

namespace lossd {

struct RankLaneOptions {
  LanePlace place;
  rpc::LaneServerOptions server;
  std::function<void(rpc::LaneServer&)> each_second = [](rpc::LaneServer&) {};
};

// Ends what there is in order when it goes, if End() has not. Not thread-safe, but for SetReady.
class RankLanes {
 public:
  // Clients that connect wait until Serve. A place that cannot be had is no error: the leader takes lanes.
  static std::unique_ptr<RankLanes> Open(const RankLaneOptions& options);
  ~RankLanes() { End(); }
  RankLanes(const RankLanes&) = delete;
  RankLanes& operator=(const RankLanes&) = delete;

  // For the leader.
  rpc::RankLanes told() const;
  // What it is given outlives this, or End().
  void Serve(rpc::LaneRelay::Stage stage, engine::RankPayloads* payloads, rpc::LeaderCalls leader);
  // Whether the leader serves.
  void SetReady(bool ready);
  void End();

 private:
  explicit RankLanes(const RankLaneOptions& options) : options_(options) {}

  const RankLaneOptions options_;
  std::unique_ptr<rpc::LaneServer> server_;  // null: it takes none
  std::unique_ptr<rpc::Ticker> ticker_;
  bool ended_ = false;
};

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_GROUP_RANK_LANES_H_
