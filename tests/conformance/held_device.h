// A group's device for tests that know nothing of ranks: it puts the hidden states of each batch where a rank
// holds them, as the lane of a client does, and brings dX back.
#ifndef LOSSD_TESTS_CONFORMANCE_HELD_DEVICE_H_
#define LOSSD_TESTS_CONFORMANCE_HELD_DEVICE_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "server/engine/device/head_backend.h"
#include "server/engine/group/rank_channel.h"
#include "server/engine/group/rank_payloads.h"

namespace lossd::engine::testing {

// `holder` says of the nth batch, from 0, which rank holds it.
std::unique_ptr<Device> CreateHeldDevice(std::unique_ptr<Device> sharded,
                                         std::shared_ptr<RankChannel> channel,
                                         std::function<RankPayloads&(int32_t rank)> payloads,
                                         std::function<int32_t(uint64_t batch)> holder);

}  // namespace lossd::engine::testing

#endif  // LOSSD_TESTS_CONFORMANCE_HELD_DEVICE_H_
