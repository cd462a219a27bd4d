#include "server/engine/group/rank_channel.h"

#include <utility>

namespace lossd::engine {
namespace {

class HeldPayload {
 public:
  HeldPayload(std::shared_ptr<RankChannel> channel, int32_t rank, uint64_t number)
      : channel_(std::move(channel)), rank_(rank), number_(number) {}
  ~HeldPayload() { channel_->SendTo(rank_, ReleasePayloadCommand{number_}); }
  HeldPayload(const HeldPayload&) = delete;
  HeldPayload& operator=(const HeldPayload&) = delete;

 private:
  const std::shared_ptr<RankChannel> channel_;
  const int32_t rank_;
  const uint64_t number_;
};

}  // namespace

std::shared_ptr<const void> HoldAtRank(std::shared_ptr<RankChannel> channel, int32_t rank, uint64_t number) {
  return std::make_shared<const HeldPayload>(std::move(channel), rank, number);
}

}  // namespace lossd::engine
